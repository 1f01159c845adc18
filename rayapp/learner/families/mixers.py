"""Runs mixers (linear attention, short convolutions, mamba) on packed tokens.

Their state would leak from one packed sequence into the next, so each sequence gets a row of its own, padded on the
right. A token that sequences share is computed in the row of each, and read from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rayapp.core.errors import LearnerError
from rayapp.learner.device import moved
from rayapp.learner.packing import Segment, segment_paths

MAX_PADDING = 2  # rows computed together are at most this many times as long as the shortest


class Borders:
    """Borders of the sequences in the current forward. They stay for the backward, where layers are computed again."""

    def __init__(self) -> None:
        self._segments: tuple[Segment, ...] = ()
        self._rows: list[Tensor] = []
        self._place = torch.empty(0, dtype=torch.long)

    @property
    def are_set(self) -> bool:
        """True if the forward has packed tokens; else each of its rows is one sequence."""
        return bool(self._segments)

    def begin(self, segments: tuple[Segment, ...], device: torch.device) -> None:
        if segments is self._segments:
            return
        if not segments:
            self._segments = ()
            return
        rows, place = lay_out(paths_of(segments))
        self._segments = segments
        self._rows = [moved(index, device) for index in rows]
        self._place = moved(place, device)

    def apply(self, mixer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Run a mixer sequence by sequence: (1, N, H) -> (1, N, H')."""
        if hidden.shape[:2] != (1, self._place.numel()):
            raise LearnerError(
                "a layer that mixes tokens (linear attention, convolution or mamba) got hidden states of shape "
                f"{tuple(hidden.shape)}, but packed tokens are one row: the shape must begin with "
                f"(1, {self._place.numel()})"
            )
        packed = hidden[0]
        mixed = [mixer(packed.index_select(0, index.reshape(-1)).unflatten(0, index.shape)) for index in self._rows]  # type: ignore[no-untyped-call]
        return torch.cat([rows.flatten(0, 1) for rows in mixed]).index_select(0, self._place)[None]


def give_borders(causal_lm: Any) -> bool:
    """Make every mixer compute sequence by sequence, once, before sharding. Return whether there are any."""
    mixers = mixers_of(causal_lm)
    if not mixers:
        return False
    borders = Borders()

    def begin(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        plan = options.get("plan")
        borders.begin(plan.segments if plan is not None else (), options["input_ids"].device)

    causal_lm.get_decoder().register_forward_pre_hook(begin, with_kwargs=True)
    for mixer in mixers:
        mixer.forward = partial(_bordered, mixer.forward, borders)
    return True


def mixers_of(causal_lm: nn.Module) -> list[nn.Module]:
    """Return the mixers: the modules with a convolution along the sequence, which every kind has."""
    return [module for module in causal_lm.modules() if any(isinstance(part, nn.Conv1d) for part in module.children())]


def _bordered(forward: Callable[..., Any], borders: Borders, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
    if not borders.are_set:
        return forward(hidden_states, *args, **options)
    return borders.apply(lambda rows: forward(rows, *args, **options), hidden_states)


def paths_of(segments: Sequence[Segment]) -> list[NDArray[np.int64]]:
    """Return the packed positions of the path to each leaf; together they hold every token."""
    continued = {segment.parent for segment in segments}
    return [path for number, path in enumerate(segment_paths(segments)) if number not in continued]


def lay_out(paths: Sequence[NDArray[np.int64]]) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Return batches (B, T) of paths of about equal length, padded with their last token, and the index (N,) of each
    token's first place in the flattened batches."""
    rows, firsts, begin = [], [], 0
    for bunch in _bunches(sorted(paths, key=len)):
        width = len(bunch[-1])
        index = np.stack([np.pad(path, (0, width - len(path)), mode="edge") for path in bunch])
        is_token = np.arange(width) < np.array([len(path) for path in bunch])[:, None]
        firsts.append(np.stack([index[is_token], begin + np.flatnonzero(is_token)]))
        rows.append(index)
        begin += index.size
    token, where = np.concatenate(firsts, axis=1)
    place = np.empty(int(token.max()) + 1, np.int64)
    place[token[::-1]] = where[::-1]  # reversed, so that a token's first place is assigned last and stays
    return rows, place


def _bunches(paths: Sequence[NDArray[np.int64]]) -> list[list[NDArray[np.int64]]]:
    bunches: list[list[NDArray[np.int64]]] = []
    for path in paths:
        if bunches and len(path) <= MAX_PADDING * len(bunches[-1][0]):
            bunches[-1].append(path)
        else:
            bunches.append([path])
    return bunches

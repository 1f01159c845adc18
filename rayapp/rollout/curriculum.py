"""Difficulty curriculum, off by default: prompts that are sometimes solved are drawn more often than the others.

In a run of several sources, sources are drawn instead of prompts, each by its ratio and by its groups' results.

The driver has one. It draws the prompt of each new group by weight, hears how every finished group went, and counts
that in when a step ends: what is drawn follows from the seed, the group's id and the counts after the last step, so a
resumed run draws what one that never stopped would have. The counts travel in each checkpoint. Pure counting, no Ray.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rayapp.config.config import Config, sources_of
from rayapp.core.errors import CheckpointError
from rayapp.core.types import GroupSummary
from rayapp.rollout.order import GroupRequest

FILE = "curriculum.json"
"""In a checkpoint, and like all its files in its manifest."""
SOLVED = "solved"
Result = tuple[int, int, float, float]
"""Of a group: its id, the place of its prompt (or the index of its source), trajectories tried, and how many of them
solved it."""


class Curriculum:
    """See the module.

    Args:
        num_prompts: of one epoch. A prompt is named by its place in the first epoch's order.
        min_weight: of prompts that were always or never solved.
        ratios: of the sources, which are then what is drawn, in place of prompts. None: prompts, all alike.
        counts, results: of a checkpoint, as `state` gave them.
    """

    def __init__(
        self,
        *,
        num_prompts: int,
        seed: int,
        min_weight: float,
        ratios: Sequence[float] | None = None,
        counts: Mapping[str, tuple[float, float]] | None = None,
        results: Sequence[Result] = (),
    ) -> None:
        self._seed, self._min_weight = seed, min_weight
        self._draws_sources = ratios is not None
        self._ratios: NDArray[np.float64] = np.ones(num_prompts) if ratios is None else np.array(ratios, np.float64)
        self._tried, self._solved = np.zeros((2, num_prompts))
        for place, (tried, solved) in (counts or {}).items():
            self._tried[int(place)], self._solved[int(place)] = tried, solved
        self._results: dict[int, Result] = {result[0]: result for result in results}
        """By group, since the last `end_step`."""
        self._cumulative = np.cumsum(self.weights())

    @classmethod
    def open(cls, config: Config, num_prompts: Sequence[int], checkpoint: Path | None) -> Curriculum:
        """The curriculum of a run that begins, or goes on from a checkpoint.

        Args:
            num_prompts: of each source.
        Raises:
            CheckpointError: the checkpoint has none, or it is of other prompts.
        """
        ratios = [source.ratio for source in sources_of(config)] if len(num_prompts) > 1 else None
        number = num_prompts[0] if ratios is None else len(ratios)
        counts, results = _read(checkpoint / FILE, number) if checkpoint is not None else ({}, ())
        return cls(
            num_prompts=number,
            seed=config.run.seed,
            min_weight=config.algorithm.curriculum.min_weight,
            ratios=ratios,
            counts=counts,
            results=results,
        )

    def weights(self) -> NDArray[np.float64]:
        """(num_prompts,) how much likelier than others each is drawn.

        4 p (1 - p) of the share p of trajectories that solved it, with one more solved and one more failed: the
        variance of a reward of 0 or 1, without which a group teaches nothing. 1 for a prompt that was never tried.
        Sources have that times their ratio.
        """
        share = (self._solved + 1) / (self._tried + 2)
        teaches: NDArray[np.float64] = np.maximum(self._min_weight, 4 * share * (1 - share))
        return self._ratios * teaches

    def drawn(self, request: GroupRequest) -> GroupRequest:
        """The request with the prompt or the source that is drawn for it."""
        chosen = self.draw(request.group_id)
        return replace(request, source=chosen) if self._draws_sources else replace(request, prompt=chosen)

    def draw(self, group_id: int) -> int:
        """Place in the first epoch's order of the prompt that this group samples, or the index of its source."""
        words = np.random.SeedSequence((self._seed, group_id, len(self._tried)))
        point = float(np.random.default_rng(words).random()) * self._cumulative[-1]
        return int(np.searchsorted(self._cumulative, point, side="right"))

    def record(self, place: int, summary: GroupSummary) -> None:
        """Record the result of a group of this prompt or source; it counts from the next `end_step` on.

        A trajectory counts as solved by its reward's term `solved`, or else by the reward itself, cut to [0, 1].
        """
        values = summary.reward_terms.get(SOLVED, summary.rewards)[summary.valid.astype(bool)]
        known = values[np.isfinite(values)]
        solved = float(np.clip(known, 0.0, 1.0).sum())
        self._results[summary.group_id] = (summary.group_id, place, float(known.size), solved)

    def end_step(self) -> None:
        """Count in what was recorded, whatever order it came in."""
        for _, place, tried, solved in sorted(self._results.values()):
            self._tried[place] += tried
            self._solved[place] += solved
        self._results.clear()
        self._cumulative = np.cumsum(self.weights())

    def state(self, is_kept: Callable[[int], bool]) -> dict[str, str]:
        """Files of a checkpoint.

        Args:
            is_kept: true for the id of a group that a resumed run does not generate, and so not record, again.
        """
        seen = {str(i): (self._tried[i], self._solved[i]) for i in np.flatnonzero(self._tried)}
        results = [result for group_id, result in self._results.items() if is_kept(group_id)]
        return {FILE: json.dumps({"num_prompts": len(self._tried), "counts": seen, "results": results})}

    def metrics(self) -> dict[str, float]:
        """`curriculum/*`: the share of prompts that were tried, and the mean weight of those."""
        tried = self._tried > 0
        weight = float(self.weights()[tried].mean()) if tried.any() else 1.0
        return {"curriculum/tried": float(tried.mean()), "curriculum/weight_mean": weight}


def _read(file: Path, num_prompts: int) -> tuple[dict[str, tuple[float, float]], list[Result]]:
    if not file.exists():
        raise CheckpointError(
            f"{file.parent} was saved without a curriculum, and algorithm.curriculum.enabled is true: choose another "
            "run.name, or leave it off."
        )
    stored = json.loads(file.read_text())
    if stored["num_prompts"] != num_prompts:
        raise CheckpointError(
            f"{file.parent} has a curriculum over {stored['num_prompts']} prompts or sources, and this run has "
            f"{num_prompts}: the tasks or the data have changed. Give the old ones, or choose another run.name."
        )
    counts = {place: (float(tried), float(solved)) for place, (tried, solved) in stored["counts"].items()}
    # A checkpoint of before 2026-11-22 has no results.
    return counts, [(group_id, place, tried, solved) for group_id, place, tried, solved in stored.get("results", ())]

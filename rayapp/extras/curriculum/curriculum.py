"""Difficulty curriculum, off by default: prompts that are sometimes solved are drawn more often than prompts that are
always or never solved.

In a run with several sources, sources are drawn instead of prompts. The chance of a source depends on its ratio and on
the results of its groups.

The driver owns the curriculum. It draws the prompt of each new group by weight, records the result of every finished
group, and adds the results to the counts when a step ends. A draw depends only on the seed, the group's id and the
counts after the last step, so a resumed run draws the same prompts as a run that never stopped. Each checkpoint has the
counts. This module doesn't need Ray.
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
"""Name of the curriculum's file in a checkpoint; the checkpoint's manifest lists it."""
SOLVED = "solved"
MIN_WEIGHT = 0.1
"""Weight of prompts that were always or never solved: they are drawn from time to time, as the policy changes."""
Result = tuple[int, int, float, float]
"""Result of a group: its id, the index of its prompt (or of its source), the number of its trajectories, and the number
of solved ones."""


class Curriculum:
    """Counts the solved trajectories of each prompt or source, and draws prompts or sources by these counts.

    Args:
        num_prompts: number of prompts in one epoch. A prompt is identified by its index in the first epoch's order.
        ratios: ratios of the sources, if sources are drawn; None to draw prompts.
        counts, results: contents of a checkpoint's curriculum file, which `state` wrote.
    """

    def __init__(
        self,
        *,
        num_prompts: int,
        seed: int,
        ratios: Sequence[float] | None = None,
        counts: Mapping[str, tuple[float, float]] | None = None,
        results: Sequence[Result] = (),
    ) -> None:
        self._seed = seed
        self._draws_sources = ratios is not None
        self._ratios: NDArray[np.float64] = np.ones(num_prompts) if ratios is None else np.array(ratios, np.float64)
        self._tried, self._solved = np.zeros((2, num_prompts))
        for place, (tried, solved) in (counts or {}).items():
            self._tried[int(place)], self._solved[int(place)] = tried, solved
        self._results: dict[int, Result] = {result[0]: result for result in results}
        """Group id -> result, for the groups that were recorded since the last `end_step`."""
        self._cumulative = np.cumsum(self.weights())

    @classmethod
    def open(cls, config: Config, num_prompts: Sequence[int], checkpoint: Path | None) -> Curriculum:
        """Return the curriculum of a new run or, with `checkpoint`, the curriculum that the checkpoint holds.

        Args:
            num_prompts: number of prompts of each source.
        Raises:
            CheckpointError: the checkpoint has no curriculum, or its curriculum is for another number of prompts.
        """
        ratios = [source.ratio for source in sources_of(config)] if len(num_prompts) > 1 else None
        number = num_prompts[0] if ratios is None else len(ratios)
        counts, results = _read(checkpoint / FILE, number) if checkpoint is not None else ({}, ())
        return cls(
            num_prompts=number,
            seed=config.run.seed,
            ratios=ratios,
            counts=counts,
            results=results,
        )

    def weights(self) -> NDArray[np.float64]:
        """Return the weights (num_prompts,) by which prompts are drawn.

        The weight of a prompt is 4 p (1 - p), but at least `MIN_WEIGHT`. p = (solved + 1) / (tried + 2), over the
        prompt's trajectories. The weight is proportional to the variance of a 0/1 reward, because a group without
        variance has no signal. A prompt that was never tried has weight 1. A source's weight is multiplied by its
        ratio; the shape is then (num_sources,).
        """
        share = (self._solved + 1) / (self._tried + 2)
        teaches: NDArray[np.float64] = np.maximum(MIN_WEIGHT, 4 * share * (1 - share))
        return self._ratios * teaches

    def drawn(self, request: GroupRequest) -> GroupRequest:
        """Return the request with a prompt or source that was drawn for it."""
        chosen = self.draw(request.group_id)
        return replace(request, source=chosen) if self._draws_sources else replace(request, prompt=chosen)

    def draw(self, group_id: int) -> int:
        """Draw the prompt of a group. Return the prompt's index in the first epoch's order or, if sources are drawn,
        the source's index.
        """
        words = np.random.SeedSequence((self._seed, group_id, len(self._tried)))
        point = float(np.random.default_rng(words).random()) * self._cumulative[-1]
        return int(np.searchsorted(self._cumulative, point, side="right"))

    def record(self, place: int, summary: GroupSummary) -> None:
        """Record the result of a group. Draws depend on it from the next `end_step` on.

        A trajectory counts as solved by its reward's term `solved`, a number from 0 to 1. Without this term, the reward
        is used, clipped to [0, 1].

        Args:
            place: index of the group's prompt or source.
        """
        values = summary.reward_terms.get(SOLVED, summary.rewards)[summary.valid.astype(bool)]
        known = values[np.isfinite(values)]
        solved = float(np.clip(known, 0.0, 1.0).sum())
        self._results[summary.group_id] = (summary.group_id, place, float(known.size), solved)

    def end_step(self) -> None:
        """Add the recorded results to the counts. The order in which they were recorded has no effect."""
        for _, place, tried, solved in sorted(self._results.values()):
            self._tried[place] += tried
            self._solved[place] += solved
        self._results.clear()
        self._cumulative = np.cumsum(self.weights())

    def state(self, is_kept: Callable[[int], bool]) -> dict[str, str]:
        """Return the file that a checkpoint keeps of the curriculum: file name -> text.

        Args:
            is_kept: function of a group's id that returns True if a resumed run does not generate the group again. The
                file keeps the results of these groups.
        """
        seen = {str(i): (self._tried[i], self._solved[i]) for i in np.flatnonzero(self._tried)}
        results = [result for group_id, result in self._results.items() if is_kept(group_id)]
        return {FILE: json.dumps({"num_prompts": len(self._tried), "counts": seen, "results": results})}

    def metrics(self) -> dict[str, float]:
        """Return the metrics `curriculum/*`: the share of prompts that were tried, and the mean weight of these
        prompts.
        """
        tried = self._tried > 0
        weight = float(self.weights()[tried].mean()) if tried.any() else 1.0
        return {"curriculum/tried": float(tried.mean()), "curriculum/weight_mean": weight}


def _read(file: Path, num_prompts: int) -> tuple[dict[str, tuple[float, float]], list[Result]]:
    if not file.exists():
        raise CheckpointError(
            f"{file.parent} was saved without a curriculum, but algorithm.curriculum.enabled is true. Set it to false, "
            "or choose another run.name"
        )
    stored = json.loads(file.read_text())
    if stored["num_prompts"] != num_prompts:
        raise CheckpointError(
            f"{file.parent} has a curriculum over {stored['num_prompts']} prompts or sources, but this run has "
            f"{num_prompts}: the run's tasks or data files have changed. Restore the earlier ones, or choose another "
            "run.name"
        )
    counts = {place: (float(tried), float(solved)) for place, (tried, solved) in stored["counts"].items()}
    # Checkpoints that were written before 2026-11-22 have no results.
    return counts, [(group_id, place, tried, solved) for group_id, place, tried, solved in stored.get("results", ())]

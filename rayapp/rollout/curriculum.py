"""Difficulty curriculum, off by default: prompts that are sometimes solved are drawn more often than the others.

In a run with several sources, sources are drawn instead of prompts, by their ratios and their groups' results.

The driver owns the curriculum. It draws the prompt of each new group by weight, records the result of every finished
group, and adds the results to the counts when a step ends. A draw depends only on the seed, the group's id and the
counts after the last step, so a resumed run draws the same prompts as a run that never stopped. Each checkpoint has the
counts. No Ray.
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
Result = tuple[int, int, float, float]
"""Result of a group: its id, the index of its prompt (or of its source), the number of its trajectories, and the number
of solved ones."""


class Curriculum:
    """Counts of solved trajectories per prompt or source, and the draws that follow from them.

    Args:
        num_prompts: number of prompts in one epoch. A prompt is identified by its index in the first epoch's order.
        min_weight: weight of prompts that were always or never solved. ratios: ratios of the sources, to draw sources
        instead of prompts; None to draw prompts. counts, results: state from a checkpoint, as `state` returned it.
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
        """Group id -> its result, for groups that were recorded since the last `end_step`."""
        self._cumulative = np.cumsum(self.weights())

    @classmethod
    def open(cls, config: Config, num_prompts: Sequence[int], checkpoint: Path | None) -> Curriculum:
        """Return the curriculum of a new run, or the one that a checkpoint holds.

        Args:
            num_prompts: number of prompts of each source.
        Raises:
            CheckpointError: the checkpoint has no curriculum, or one for other prompts.
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
        """Return the weight (num_prompts,) with which each prompt is drawn.

        The weight is 4 p (1 - p), where p is the share of solved trajectories after adding a solved and a failed one.
        This is proportional to the variance of a 0/1 reward: a group without variance has no signal. A prompt that was
        never tried has weight 1. For sources, the weight (num_sources,) is multiplied by the source's ratio.
        """
        share = (self._solved + 1) / (self._tried + 2)
        teaches: NDArray[np.float64] = np.maximum(self._min_weight, 4 * share * (1 - share))
        return self._ratios * teaches

    def drawn(self, request: GroupRequest) -> GroupRequest:
        """Return the request with a drawn prompt or source."""
        chosen = self.draw(request.group_id)
        return replace(request, source=chosen) if self._draws_sources else replace(request, prompt=chosen)

    def draw(self, group_id: int) -> int:
        """Draw the prompt of a group: return its index in the first epoch's order. With ratios, return the index of a
        source."""
        words = np.random.SeedSequence((self._seed, group_id, len(self._tried)))
        point = float(np.random.default_rng(words).random()) * self._cumulative[-1]
        return int(np.searchsorted(self._cumulative, point, side="right"))

    def record(self, place: int, summary: GroupSummary) -> None:
        """Record the result of a group. It counts from the next `end_step` on.

        A trajectory counts as solved by the value of its reward's term `solved`; without this term, by the reward
        itself, limited to [0, 1].

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
        """Return the curriculum's file for a checkpoint: file name -> text.

        Args:
            is_kept: function that returns True for a group that a resumed run does not generate again: the file keeps
                its result.
        """
        seen = {str(i): (self._tried[i], self._solved[i]) for i in np.flatnonzero(self._tried)}
        results = [result for group_id, result in self._results.items() if is_kept(group_id)]
        return {FILE: json.dumps({"num_prompts": len(self._tried), "counts": seen, "results": results})}

    def metrics(self) -> dict[str, float]:
        """Return `curriculum/*`: the share of prompts that were tried, and their mean weight."""
        tried = self._tried > 0
        weight = float(self.weights()[tried].mean()) if tried.any() else 1.0
        return {"curriculum/tried": float(tried.mean()), "curriculum/weight_mean": weight}


def _read(file: Path, num_prompts: int) -> tuple[dict[str, tuple[float, float]], list[Result]]:
    if not file.exists():
        raise CheckpointError(
            f"{file.parent} was saved without a curriculum, and algorithm.curriculum.enabled is true: set it to false, "
            "or choose another run.name"
        )
    stored = json.loads(file.read_text())
    if stored["num_prompts"] != num_prompts:
        raise CheckpointError(
            f"{file.parent} has a curriculum over {stored['num_prompts']} prompts or sources, but this run has "
            f"{num_prompts}: its tasks or data files have changed. Restore them, or choose another run.name"
        )
    counts = {place: (float(tried), float(solved)) for place, (tried, solved) in stored["counts"].items()}
    # Checkpoints that were written before 2026-11-22 have no results.
    return counts, [(group_id, place, tried, solved) for group_id, place, tried, solved in stored.get("results", ())]

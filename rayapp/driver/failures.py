"""How many failed rollouts a run puts up with before it stops rather than train on what is left."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from rayapp.core.errors import TrainingAbortedError
from rayapp.core.types import GroupSummary

WINDOW_STEPS = 10


class FailureBudget:
    """Counts trajectories that failed for reasons that are not the policy's, over the last ten steps.

    Args:
        max_ratio: rollout.max_failed_ratio.
    """

    def __init__(self, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        self._window: deque[tuple[int, Counter[str]]] = deque(maxlen=WINDOW_STEPS)

    def record(self, summaries: Iterable[GroupSummary]) -> None:
        """Count one step.

        Raises:
            TrainingAbortedError: the share of failures is above the limit.
        """
        kinds = [kind for summary in summaries for kind in summary.failure_kinds]
        self._window.append((len(kinds), Counter(kind for kind in kinds if kind)))
        if self.ratio > self._max_ratio:
            raise TrainingAbortedError(
                f"{self.ratio:.0%} of the trajectories of the last {len(self._window)} step(s) failed for reasons that "
                f"are not the policy's ({self._described()}); rollout.max_failed_ratio is {self._max_ratio:g}. Nothing "
                "was trained on them. Find the cause with `rayapp doctor` or in trajectories/ (column reward_detail); "
                "the run goes on from its last checkpoint."
            )

    @property
    def ratio(self) -> float:
        """Failed over all, in the window."""
        total = sum(count for count, _ in self._window)
        return sum(kinds.total() for _, kinds in self._window) / total if total else 0.0

    def _described(self) -> str:
        kinds: Counter[str] = sum((kinds for _, kinds in self._window), Counter())
        return ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())

    def metrics(self) -> dict[str, float]:
        return {"rollout/failed_ratio_10_steps": self.ratio}

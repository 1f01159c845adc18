"""Calls all learner ranks as one group: collective calls go to every rank, and rank 0's answer is the result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import RayActorError

from actors import progress
from actors.handles import LearnerHandle, VllmServerHandle
from rayapp.config.config import Config
from rayapp.core.errors import (
    CheckpointError,
    DeadlineError,
    LearnersLostError,
    ObjectsLostError,
    ProcessDiedError,
    RayappError,
    WeightSyncError,
)
from rayapp.core.timing import Profile
from rayapp.core.types import FloatArray, GroupSummary, Trajectory
from rayapp.engine.weights.sync import TransferRanks
from rayapp.learner.shares import deal
from rayapp.storage.media import pictures_of

T = TypeVar("T")

DEATH_NOTICE_S = 10.0  # from a rank's death until the other ranks fail and Ray reports the death


@dataclass(slots=True, eq=False)
class LearnerGroup:
    """Handles of the learners, by rank. Empty if the run only evaluates."""

    handles: tuple[LearnerHandle, ...]
    config: Config
    plan: TransferRanks | None = None  # of the weight group; None if weights go through the object store
    processor: str = ""  # instruction set of the learners' processors; `gpu` on GPUs
    on_progress: Callable[[str], None] = lambda text: None  # gets how far a training step is
    # Ranks that have written their part of the present checkpoint.
    _written: set[str] = field(default_factory=set, init=False, repr=False)
    # Policy version that every rank holds; None during a step, and after one that failed midway.
    _version: int | None = field(default=0, init=False, repr=False)
    # Event that is unset while a step is trained, and while successors of these learners load the model.
    _at_rest: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)

    def __post_init__(self) -> None:
        self._at_rest.set()

    @property
    def _data_parallel(self) -> int:
        return len(self.handles) // self.config.learner.sequence_parallel

    async def rest(self) -> None:
        await self._at_rest.wait()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._at_rest.clear()
        try:
            yield
        finally:
            self._at_rest.set()

    def holds(self, version: int) -> bool:
        """True if every rank holds exactly the weights and the optimizer of this version."""
        return self._version == version

    async def train_step(self, step: int, summaries: tuple[GroupSummary, ...], refs: Sequence[Any]) -> dict[str, float]:
        """Train one step on these groups (references in the order of `summaries`), distributed so that all ranks have
        about equally many tokens."""
        self._version = None
        shares = deal(summaries, self.config, self._data_parallel)
        refs_of = self._of_ranks([[refs[share.position] for share in mine] for mine in shares])
        showing = asyncio.create_task(self._show_progress())
        try:
            with self.at_work():
                results = await self._all(
                    handle.train_step(step, summaries, shares, own)
                    for handle, own in zip(self.handles, refs_of, strict=True)
                )
        finally:
            showing.cancel()
        self._version = step
        return dict(results[0])

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(progress.EVERY_S)
            if text := await asyncio.to_thread(progress.told):
                self.on_progress(text)

    async def supervised_step(
        self, step: int, rows: Sequence[Trajectory], pictures: Mapping[str, bytes]
    ) -> dict[str, float]:
        """Take one optimizer step on demonstrations, distributed so that all ranks have about equally many tokens.
        `pictures` are those of the demonstrations and others, by SHA-256."""
        self._version = None
        results = await self._all(
            handle.supervised_step(step, dealt, pictures_of(dealt, pictures))
            for handle, dealt in zip(self.handles, self._dealt(rows), strict=True)
        )
        self._version = step
        return dict(results[0])

    async def supervised_loss(self, rows: Sequence[Trajectory], pictures: Mapping[str, bytes]) -> float:
        losses = await self._all(
            handle.supervised_loss(dealt, pictures_of(dealt, pictures))
            for handle, dealt in zip(self.handles, self._dealt(rows), strict=True)
        )
        return float(losses[0])

    def _dealt(self, rows: Sequence[Trajectory]) -> list[list[Trajectory]]:
        """Deal the rows, longest first, to the rank with the fewest tokens so far."""
        dealt: list[list[Trajectory]] = [[] for _ in range(self._data_parallel)]
        loads = [0] * len(dealt)
        for row in sorted(rows, key=lambda row: -row.num_tokens):
            rank = loads.index(min(loads))
            dealt[rank].append(row)
            loads[rank] += row.num_tokens
        return self._of_ranks(dealt)

    def _of_ranks(self, parts: Sequence[T]) -> list[T]:
        return [parts[rank // self.config.learner.sequence_parallel] for rank in range(len(self.handles))]

    async def log_probs_before(self, step: int) -> dict[int, FloatArray]:
        """Return log-probs of the step's response tokens before its update, by the trajectory's position in it."""
        [found] = await self._all([self.handles[0].log_probs_before(step)])
        return dict(found)

    async def profile(self, step: int) -> Profile | None:
        [found] = await self._all([self.handles[0].profile(step)])
        return found if isinstance(found, Profile) else None

    async def export_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[Any]:
        """Yield references to rank 0's `WeightBucket`s, each as soon as it is in the object store."""
        streams = [handle.export_weights(version, bucket_bytes) for handle in self.handles]
        try:
            async for ref in streams[0]:
                yield ref
            for stream in streams[1:]:
                # Gathering is collective: the other ranks yield nothing, but their errors must be raised.
                async for _ in stream:
                    raise AssertionError("a learner other than rank 0 yielded weights: only rank 0 gathers them")
        except RayActorError as error:
            raise LearnersLostError(f"a learner died while it exported its weights. {error}") from None

    async def open_weight_group(self, servers: Sequence[VllmServerHandle], timeout_s: float) -> None:
        """Form a new group of all ranks and these servers; rank 0 listens on its own node."""
        assert self.plan is not None, "a transport with a group needs `plan`"
        address = await self.handles[0].free_address(timeout_s)
        await self._all(
            handle.open_weight_group(tuple(servers), self.plan, address, timeout_s) for handle in self.handles
        )

    async def send_weights(self, version: int, timeout_s: float) -> dict[str, float]:
        """Send the present weights to the group's servers. Return rank 0's bytes and seconds.

        WeightSyncError: not all arrived; the ranks are unchanged. LearnersLostError: a rank failed; the others wait for
        it.
        """
        try:
            results = await self._all(handle.send_weights(version, timeout_s) for handle in self.handles)
        except (WeightSyncError, LearnersLostError):
            raise
        except RayappError as error:
            raise LearnersLostError(f"a learner failed while it exported its weights. {error}") from error
        return dict(results[0])

    async def begin_checkpoint(self, folder: Path, version: int) -> None:
        """Let every rank copy its state and start to write it."""
        if not self.holds(version):
            held = "a half-finished step" if self._version is None else f"version {self._version}"
            raise CheckpointError(
                f"the checkpoint {folder} can't be saved: it is for policy version {version}, but the learners hold "
                f"{held}."
            )
        self._written.clear()
        await self._all(handle.begin_checkpoint(str(folder), version) for handle in self.handles)

    async def checkpoint_done(self) -> bool:
        left = [handle for handle in self.handles if handle.name not in self._written]
        done = await self._all(handle.checkpoint_done() for handle in left)
        self._written.update(handle.name for handle, is_done in zip(left, done, strict=True) if is_done)
        return len(self._written) == len(self.handles)

    async def load_checkpoint(self, folder: Path) -> int:
        versions = await self._all(handle.load_checkpoint(str(folder)) for handle in self.handles)
        self._version = int(versions[0])
        return self._version

    async def export_hf(self, folder: Path) -> None:
        await self._all(handle.export_hf(str(folder)) for handle in self.handles)

    async def _all(self, calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        # LearnersLostError: a rank died or hangs, or a group that it needs is gone; the others wait for it in mid-step.
        running = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            # A rank that dies breaks the others' collective, and their errors may arrive before Ray reports the death.
            await asyncio.wait(running, timeout=DEATH_NOTICE_S)
            errors = [error for task in running if task.done() and (error := task.exception())]
            lost = [e for e in errors if isinstance(e, ProcessDiedError | DeadlineError | ObjectsLostError)]
            if lost:
                raise LearnersLostError(str(lost[0]))
            if errors:
                raise errors[0]
            return [task.result() for task in running]
        finally:
            for task in running:
                task.cancel()

"""Typed handles of the Ray actors, through which the driver and the workers call them with deadlines.

A handle is plain data. Sent to another actor, it travels as a name, by which the receiver finds the actor. Each method
declares the name, deadline and types of a call; the class named like the handle does the work. Errors name actor and
call.
"""

# mypy: disable-error-code="no-any-return"
# Results of actor calls are untyped: the signatures here declare their types.
from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from rayapp.core.errors import (
    DeadlineError,
    EngineDeadError,
    ObjectsLostError,
    ProcessDiedError,
    ProcessUnavailableError,
    RayappError,
)
from rayapp.core.timing import Profile
from rayapp.core.types import (
    Completion,
    FloatArray,
    GroupSummary,
    Int32Array,
    RequestId,
    SamplingParams,
    SandboxSpec,
    Trajectory,
)
from rayapp.engine.weights.sync import TransferRanks
from rayapp.learner.shares import Shares
from rayapp.rollout.order import GroupRequest
from rayapp.sandbox.leases import Lease

T = TypeVar("T")


async def answer(ref: Awaitable[T], *, timeout_s: float, what: str) -> T:
    """Await the result of a remote call; `what` names it in messages. DeadlineError, ProcessDiedError, ObjectsLostError
    (an argument or the result was on a node that is gone), or the RayappError that our code raised in the actor."""
    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except RayTaskError as error:
        # Check RayTaskError first: it is also an instance of its cause's class, so an error about another actor's death
        # would look like this actor's death.
        raise _remote_error(error, what) from error
    except RayActorError as error:
        raise _died(error, what) from None
    except OutOfMemoryError as error:
        raise _out_of_memory(error, what) from None
    except ObjectLostError as error:
        raise _lost(error, what) from None
    except TimeoutError:
        raise DeadlineError(f"{what} did not answer within {timeout_s:g} s") from None


def _died(error: RayActorError, what: str) -> ProcessDiedError:
    if isinstance(error, ActorUnavailableError):
        return ProcessUnavailableError(f"{what}: its process can't be reached. {_first_lines(error)}")
    if error.actor_init_failed:
        return ProcessDiedError(f"{what}: its process could not start. {_last_line(error)}")
    return ProcessDiedError(f"{what}: its process is gone. {_first_lines(error)}")


def _lost(error: ObjectLostError | RayActorError, what: str) -> ObjectsLostError:
    return ObjectsLostError(
        f"{what}: an object that this call needs was lost with its process or node. {_first_lines(error)}"
    )


def _remote_error(error: RayTaskError, what: str) -> BaseException:
    cause = error.cause
    if isinstance(cause, RayappError | TimeoutError):
        return cause
    # A full store spills to files; Ray raises this only when the disk is full too, and names the disk.
    if isinstance(cause, ObjectStoreFullError | OutOfDiskError):
        return RayappError(
            f"{what}: Ray's object store is full. Raise cluster.object_store_mib (or --object-store-memory, if you ran "
            f"`ray start`), or free space on the disk to which Ray spills. {_first_lines(cause)}"
        )
    if isinstance(cause, OutOfMemoryError):
        return _out_of_memory(cause, what)
    if isinstance(cause, ObjectLostError | RayActorError):
        return _lost(cause, what)
    return RayappError(f"{what} failed: {type(cause).__name__}: {cause}")


def _out_of_memory(error: OutOfMemoryError, what: str) -> ProcessDiedError:
    return ProcessDiedError(
        f"{what}: Ray ended its process because the node ran out of memory. Lower learner.max_tokens_per_microbatch or "
        f"server.kv_cache_gib, or end other programs on that node. {_first_lines(error)}"
    )


def _last_line(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2].strip()


def _first_lines(error: BaseException, num_lines: int = 3) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:num_lines])


class Restartable:
    """Base of actors whose process Ray restarts; `incarnation` identifies each start."""

    @cached_property
    def _start(self) -> str:
        return uuid.uuid4().hex

    async def incarnation(self) -> str:
        return self._start


ObjectRef = Any  # ray.ObjectRef[T] would require the objects' types
Facts = dict[str, Any]
GROUP_MARGIN_S = 180.0  # after a group's deadline, which the worker enforces; a worker that hangs is replaced before
# id, prompt, sampling, oldest policy version allowed, size of the cohort
GenerateRequest = tuple[RequestId, Int32Array, SamplingParams, int, int]


@dataclass(frozen=True, slots=True)
class Handle:
    """Base of the handles: an actor, its name, and calls with a deadline."""

    actor: Any
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        # Send the actor's name and look the actor up on arrival. Ray would keep a reference that is an argument of a
        # constructor for all restarts of the constructed actor, and warn of it at each start.
        others = tuple(getattr(self, field.name) for field in fields(self) if field.name not in ("actor", "name"))
        return _found, (type(self), self.name, others)

    async def call(self, method: str, *args: Any, timeout_s: float, label: str | None = None) -> Any:
        """Call the actor's method and return its result. The dashboard shows `label` with the call."""
        bound = getattr(self.actor, method) if label is None else self.labelled(method, label)
        return await self.answered(method, bound.remote(*args), timeout_s)

    async def answered(self, method: str, ref: Any, timeout_s: float) -> Any:
        return await answer(ref, timeout_s=timeout_s, what=f"{self.name}.{method}")

    def labelled(self, method: str, label: str, **options: Any) -> Any:
        return getattr(self.actor, method).options(name=f"{self.name}.{method} {label}".rstrip(), **options)

    async def incarnation(self, timeout_s: float) -> str:
        """Return an id that differs after every restart of the process. Learners answer only between steps."""
        return await self.call("incarnation", timeout_s=timeout_s)

    async def ping(self, timeout_s: float) -> str:
        """Return the `incarnation` if the process, a server or a rollout worker, makes progress with its work."""
        return await self.call("ping", timeout_s=timeout_s)


def _found(kind: type[Handle], name: str, others: tuple[Any, ...]) -> Handle:
    return kind(ray.get_actor(name), name, *others)


@dataclass(frozen=True, slots=True)
class VllmServerHandle(Handle):
    request_timeout_s: float
    sync_timeout_s: float

    async def ready(self, timeout_s: float) -> Facts:
        return await self.call("start", timeout_s=timeout_s, label="")

    async def generate_many(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[list[tuple[int, Completion | Exception | Sequence[int]]]]:
        """Yield the completions of requests that start together, as each ends, with the request's position, and new
        tokens of streamed ones. EngineDeadError: what was not yielded yet is lost."""
        name = f"{self.name}.generate {requests[0][0]}"
        method = self.actor.generate_many.options(num_returns="streaming", name=name)
        try:
            async for ref in method.remote(list(requests)):
                yield await self.answered("generate", ref, self.request_timeout_s)
        except RayActorError as error:
            raise EngineDeadError(f"{name}: its process is gone. {error}") from None
        except ProcessDiedError as error:
            raise EngineDeadError(str(error)) from None

    async def load_weights(self, version: int, buckets: Sequence[ObjectRef]) -> Facts:
        # Send a list of references, which Ray does not resolve: the server maps each bucket when it needs it.
        refs = list(buckets)
        return await self.call("load_weights", version, refs, timeout_s=self.sync_timeout_s, label=f"step={version}")

    async def go_on(self, timeout_s: float) -> int:
        return await self.call("go_on", timeout_s=timeout_s)

    async def sleep(self) -> bool:
        return await self.call("sleep", timeout_s=self.sync_timeout_s)

    async def begin_profile(self) -> None:
        await self.call("begin_profile", timeout_s=self.sync_timeout_s)

    async def end_profile(self) -> Profile:
        return await self.call("end_profile", timeout_s=self.sync_timeout_s)

    async def close(self, timeout_s: float = 20.0) -> None:
        await self.call("close", timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class ModelServerHandle(Handle):
    async def ready(self, timeout_s: float, address: tuple[str, int] | None = None) -> tuple[str, int]:
        return await self.call("start", address, timeout_s=timeout_s, label="")

    async def close(self, timeout_s: float = 20.0) -> None:
        await self.call("close", timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class LearnerHandle(Handle):
    """Handle of one rank. `actors.learner_group.LearnerGroup` calls all ranks."""

    step_timeout_s: float

    async def ready(self, timeout_s: float) -> Facts:
        return await self.call("ready", timeout_s=timeout_s)

    async def train_step(
        self, step: int, summaries: tuple[GroupSummary, ...], shares: Shares, groups: Sequence[ObjectRef]
    ) -> dict[str, float]:
        """Train one step; `groups` are references, which Ray resolves in the learner's process."""
        return await self._of_step("train_step", step, summaries, shares, *groups, label=f"step={step}")

    async def supervised_step(
        self, step: int, rows: Sequence[Trajectory], pictures: Mapping[str, bytes]
    ) -> dict[str, float]:
        return await self._of_step("supervised_step", step, tuple(rows), pictures, label=f"step={step}")

    async def supervised_loss(self, rows: Sequence[Trajectory], pictures: Mapping[str, bytes]) -> float:
        return await self._of_step("supervised_loss", tuple(rows), pictures)

    async def log_probs_before(self, step: int) -> dict[int, FloatArray]:
        return await self._of_step("log_probs_before", label=f"step={step}")

    async def profile(self, step: int) -> Profile | None:
        return await self._of_step("profile", label=f"step={step}")

    def export_weights(self, version: int, bucket_bytes: int) -> Any:
        """Stream references to `WeightBucket`s, which the caller owns. Ranks other than 0 yield nothing."""
        return self.labelled("export_weights", f"step={version}", num_returns="streaming").remote(version, bucket_bytes)

    async def free_address(self, timeout_s: float) -> tuple[str, int]:
        return await self.call("free_address", timeout_s=timeout_s)

    async def open_weight_group(
        self, servers: tuple[VllmServerHandle, ...], plan: TransferRanks, address: tuple[str, int], timeout_s: float
    ) -> None:
        # Learners and servers enforce timeout_s, and vLLM enforces 300 s over NCCL. This longer deadline is for a
        # process that hangs.
        last_s = 2 * timeout_s + 300.0 + 60.0
        await self.call("open_weight_group", servers, plan, address, timeout_s, timeout_s=last_s)

    async def send_weights(self, version: int, timeout_s: float) -> Facts:
        return await self.call("send_weights", version, timeout_s=4 * timeout_s + 60.0)

    async def begin_checkpoint(self, folder: str, version: int) -> None:
        await self._of_step("begin_checkpoint", folder, version, label=f"step={version}")

    async def checkpoint_done(self) -> bool:
        return await self._of_step("checkpoint_done")

    async def load_checkpoint(self, folder: str) -> int:
        return await self._of_step("load_checkpoint", folder, label=Path(folder).parent.name)

    async def export_hf(self, folder: str) -> None:
        await self._of_step("export_hf", folder, label="final")

    async def _of_step(self, method: str, *args: Any, label: str | None = None) -> Any:
        return await self.call(method, *args, timeout_s=self.step_timeout_s, label=label)


@dataclass(frozen=True, slots=True)
class SandboxPoolHandle(Handle):
    async def ready(self, timeout_s: float) -> Facts:
        return await self.call("ready", timeout_s=timeout_s)

    async def acquire(self, holder: str, spec: SandboxSpec, *, timeout_s: float, lease_id: int | None = None) -> Lease:
        # The pool enforces the caller's deadline; the extra seconds are for a pool that hangs.
        ref = self.actor.acquire.remote(holder, spec, timeout_s=timeout_s, lease_id=lease_id)
        return await self.answered("acquire", ref, timeout_s + 10.0)

    async def release(self, lease_id: int, is_clean: bool) -> None:
        await self.call("release", lease_id, is_clean, timeout_s=10.0)

    async def reclaim(self, holder: str) -> int:
        return await self.call("reclaim", holder, timeout_s=10.0)

    async def stats(self) -> dict[str, float]:
        return await self.call("stats", timeout_s=10.0)

    async def close(self, timeout_s: float = 30.0) -> None:
        await self.call("close", timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class RolloutWorkerHandle(Handle):
    group_deadline_s: float

    async def ready(self, timeout_s: float) -> Facts:
        return await self.call("ready", timeout_s=timeout_s)

    async def run_group(self, request: GroupRequest) -> tuple[GroupSummary, ObjectRef]:
        """Run a group; returns the summary and a *reference* to the Group."""
        return await self._group("run_group", request, f"step={request.policy_version + 1} group={request.group_id}")

    async def evaluate(self, request: GroupRequest, step: int) -> tuple[GroupSummary, ObjectRef]:
        """Sample one prompt after `step`; returns the summary and a *reference* to the Group."""
        return await self._group("evaluate", request, f"step={step} prompt={request.group_id}")

    async def _group(self, method: str, request: GroupRequest, label: str) -> tuple[GroupSummary, ObjectRef]:
        group_ref, summary_ref = self.labelled(method, label, num_returns=2).remote(request)
        # The worker enforces the group's deadline; this longer deadline is for a worker that hangs.
        return await self.answered(method, summary_ref, self.group_deadline_s + GROUP_MARGIN_S), group_ref

    async def prefetch(self, images: Sequence[str], timeout_s: float = 30.0) -> None:
        await self.call("prefetch", list(images), timeout_s=timeout_s)

    async def num_eval_prompts(self, timeout_s: float = 30.0) -> tuple[int, ...]:
        return await self.call("num_eval_prompts", timeout_s=timeout_s)

    async def close(self, timeout_s: float = 10.0) -> None:
        await self.call("close", timeout_s=timeout_s)

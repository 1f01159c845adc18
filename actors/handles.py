"""Typed handles of the Ray actors: what the driver and the workers call, with jump-to-definition and deadlines.

A handle is plain data and travels to other actors as its name. Each method names the call, its deadline
and its types; the work is in the class of the same name without `Handle`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.calls import answer
from rayapp.core.errors import EngineDeadError, ProcessDiedError
from rayapp.core.types import (
    Completion,
    FloatArray,
    GroupSummary,
    Int32Array,
    SamplingParams,
    SandboxSpec,
    Trajectory,
)
from rayapp.engine.weights.transfer_plan import TransferPlan
from rayapp.learner.shares import Share
from rayapp.rollout.order import GroupRequest
from rayapp.sandbox.leases import Fate, Lease

ObjectRef = Any  # ray.ObjectRef[T] can't be named where `Group` is only a reference
Facts = dict[str, Any]
GROUP_MARGIN_S = 180.0
"""Past a group's own deadline, which its worker keeps. One that does not is replaced before this is over."""
GenerateRequest = tuple[str, Int32Array, SamplingParams, int, int]
"""Arguments of `VllmServer.generate`: id, prompt, sampling, the oldest version that will do, size of the cohort."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A named actor.

    Calls that take long have a name of their own in the dashboard: which actor does what, in which step.
    """

    actor: Any
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        # As a reference, an argument of a constructor would have to outlive every restart of the actor it made (Ray
        # says so in red at each start); a name is looked up again each time.
        others = tuple(getattr(self, field.name) for field in fields(self) if field.name not in ("actor", "name"))
        return _found, (type(self), self.name, others)

    async def call(self, method: str, ref: Any, timeout_s: float) -> Any:
        return await answer(ref, timeout_s=timeout_s, what=f"{self.name}.{method}")

    async def incarnation(self, timeout_s: float) -> str:
        """Which start of the process answers. Not for learners: they answer only between steps."""
        incarnation: str = await self.call("incarnation", self.actor.incarnation.remote(), timeout_s)
        return incarnation


def _found(kind: type[Handle], name: str, others: tuple[Any, ...]) -> Handle:
    return kind(ray.get_actor(name), name, *others)


@dataclass(frozen=True, slots=True)
class VllmServerHandle(Handle):
    """See `actors.vllm_server.VllmServer`."""

    request_timeout_s: float
    sync_timeout_s: float

    async def ready(self, timeout_s: float) -> Facts:
        facts: Facts = await self.call("start", self.actor.start.options(name=f"{self.name}.start").remote(), timeout_s)
        return facts

    async def ping(self, timeout_s: float) -> str:
        """`incarnation`, if the engine answers too."""
        incarnation: str = await self.call("ping", self.actor.ping.remote(), timeout_s)
        return incarnation

    async def generate_many(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[list[tuple[int, Completion | Exception]]]:
        """Completions of requests that start together, by their position, as they end.

        Raises:
            EngineDeadError: the server is gone; so is what has not come yet.
        """
        name = f"{self.name}.generate {requests[0][0]}"
        method = self.actor.generate_many.options(num_returns="streaming", name=name)
        try:
            async for ref in method.remote(list(requests)):
                yield await self.call("generate", ref, self.request_timeout_s)
        except RayActorError as error:
            raise EngineDeadError(f"{name}: its process is gone. {error}") from None
        except ProcessDiedError as error:
            raise EngineDeadError(str(error)) from None

    async def load_weights(self, version: int, buckets: Sequence[ObjectRef]) -> Facts:
        # A list of references and not the references themselves: the server maps each bucket when it needs it.
        method = self.actor.load_weights.options(name=f"{self.name}.load_weights step={version}")
        ref = method.remote(version, list(buckets))
        facts: Facts = await self.call("load_weights", ref, self.sync_timeout_s)
        return facts

    async def go_on(self, timeout_s: float) -> int:
        """Serve with the weights of an update that is whole. Policy version that it holds; -1 for none."""
        version: int = await self.call("go_on", self.actor.go_on.remote(), timeout_s)
        return version

    async def sleep(self) -> bool:
        is_asleep: bool = await self.call("sleep", self.actor.sleep.remote(), self.sync_timeout_s)
        return is_asleep

    async def close(self, timeout_s: float = 20.0) -> None:
        await self.call("close", self.actor.close.remote(), timeout_s)


@dataclass(frozen=True, slots=True)
class ModelServerHandle(Handle):
    """See `actors.model_server.ModelServer`."""

    async def ready(self, timeout_s: float, address: tuple[str, int] | None = None) -> tuple[str, int]:
        method = self.actor.start.options(name=f"{self.name}.start")
        found: tuple[str, int] = await self.call("start", method.remote(address), timeout_s)
        return found

    async def ping(self, timeout_s: float) -> str:
        """`incarnation`, if its server answers too."""
        incarnation: str = await self.call("ping", self.actor.ping.remote(), timeout_s)
        return incarnation

    async def close(self, timeout_s: float = 20.0) -> None:
        await self.call("close", self.actor.close.remote(), timeout_s)


@dataclass(frozen=True, slots=True)
class LearnerHandle(Handle):
    """See `actors.learner.Learner`. One rank; `rayapp.cluster.LearnerGroup` calls all of them."""

    step_timeout_s: float

    async def ready(self, timeout_s: float) -> Facts:
        facts: Facts = await self.call("ready", self.actor.ready.remote(), timeout_s)
        return facts

    async def train_step(
        self,
        step: int,
        summaries: tuple[GroupSummary, ...],
        shares: tuple[tuple[Share, ...], ...],
        groups: Sequence[ObjectRef],
    ) -> dict[str, float]:
        """`groups` are references; Ray resolves top-level arguments in the learner's process, not here."""
        method = self.actor.train_step.options(name=f"{self.name}.train_step step={step}")
        ref = method.remote(step, summaries, shares, *groups)
        metrics: dict[str, float] = await self.call("train_step", ref, self.step_timeout_s)
        return metrics

    async def supervised_step(self, step: int, rows: Sequence[Trajectory]) -> dict[str, float]:
        method = self.actor.supervised_step.options(name=f"{self.name}.supervised_step step={step}")
        metrics: dict[str, float] = await self.call(
            "supervised_step", method.remote(step, tuple(rows)), self.step_timeout_s
        )
        return metrics

    async def supervised_loss(self, rows: Sequence[Trajectory]) -> float:
        ref = self.actor.supervised_loss.remote(tuple(rows))
        loss: float = await self.call("supervised_loss", ref, self.step_timeout_s)
        return loss

    async def log_probs_before(self, step: int) -> dict[int, FloatArray]:
        method = self.actor.log_probs_before.options(name=f"{self.name}.log_probs_before step={step}")
        found: dict[int, FloatArray] = await self.call("log_probs_before", method.remote(), self.step_timeout_s)
        return found

    def export_weights(self, version: int, bucket_bytes: int) -> Any:
        """Streams references to `WeightBucket`; owned by the caller. Ranks other than 0 yield nothing."""
        method = self.actor.export_weights.options(
            num_returns="streaming", name=f"{self.name}.export_weights step={version}"
        )
        return method.remote(bucket_bytes)

    async def free_address(self, timeout_s: float) -> tuple[str, int]:
        """Address of this learner's node, and a port that is free there now."""
        address: tuple[str, int] = await self.call("free_address", self.actor.free_address.remote(), timeout_s)
        return address

    async def open_weight_group(
        self, servers: tuple[VllmServerHandle, ...], plan: TransferPlan, address: tuple[str, int], timeout_s: float
    ) -> None:
        ref = self.actor.open_weight_group.remote(servers, plan, address, timeout_s)
        # Each side's own deadline is timeout_s, and vLLM's over NCCL is 300 s; this one is for a process that hangs.
        await self.call("open_weight_group", ref, 2 * timeout_s + 300.0 + 60.0)

    async def send_weights(self, version: int, timeout_s: float) -> Facts:
        facts: Facts = await self.call("send_weights", self.actor.send_weights.remote(version), 4 * timeout_s + 60.0)
        return facts

    async def begin_checkpoint(self, folder: str, version: int) -> None:
        method = self.actor.begin_checkpoint.options(name=f"{self.name}.begin_checkpoint step={version}")
        await self.call("begin_checkpoint", method.remote(folder, version), self.step_timeout_s)

    async def checkpoint_done(self) -> bool:
        """Answered between two steps."""
        done: bool = await self.call("checkpoint_done", self.actor.checkpoint_done.remote(), self.step_timeout_s)
        return done

    async def load_checkpoint(self, folder: str) -> int:
        method = self.actor.load_checkpoint.options(name=f"{self.name}.load_checkpoint {Path(folder).parent.name}")
        version: int = await self.call("load_checkpoint", method.remote(folder), self.step_timeout_s)
        return version

    async def export_hf(self, folder: str) -> None:
        method = self.actor.export_hf.options(name=f"{self.name}.export_hf final")
        await self.call("export_hf", method.remote(folder), self.step_timeout_s)


@dataclass(frozen=True, slots=True)
class SandboxReaperHandle(Handle):
    """See `actors.sandbox_reaper.SandboxReaper`."""

    async def beat(self, labels: dict[str, str], timeout_s: float = 10.0) -> None:
        await self.call("beat", self.actor.beat.remote(labels), timeout_s)

    async def dismiss(self, timeout_s: float = 5.0) -> None:
        await self.call("dismiss", self.actor.dismiss.remote(), timeout_s)


@dataclass(frozen=True, slots=True)
class SandboxPoolHandle(Handle):
    """See `actors.sandbox_pool.SandboxPool`."""

    async def guard(self, reaper: SandboxReaperHandle, timeout_s: float) -> None:
        """Before `ready`: whom the pool tells that the run lives."""
        await self.call("guard", self.actor.guard.remote(reaper, timeout_s), timeout_s + 10.0)

    async def ready(self, timeout_s: float) -> Facts:
        facts: Facts = await self.call("ready", self.actor.ready.remote(), timeout_s)
        return facts

    async def acquire(self, holder: str, spec: SandboxSpec, *, timeout_s: float, lease_id: int | None = None) -> Lease:
        # The pool keeps the caller's deadline itself; the margin is for a pool that hangs.
        ref = self.actor.acquire.remote(holder, spec, timeout_s=timeout_s, lease_id=lease_id)
        lease: Lease = await self.call("acquire", ref, timeout_s + 10.0)
        return lease

    async def release(self, lease_id: int, fate: Fate) -> None:
        await self.call("release", self.actor.release.remote(lease_id, fate), 10.0)

    async def heartbeat(self, holder: str) -> None:
        await self.call("heartbeat", self.actor.heartbeat.remote(holder), 10.0)

    async def reclaim(self, holder: str) -> int:
        """A holder is dead: what it held serves others from now on."""
        count: int = await self.call("reclaim", self.actor.reclaim.remote(holder), 10.0)
        return count

    async def prefetch(self, spec: SandboxSpec, num_ready: int) -> None:
        await self.call("prefetch", self.actor.prefetch.remote(spec, num_ready), 10.0)

    async def stats(self) -> dict[str, float]:
        stats: dict[str, float] = await self.call("stats", self.actor.stats.remote(), 10.0)
        return stats

    async def close(self, timeout_s: float = 30.0) -> None:
        await self.call("close", self.actor.close.remote(), timeout_s)


@dataclass(frozen=True, slots=True)
class RolloutWorkerHandle(Handle):
    """See `actors.rollout_worker.RolloutWorker`."""

    group_deadline_s: float

    async def ready(self, timeout_s: float) -> Facts:
        facts: Facts = await self.call("ready", self.actor.ready.remote(), timeout_s)
        return facts

    async def ping(self, timeout_s: float) -> str:
        """`incarnation`, if its groups end in time."""
        incarnation: str = await self.call("ping", self.actor.ping.remote(), timeout_s)
        return incarnation

    async def run_group(self, request: GroupRequest) -> tuple[GroupSummary, ObjectRef]:
        """Returns the summary and a *reference* to the Group."""
        name = f"{self.name}.run_group step={request.policy_version + 1} group={request.group_id}"
        method = self.actor.run_group.options(num_returns=2, name=name)
        group_ref, summary_ref = method.remote(request)
        # The group's own deadline is kept in the worker; this one is for a worker that hangs.
        summary: GroupSummary = await self.call("run_group", summary_ref, self.group_deadline_s + GROUP_MARGIN_S)
        return summary, group_ref

    async def num_eval_prompts(self, timeout_s: float = 30.0) -> tuple[int, ...]:
        """By source."""
        numbers: tuple[int, ...] = await self.call("num_eval_prompts", self.actor.num_eval_prompts.remote(), timeout_s)
        return numbers

    async def num_train_prompts(self, timeout_s: float = 30.0) -> tuple[int, ...]:
        """By source."""
        ref = self.actor.num_train_prompts.remote()
        numbers: tuple[int, ...] = await self.call("num_train_prompts", ref, timeout_s)
        return numbers

    async def evaluate(self, request: GroupRequest, step: int) -> tuple[GroupSummary, ObjectRef]:
        """Samples of one prompt after `step`: their numbers, and a *reference* to the Group."""
        name = f"{self.name}.evaluate step={step} prompt={request.group_id}"
        method = self.actor.evaluate.options(num_returns=2, name=name)
        group_ref, summary_ref = method.remote(request)
        summary: GroupSummary = await self.call("evaluate", summary_ref, self.group_deadline_s + GROUP_MARGIN_S)
        return summary, group_ref

    async def close(self, timeout_s: float = 10.0) -> None:
        await self.call("close", self.actor.close.remote(), timeout_s)

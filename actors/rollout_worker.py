"""`rollout-worker-N`: runs many groups at once, from prompt to verdicts. A thin actor around `rayapp.rollout`.

A group stays in the object store and goes to a learner by reference. It is the call's return value, so the driver owns
it, and finished groups survive the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from actors.handles import Restartable, SandboxPoolHandle, VllmServerHandle
from actors.metrics import Reporter
from actors.routing import GroupCalls
from rayapp.config.algorithm import NEEDS_GREEDY_BASELINE
from rayapp.config.config import Config
from rayapp.core.errors import RayappError
from rayapp.core.logs import about, label_logs
from rayapp.core.names import add_given
from rayapp.core.timing import InHand
from rayapp.core.types import Group, GroupSummary, SamplingParams
from rayapp.rollout.group import run_group
from rayapp.rollout.order import (
    GroupRequest,
    evaluation_seed,
    neighbours,
)
from rayapp.rollout.overlong import shape_group
from rayapp.rollout.sources import Sources, open_sources
from rayapp.sandbox.pool.client import PoolClient
from rayapp.sandbox.providers import local_provider, remote_providers

log = logging.getLogger(__name__)
LATE_S = 60.0  # after a group's deadline; this process then counts as stalled
CLOSE_WAIT_S = 5.0  # for cancelled groups to release their sandboxes


class RolloutWorker(Restartable):
    """Actor of one rollout worker. `given` are tasks and reward functions of the program that started the run."""

    def __init__(
        self,
        config: Config,
        index: int,
        servers: tuple[VllmServerHandle, ...],
        pool: SandboxPoolHandle,
        given: Mapping[str, object] | None = None,
    ) -> None:
        label_logs(config.run.name)
        add_given(given or {})
        self._config = config
        self._index = index
        self._servers = servers
        self._sources: Sources | None = None
        self._in_hand = InHand()
        self._running: set[asyncio.Task[object]] = set()
        self._reporter = Reporter(config.run.name)
        self._local = local_provider(config.sandbox)
        self._sandboxes = PoolClient(
            pool,
            self._local,
            remote=remote_providers(config.sandbox),
            holder=repr(self),
            ttl_s=config.sandbox.lease_ttl_s,
            on_exec=self._observe_exec,
        )

    def __repr__(self) -> str:
        return f"rollout-worker-{self._index}"

    async def ready(self) -> dict[str, float]:
        if self._sources is None:
            self._sources = await open_sources(self._config, self._sandboxes)
        return {"num_eval_prompts": float(sum(self._sources.num_eval_prompts))}

    async def ping(self) -> str:
        """Return the `incarnation`. StalledError: a group still runs LATE_S after its deadline."""
        self._in_hand.check_ends(self._config.group_deadline_s + LATE_S, who=repr(self), work="groups")
        return await self.incarnation()

    async def run_group(self, request: GroupRequest) -> tuple[Group, GroupSummary]:
        """Run one training group; Ray stores the two results as two objects."""
        config = self._ready_sources().of(request)[0].config
        with about(step=request.policy_version + 1, group=request.group_id):
            limit = config.rollout.max_completion_tokens
            has_baseline = config.algorithm.adv_estimator in NEEDS_GREEDY_BASELINE
            group, summary = await self._sample(
                replace(request, has_greedy_baseline=has_baseline),
                config,
                num_samples=config.rollout.group_size,
                sampling=SamplingParams(max_tokens=limit, temperature=config.rollout.temperature),
                seed=config.run.seed,
            )
            log.info(
                "%d trajectories of %s in %.1f s: mean reward %.3f, %s", summary.rewards.size, summary.task,
                summary.time_total_s, summary.rewards.mean(), ", ".join(sorted(set(summary.statuses))),
            )  # fmt: skip
            return shape_group(group, summary, config.algorithm.overlong, limit)

    async def evaluate(self, request: GroupRequest) -> tuple[Group, GroupSummary]:
        """Sample one prompt for evaluation, with seeds that training does not use."""
        config = self._ready_sources().of(request)[0].config
        section, limit = config.eval, config.rollout.max_completion_tokens
        return await self._sample(
            request,
            config,
            num_samples=section.samples_per_task,
            sampling=SamplingParams(
                max_tokens=limit, temperature=section.temperature, top_p=section.top_p, top_k=section.top_k
            ),
            seed=evaluation_seed(config.run.seed),
        )

    async def prefetch(self, images: Sequence[str]) -> None:
        if self._local is not None:
            self._local.images.prefetch(images)

    async def num_eval_prompts(self) -> tuple[int, ...]:
        return self._ready_sources().num_eval_prompts

    async def _sample(
        self, request: GroupRequest, config: Config, *, num_samples: int, sampling: SamplingParams, seed: int
    ) -> tuple[Group, GroupSummary]:
        source, placed = self._ready_sources().of(request)
        with self._in_hand.one(), self._ended_by_close():
            return await run_group(
                request,
                await source.problem(placed, seed=seed),
                source.agent,
                sandboxes=self._sandboxes,
                judging=source.judging,
                engine=self._engine(request, num_samples),
                sampling=sampling,
                group_size=num_samples,
                seed=seed,
                deadline_s=config.group_deadline_s,
            )

    @contextmanager
    def _ended_by_close(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    def _ready_sources(self) -> Sources:
        if self._sources is None:
            raise RayappError(f"{self!r} can't sample a group yet: its tasks are not loaded. Call `ready` first.")
        return self._sources

    def _engine(self, request: GroupRequest, num_samples: int) -> GroupCalls:
        assert request.server is not None, "the driver's Router places every group"
        return GroupCalls(
            self._servers[request.server],
            min_policy_version=request.policy_version,
            cohort_size=neighbours(request.cohort, len(self._servers)) * num_samples,
        )

    def _observe_exec(self, provider: str, seconds: float) -> None:
        self._reporter.observe("rl_sandbox_exec_seconds", seconds, provider=provider)

    async def close(self) -> None:
        sources, self._sources = self._sources, None
        try:
            # End the groups first: otherwise they would continue in sandboxes that are gone, and nothing would await
            # their errors.
            if running := [*self._running]:
                for task in running:
                    task.cancel()
                await asyncio.wait(running, timeout=CLOSE_WAIT_S)
            if sources is not None:
                await sources.close()
        finally:
            await self._sandboxes.close()

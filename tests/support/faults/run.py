"""Many executions through the pool while the services behind it fail in every way, with counted results.

    programs with known verdicts -> task.score -> PoolClient -> LeasePool -> real SDKs -> stub services with faults

There is one pool per provider, and all run at once. Used by
`benchmarks/sandbox_faults.py` and by a test; it measures no speed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from rayapp.config.sandbox import DaytonaConfig, E2BConfig, McpConfig, SandboxConfig
from rayapp.core.protocols import Sandbox
from rayapp.core.types import Reward, SandboxSpec
from rayapp.extras.providers.daytona import DaytonaProvider
from rayapp.extras.providers.e2b import E2BProvider
from rayapp.extras.providers.mcp import McpProvider
from rayapp.sandbox.leases import RemoteProvider
from rayapp.sandbox.pool.build import PoolHere, build_pool
from rayapp.sandbox.pool.client import PoolClient
from rayapp.sandbox.pool.pool import LeasePool
from support.faults.programs import Program, draw_program, square_prompt, square_task
from support.stubs import daytona_stub, e2b_stub, mcp_stub
from support.stubs.boxes import Boxes
from support.stubs.faults import Faults

ProviderSection = E2BConfig | DaytonaConfig | McpConfig
SETTLE_S = 30.0
_TEND_EVERY_S = 1.0
_ENDLESS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRun:
    """Settings of a fault run."""

    executions: int
    share: float = 0.05
    """Share of calls that fail."""
    death_share: float = 0.05
    """Share of executions during which some sandbox dies, leased or idle. Not a rate per second: while the machine is
    slow, all sandboxes would die before an execution ends."""
    concurrency: int = 12
    """Executions at once, for each provider."""
    timeout_s: float = 20.0
    """Deadline of an honest program: long, because a slow machine must not cause a wrong verdict."""
    answer_within_s: float = 10.0
    """Seconds that a call may take beyond its deadline. A call that hangs takes both."""
    create_timeout_s: float = 10.0
    hung_after_s: float = 600.0
    """Seconds after which an execution counts as hung: enough for two waits for a lease and two executions."""
    hang_s: float = 600.0
    """Seconds that a hanging service keeps the connection: longer than any deadline of ours."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """Counts of one fault run."""

    executions: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    invalid: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    hung: int = 0
    leaked: dict[str, int] = field(default_factory=dict)
    leases_left: float = 0.0
    reclaimed: float = 0.0
    strays_ended: float = 0.0
    reported_left: int = 0
    """Number of sandboxes that pools reported as impossible to end."""
    injected: dict[str, int] = field(default_factory=dict)


class _Services:
    """The three stub services, and a provider through the real SDK for each."""

    def __init__(self, run: FaultRun) -> None:
        def faults(offset: int) -> Faults:
            return Faults(share=run.share, seed=run.seed + offset, hang_s=run.hang_s)

        self._answer_within_s = run.answer_within_s
        self.e2b = e2b_stub.E2BStub(faults=faults(1))
        self.daytona = daytona_stub.DaytonaStub(faults=faults(2))
        self.mcp = mcp_stub.McpStub(faults=faults(3))
        self.sections: dict[str, ProviderSection] = {}
        self.deaths = _Deaths([self.e2b.boxes, self.daytona.boxes], run)

    @property
    def boxes(self) -> dict[str, Boxes]:
        return {"e2b": self.e2b.boxes, "daytona": self.daytona.boxes, "mcp": self.mcp.boxes}

    @asynccontextmanager
    async def running(self, max_sandboxes: int) -> AsyncIterator[None]:
        common = {"max_sandboxes": max_sandboxes}
        limits = {"creations_per_s": 1000.0, **common}
        sessions = {"template": "code-interpreter", **common}
        async with self.e2b.running() as e2b, self.daytona.running() as daytona, self.mcp.running() as mcp:
            self.sections = {
                "e2b": E2BConfig.model_validate({"api_url": e2b, "sandbox_url": e2b, **limits}),
                "daytona": DaytonaConfig.model_validate({"api_url": f"{daytona}/api", **limits}),
                "mcp": McpConfig.model_validate({"url": mcp, **sessions}),
            }
            yield

    def provider(self, section: ProviderSection) -> RemoteProvider:
        match section:
            case E2BConfig():
                return E2BProvider(section, api_key=e2b_stub.API_KEY, answer_within_s=self._answer_within_s)
            case DaytonaConfig():
                return DaytonaProvider(section, api_key=daytona_stub.API_KEY, answer_within_s=self._answer_within_s)
            case McpConfig():
                return McpProvider(section, api_key=mcp_stub.API_KEY, answer_within_s=self._answer_within_s)

    def injected(self) -> dict[str, int]:
        stubs = {"e2b": self.e2b.faults, "daytona": self.daytona.faults, "mcp": self.mcp.faults}
        return {f"{name}:{fault}": n for name, faults in stubs.items() for fault, n in sorted(faults.injected.items())}


class _Counting:
    """A sandbox source that counts how often one execution asked for a sandbox."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client
        self.num_leases = 0

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> AbstractAsyncContextManager[Sandbox]:
        self.num_leases += 1
        return self._client.lease(spec, timeout_s=timeout_s)


async def run_with_faults(run: FaultRun, outcome: Outcome | None = None) -> Outcome:
    """Run everything from start to end. A given outcome is filled during the run, so that it can be watched."""
    outcome, services = outcome or Outcome(), _Services(run)
    async with services.running(run.concurrency + 4):
        names = sorted(services.sections)
        async with asyncio.TaskGroup() as pools:
            for index, name in enumerate(names):
                share = run.executions // len(names) + (index < run.executions % len(names))
                pools.create_task(_run_pool(services, run, name, share, outcome), name=f"pool {name}")
        outcome.injected = services.injected()
        await _wait_for_ends(services)
        outcome.leaked = _leaked(services)
    return outcome


async def _run_pool(services: _Services, run: FaultRun, name: str, executions: int, outcome: Outcome) -> None:
    section = services.sections[name]
    config = SandboxConfig(
        providers=(section,),
        max_leases=run.concurrency,
        lease_ttl_s=2 * run.hung_after_s,
    )
    times = {"grace_s": 2.0, "kill_timeout_s": run.answer_within_s, "create_timeout_s": run.create_timeout_s}
    async with AsyncExitStack() as stack:
        pool = build_pool(config, f"faults-{name}", provider=services.provider(section), **times)
        stack.push_async_callback(_close, pool, outcome)
        client = PoolClient(
            PoolHere(pool),
            None,
            remote={name: services.provider(section)},  # pool and worker have their own
            holder=name,
            ttl_s=900.0,
            create_timeout_s=run.create_timeout_s,
        )
        stack.push_async_callback(client.close)
        chores = asyncio.create_task(_tend(pool, sweep_every_s=5.0))
        stack.callback(chores.cancel)
        rng = random.Random(f"{run.seed} {name}")
        await _execute_all(client, run, [draw_program(rng) for _ in range(executions)], services.deaths, outcome)


async def _execute_all(
    client: PoolClient, run: FaultRun, programs: Sequence[Program], deaths: _Deaths, outcome: Outcome
) -> None:
    waiting = iter(programs)

    async def work() -> None:
        for program in waiting:
            deaths.maybe()
            await _execute(client, run, program, outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(run.concurrency):
            group.create_task(work())


async def _execute(client: PoolClient, run: FaultRun, program: Program, outcome: Outcome) -> None:
    source = _Counting(client)
    task = square_task(timeout_s=_ENDLESS_TIMEOUT_S if program.is_endless else run.timeout_s)
    reward: Reward | None = None
    try:
        async with asyncio.timeout(run.hung_after_s):
            reward = await task.score(square_prompt(), program.code, source, seed=0)
    except TimeoutError:
        outcome.hung += 1
    outcome.executions += 1
    outcome.retried += source.num_leases > 1
    if reward is None:
        return
    if not reward.valid:
        outcome.invalid[reward.failure_kind] += 1
        return
    outcome.verdicts[f"{program.name}: {reward.value:g}"] += 1
    if not program.agrees(reward):
        outcome.wrong.append(f"{program.name}: {reward.value:g} {reward.status} {reward.detail}")


async def _tend(pool: LeasePool, sweep_every_s: float) -> None:
    """Do the periodic work of the sandbox-pool actor."""
    loop = asyncio.get_running_loop()
    swept_at = loop.time()
    while True:
        await asyncio.sleep(_TEND_EVERY_S)
        pool.tend()
        if loop.time() - swept_at >= sweep_every_s:
            swept_at = loop.time()
            if pool.stock is not None:
                await pool.stock.sweep()


async def _close(pool: LeasePool, outcome: Outcome) -> None:
    stats = pool.stats()
    outcome.leases_left += stats["sandbox/leased"] + stats["sandbox/waiting"]
    outcome.reclaimed += stats["sandbox/reclaimed"]
    outcome.reported_left += len(await pool.close(timeout_s=60.0))
    outcome.strays_ended += pool.stock.num_strays_ended if pool.stock is not None else 0


class _Deaths:
    """Ends a sandbox now and then, like a failing machine of a provider."""

    def __init__(self, of: Sequence[Boxes], run: FaultRun) -> None:
        self._all = of
        self._share = run.death_share
        self._rng = random.Random(run.seed)

    def maybe(self) -> None:
        """Called as an execution begins; a sandbox then dies within a second."""
        if self._rng.random() < self._share:
            asyncio.get_running_loop().call_later(self._rng.random(), self._one)

    def _one(self) -> None:
        boxes = self._rng.choice(self._all)
        if boxes.living:
            boxes.end(self._rng.choice(sorted(boxes.living)))


async def _wait_for_ends(services: _Services) -> None:
    """Wait for work that the services still do after the last call, e.g. a slow kill."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S
    while any(_leaked(services).values()) and loop.time() < deadline:
        await asyncio.sleep(0.2)


def _leaked(services: _Services) -> dict[str, int]:
    """Return what is still alive after every pool is closed. An MCP sandbox has no call that ends it: its sessions are
    counted."""
    leaked = {name: len(boxes.living) for name, boxes in services.boxes.items() if name != "mcp"}
    return leaked | {"mcp": services.mcp.num_sessions}

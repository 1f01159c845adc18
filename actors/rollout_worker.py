"""`rollout-worker-N`: runs many groups at once, from prompt to verdicts. A thin shell around `rayapp.rollout`.

The driver calls `run_group` and gets two objects: the group, which stays in the object store and goes to a learner by
reference, and its summary. Both are the call's return values, so the driver owns them: a worker that dies later does
not take finished groups with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.handles import SandboxPoolHandle, VllmServerHandle
from actors.metrics import Reporter
from rayapp.config import Config
from rayapp.rollout.group import run_group
from rayapp.rollout.order import ANY_VERSION, GroupRequest, evaluation_seed, prompt_index
from rayapp.rollout.prompts import render_prompts
from rayapp.sandbox.client import PoolClient
from rayapp.sandbox.providers import local_provider, remote_providers
from rayapp.tasks.loading import load_tasks
from rayapp.types import Completion, Group, GroupSummary, SamplingParams


class ServerEngine:
    """`RolloutEngine` over one server: whole groups go to one server, whose prefix cache then holds their prompt."""

    def __init__(self, server: VllmServerHandle, request: GroupRequest, cohort_size: int) -> None:
        self._server = server
        self._version = request.policy_version
        self._cohort_size = cohort_size

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        return await self._server.generate(
            request_id,
            prompt_ids,
            sampling,
            min_policy_version=self._version,
            cohort_size=self._cohort_size,
        )


class RolloutWorker:
    """See the module.

    Args:
        config: of the run.
        index: N of the name.
        servers: every vLLM server.
        pool: where sandboxes come from.
    """

    def __init__(
        self, config: Config, index: int, servers: tuple[VllmServerHandle, ...], pool: SandboxPoolHandle
    ) -> None:
        self._config = config
        self._index = index
        self._servers = servers
        self._tasks = load_tasks(config.tasks)
        self._prompts = render_prompts(config, self._tasks)
        self._reporter = Reporter(config.run.name)
        self._sandboxes = PoolClient(
            pool,
            local_provider(config.sandbox),
            remote=remote_providers(config.sandbox),
            holder=repr(self),
            ttl_s=config.sandbox.lease_ttl_s,
            on_exec=self._observe_exec,
        )

    def __repr__(self) -> str:
        return f"rollout-worker-{self._index}"

    async def ready(self) -> dict[str, float]:
        """Facts for the log, once tasks, prompts and sandboxes are usable."""
        return {"num_prompts": float(len(self._prompts))}

    async def run_group(self, request: GroupRequest) -> tuple[Group, GroupSummary]:
        """One group of training; Ray stores the two results as two objects."""
        config = self._config
        return await self._sample(
            request,
            index=prompt_index(request.group_id, num_prompts=len(self._prompts), seed=config.run.seed),
            num_samples=config.rollout.group_size,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
        )

    async def evaluate(self, index: int) -> tuple[Group, GroupSummary]:
        """Samples of the `index`-th prompt for evaluation: seeds apart from training's, whatever the weights are."""
        config = self._config
        # All prompts start together where nothing else runs, so that the same weights give the same numbers.
        cohort = tuple(range(len(self._prompts))) if config.train.max_staleness == 0 else ()
        return await self._sample(
            GroupRequest(group_id=index, policy_version=ANY_VERSION, cohort=cohort, purpose="eval"),
            index=index,
            num_samples=config.eval.samples_per_task,
            temperature=config.eval.temperature,
            seed=evaluation_seed(config.run.seed),
        )

    async def _sample(
        self, request: GroupRequest, *, index: int, num_samples: int, temperature: float, seed: int
    ) -> tuple[Group, GroupSummary]:
        rollout = self._config.rollout
        return await run_group(
            request,
            task=self._tasks[index],
            prompt=self._prompts[index],
            engine=self._engine(request, num_samples),
            sandboxes=self._sandboxes,
            sampling=SamplingParams(max_tokens=rollout.max_completion_tokens, temperature=temperature),
            group_size=num_samples,
            seed=seed,
            deadline_s=rollout.group_deadline_s,
        )

    def _engine(self, request: GroupRequest, num_samples: int) -> ServerEngine:
        position = request.group_id % len(self._servers)
        neighbours = [g for g in request.cohort if g % len(self._servers) == position]
        return ServerEngine(self._servers[position], request, max(1, len(neighbours) * num_samples))

    def _observe_exec(self, provider: str, seconds: float) -> None:
        self._reporter.observe("rl_sandbox_exec_seconds", seconds, provider=provider)

    async def close(self) -> None:
        """Give every sandbox back."""
        await self._sandboxes.close()

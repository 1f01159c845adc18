"""A group from prompt to verdicts, with a hand-written engine and task: no model, no sandbox, no Ray."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rayapp.config.agent import RewardSection
from rayapp.core.errors import DeadlineError, EngineDeadError, EngineError, StaleVersionError
from rayapp.core.protocols import SandboxSource, Tokenizer
from rayapp.core.syntax import answer_of
from rayapp.core.types import (
    Completion,
    ExpertArray,
    Group,
    GroupSummary,
    Prompt,
    RequestId,
    Reward,
    RolloutStatus,
    SamplingParams,
)
from rayapp.engine.vllm_output import whole_completion
from rayapp.extras.judges.judging import Judging
from rayapp.rollout.agents import OneTurn
from rayapp.rollout.order import GroupRequest, prompt_index, sampling_seed, scoring_seed
from rayapp.rollout.problem import problem_of_task
from support import make

PROMPT = Prompt(task="echo", text="say", token_ids=np.array([5, 9], np.int32), stop=("\n",))


@dataclass
class Engine:
    """Answers token 7 repeated `index + 1` times; `fail` maps an index to the error it raises."""

    fail: dict[int, Exception] = field(default_factory=dict)
    hang: frozenset[int] = frozenset()
    seen: list[tuple[str, SamplingParams]] = field(default_factory=list)

    async def generate(
        self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams, on_tokens: Any = None
    ) -> Completion:
        self.seen.append((request_id, sampling))
        index = request_id.trajectory
        if index in self.hang:
            await asyncio.Event().wait()
        if index in self.fail:
            raise self.fail[index]
        reason = "length" if index == 1 else "stop"
        return make.completion(*[7] * (index + 1), text="x" * (index + 1), finish_reason=reason, policy_version=3)


@dataclass(frozen=True)
class Task:
    """Gives one point per character; for three characters the sandbox is dead."""

    name: str = "echo"

    def render(self, tokenizer: Tokenizer) -> Prompt:
        return PROMPT

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        if len(completion_text) == 3:
            return Reward.invalid("sandbox_gone", "it died twice")
        return Reward(value=float(len(completion_text)), terms={"pass_rate": 1.0, "seed": float(seed)})


async def run(
    engine: Engine, task: Task | None = None, *, asked: dict[str, Any] | None = None, **options: Any
) -> tuple[Group, GroupSummary]:
    request = GroupRequest(group_id=11, policy_version=3, **asked or {})
    problem = replace(problem_of_task(task or Task()), prompt=PROMPT)
    agent = OneTurn(make.Wordless())
    usual: dict[str, Any] = {"max_tokens": 8, "group_size": 4}
    return await make.played(problem, agent, engine, request=request, **usual | options)


async def test_a_trajectory_is_prompt_then_completion_and_the_mask_covers_the_completion_only() -> None:
    group, summary = await run(Engine())
    trajectory = group.trajectories[1]
    assert trajectory.token_ids.tolist() == [5, 9, 7, 7]
    assert trajectory.response_mask.tolist() == [False, False, True, True]
    assert trajectory.rollout_log_probs.tolist() == [0.0, 0.0, -0.5, -0.5]
    assert trajectory.status is RolloutStatus.TRUNCATED
    (turn,) = trajectory.turns
    assert (turn.text, trajectory.completion_text, turn.start, turn.end) == ("xx", "xx", 2, 4)
    assert set(summary.reward_terms) == {"pass_rate", "seed"}, "and no numbers of tools"


LATE = "vllm-server-0.generate did not answer within 600 s"


@pytest.mark.parametrize("error", [EngineError("refused"), DeadlineError(LATE)])
async def test_an_engine_that_fails_one_request_or_misses_its_own_deadline_costs_one_trajectory(
    error: Exception,
) -> None:
    group, summary = await run(Engine(fail={0: error}))
    assert [t.status for t in group.trajectories[:2]] == [RolloutStatus.ERROR_ENGINE, RolloutStatus.TRUNCATED]
    assert group.trajectories[0].reward.detail == str(error)
    assert summary.valid.tolist() == [False, True, False, True]  # index 2 writes three characters: its sandbox died
    assert summary.failure_kinds == ("engine", "", "sandbox_gone", "")
    # An invalid verdict shows no reward.
    assert summary.rewards.tolist() == [0.0, 2.0, 0.0, 4.0]
    assert np.isnan(summary.reward_terms["pass_rate"][[0, 2]]).all()


@dataclass
class QuittingEngine(Engine):
    """vLLM ends the last trajectory after two tokens, for this reason."""

    reason: str = "abort"

    async def generate(
        self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams, on_tokens: Any = None
    ) -> Completion:
        if request_id.trajectory != 3:
            return await super().generate(request_id, prompt_ids, sampling)
        log_probs = SimpleNamespace(logprobs=[-0.5, -0.5])
        output = SimpleNamespace(token_ids=[7, 7], logprobs=log_probs, text="xx", finish_reason=self.reason)
        return whole_completion(request_id, output, (), 3, 0.0, 0.1)


@pytest.mark.parametrize("experts", [None, np.zeros((3, 1, 2), np.uint8)])
def test_a_completion_without_the_experts_of_each_token_is_the_engines_failure(experts: ExpertArray | None) -> None:
    log_probs = SimpleNamespace(logprobs=[-0.5, -0.5])
    output = SimpleNamespace(
        token_ids=[7, 7], logprobs=log_probs, text="xx", finish_reason="stop", routed_experts=experts
    )
    with pytest.raises(EngineError, match=r"experts for [03] tokens, but router replay needs them for 4 tokens$"):
        whole_completion(RequestId("group", 1), output, (), 3, 0.0, 0.1, num_routed=4)


@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
async def test_half_an_answer_that_the_engine_gave_up_is_a_failed_rollout_and_gets_no_reward(reason: str) -> None:
    group, summary = await run(QuittingEngine(reason=reason))
    assert group.trajectories[3].status is RolloutStatus.ERROR_ENGINE
    assert (
        group.trajectories[3].reward.detail
        == f"group=11/trajectory=3: vLLM ended the request early, after 2 tokens (finish reason {reason})"
    )
    assert summary.valid.tolist() == [True, True, False, False]
    assert summary.failure_kinds == ("", "", "sandbox_gone", "engine")


async def test_a_trajectory_that_hangs_is_recorded_at_the_deadline() -> None:
    group, summary = await run(Engine(hang=frozenset({3})), deadline_s=2.0)
    assert group.trajectories[3].reward.failure_kind == "deadline"
    assert summary.valid.tolist() == [True, True, False, False]


@dataclass(frozen=True)
class PoolHangs(Task):
    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        raise DeadlineError("sandbox-pool.acquire did not answer within 90 s")


async def test_a_sandbox_pool_that_does_not_answer_is_named_and_not_the_groups_deadline() -> None:
    group, _ = await run(Engine(), PoolHangs(), group_size=1)
    assert group.trajectories[0].reward.failure_kind != "deadline"
    assert "sandbox-pool.acquire" in group.trajectories[0].reward.detail


@pytest.mark.parametrize("error", [StaleVersionError("holds 2, wants 3"), EngineDeadError("gone")])
async def test_a_stale_or_dead_server_ends_the_whole_group_which_is_then_sampled_elsewhere(error: Exception) -> None:
    with pytest.raises(type(error)):
        await run(Engine(fail={2: error}))


async def test_every_trajectory_has_its_own_sampling_seed_and_the_prompts_stop_texts() -> None:
    engine = Engine()
    group, _ = await run(engine)
    assert len({sampling.seed for _, sampling in engine.seen}) == 4
    assert all(sampling.stop == ("\n",) for _, sampling in engine.seen)
    # ... and all of them face the same hidden tests
    assert len({t.reward.terms["seed"] for t in group.trajectories if t.is_trainable}) == 1


@pytest.mark.parametrize("has_greedy_baseline", [False, True])
async def test_remax_compares_with_a_greedy_completion_the_last_of_its_group(*, has_greedy_baseline: bool) -> None:
    engine = Engine()
    await run(engine, asked={"has_greedy_baseline": has_greedy_baseline})
    temperatures = {request_id.trajectory: sampling.temperature for request_id, sampling in engine.seen}
    assert temperatures == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0 if has_greedy_baseline else 1.0}


def test_an_epoch_visits_every_prompt_once_and_the_next_one_in_another_order() -> None:
    epochs = [[prompt_index(e * 8 + i, num_prompts=8, seed=0) for i in range(8)] for e in range(3)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_seeds_depend_on_run_group_and_trajectory_only() -> None:
    seeds = {sampling_seed(g, i, seed=s) for s in range(3) for g in range(20) for i in range(16)}
    assert len(seeds) == 3 * 20 * 16
    assert scoring_seed(4, seed=1) == scoring_seed(4, seed=1) != scoring_seed(5, seed=1)


@dataclass
class Comparing(Judging):
    """Judges that score each response by its place from the end, or never finish."""

    hangs: bool = False
    compares: bool = True
    compare_timeout_s: float = 2.5

    def __post_init__(self) -> None:
        super().__init__({}, RewardSection())

    async def with_comparisons(self, prompt: Prompt, texts: Sequence[str], rewards: Sequence[Reward]) -> list[Reward]:
        if self.hangs:
            await asyncio.Event().wait()
        assert [reward.valid for reward in rewards] == [True, True, False, True]  # three characters: its sandbox died
        return [replace(each, value=float(-place)) for place, each in enumerate(rewards)]


async def compared(engine: Engine, *, purpose: str = "group", **comparing: bool) -> Group:
    return (await run(engine, asked={"purpose": purpose}, judging=Comparing(**comparing), deadline_s=5.0))[0]


async def test_a_group_is_compared_once_it_is_whole_and_evaluation_is_not() -> None:
    trained, evaluated = await compared(Engine()), await compared(Engine(), purpose="eval")

    assert [t.reward.value for t in trained.trajectories if t.reward.valid] == [0.0, -1.0, -3.0]
    assert [t.reward.value for t in evaluated.trajectories if t.reward.valid] == [1.0, 2.0, 4.0]


async def test_a_group_that_is_not_compared_in_time_has_no_rewards_and_keeps_its_tokens() -> None:
    group = await compared(Engine(), hangs=True)

    assert [t.reward.failure_kind for t in group.trajectories] == ["judge_timeout"] * 2 + [
        "sandbox_gone",
        "judge_timeout",
    ]
    assert [t.status for t in group.trajectories[:2]] == [RolloutStatus.ERROR_REWARD] * 2
    assert group.trajectories[3].num_response_tokens == 4


async def test_a_trajectory_that_hangs_leaves_the_others_time_to_be_compared() -> None:
    group = await compared(Engine(hang=frozenset({2})))

    assert [t.reward.value for t in group.trajectories if t.reward.valid] == [0.0, -1.0, -3.0]
    assert group.trajectories[2].reward.failure_kind == "deadline"


@pytest.mark.parametrize(("said", "answer"), [
    ("[THINK]draft[/THINK]No.", "No."), ("[THINK]draft", ""), ("<|START_THINKING|>draft<|END_THINKING|>No.", "No."),
    ("<|channel|>analysis<|message|>draft", ""), ("No.", "No."),
])  # fmt: skip
async def test_a_thought_between_special_tokens_is_no_answer_although_the_engines_text_lacks_them(
    chat_tokenizer: Any, said: str, answer: str
) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer)
    tags = re.findall(r"\[/?THINK\]|<\|[^|]*\|>", said)
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    ids = tokenizer.encode(said, add_special_tokens=False)
    heard = list[str]()

    class Says(Engine):
        async def generate(self, *_: Any) -> Completion:
            return make.completion(*ids, text=tokenizer.decode(ids, skip_special_tokens=True))

    class Hears(Task):
        async def score(self, prompt: Prompt, completion_text: str, sandboxes: Any, *, seed: int) -> Reward:
            heard.append(answer_of(completion_text))
            return Reward(value=0.0)

    problem = replace(problem_of_task(Hears()), prompt=PROMPT)
    await make.played(problem, OneTurn(tokenizer), Says(), group_size=2)

    assert heard == [answer] * 2

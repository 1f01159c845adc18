"""Makes what most tests need, with usual values: a test states only the values that it is about.

Used as `make.group(make.trajectory([5, 9, 7, 2], 2, reward=1.0))`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rayapp.config.config import Config
from rayapp.core.types import (
    Completion,
    FloatArray,
    Group,
    GroupSummary,
    Prompt,
    RequestId,
    Reward,
    RolloutStatus,
    SamplingParams,
    Trajectory,
    TurnRecord,
)
from rayapp.testing.engine import ScriptedEngine

SMALL: dict[str, dict[str, Any]] = {
    "cluster": {"device": "cpu"},
    "rollout": {"max_prompt_tokens": 64, "max_completion_tokens": 32},
    "learner": {"compute_dtype": "float32", "cpu_threads": 1, "max_tokens_per_microbatch": 256},
    "server": {"cpu_threads": 1, "kv_cache_gib": 0.1},
}
"""Sections of a run of a tiny model on a CPU."""


def config(model: Path | str, **sections: Any) -> Config:
    """Return the config of a small run on a CPU. `sections` adds keys to the usual ones: `learner={"lora": {...}}`."""
    for name, usual in SMALL.items():
        sections[name] = usual | sections.get(name, {})
    return Config.model_validate({"model": {"path": str(model)}, **sections})


def double_task(**fields: Any) -> Any:
    """Return the coding task `double`, whose function returns twice its argument."""
    from rayapp.tasks.coding import CodingTask

    usual = {"name": "double", "func_name": "double", "signature": "def double(x):", "reference": "2 * x"}
    return CodingTask(**usual | {"prompt": "Write double(x), which returns twice the integer x.", **fields})


def prompt(*token_ids: int, **fields: Any) -> Prompt:
    return Prompt(**{"task": "t", "text": "", "token_ids": np.array(token_ids, np.int32), **fields})


def completion(*token_ids: int, **fields: Any) -> Completion:
    """Return a completion whose tokens have the log-probs -0.5, unless `fields` says otherwise."""
    usual: dict[str, Any] = {
        "token_ids": np.array(token_ids, np.int32),
        "log_probs": np.full(len(token_ids), -0.5, np.float32),
        "text": "",
        "finish_reason": "stop",
        "policy_version": 0,
    }
    return Completion(**usual | fields)


def turn(start: int, end: int, **fields: Any) -> TurnRecord:
    """Return the record of a turn whose tokens are at [start:end] of its trajectory."""
    usual: dict[str, Any] = {
        "text": "",
        "finish_reason": "stop",
        "policy_version": 0,
        "started_at_s": 0.0,
        "queued_s": 0.0,
        "generate_s": 0.0,
    }
    return TurnRecord(start=start, end=end, **usual | fields)


def trajectory(
    token_ids: ArrayLike,
    num_prompt_tokens: int = 1,
    *,
    reward: float | Reward = 0.0,
    terms: dict[str, float] | None = None,
    log_prob: float = 0.0,
    policy_version: int = 0,
    **fields: Any,
) -> Trajectory:
    """Return a completed trajectory: a prompt, and a response whose tokens all have the engine's log-prob
    `log_prob`."""
    tokens = np.asarray(token_ids, np.int32)
    mask = fields.get("response_mask", np.arange(tokens.size) >= num_prompt_tokens)
    usual: dict[str, Any] = {
        "token_ids": tokens,
        "response_mask": mask,
        "rollout_log_probs": np.where(mask, log_prob, 0.0).astype(np.float32),
        "completion_text": "",
        "reward": reward if isinstance(reward, Reward) else Reward(value=reward, terms=terms or {}),
        "status": RolloutStatus.COMPLETED,
        "min_policy_version": policy_version,
        "max_policy_version": policy_version,
    }
    return Trajectory(**usual | fields)


def group(*trajectories: Trajectory, group_id: int = 0, **fields: Any) -> Group:
    """Return a group of trajectories, whose prompt is the beginning of the first one, with these `fields`."""
    first = trajectories[0]
    shared = prompt(*first.token_ids[: first.num_prompt_tokens], **fields)
    return Group(group_id=group_id, prompt=shared, trajectories=trajectories)


def summary(rewards: Sequence[float] | FloatArray, **fields: Any) -> GroupSummary:
    """Return the summary of a group with these rewards, all valid and scored, each with one prompt token and one
    response token."""
    size = len(rewards)
    usual: dict[str, Any] = {
        "group_id": 0,
        "task": "t",
        "rewards": np.array(rewards, np.float32),
        "valid": np.ones(size, np.bool_),
        "num_tokens": np.full(size, 2, np.int32),
        "num_response_tokens": np.ones(size, np.int32),
        "num_prompt_tokens": 1,
        "statuses": ("completed",) * size,
        "reward_statuses": ("scored",) * size,
        "failure_kinds": ("",) * size,
        "reward_terms": {},
        "min_policy_version": 0,
        "time_generate_s": 0.0,
        "time_total_s": 0.0,
    }
    return GroupSummary(**usual | fields)


def request(group_id: int = 0, **fields: Any) -> Any:
    """Return the request for a group of training by policy version 0, unless `fields` says otherwise."""
    from rayapp.rollout.order import GroupRequest

    return GroupRequest(**{"group_id": group_id, "policy_version": 0, **fields})


Said = str | Sequence[int]


class Wordless:
    """A tokenizer for scripted engines whose token ids stand for no text."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return []

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return ""

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("the prompt is rendered")


def engine(tokenizer: Any, script: Callable[[RequestId, Sequence[int]], Said], **options: Any) -> ScriptedEngine:
    """Return an engine that says what `script` returns, and records the requests."""
    made = ScriptedEngine(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.decode,
        script,
        end_id=tokenizer.eos_token_id,
        **options,
    )
    made.record = True
    return made


def formats(tokenizer: Any, template: str = "", *, with_parser: bool = True) -> Any:
    """Return the gateway's formats of a model that writes calls as Hermes does, by the shipped template or this one."""
    from rayapp.rollout.agent.chat import load_template
    from rayapp.rollout.gateway.formats import Formats
    from support.hermes import HermesParser

    parser = {"make_parser": lambda *parts: HermesParser()} if with_parser else {}
    return Formats(tokenizer, model="tiny", template=template or load_template("chatml_hermes"), **parser)


@asynccontextmanager
async def session(
    tokenizer: Any,
    engine: Any,
    *,
    max_tokens: int = 100_000,
    max_turns: int = 100,
    own_formats: Any = None,
    **options: Any,
) -> AsyncIterator[tuple[Any, Any]]:
    """Serve one session at a gateway of its own. Yield the gateway and the session."""
    from rayapp.rollout.gateway.limits import SessionLimits
    from rayapp.rollout.gateway.server import Gateway

    gateway = Gateway(own_formats or formats(tokenizer))
    await gateway.start()
    usual: dict[str, Any] = {
        "sampling": SamplingParams(max_tokens=10_000),
        "limits": SessionLimits(max_tokens=max_tokens, max_turns=max_turns),
        "request_id": RequestId("group", 0),
    }
    try:
        with gateway.session(engine=engine, **usual | options) as opened:
            yield gateway, opened
    finally:
        await gateway.close()


def agent_loop(tokenizer: Any, tools: Any, **limits: Any) -> Any:
    """Return an agent loop of the shipped template for these tools: a ToolSet, or a sequence of tools."""
    from rayapp.rollout.agent.chat import ChatFormat, load_template
    from rayapp.rollout.agent.loop import AgentLoop
    from rayapp.rollout.recorder import AgentLimits
    from rayapp.tools.toolset import ToolSet
    from support.hermes import HermesParser

    tool_set = tools if isinstance(tools, ToolSet) else ToolSet(tools)
    chat = ChatFormat(tokenizer, tool_set.schemas, template=load_template("chatml_hermes"))
    allowed = AgentLimits(**{"max_response_tokens": 2000, **limits})
    return AgentLoop(chat=chat, parser=HermesParser(), tools=tool_set, limits=allowed)


async def played(
    problem: Any, agent: Any, engine: Any, *, group_id: int = 0, max_tokens: int = 2000, **options: Any
) -> tuple[Group, GroupSummary]:
    """Let an agent play a problem, by the path that a rollout worker takes.

    Args:
        options: arguments of `run_group`, and `request` in place of a training request for `group_id`.
    """
    from rayapp.rollout.group import run_group

    usual: dict[str, Any] = {
        "sandboxes": None,
        "sampling": SamplingParams(max_tokens=max_tokens),
        "group_size": 1,
        "seed": 0,
        "deadline_s": 60.0,
    }
    asked = options.pop("request", None) or request(group_id)
    return await run_group(asked, problem, agent, engine=engine, **usual | options)


def watchdog(*, stop_after_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> Any:
    """Return a watchdog that reports on the console and dumps no stacks."""
    from rayapp.driver.watchdog import Watchdog

    async def no_stacks() -> str:
        return ""

    return Watchdog(report_after_s=60, stop_after_s=stop_after_s, report=print, dump_stacks=no_stacks, clock=clock)


class Clock:
    """A clock that moves only when a test sets `now`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

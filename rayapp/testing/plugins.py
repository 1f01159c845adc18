"""Contract checks for each kind of plug-in, for a package's own tests.

    from rayapp.testing.plugins import check_task
    def test_it_is_a_task(): check_task(MY_TASK)

A check that fails raises AssertionError with the reason. No check needs a GPU, a model or a network. Tasks and tools
that run code get real sandboxes on this machine.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rayapp.config.config import Config
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.names import PREFIX, Kind, Plugin, giving
from rayapp.core.types import Prompt, Reward
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.custom_rewards import CustomReward
from rayapp.tasks.verdict import settled
from rayapp.tools.base import ToolContext, ToolOutput
from rayapp.tools.toolset import ToolSet


def check_plugin(plugin: Plugin) -> None:
    """Load a plug-in and run the checks of its kind.

    Raises:
        ConfigError: the plug-in can't be loaded.
        AssertionError: the plug-in breaks its contract. The message says how.
    """
    _CHECKS[plugin.kind](plugin.load())


def check_task(task: Any) -> None:
    """Check a `Task`: it has a name and a prompt, scores every text, gives equal scores for equal seeds, and can be
    pickled.
    """
    task = task() if isinstance(task, type) or not hasattr(task, "score") else task
    assert isinstance(task.name, str), "a task's name must be a string"
    assert task.name, "a task's name must not be empty"
    assert callable(getattr(task, "render", None)), f"task {task.name} has no method render"
    if isinstance(task, CodingTask):
        task.check()
    other = pickle.loads(pickle.dumps(task))
    assert other.name == task.name, f"task {task.name} changes when it is pickled: its name is then {other.name}"

    async def verdicts() -> list[Reward]:
        prompt = Prompt(task=task.name, text="", token_ids=np.zeros(0, np.int32))
        async with open_pool(SandboxConfig(min_ready=0), f"check-{task.name}"[:40]) as (sandboxes, _):
            texts = ("", "nonsense", "x" * 10_000, "\ud800")
            return [await each.score(prompt, text, sandboxes, seed=1) for text in texts for each in (task, other)]

    found = asyncio.run(verdicts())
    for one, same in zip(found[::2], found[1::2], strict=True):
        _check_verdict(one, f"task {task.name}")
        assert one.value == same.value, f"task {task.name} gives {one.value} and {same.value} for equal inputs"


def _check_verdict(reward: Any, where: str) -> None:
    found = settled(reward)
    assert found.failure_kind != "reward_nonsense", f"{where}: {found.detail}"


def check_reward(function: Any) -> None:
    """Check a reward function of verl's signature: (data_source, solution_str, ground_truth, extra_info) -> a number or
    a dict with `score`."""
    assert callable(function), f"a reward must be a function, not {type(function).__name__}"
    path = f"{PREFIX}the plug-in"

    async def terms() -> list[dict[str, float]]:
        arguments: dict[str, Any] = {"data_source": "check", "ground_truth": "4", "extra_info": {}}
        texts = ("4", "", "It is\n#### 4")
        return [await CustomReward(path=path)(solution_str=text, **arguments) for text in texts]

    with giving({path: function}):
        scored = asyncio.run(terms())
    for found in scored:
        assert math.isfinite(found["score"]), f"a reward must have a finite score, not {found['score']}"


def check_tool(kind: Any) -> None:
    """Check a `Tool` class: constructed from (config, schema, context), with a schema, `create` and `release`."""

    async def play() -> None:
        async with open_pool(SandboxConfig(min_ready=0), "check-tool") as (sandboxes, _):
            tool = kind({}, None, ToolContext(sandboxes=sandboxes))
            assert tool.schema.name, "a tool's schema must have a name"
            assert tool.timeout_s > 0, f"tool {tool.schema.name} must have timeout_s above 0"
            ToolSet([tool])  # this also checks that the parameters are a JSON schema
            state = await tool.create({})
            try:
                verdict = await tool.reward(state)
                assert verdict is None or math.isfinite(verdict), f"tool {tool.schema.name} has no finite verdict"
            finally:
                await tool.release(state)
            if not tool.schema.parameters.get("required"):
                await _call(tool)

    asyncio.run(play())


async def _call(tool: Any) -> None:
    state = await tool.create({})
    try:
        async with asyncio.timeout(tool.timeout_s):
            output = await tool.execute(state, {})
    finally:
        await tool.release(state)
    assert isinstance(output, ToolOutput), (
        f"tool {tool.schema.name} returns a {type(output).__name__}: it must return a ToolOutput"
    )
    assert isinstance(output.text, str), f"tool {tool.schema.name}: ToolOutput.text must be a str"


def check_tracker(make: Any) -> None:
    """Check a tracker factory (config, folder, first_step): its tracker logs steps in order and can be closed twice."""
    with tempfile.TemporaryDirectory() as folder:
        tracker = make(Config(), Path(folder), 1)
        for step in (1, 2):
            tracker.log(step, {"reward/mean": 0.5, "not/a number": math.nan})
        tracker.close()
        tracker.close()


def check_loss(function: Any) -> None:
    """Check a policy loss of verl's signature: it returns a finite loss with a gradient, and metrics."""
    import torch

    assert callable(function), f"a loss must be a function, not a {type(function).__name__}"
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    missing = [name for name in ("old_log_prob", "log_prob", "advantages", "response_mask") if name not in parameters]
    assert takes_any or not missing, f"a loss must take the arguments {', '.join(missing)}"
    log_prob = torch.full((2, 3), -1.0, requires_grad=True)
    arguments = {
        "old_log_prob": torch.full((2, 3), -1.1),
        "log_prob": log_prob,
        "advantages": torch.tensor([[1.0] * 3, [-1.0] * 3]),
        "response_mask": torch.ones(2, 3),
    }
    from rayapp.learner.algo.losses import LossScale, make_actor_config

    scale = LossScale(num_tokens=6, num_trajectories=2, dp_size=1, max_response_tokens=3)
    actor = make_actor_config(Config().algorithm, scale, group_size=1)
    loss, metrics = function(**arguments, loss_agg_mode="token-mean", config=actor, rollout_is_weights=None)
    assert loss.ndim == 0, f"a loss must be one number, not an array of shape {tuple(loss.shape)}"
    assert torch.isfinite(loss), f"a loss must be finite, not {loss}"
    loss.backward()
    assert log_prob.grad is not None, "a loss must depend on log_prob: it has no gradient"
    assert isinstance(metrics, Mapping), "a loss must return (loss, metrics)"


def check_estimator(function: Any) -> None:
    """Check an estimator of verl's signature: it returns finite advantages for all tokens, 0 for unsampled ones."""
    import torch

    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    found = function(token_level_rewards=rewards, response_mask=mask, index=np.array([0, 0]), config=None)
    advantages, returns = found
    assert advantages.shape == mask.shape, f"advantages must be {tuple(mask.shape)}, not {tuple(advantages.shape)}"
    assert returns.shape == mask.shape, f"returns must be {tuple(mask.shape)}, not {tuple(returns.shape)}"
    assert torch.isfinite(advantages).all(), "advantages must be finite"
    assert bool((advantages[mask == 0] == 0).all()), "tokens that were not sampled must have advantage 0"


def check_agent(make: Any) -> None:
    """Check an agent factory: a function of the process's tool agent that returns an object with an async `run`."""
    assert callable(make), f"an agent must be a function of the tool agent, not a {type(make).__name__}"
    assert len(inspect.signature(make).parameters) >= 1, (
        "an agent factory must take the process's AgentLoop as argument"
    )


def check_provider(make: Any) -> None:
    """Check a provider factory: it makes a provider from the options of a config section. `sandbox_contract` checks
    sandboxes.
    """
    provider = make({})
    for name in ("create", "attach", "list", "kill", "close"):
        assert callable(getattr(provider, name, None)), f"a sandbox provider must have a method {name}"
    assert isinstance(provider.name, str), "a sandbox provider must have a name"


_CHECKS: Mapping[Kind, Callable[[Any], None]] = {
    "tasks": check_task,
    "agents": check_agent,
    "rewards": check_reward,
    "tools": check_tool,
    "sandbox_providers": check_provider,
    "trackers": check_tracker,
    "losses": check_loss,
    "estimators": check_estimator,
}

"""Agents as other people publish them, on a scripted policy: mini-swe-agent from PyPI and Codex from npm.

They conflict with this project's lock (mini-swe-agent needs an older openai) or are not Python, so each test looks for
its agent on PATH, and is skipped if it isn't installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.loading import load_config
from rayapp.core.types import RequestId, RolloutStatus, SamplingParams, Trajectory
from rayapp.rollout.agent.chat import load_template
from rayapp.rollout.external_agent import ExternalAgent
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.problem import problem_of_row
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.data.data_row import DataRow
from support import make
from support.hermes import HermesParser

ROOT = Path(__file__).parents[3]
MESSAGES = ({"role": "user", "content": "Write a greeting."},)

pytestmark = [pytest.mark.long, pytest.mark.slow]


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play(
    tokenizer: Any, config_name: str, turns: Sequence[str], replaced: Mapping[str, str], left_out: Sequence[str] = ()
) -> Trajectory:
    """The shipped configuration's agent, with single arguments of its command replaced or left out."""
    path = ROOT / "configs" / "agents" / config_name
    config = load_config(path, ["rollout.max_prompt_tokens=200000", "learner.max_tokens_per_microbatch=400000"])
    command = [replaced.get(word, word) for word in config.agent.external.command if word not in left_out]
    external = config.agent.external.model_copy(update={"command": tuple(command), "timeout_s": 240.0})
    config = config.model_copy(update={"agent": config.agent.model_copy(update={"external": external})})
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    formats = Formats(
        tokenizer, model="tiny", template=load_template("chatml_hermes"), make_parser=lambda *parts: HermesParser()
    )
    agent = ExternalAgent(config, formats, None)
    await agent._gateway.start()
    said = iter(turns)
    engine = make.engine(tokenizer, lambda name, ids: next(said))

    try:
        row = DataRow(messages=MESSAGES, data_source="openai/gsm8k", ground_truth="")
        return await agent.play(
            problem_of_row(row, AnswerRewards()),
            engine=engine,
            sampling=SamplingParams(max_tokens=5000),
            request_id=RequestId("group", 0),
        )
    finally:
        await agent.close()


async def test_mini_swe_agent_plays_and_its_history_is_one_line(chat_tokenizer: Any) -> None:
    turns = [
        call("bash", command="echo hello > solution.py"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat solution.py"),
    ]
    # The policy's text comes from this file, so it may run here.
    here = {"--environment-class=docker": "--environment-class=local"}
    of_docker = (
        "--config=environment.image=python:3.12-slim",
        "--config=environment.cwd=/work",
        '--config=environment.run_args=["--rm", "--network=none", "--volume={folder}:/work"]',
    )

    played = await play(chat_tokenizer, "mini_swe_agent.yaml", turns, here, of_docker)

    assert played.status is RolloutStatus.COMPLETED
    assert played.completion_text == "hello\n"
    assert [record.name for turn in played.turns for record in turn.calls] == ["bash", "bash"]
    assert played.forks == ()


async def test_codex_plays_and_its_history_is_one_line(chat_tokenizer: Any) -> None:
    turns = [call("exec_command", cmd="echo hello > solution.py; cat solution.py"), "It is done."]

    played = await play(chat_tokenizer, "codex.yaml", turns, {})

    assert played.status is RolloutStatus.COMPLETED
    assert played.completion_text == "hello\n"
    assert "hello" in played.turns[0].calls[0].output
    assert played.completion_text == "hello\n"
    assert played.forks == ()

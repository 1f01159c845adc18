"""Whole runs on data rows with tools: our own MCP server, real sandboxes, and a policy whose odds are known.

The servers say what a script says, as vLLM is not the subject: its parsers are in tests/contracts/test_tool_parsers.py,
a run with it in test_resume.py. With `-m long` they are the real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.runs.trajectories import read_groups
from support.whole_runs import records, write_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600.0
CALL = '<tool_call>{"name": "run_code_once", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
RIGHT, WRONG = "So it is #### 42", "So it is #### 41"
TOOLS_KEY = "key-of-the-tools"
SCRIPTS = [[CALL, RIGHT], [CALL, WRONG], [CALL, CALL, RIGHT], [RIGHT], [CALL, RIGHT], [CALL, CALL, CALL]]


@pytest.fixture(scope="session")
def calling_model(policy_of: Callable[..., Path]) -> Path:
    """A policy that calls the tool in 79% of its turns, and gives the right or the wrong answer in 11% each."""
    return policy_of({CALL: 12.0, RIGHT: 10.0, WRONG: 10.0})


@contextmanager
def mcp_server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`rayapp sandbox serve` on a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rayapp", "sandbox", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"RAYAPP_SANDBOX_API_KEY": TOOLS_KEY, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving at "), line
        yield process, line.split()[2] + "/mcp"
    finally:
        process.kill()
        process.wait()


def tool_file(tmp_path: Path, url: str) -> Path:
    """In verl's format, with verl's class names."""
    servers = {"mcpServers": {"sandboxes": {"url": url, "api_key": "${RAYAPP_SANDBOX_API_KEY}"}}}
    (tmp_path / "mcp_server.json").write_text(json.dumps(servers))
    entry = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"type": "mcp", "rate_limit": 120, "timeout": 30, "reconnect_timeout": 1},
        "mcp": {"mcp_servers_config_path": "mcp_server.json", "tool_selected_list": ["run_code_once"]},
    }
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    return path


@dataclass(frozen=True)
class Trained:
    """A run that lost its tools' server after two good steps, and what it left."""

    folder: Path
    returncode: int
    output: str
    records: list[dict[str, float]]
    """The first is of step 0, the evaluation before training."""


@pytest.fixture(scope="module")
def scripts(calling_model: Path) -> str:
    """The texts of SCRIPTS in the policy's tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(calling_model)
    return json.dumps([[[*tokenizer.encode(said), tokenizer.eos_token_id] for said in turns] for turns in SCRIPTS])


@pytest.fixture(scope="module")
def trained(
    short_run: Callable[..., dict[str, Any]], calling_model: Path, running_ray: Any, scripts: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:  # fmt: skip
    """A run on six rows in verl's schema, all of them with the answer 42."""
    folder = tmp_path_factory.mktemp("tools")
    rows = write_rows(folder / "rows.parquet", *(f"Problem {number}: what is 6 times 7?" for number in range(6)))
    file, log, run = folder / "config.yaml", folder / "log", folder / "tools"
    with mcp_server() as (server, url):
        config = short_run(
            folder,
            run={"name": "tools"},
            model={"path": str(calling_model)},
            agent={
                "chat_template": "chatml_hermes",
                "max_assistant_turns": 3,
                "tool_file": str(tool_file(folder, url)),
            },
            rollout={"max_prompt_tokens": 2000, "max_completion_tokens": 1000, "max_failed_ratio": 0.5},
            train={"num_steps": 40},
            eval={
                "tasks": [rows], "max_problems": 3, "every_steps": 2, "samples_per_task": 2, "before_training": True
            },
            learner={"max_tokens_per_microbatch": 8192, "optimizer": {"lr": 1e-6}},
            checkpoint={"every_steps": 0},
        )  # fmt: skip
        file.write_text(yaml.safe_dump(config | {"tasks": [rows]}))
        process = running_ray.train(str(file), log=log, SCRIPTS=scripts)
        deadline = time.monotonic() + DEADLINE_S
        while len(records(run)) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        server.send_signal(signal.SIGKILL)
        code = process.wait(timeout=DEADLINE_S)
    return Trained(run, code, log.read_text(), records(run))


def test_a_run_with_our_mcp_server_trains_on_what_the_tools_answered(trained: Trained) -> None:
    groups = read_groups(trained.folder / "trajectories" / "step=000001.parquet")
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    calls = [call for trajectory in trajectories for turn in trajectory.turns for call in turn.calls]
    assert calls
    assert {call.failure for call in calls} == {""}
    assert all("42" in call.output for call in calls)
    for trajectory in trajectories:
        assert trajectory.reward.value == float(trajectory.completion_text == RIGHT)
        assert trajectory.num_turns == len(trajectory.turns)

    start, first, second, *_ = trained.records
    assert start["step"] == 0
    assert 0 <= start["eval/pass_at_1/openai/gsm8k"] <= start["eval/pass_at_2/openai/gsm8k"] <= 1
    assert start["eval/pass_prompts/openai/gsm8k"] == 3
    assert first["tool/calls"] == len(calls)
    assert first["turns/max"] <= 3
    assert first["rollout/invalid"] == 0
    assert "eval/pass_at_1/openai/gsm8k" in second
    assert "eval/pass_at_1/openai/gsm8k" not in first


def test_a_server_that_dies_fails_its_trajectories_and_then_stops_the_run(trained: Trained) -> None:
    # Four of five trajectories call the tool: after two good steps the share passes one half within a few more.
    assert trained.returncode == 1, trained.output
    assert "TrainingAbortedError" in trained.output
    assert "tool_unavailable" in trained.output
    assert "rollout.max_failed_ratio is 0.5" in trained.output
    assert 3 <= len(trained.records) < 40
    assert any(record.get("failure/tool_unavailable", 0) > 0 for record in trained.records)

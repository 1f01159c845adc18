"""Hostile texts of a policy and its tools, from the turn to the page: none raises or blocks the event loop."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayapp.core.errors import SandboxGoneError
from rayapp.core.protocols import Sandbox, SandboxSource
from rayapp.core.types import Group, Prompt, RequestId, SamplingParams, SandboxSpec, Trajectory
from rayapp.extras.view.groups import GroupFilter, Groups, Page, find_groups
from rayapp.extras.view.trajectory import read_group, read_trajectory
from rayapp.rollout.group import with_terms
from rayapp.rollout.recorder import AgentPrompt
from rayapp.runs.source import open_source
from rayapp.runs.trajectories import write_trajectories
from rayapp.tasks.answers import Answer, AnswerRewards, score_answer
from rayapp.tasks.verdict import Weights
from rayapp.tools.base import ToolBase, ToolOutput, ToolSchema
from support import make
from support.timing import nothing_holds_the_loop

LOOP_HOLD_S = 0.2
"""Processor time for which one text may block all other trajectories of a worker."""
PIECES = [
    *("<tool_call>", "</tool_call>", '<tool_call>{"name": "say", "arguments": {"text": ', "}}</tool_call>", "<think>"),
    *("</think>", "</tool_response>", "<|im_end|>", "<|im_start|>user\n", "```python\n", "```", "~~~", "`", " ", "\n"),
    *("def double(x):", "\n    return x", "x", ".a", "(", "[", "{", '"', "'", '"""', "\\", "import os", "lambda x:"),
    *("#### ", "7", "9" * 400, "1e999", "NaN", "-Infinity", '"\\ud800"', "\x00", "\x1b[2J", "\u202e", "\U0001f600"),
    *("<script>", "{{", "{% for %}", "=1;", "a=", "@", "not ", "if x else ", ", ", "é"),
]
HOSTILE = st.lists(
    st.tuples(st.sampled_from(PIECES) | st.text(max_size=8), st.sampled_from([1, 1, 1, 2, 40, 3000])), max_size=6
).map(lambda parts: "".join(piece * count for piece, count in parts)[:20_000])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)
CALLS = ANY_JSON.map(lambda text: f"<tool_call>{json.dumps({'name': 'say', 'arguments': {'text': text}})}</tool_call>")
TASK = make.double_task(tests=("1", "2"), banned_patterns=("os.system", "sum"))


class Say(ToolBase):
    """Returns a text from outside."""

    schema = ToolSchema(
        name="say",
        parameters={
            "type": "object",
            "properties": {"text": {"pattern": "^(a+)+$", "multipleOf": 0.1, "uniqueItems": True}},
        },
    )

    def __init__(self, result: str) -> None:
        self._result = result

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        return ToolOutput(text=self._result)


class NoSandboxes:
    """Every sandbox is gone: the code that reads the text runs before any code runs."""

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> Self:
        return self

    async def __aenter__(self) -> Sandbox:
        raise SandboxGoneError("none here")

    async def __aexit__(self, *exc: object) -> None:
        return None


async def play(tokenizer: Any, turns: list[str], result: str) -> Trajectory:
    loop = make.agent_loop(tokenizer, [Say(result)], max_response_tokens=200_000)
    messages = ({"role": "user", "content": "2 + 2?"},)
    said = iter([*turns, "done"])
    engine = make.engine(tokenizer, lambda request_id, prompt_ids: next(said))
    prompt = AgentPrompt(token_ids=tuple(loop.chat.prompt_ids(messages)))
    sampling = SamplingParams(max_tokens=100_000)
    return await loop.run(prompt, engine=engine, sampling=sampling, request_id=RequestId("group", 0))


def shown(folder: Path, tokenizer: Any) -> str:
    """Return everything that the page requests, as it is sent."""
    source = open_source(str(folder))
    found = find_groups(Groups(source), GroupFilter(), Page())
    return json.dumps([found, read_group(source, 1, 0), read_trajectory(source, 1, 0, 0, tokenizer)])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(HOSTILE | CALLS, min_size=1, max_size=3), result=HOSTILE)
async def test_whatever_a_policy_and_its_tools_write_is_data(
    turns: list[str], result: str, chat_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with nothing_holds_the_loop(LOOP_HOLD_S, time.thread_time):
        played = await play(chat_tokenizer, turns, result)
        answer = Answer(
            completion_text=played.completion_text, data_source="openai/gsm8k", ground_truth="7", extra_info={}
        )
        nowhere = cast(SandboxSource, NoSandboxes())
        reward = await score_answer(answer, AnswerRewards(weights=Weights(format=0.1)), nowhere)
        # The text as an engine could hand it on, which no tokenizer has cleaned.
        prompt = Prompt(task="double", text="", token_ids=np.zeros(1, np.int32), prefill=TASK.answer_prefix)
        code_reward = await TASK.score(prompt, turns[0], nowhere, seed=0)

    folder = tmp_path_factory.mktemp("run")
    (folder / "trajectories").mkdir()
    trajectories = tuple(replace(played, reward=with_terms(one, played)) for one in (reward, code_reward))
    group = Group(
        group_id=0,
        prompt=Prompt(task="t", text=result, token_ids=played.token_ids[: played.num_prompt_tokens]),
        trajectories=trajectories,
    )
    write_trajectories(folder / "trajectories" / "step=000001.parquet", 1, [group])
    assert shown(folder, chat_tokenizer).isascii()

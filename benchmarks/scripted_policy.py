"""The real agent loop over a scripted policy, which the parts of benchmarks/agent_loop.py share.

Every trajectory has four turns of about 200 tokens. All turns except the last call one tool. Completions are made
beforehand, and the processor time of tokenizer and template is measured separately.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayapp.core.types import Completion, RequestId, SamplingParams, Trajectory
from rayapp.rollout.agent.chat import ChatFormat, load_template
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agent.vllm_tool_parser import load_parser
from rayapp.rollout.recorder import AgentLimits, AgentPrompt
from rayapp.tools.base import ToolBase, ToolOutput, ToolSchema
from rayapp.tools.toolset import ToolSet

TURNS = 4
MESSAGES = ({"role": "system", "content": "You solve problems step by step."}, {"role": "user", "content": "17 * 23?"})
THOUGHT = "First I work out the product by hand, then I check it with the tool. " * 10
MODEL = Path(__file__).parents[1] / "models" / "smollm2-135m"


class Clock:
    """Counts the CPU seconds that wrapped calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started

        return call


class TimedTokenizer:
    """A tokenizer whose CPU time is measured."""

    def __init__(self, tokenizer: Any, clock: Clock) -> None:
        self._tokenizer = tokenizer
        for name in ("encode", "decode", "apply_chat_template"):
            setattr(self, name, clock.timed(getattr(tokenizer, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Instant(ToolBase):
    """A tool that answers at once, so that only the loop takes time."""

    schema = ToolSchema(
        name="python",
        description="Runs code.",
        parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    )

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        return ToolOutput(text="391")


def code_of(turn: int) -> str:
    """Return the code that the tool runs in a turn."""
    return f"print({turn} + 17 * 23)"


def script(tool: str) -> list[str]:
    """Return the policy's text of each turn."""
    calls = [json.dumps({"name": tool, "arguments": {"code": code_of(turn)}}) for turn in range(TURNS - 1)]
    return [*(f"{THOUGHT}<tool_call>\n{call}\n</tool_call>" for call in calls), f"{THOUGHT}It is #### 391"]


class ScriptedPolicy:
    """The agent loop with all parts that a rollout worker has, except the engine.

    Args:
        tool: name of the tool that the policy calls; `tools` has it.
    """

    def __init__(self, tokenizer: Any, tools: ToolSet, tool: str) -> None:
        self.clock = Clock()
        self._tokenizer = tokenizer
        chat = ChatFormat(TimedTokenizer(tokenizer, self.clock), tools.schemas, template=load_template("chatml_hermes"))
        self._prompt = AgentPrompt(token_ids=tuple(chat.prompt_ids(MESSAGES)))
        self._loop = AgentLoop(
            chat=chat,
            parser=load_parser("hermes", tokenizer, tools.schemas),
            tools=tools,
            limits=AgentLimits(max_response_tokens=4096, max_assistant_turns=TURNS),
        )
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        said = [[*tokenizer.encode(text, add_special_tokens=False), end] for text in script(tool)]
        self._engine = PreparedEngine([_completion(ids) for ids in said])

    async def run(self, count: int) -> list[Trajectory]:
        """Play `count` trajectories at once. Raises SystemExit: a trajectory departs from the script."""
        engine, sampling = self._engine, SamplingParams(max_tokens=1024)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._loop.run(self._prompt, engine=engine, sampling=sampling, request_id=RequestId("group", i))
                )
                for i in range(count)
            ]
        plays = [task.result() for task in tasks]
        wrong = [played for played in plays if len(played.turns) != TURNS or played.status.is_error]
        failures = {record.failure for played in plays for record in played.calls if record.failure}
        calls = sum(len(played.calls) for played in plays)
        if wrong or failures or calls != count * (TURNS - 1):
            raise SystemExit(f"{len(wrong)} of {count} trajectories went wrong: {wrong[:1]} {failures} {calls} calls")
        return plays


class PreparedEngine:
    """An engine that takes no time, because each completion was made beforehand."""

    def __init__(self, completions: list[Completion]) -> None:
        self._completions = completions

    async def generate(self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        await asyncio.sleep(0)
        return self._completions[request_id.turn]


def _completion(token_ids: list[int]) -> Completion:
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        log_probs=np.full(len(token_ids), -0.5, np.float32),
        text="",
        finish_reason="stop",
        policy_version=0,
    )


def load_tokenizer() -> Any:
    from transformers import AutoTokenizer

    if not MODEL.exists():
        raise SystemExit(f"there is no {MODEL}; run: rayapp model fetch smollm2-135m")
    return AutoTokenizer.from_pretrained(MODEL)

"""Agents that run in the rollout worker: the agent loop, and one turn without a chat template.

    tool_agent           the prompt lists the tools; the policy calls them over several turns
    single_turn_agent    the prompt lists no tools; one turn is sampled, and tool calls in it are plain text

`LoopAgent` plays both with a chat template; `OneTurn` plays tasks that render their own prompt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rayapp.config.agent import AGENTS
from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.core.protocols import RolloutEngine, SandboxSource, Task, Tokenizer
from rayapp.core.syntax import answer_of, spoken
from rayapp.core.types import Completion, Prompt, RequestId, RolloutStatus, SamplingParams, Trajectory
from rayapp.rollout.agent.build import open_loop
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.problem import Problem
from rayapp.rollout.recorder import AgentPrompt, Recorder
from rayapp.storage.media import compact
from rayapp.tools.base import RawCall
from rayapp.tools.toolset import ToolSet

TOOL_AGENT, SINGLE_TURN_AGENT = AGENTS


class NoCalls:
    """A `ToolCallParser` that finds no calls."""

    def parse(self, text: str) -> tuple[RawCall, ...]:
        return ()

    start = ""

    def words(self, text: str) -> str:
        return text


def without_tools(tool_agent: AgentLoop) -> AgentLoop:
    """Return a loop for a single turn with the model and limits of `tool_agent`."""
    return AgentLoop(
        chat=tool_agent.chat.without_tools(),
        parser=NoCalls(),
        tools=ToolSet(),
        limits=replace(tool_agent.limits, max_assistant_turns=1),
    )


def check_agent_name(agent_name: str, where: str = "") -> None:
    """Raise InputError if there is no agent of this name."""
    if agent_name and agent_name not in AGENTS:
        at = f"{where}: " if where else ""
        raise InputError(
            f"{at}agent_name {agent_name!r} is neither {' nor '.join(AGENTS)}. Use one of these; your own tools go "
            "into agent.tool_file (docs/tools.md)"
        )


def render_prompts(tasks: Sequence[Task], tokenizer: Tokenizer, max_prompt_tokens: int) -> list[Prompt]:
    """Return the prompts of the tasks, in their order. InputError: one is longer than rollout.max_prompt_tokens."""
    prompts = [task.render(tokenizer) for task in tasks]
    check_length(prompts, max_prompt_tokens)
    return prompts


def check_length(prompts: Sequence[Prompt], limit: int) -> None:
    for prompt in prompts:
        if prompt.token_ids.size > limit:
            raise InputError(
                f"task {prompt.task!r}: its prompt has {prompt.token_ids.size} tokens, but rollout.max_prompt_tokens "
                f"is {limit}. Raise rollout.max_prompt_tokens, or shorten the prompt"
            )


OpenLoop = Callable[[tuple[str, ...]], Awaitable[AgentLoop]]  # makes a loop with the tools that a problem brings


@dataclass(slots=True, eq=False, repr=False)
class LoopAgent:
    """Agent that plays problems with agent loops. Problems that bring the same tools share a loop."""

    make_loop: OpenLoop  # called once for each set of tools
    default: str = TOOL_AGENT  # for problems that don't name an agent
    _loops: dict[tuple[str, ...], AgentLoop] = field(default_factory=dict, init=False)
    _single_turns: dict[tuple[str, ...], AgentLoop] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, config: Config, sandboxes: SandboxSource) -> LoopAgent:
        """Make the agent for the run's settings and tool file."""

        async def make_loop(tools: tuple[str, ...]) -> AgentLoop:
            limit = config.rollout.max_completion_tokens
            return await open_loop(config.model, config.agent, limit, sandboxes, brought=tools)

        return cls(make_loop, default=config.agent_name)

    async def open(self, tools: tuple[str, ...] = ()) -> LoopAgent:
        """Make the loop with these tools, unless it exists. UserError: a part can't be used."""
        if tools not in self._loops:
            self._loops[tools] = await self.make_loop(tools)
        return self

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], agent_name: str = "") -> list[int]:
        """Return the ids of a data row's prompt, which lists tools only for the tool agent."""
        return self._loop(agent_name).chat.prompt_ids(messages)

    async def prompt(self, problem: Problem) -> Prompt:
        bare, start = problem.prompt, problem.start
        await self.open(start.tools)
        chat = self._loop(problem.agent_name, start.tools).chat
        if bare.token_ids.size:  # a row's prompt was already rendered and cut when the row was read
            ids = bare.token_ids.tolist()
            if bare.media:  # show one placeholder for a picture, not hundreds
                ids = compact(ids, bare.media, ids[bare.media[0].start])
            text = chat.tokenizer.decode(ids, skip_special_tokens=False)
            return replace(bare, text=text, messages=start.messages)
        ids = np.array(chat.prompt_ids(start.messages), np.int32)
        return replace(bare, text=chat.render(start.messages), token_ids=ids, messages=start.messages)

    async def play(
        self, problem: Problem, *, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
    ) -> Trajectory:
        start = problem.start
        begin = AgentPrompt(
            token_ids=tuple(problem.prompt.token_ids.tolist()),
            tools_kwargs=start.tools_kwargs,
            files=start.files,
            packages=start.packages,
            spec=start.spec,
            setup=start.setup,
        )
        loop = self._loop(problem.agent_name, start.tools)
        return await loop.run(begin, engine=engine, sampling=sampling, request_id=request_id)

    def _loop(self, agent_name: str, tools: tuple[str, ...] = ()) -> AgentLoop:
        check_agent_name(agent_name)
        if (agent_name or self.default) != SINGLE_TURN_AGENT:
            return self._loops[tools]
        if tools not in self._single_turns:
            self._single_turns[tools] = without_tools(self._loops[tools])
        return self._single_turns[tools]

    async def close(self) -> None:
        for loop in self._loops.values():
            await loop.tools.close()


@dataclass(frozen=True, slots=True)
class OneTurn:
    """Agent that plays tasks in one turn. The task renders its prompt."""

    tokenizer: Tokenizer

    async def prompt(self, problem: Problem) -> Prompt:
        assert problem.task is not None, "a row of data must be played by an agent with a chat template"
        return problem.task.render(self.tokenizer)

    async def play(
        self, problem: Problem, *, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
    ) -> Trajectory:
        recorder = Recorder(problem.prompt.token_ids.tolist())

        def text_of(completion: Completion) -> str:
            # Score the engine's text instead of the decoded tokens, because the tokens include the stop text.
            # Unless tags of thoughts are special tokens of the model, which the engine's text lacks.
            whole = self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=False)
            has_more_thoughts = answer_of(completion.text) == completion.text and answer_of(whole) != whole
            return spoken(whole if has_more_thoughts else completion.text, problem.prompt.text)

        completion = await recorder.sample_turn(engine, request_id, sampling, text_of)
        is_cut = completion.finish_reason == "length"
        return recorder.trajectory(RolloutStatus.TRUNCATED if is_cut else RolloutStatus.COMPLETED)

    async def close(self) -> None: ...

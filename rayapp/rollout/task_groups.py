"""Groups of coding tasks, played in one turn or by the tool agent, and scored by the task. See `sources.py`.

single_turn_agent    the policy speaks once, after the task's own prompt, and the task scores the text
tool_agent           it gets the task as messages, files and tools, and the task scores its answer alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.core.protocols import AgentTask, RolloutEngine, SandboxSource, Task
from rayapp.core.types import AgentStart, Completion, Prompt, Reward, SamplingParams
from rayapp.rollout.agent.build import open_loop
from rayapp.rollout.agent.episode import AgentPrompt, Episode, EpisodeEnd
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agent.loops import SINGLE_TURN_AGENT
from rayapp.rollout.agent.outcome import tool_reward, with_terms
from rayapp.rollout.agent.transcript import Transcript
from rayapp.rollout.group import Assignment, Play
from rayapp.rollout.order import GroupRequest, prompt_index, scoring_seed
from rayapp.rollout.prompts import check_length, render_prompts
from rayapp.tasks.loading import load_tasks


class TaskGroups:
    """Groups of the tasks in `config.tasks`; evaluation takes each task once.

    Args:
        prompts: one for each task.
        plays: of the tool agent, one for each task; None: the policy speaks once.
        loops: what the plays share, to be closed.
        tool_weight: of the sum of what tools gave for single calls.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        prompts: Sequence[Prompt],
        sandboxes: SandboxSource,
        *,
        plays: Sequence[Play] | None = None,
        loops: Sequence[AgentLoop] = (),
        tool_weight: float = 0.0,
    ) -> None:
        self._tasks = tasks
        self._prompts = prompts
        self._sandboxes = sandboxes
        self._plays = plays
        self._loops = loops
        self._tool_weight = tool_weight

    @classmethod
    async def open(cls, config: Config, sandboxes: SandboxSource) -> TaskGroups:
        """See `open_groups`."""
        tasks = load_tasks(config.tasks)
        if config.default_agent == SINGLE_TURN_AGENT:
            return cls(tasks, render_prompts(config, tasks), sandboxes)
        starts = agent_starts(tasks)
        loops: dict[tuple[str, ...], AgentLoop] = {}
        try:
            for start in starts:
                # Tasks that bring the same tools share a loop: its prompts tell of them.
                if start.tools not in loops:
                    loops[start.tools] = await open_loop(config, sandboxes, brought=start.tools)
            return cls.of_agents(tasks, starts, [loops[start.tools] for start in starts], sandboxes, config=config)
        except BaseException:
            for loop in loops.values():
                await loop.tools.close()
            raise

    @classmethod
    def of_agents(
        cls,
        tasks: Sequence[Task],
        starts: Sequence[AgentStart],
        loops: Sequence[AgentLoop],
        sandboxes: SandboxSource,
        *,
        config: Config,
    ) -> TaskGroups:
        """Groups that the tool agent plays, each task in its loop.

        Raises:
            InputError: a prompt is longer than rollout.max_prompt_tokens.
        """
        pairs = list(zip(tasks, starts, loops, strict=True))
        prompts = [_prompt(task, start, loop) for task, start, loop in pairs]
        check_length(prompts, config.rollout.max_prompt_tokens)
        plays = [_play(prompt, start, loop) for prompt, (_, start, loop) in zip(prompts, pairs, strict=True)]
        own = tuple(dict.fromkeys(loops))
        return cls(tasks, prompts, sandboxes, plays=plays, loops=own, tool_weight=config.reward.tool_weight)

    @property
    def num_eval_prompts(self) -> int:
        return len(self._prompts)

    @property
    def num_train_prompts(self) -> int:
        return len(self._prompts)

    async def assignment(self, request: GroupRequest, *, seed: int) -> Assignment:
        index = request.place
        if request.purpose == "group":
            index = prompt_index(index, num_prompts=len(self._prompts), seed=seed)
        task, prompt = self._tasks[index], self._prompts[index]
        tests = scoring_seed(request.group_id, seed=seed)

        async def verdict(episode: Episode) -> Reward:
            return await task.score(prompt, episode.final_text, self._sandboxes, seed=tests)

        async def agents_verdict(episode: Episode) -> Reward:
            if episode.status.is_error:
                return with_terms(None, episode)
            return with_terms(self._weighed(await verdict(episode), episode), episode)

        if self._plays is None:
            return Assignment(prompt=prompt, play=partial(_one_turn, prompt), score=verdict)
        return Assignment(prompt=prompt, play=self._plays[index], score=agents_verdict)

    def _weighed(self, reward: Reward, episode: Episode) -> Reward:
        if not reward.valid:
            return reward
        tool = tool_reward(episode)
        return replace(reward, value=reward.value + self._tool_weight * tool, terms={**reward.terms, "tool": tool})

    async def close(self) -> None:
        """End what the tools hold."""
        for loop in self._loops:
            await loop.tools.close()


def agent_starts(tasks: Sequence[Task]) -> list[AgentStart]:
    """Where the tool agent begins each of these tasks.

    Raises:
        InputError: one can't be played by an agent.
    """
    starts = []
    for task in tasks:
        if not isinstance(task, AgentTask):
            raise InputError(
                f"task {task.name}: agent.default_agent is tool_agent, but the task has no method agent_start, which "
                "says what an agent is told and finds (rayapp/core/protocols.py). Use single_turn_agent for it."
            )
        starts.append(task.agent_start())
    return starts


def _prompt(task: Task, start: AgentStart, loop: AgentLoop) -> Prompt:
    text = loop.chat.render(start.messages)
    return Prompt(task=task.name, text=text, token_ids=np.array(loop.chat.prompt_ids(start.messages), np.int32))


def _play(prompt: Prompt, start: AgentStart, loop: AgentLoop) -> Play:
    begin = AgentPrompt(
        token_ids=tuple(prompt.token_ids.tolist()),
        tools_kwargs=start.tools_kwargs,
        files=start.files,
        packages=start.packages,
    )
    return partial(loop.run, begin)


async def _one_turn(prompt: Prompt, *, engine: RolloutEngine, sampling: SamplingParams, request_id: str) -> Episode:
    transcript = Transcript(prompt.token_ids.tolist())
    completion = await transcript.sample_turn(engine, request_id, sampling, _text_of)
    return transcript.finished(EpisodeEnd.MAX_TOKENS if completion.finish_reason == "length" else EpisodeEnd.ANSWERED)


def _text_of(completion: Completion) -> str:
    # The engine's text and not the decoded tokens: those hold the stop text, which is no part of the code.
    return completion.text

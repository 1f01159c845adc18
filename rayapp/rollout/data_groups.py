"""Groups of data rows: episodes of the agent loop, scored by the rule of the row's source. See `sources.py`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from rayapp.config.agent import EXTERNAL_AGENT
from rayapp.config.config import Config
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import Prompt, Reward
from rayapp.rollout.agent.build import open_loop
from rayapp.rollout.agent.episode import AgentPrompt, Episode
from rayapp.rollout.agent.loops import AgentLoops, agent_loops, check_agent_name
from rayapp.rollout.agent.outcome import tool_reward, tool_verdict, with_terms
from rayapp.rollout.external.agent import ExternalAgent
from rayapp.rollout.group import Assignment
from rayapp.rollout.order import GroupRequest, scoring_seed
from rayapp.tasks.answers import Answer, AnswerRewards, score_answer
from rayapp.tasks.custom_rewards import CustomReward
from rayapp.tasks.data.data_row import DataRow
from rayapp.tasks.data.reading import Encode, ReadOptions, TrainingData, open_data

Players = AgentLoops | ExternalAgent
"""Who plays rows."""
MAX_KEPT_CHARS = 1 << 16


@dataclass(slots=True, eq=False, repr=False)
class DataGroups:
    """Groups of data rows; group N of the training is row N of the run, whatever worker it is on."""

    config: Config
    players: Players
    rewards: AnswerRewards
    sandboxes: SandboxSource
    train: TrainingData | None
    held_out: TrainingData | None
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @classmethod
    async def open(cls, config: Config, sandboxes: SandboxSource) -> DataGroups:
        """See `open_groups`."""
        rewards = answer_rewards(config)
        if rewards.custom is not None:
            # Its imports may take seconds, which would hold up every trajectory of this process.
            await asyncio.to_thread(rewards.custom.load)
        players: Players = (
            await ExternalAgent.open(config, sandboxes)
            if config.default_agent == EXTERNAL_AGENT
            else agent_loops(await open_loop(config, sandboxes), config.default_agent)
        )
        try:
            train, held_out = await open_files(config, players.prompt_ids)
        except BaseException:
            await players.close()
            raise
        return cls(config, players, rewards, sandboxes, train=train, held_out=held_out)

    @property
    def num_eval_prompts(self) -> int:
        if self.held_out is None:
            return 0
        return min(len(self.held_out), self.config.data.max_eval_rows or len(self.held_out))

    @property
    def num_train_prompts(self) -> int:
        return len(self.train) if self.train is not None else 0

    async def assignment(self, request: GroupRequest, *, seed: int) -> Assignment:
        tests = scoring_seed(request.group_id, seed=seed)
        return assignment_of(await self._row(request), self.players, self.rewards, self.sandboxes, seed=tests)

    async def _row(self, request: GroupRequest) -> DataRow:
        rows = self.train if request.purpose == "group" else self.held_out
        assert rows is not None, "the driver checks which files a command needs"
        # One at a time: two groups that reach a new window of rows together would both load it.
        async with self._reading:
            return await asyncio.to_thread(rows.row, request.place)

    async def close(self) -> None:
        """End what the tools hold."""
        await self.players.close()


def assignment_of(
    row: DataRow, players: Players, rewards: AnswerRewards, sandboxes: SandboxSource, *, seed: int = 0
) -> Assignment:
    """What the trajectories of a row's group are to do.

    Args:
        sandboxes: where code in the answers runs.
        seed: draws the hidden tests of a code problem.
    Raises:
        InputError: there is no loop of the row's agent_name.
    """
    score = partial(_score, row, rewards, sandboxes, seed)
    if isinstance(players, ExternalAgent):
        played = players.assignment(row.data_source, row.messages, score)
        return replace(played, prompt=replace(played.prompt, **_facts(row)))
    loop = players.of(row.agent_name)
    text = loop.chat.tokenizer.decode(list(row.prompt_ids), skip_special_tokens=False)
    return Assignment(
        # The row's source stands where a task's name would.
        prompt=Prompt(task=row.data_source, text=text, token_ids=np.array(row.prompt_ids, np.int32), **_facts(row)),
        play=partial(
            players.player(row.agent_name).run, AgentPrompt(token_ids=row.prompt_ids, tools_kwargs=row.tools_kwargs)
        ),
        score=score,
    )


def _facts(row: DataRow) -> dict[str, Any]:
    """What a prompt keeps of its row. Tests of a code problem may have megabytes, which no judge reads."""
    long = {"ground_truth": row.ground_truth, "extra_info": row.extra_info}
    kept = {name: value for name, value in long.items() if len(json.dumps(value, default=str)) <= MAX_KEPT_CHARS}
    return {"messages": row.messages, **kept}


async def _score(row: DataRow, rewards: AnswerRewards, sandboxes: SandboxSource, seed: int, episode: Episode) -> Reward:
    if episode.status.is_error:
        return with_terms(None, episode)
    answer = Answer(
        completion_text=episode.final_text,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
        tool_reward=tool_reward(episode),
        tool_verdict=tool_verdict(episode),
    )
    return with_terms(await score_answer(answer, rewards, sandboxes, seed=seed), episode)


async def open_files(config: Config, encode: Encode) -> tuple[TrainingData | None, TrainingData | None]:
    """Training's rows and evaluation's; None where the configuration names no files.

    Raises:
        InputError: a file or a prompt can't be used.
        StorageError: a remote file can't be fetched.
    """

    async def opened(files: tuple[str, ...], *, shuffle: bool) -> TrainingData | None:
        if not files:
            return None
        options = ReadOptions(
            seed=config.run.seed,
            shuffle=shuffle,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            filter_overlong_prompts=config.data.filter_overlong_prompts,
            truncation=config.data.truncation,
        )
        return await open_data(files, options, cache=config.data.cache_dir, encode=encode, check_agent=check_agent_name)

    train = await opened(config.data.train_files, shuffle=config.data.shuffle)
    return train, await opened(config.data.eval_files, shuffle=False)


def answer_rewards(config: Config) -> AnswerRewards:
    """The section `reward` as the rules take it."""
    section = config.reward
    return AnswerRewards(
        method=section.method,
        format_score=section.format_score,
        correct_score=section.correct_score,
        format_weight=section.format_weight,
        tool_weight=section.tool_weight,
        tool_verdict_weight=section.tool_verdict_weight,
        code=section.code,
        is_optional=bool(section.judges) and not section.verdict_weight,
        custom=CustomReward(path=section.custom, timeout_s=section.custom_timeout_s) if section.custom else None,
    )

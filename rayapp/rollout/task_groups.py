"""Groups of coding tasks: the policy speaks once, or the tool agent plays, and the task scores the text. See
`sources.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rayapp.core.protocols import RolloutEngine, SandboxSource, Task
from rayapp.core.types import Prompt, Reward, SamplingParams
from rayapp.rollout.agent.episode import Episode, EpisodeEnd
from rayapp.rollout.agent.transcript import Transcript
from rayapp.rollout.environments.agents import EnvironmentAgents
from rayapp.rollout.external.agent import ExternalAgent
from rayapp.rollout.group import Assignment
from rayapp.rollout.order import GroupRequest, prompt_index, scoring_seed
from rayapp.rollout.task_agents import TaskAgents

Prompted = tuple[Task, Prompt]


class TaskGroups:
    """Groups of the tasks in `config.tasks`; evaluation takes each of `config.eval.tasks` once, or of these.

    Args:
        train, held_out: tasks, each with its prompt.
        agents: who plays them; None: the policy speaks once.
    """

    def __init__(
        self,
        train: Sequence[Prompted],
        held_out: Sequence[Prompted],
        sandboxes: SandboxSource,
        agents: TaskAgents | ExternalAgent | EnvironmentAgents | None = None,
    ) -> None:
        self._train = train
        # A task that training has twice is evaluated once.
        self._held_out = held_out or list({id(task): (task, prompt) for task, prompt in train}.values())
        self._sandboxes = sandboxes
        self._agents = agents

    @property
    def num_eval_prompts(self) -> int:
        return len(self._held_out)

    @property
    def num_train_prompts(self) -> int:
        return len(self._train)

    async def assignment(self, request: GroupRequest, *, seed: int) -> Assignment:
        if request.purpose == "group":
            task, prompt = self._train[prompt_index(request.place, num_prompts=len(self._train), seed=seed)]
        else:
            task, prompt = self._held_out[request.place]

        async def score(episode: Episode) -> Reward:
            tests = scoring_seed(request.group_id, seed=seed)
            return await task.score(prompt, episode.final_text, self._sandboxes, seed=tests)

        if (agents := self._agents) is None:
            return Assignment(prompt=prompt, play=partial(_one_turn, prompt), score=score)

        return Assignment(
            prompt=prompt,
            play=agents.play(task, prompt),
            score=lambda episode: agents.score(episode, partial(score, episode)),
        )

    async def close(self) -> None:
        """End what the tools hold."""
        if self._agents is not None:
            await self._agents.close()


async def _one_turn(prompt: Prompt, *, engine: RolloutEngine, sampling: SamplingParams, request_id: str) -> Episode:
    transcript = Transcript(prompt.token_ids.tolist())
    # The engine's text and not the decoded tokens: those hold the stop text, which is no part of the code.
    completion = await transcript.sample_turn(engine, request_id, sampling, lambda completion: completion.text)
    return transcript.finished(EpisodeEnd.MAX_TOKENS if completion.finish_reason == "length" else EpisodeEnd.ANSWERED)

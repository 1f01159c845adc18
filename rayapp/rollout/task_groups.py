"""Groups of coding tasks: the policy speaks once, and the task scores the text. See `sources.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rayapp.core.protocols import RolloutEngine, SandboxSource, Task
from rayapp.core.types import Completion, Prompt, Reward, SamplingParams
from rayapp.rollout.agent.episode import Episode, EpisodeEnd
from rayapp.rollout.agent.transcript import Transcript
from rayapp.rollout.group import Assignment
from rayapp.rollout.order import GroupRequest, prompt_index, scoring_seed


class TaskGroups:
    """Groups of the tasks in `config.tasks`; evaluation takes each task once.

    Args:
        prompts: one for each task.
    """

    def __init__(self, tasks: Sequence[Task], prompts: Sequence[Prompt], sandboxes: SandboxSource) -> None:
        self._tasks = tasks
        self._prompts = prompts
        self._sandboxes = sandboxes

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

        async def score(episode: Episode) -> Reward:
            tests = scoring_seed(request.group_id, seed=seed)
            return await task.score(prompt, episode.final_text, self._sandboxes, seed=tests)

        return Assignment(prompt=prompt, play=partial(_one_turn, prompt), score=score)

    async def close(self) -> None:
        """Nothing is held."""


async def _one_turn(prompt: Prompt, *, engine: RolloutEngine, sampling: SamplingParams, request_id: str) -> Episode:
    transcript = Transcript(prompt.token_ids.tolist())
    completion = await transcript.sample_turn(engine, request_id, sampling, _text_of)
    return transcript.finished(EpisodeEnd.MAX_TOKENS if completion.finish_reason == "length" else EpisodeEnd.ANSWERED)


def _text_of(completion: Completion) -> str:
    # The engine's text and not the decoded tokens: those hold the stop text, which is no part of the code.
    return completion.text

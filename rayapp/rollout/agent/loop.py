"""The agent loop: the policy samples a turn, and the turn's tool calls run side by side, until a turn has no calls.

Token in, token out: the engine reads exactly the tokens that it sampled before, and the tokens that the template adds.
Mistakes of the policy and failures of a tool become text for the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rayapp.core.aio import side_by_side
from rayapp.core.errors import InputError, SandboxConfigError, SandboxError, ToolUnavailableError
from rayapp.core.protocols import RolloutEngine
from rayapp.core.syntax import answer_of, spoken
from rayapp.core.types import CallRecord, Completion, Media, RequestId, RolloutStatus, SamplingParams, Trajectory
from rayapp.rollout.agent.calls import read_calls, run_call, too_many
from rayapp.rollout.agent.chat import ChatFormat
from rayapp.rollout.recorder import AgentLimits, AgentPrompt, Recorder
from rayapp.storage.media import MOST_PICTURES, pictured
from rayapp.storage.models.pictures import PictureProcessor
from rayapp.tasks.data.pictures import placed
from rayapp.tools.base import RawCall, ToolCallParser, ToolFailedError
from rayapp.tools.toolset import ToolSet, ToolStates


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoop:
    """Plays prompts with a chat template, a parser, tools and limits. All trajectories of a process share one loop."""

    chat: ChatFormat
    parser: ToolCallParser
    tools: ToolSet
    limits: AgentLimits
    is_talk: bool = False  # tool results are sent as user messages, because the prompt lists no tools
    pictures: PictureProcessor | None = None  # None if the model reads only text

    async def run(
        self, prompt: AgentPrompt, *, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
    ) -> Trajectory:
        """Play the prompt once; turns are numbered from `prompt.first_turn` on. Only tool calls have deadlines: callers
        limit the time of the trajectory. EngineError and SandboxConfigError pass through."""
        play = _Play(loop=self, engine=engine, sampling=sampling, request_id=request_id, prompt=prompt)
        try:
            opening = self.tools.trajectory(
                prompt.tools_kwargs,
                files=prompt.files,
                packages=prompt.packages,
                spec=prompt.spec,
                setup=prompt.setup,
            )
            async with opening as states:
                status = await play.run(states)
                rewards = await states.rewards()
        except SandboxConfigError:
            raise
        except SandboxError as error:
            return play.failed(RolloutStatus.ERROR_SANDBOX, error)
        except ToolUnavailableError as error:
            return play.failed(RolloutStatus.ERROR_TOOL, error)
        except (InputError, ToolFailedError) as error:
            return play.failed(RolloutStatus.ERROR_TASK, error)
        return replace(play.recorder.trajectory(status, answer=states.answer), tool_rewards=rewards)


@dataclass(slots=True, kw_only=True)
class _Play:
    """State of one trajectory while it is played."""

    loop: AgentLoop
    engine: RolloutEngine
    sampling: SamplingParams
    request_id: RequestId
    prompt: AgentPrompt
    recorder: Recorder = field(init=False)
    _read_ids: Sequence[int] = field(init=False)  # before the next turn: the prompt, or the last results
    _shown: dict[str, bytes] = field(default_factory=dict)  # SHA-256 -> encoded bytes of pictures, also unread ones

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.prompt.token_ids, self.prompt.media)
        self._read_ids = self.prompt.token_ids

    async def run(self, states: ToolStates) -> RolloutStatus:
        limits, self._shown = self.loop.limits, states.pictures
        self._shown |= self.prompt.pictures
        while True:
            completion, calls = await self._speak()
            if completion.finish_reason == "length":
                return RolloutStatus.TRUNCATED
            if not calls:
                return RolloutStatus.COMPLETED
            is_last = len(self.recorder.turns) >= limits.max_assistant_turns
            if is_last and not any(self.loop.tools.ends_episode(call.name) for call in calls):
                return RolloutStatus.MAX_TURNS
            records = await self._run_calls(calls, states)
            self.recorder.add_calls(records)
            if states.answer is not None:
                return RolloutStatus.COMPLETED
            if is_last:
                return RolloutStatus.MAX_TURNS
            suffix, media = await self._suffix(completion, records)
            pictures = self.loop.pictures
            if pictures is not None and pictures.token_id in completion.token_ids:
                return RolloutStatus.TRUNCATED  # vLLM would take the policy's placeholder for a picture, and fail
            if self._left() <= len(suffix) or len(self._shown) > MOST_PICTURES:
                # Don't append results that leave no room for another turn: the policy could not answer them.
                return RolloutStatus.TRUNCATED
            self.recorder.add_read(suffix, media)
            self._read_ids = suffix

    async def _speak(self) -> tuple[Completion, tuple[RawCall, ...]]:
        max_tokens = min(self.sampling.max_tokens, self._left())
        sampling = replace(self.sampling, max_tokens=max_tokens, pictures=self._shown)
        request_id = self.request_id._replace(turn=self.prompt.first_turn + len(self.recorder.turns))
        completion = await self.recorder.sample_turn(self.engine, request_id, sampling, self._text_of)
        said = answer_of(self.recorder.turns[-1].text)
        return completion, await read_calls(self.loop.parser, said, str(self.request_id))

    def _text_of(self, completion: Completion) -> str:
        chat = self.loop.chat
        return spoken(chat.turn_text(completion.token_ids.tolist()), chat.end_of(self._read_ids))

    async def _suffix(self, completion: Completion, records: Sequence[CallRecord]) -> tuple[list[int], Media]:
        results = [pictured(record.output, len(record.pictures)) for record in records]
        names = [record.name if self.loop.tools.get(record.name) else "unknown" for record in records]
        try:
            chat, sampled = self.loop.chat, completion.token_ids.tolist()
            if self.loop.is_talk:
                ids = chat.continuation_ids(sampled, [{"role": "user", "content": result} for result in results])
            else:
                ids = chat.suffix_ids(sampled, results, names)
            shown = [sha256 for record in records for sha256 in record.pictures]
            return await placed(self.loop.pictures, ids, shown, self._shown)
        except Exception as error:  # boundary: the template is a program and may fail on a tool's text
            why = f"the chat template can't render the tool results or the environment's text: {error}"
            raise ToolFailedError(why, "template") from error

    async def _run_calls(self, calls: Sequence[RawCall], states: ToolStates) -> tuple[CallRecord, ...]:
        limits, tools, reads_pictures = self.loop.limits, self.loop.tools, self.loop.pictures is not None
        first, rest = calls[: limits.max_calls_per_turn], calls[limits.max_calls_per_turn :]
        records = await side_by_side(
            run_call(call, tools=tools, states=states, limits=limits, reads_pictures=reads_pictures) for call in first
        )
        return (*records, *(too_many(call, limits) for call in rest))

    def _left(self) -> int:
        return self.loop.limits.max_response_tokens - (self.recorder.size - len(self.prompt.token_ids))

    def failed(self, status: RolloutStatus, error: Exception) -> Trajectory:
        return self.recorder.trajectory(status, f"{type(error).__name__}: {error}"[:500])

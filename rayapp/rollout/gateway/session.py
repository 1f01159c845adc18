"""One trajectory's conversations with the policy: calls in, replies out, and every token recorded.

    Ask -> where it goes on (Conversations) -> recorded ids + suffix -> engine -> TokenTree, Conversations -> Reply

Made by the gateway for each trajectory, and over with it. What the agent does wrong is a `RefusedError`; what the
engine does wrong is one too, and ends the session: `trouble` then has the error.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rayapp.core.errors import RayappError
from rayapp.core.protocols import RolloutEngine
from rayapp.core.types import CallRecord, RolloutStatus, SamplingParams
from rayapp.rollout.agent.cutting import readable
from rayapp.rollout.agent.episode import Episode, EpisodeEnd
from rayapp.rollout.agent.parsing import read_turn
from rayapp.rollout.agent.transcript import STATUS
from rayapp.rollout.gateway.conversation import Ask, Choice, Conversations, Found, Reply, Said, ToolCall, in_order
from rayapp.rollout.gateway.formats import Format, Formats, continued, rendered
from rayapp.rollout.gateway.refusals import RefusedError
from rayapp.rollout.gateway.tree import TokenTree, cut_completion
from rayapp.rollout.order import seed_of_call
from rayapp.tools.calls import RawCall, after_thoughts, thoughts_of

MOST_CHOICES = 16
MOST_TURNS_AT_ONCE = 64
MAX_RECORDED_CHARS = 16_384
"""Of a tool's result, in the record of its call; the policy reads all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """How much of the policy a session may have."""

    max_tokens: int
    """In all its conversations together, read and sampled, each counted once: what one trajectory may hold."""
    max_turns: int
    """Times the policy speaks; each of several choices is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A prompt, and where it goes on."""

    format: Format
    after: int
    """Index of the token that the rest was read after."""
    read_ids: list[int]
    """The rest."""
    prompt_ids: list[int]
    """All of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A turn that was recorded."""

    number: int
    """In `TokenTree.turns`."""
    prompt_end: int
    end: int
    """Index of its last token."""


@dataclass(slots=True, kw_only=True)
class Session:
    """See the module."""

    formats: Formats
    engine: RolloutEngine
    sampling: SamplingParams
    """Of every turn. An agent sets the number of tokens, choices and stop texts; the run sets the distribution."""
    limits: SessionLimits
    follows_requests: bool = False
    """Requests set the distribution too: nobody trains on what is sampled."""
    request_id: str
    """Turn N asks the engine as `request_id/turn=N`, from 1 on."""
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    tree: TokenTree = field(default_factory=TokenTree)
    is_over: bool = False
    limit: Literal["", "turns", "tokens"] = ""
    """What ran out, if anything did."""
    trouble: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Fails when the engine does."""
    _conversations: Conversations = field(default_factory=Conversations)
    _replies: dict[str, tuple[Said, ...]] = field(default_factory=dict)
    """By id: the conversation up to a reply, for calls that name it (Responses)."""
    _num_asked: int = 0
    _running: set[asyncio.Task[_Turn]] = field(default_factory=set)

    async def ask(self, ask: Ask) -> Reply:
        """The policy's answer.

        Raises:
            RefusedError: there is none.
        """
        messages = self._messages(ask)
        self._check(ask, messages)
        wanted = await self._wanted(ask, messages)
        num_cached = len(wanted.prompt_ids) - self.tree.num_new(wanted.after, wanted.read_ids)
        choices = await self._sampled(ask, messages, wanted)
        reply = Reply(
            choices=choices,
            num_prompt_tokens=len(wanted.prompt_ids),
            num_cached_tokens=num_cached,
            model=ask.model,
        )
        self._replies[reply.id] = (*messages, choices[0].said)
        return reply

    async def count(self, ask: Ask) -> int:
        """Tokens of the prompt that a call would have."""
        return len((await self._wanted(ask, self._messages(ask))).prompt_ids)

    def fail(self, error: BaseException) -> None:
        """The trajectory can't go on; whoever plays it looks at `trouble`."""
        if not self.trouble.done():
            self.trouble.set_exception(error)

    def end(self) -> None:
        """Serve no more calls, and give up those that wait for the engine. Idempotent."""
        self.is_over = True
        for task in self._running:
            task.cancel()
        if self.trouble.done() and not self.trouble.cancelled():
            self.trouble.exception()  # Somebody has looked at it.

    def episode(
        self, *, failure: str = "", answer: str | None = None, ran_out: bool = False, output: str = ""
    ) -> Episode:
        """What the session was, as the groups take it.

        Args:
            failure: why the agent's program failed; empty if it ended well, or a limit ended it.
            answer: what the agent named as its answer; None: what the policy said last.
            ran_out: the agent's time was up.
            output: what its program wrote.
        """
        end = EpisodeEnd.ANSWERED
        if self.limit == "tokens":
            end = EpisodeEnd.MAX_TOKENS
        elif self.limit == "turns" or ran_out:
            end = EpisodeEnd.MAX_TURNS
        elif failure:
            end = EpisodeEnd.FAILED
        tree = self.tree
        return Episode(
            token_ids=tree.token_ids,
            response_mask=tree.response_mask,
            rollout_log_probs=tree.log_probs,
            num_prompt_tokens=tree.turns[0].start if tree.turns else 0,
            turns=tuple(tree.turns),
            end=end,
            status=STATUS.get(end, RolloutStatus.ERROR_TASK),
            failure=failure if end is EpisodeEnd.FAILED else "",
            answer=answer,
            forks=tuple(tree.forks),
            agent_output=output,
            routed_experts=tree.routed_experts,
        )

    def _messages(self, ask: Ask) -> tuple[Said, ...]:
        if not ask.previous:
            return in_order(ask.messages)
        before = self._replies.get(ask.previous)
        if before is None:
            raise RefusedError("invalid", f"this session has given no reply with the id {ask.previous!r}")
        # The instructions of a call are its own: those of the one before don't go on.
        own = ask.messages[:1] if ask.messages and ask.messages[0].role == "system" else ()
        kept = before[1:] if before[0].role == "system" else before
        return in_order((*own, *kept, *ask.messages[len(own) :]))

    def _check(self, ask: Ask, messages: Sequence[Said]) -> None:
        self._check_open()
        if not messages or messages[-1].role == "assistant":
            raise RefusedError("invalid", "the last message must be the user's or a tool's: the policy speaks next")
        if not 1 <= ask.num_choices <= MOST_CHOICES:
            raise RefusedError("invalid", f"n is {ask.num_choices}: it must be from 1 to {MOST_CHOICES}")

    def _take_turns(self, number: int) -> range:
        """Numbers of the next turns."""
        if len(self._running) + number > MOST_TURNS_AT_ONCE:
            raise RefusedError("busy", f"a session waits for at most {MOST_TURNS_AT_ONCE} turns at once")
        if self._num_asked + number > self.limits.max_turns:
            self.limit = self.limit or "turns"
            raise RefusedError(
                "turns",
                f"the session has had {self._num_asked} of its {self.limits.max_turns} turns "
                "(agent.max_assistant_turns), and no more are served",
            )
        self._num_asked += number
        return range(self._num_asked - number + 1, self._num_asked + 1)

    def _check_open(self) -> None:
        if self.is_over:
            raise RefusedError("over", "this session is over: its trajectory has ended, and no call is served any more")

    async def _wanted(self, ask: Ask, messages: Sequence[Said]) -> _Wanted:
        chat_format = await self.formats.with_tools(ask.tools)
        found = self._conversations.find(chat_format.key, messages)
        read_ids = self._read_ids(chat_format, found, messages)
        prompt_ids = self.tree.context(found.after) + read_ids
        return _Wanted(format=chat_format, after=found.after, read_ids=read_ids, prompt_ids=prompt_ids)

    def _read_ids(self, chat_format: Format, found: Found, messages: Sequence[Said]) -> list[int]:
        """What the policy is to read after the token at `found.after`."""
        rest = messages[found.num_messages :]
        if found.after < 0:
            return rendered(chat_format.chat, messages)
        if found.turn is None:
            return []
        self._note_results(found.turn, rest)
        reply = messages[found.num_messages - 1]
        return continued(chat_format.chat, self.tree.sampled_ids(found.turn), reply, rest)

    def _note_results(self, number: int, rest: Sequence[Said]) -> None:
        """Put what the agent's tools said into the record of the turn that called them."""
        turn = self.tree.turns[number]
        outputs = [readable(said.text)[:MAX_RECORDED_CHARS] for said in rest if said.role == "tool"]
        calls = [replace(call, output=output) for call, output in zip(turn.calls, outputs, strict=False)]
        self.tree.turns[number] = replace(turn, calls=(*calls, *turn.calls[len(calls) :]))

    async def _sampled(self, ask: Ask, messages: Sequence[Said], wanted: _Wanted) -> tuple[Choice, ...]:
        left = self._left(wanted)
        sampling = replace(
            self.sampling,
            max_tokens=min(self.sampling.max_tokens, left, ask.max_tokens or left),
            stop=(*self.sampling.stop, *ask.stop),
            **(ask.distribution if self.follows_requests else {}),
        )
        choices = list[Choice]()
        for turn in await self._turns(wanted, sampling, ask.num_choices):
            choice = await self._choice(ask, wanted.format, turn)
            self._conversations.record(
                wanted.format.key,
                messages,
                prompt_end=turn.prompt_end,
                reply=choice.said,
                turn=turn.number,
                end=turn.end,
            )
            choices.append(choice)
        return tuple(choices)

    def _left(self, wanted: _Wanted) -> int:
        """Tokens that may be sampled."""
        num_new = self.tree.num_new(wanted.after, wanted.read_ids)
        left = self.limits.max_tokens - self.tree.size - num_new
        if left < 1:
            self.limit = self.limit or "tokens"
            raise RefusedError(
                "tokens",
                f"the prompt has {num_new} tokens that the session has not had, and {self.tree.size} of its "
                f"{self.limits.max_tokens} (rollout.max_prompt_tokens + rollout.max_completion_tokens) are used: its "
                "maximum context length is reached",
            )
        return left

    async def _turns(self, wanted: _Wanted, sampling: SamplingParams, number: int) -> list[_Turn]:
        """So many turns after one prompt, recorded."""
        numbers = self._take_turns(number)
        tasks = [asyncio.create_task(self._turn(wanted, sampling, each)) for each in numbers]
        self._running.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            # The caller's, who has gone, or that of `end`.
            self._check_open()
            raise
        except RayappError as error:
            self.fail(error)
            raise RefusedError("engine", f"the policy can't be asked: {type(error).__name__}") from error
        finally:
            for task in tasks:
                task.cancel()
            self._running.difference_update(tasks)

    async def _turn(self, wanted: _Wanted, sampling: SamplingParams, number: int) -> _Turn:
        if sampling.seed is not None:
            # The same prompt asked again is to be answered anew.
            sampling = replace(sampling, seed=seed_of_call(sampling.seed, number))
        sampling = replace(sampling, num_routed=self.tree.num_routed(wanted.after))
        started_at_s = time.time()
        sampled = await self.engine.generate(f"{self.request_id}/turn={number}", wanted.prompt_ids, sampling)
        self._check_open()
        # Others may have used up what was left. A sample that is cut is one of fewer tokens.
        completion = cut_completion(sampled, self._left(wanted))
        text = wanted.format.chat.turn_text(completion.token_ids.tolist())
        prompt_end, end = self.tree.add_turn(
            wanted.after, wanted.read_ids, completion, text=text, started_at_s=started_at_s
        )
        if self.tree.size >= self.limits.max_tokens:
            self.limit = self.limit or "tokens"
        return _Turn(number=len(self.tree.turns) - 1, prompt_end=prompt_end, end=end)

    async def _choice(self, ask: Ask, chat_format: Format, turn: _Turn) -> Choice:
        record = self.tree.turns[turn.number]
        text, stopped_by = _before_stop(record.text, ask.stop)
        said = readable(after_thoughts(text))
        calls, said = await self._calls(ask, chat_format, said, turn.number)
        return Choice(
            text=said,
            thoughts=readable(thoughts_of(text)),
            calls=calls,
            finish_reason=record.finish_reason,
            is_stopped_by=stopped_by,
            num_tokens=record.end - record.start,
        )

    async def _calls(self, ask: Ask, chat_format: Format, said: str, number: int) -> tuple[tuple[ToolCall, ...], str]:
        """The calls of a turn and what is said beside them. Where one can't be read the whole turn is text: the agent
        could not answer that one."""
        if not ask.tools or not ask.reads_calls:
            return (), said
        raw, words = await read_turn(chat_format.parser, said, f"{self.request_id}/turn={number}")
        self._note_calls(number, raw)
        if any(call.problem for call in raw):
            return (), said
        return tuple(
            ToolCall(id=uuid.uuid4().hex[:24], name=call.name, arguments=call.arguments) for call in raw
        ), words

    def _note_calls(self, number: int, raw: Sequence[RawCall]) -> None:
        records = tuple(
            CallRecord(name=call.name, arguments=call.arguments, output="", failure="malformed" if call.problem else "")
            for call in raw
        )
        self.tree.turns[number] = replace(self.tree.turns[number], calls=records)


def _before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text up to the first stop text in it, and which that was."""
    places = [(text.find(each), each) for each in stop if each in text]
    if not places:
        return text, ""
    place, stopped_by = min(places)
    return text[:place], stopped_by

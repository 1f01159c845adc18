"""One trajectory's conversations with the policy: reads calls, writes replies, and records every token.

    Ask -> recorded part (Conversations) -> recorded ids + new ids -> engine -> Recorder, Conversations -> Reply

The gateway makes one session for each trajectory and ends it with the trajectory. An agent's mistake raises a
`RefusedError`. So does a failure of the engine, which also ends the session and sets `trouble` to the engine's error.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from rayapp.core.errors import EngineDeadError, EngineError, RayappError
from rayapp.core.protocols import RolloutEngine
from rayapp.core.types import CallRecord, RequestId, RolloutStatus, SamplingParams, Trajectory
from rayapp.rollout.agent.calls import read_turn
from rayapp.rollout.agent.text import readable
from rayapp.rollout.gateway.conversation import (
    Ask,
    Choice,
    Conversations,
    Found,
    RefusedError,
    Reply,
    Said,
    ToolCall,
    in_order,
    not_in_training,
)
from rayapp.rollout.gateway.formats import Format, Formats, continued, rendered
from rayapp.rollout.order import seed_of_call
from rayapp.rollout.recorder import Recorder, cut_completion
from rayapp.tools.base import RawCall, after_thoughts, thoughts_of

MOST_CHOICES = 16
MOST_TURNS_AT_ONCE = 64
MAX_RECORDED_CHARS = 16_384
"""Maximum characters of a tool's result in the record of its call; the policy reads the whole result."""
_MAX_CHARS_A_TOKEN = 32
"""Maximum characters per token, on average over a prompt. A prompt with more can't fit into the session's tokens, and
is refused before it is rendered."""
_BODY_BYTES, _BODY_VALUES = 1 << 20, 50_000
"""Bytes and JSON values allowed in a body besides its messages' texts: for tools and the fields around each message."""
_MAX_TOOL_SETS = 32
"""Maximum sets of tools of a session: each is prepared in the one thread that all sessions of a worker share."""
_SIDE_CALLS_A_TURN = 4
_SMALL = 16 << 10
"""Bytes or characters up to which input is read on the event loop, which takes milliseconds."""
_READING = ThreadPoolExecutor(2, thread_name_prefix="gateway")
"""Threads that read bodies and render prompts. Each session uses at most one thread at a time."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of a session's use of the policy."""

    max_tokens: int
    """Maximum tokens of all the session's conversations together, read and sampled. A token that several calls share
    counts once."""
    max_turns: int
    """Maximum turns of the policy. A call with n choices takes n turns."""

    @property
    def max_chars(self) -> int:
        """Maximum characters of a prompt's messages."""
        return _MAX_CHARS_A_TOKEN * self.max_tokens

    @property
    def max_body_bytes(self) -> int:
        return _BODY_BYTES + 2 * self.max_chars

    @property
    def max_body_values(self) -> int:
        """Maximum JSON values in a body: parsing them holds the interpreter's lock. Few tokens contain two values."""
        return _BODY_VALUES + 3 * self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Prompt of a call, and the recorded token that it continues from."""

    format: Format
    after: int
    """Index of the recorded token that the new part follows."""
    read_ids: list[int]
    """Ids of the new part."""
    prompt_ids: list[int]
    """Ids of the whole prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A recorded turn."""

    number: int
    """Index of the turn in `Recorder.turns`."""
    prompt_end: int
    end: int
    """Index of its last token."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Conversations of one trajectory with the policy."""

    formats: Formats
    engine: RolloutEngine
    sampling: SamplingParams
    """Sampling settings of every turn. They fix the distribution; the agent sets only the number of tokens and choices,
    and stop texts."""
    limits: SessionLimits
    follows_requests: bool = False
    """True if requests may also set the distribution, because the session is not trained on."""
    request_id: RequestId
    """Id of the trajectory; turns are numbered from 1 on."""
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    tree: Recorder = field(default_factory=Recorder)
    is_over: bool = False
    limit: Literal["", "turns", "tokens"] = ""
    """Limit that caused the last call to be refused or its answer to be cut. A later call that fits clears it."""
    only_model: str = ""
    """Name of the model whose calls are recorded: calls that name another model are answered without taking turns.
    Empty records all calls."""
    trouble: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Future that fails with the engine's error when the engine fails."""
    _conversations: Conversations = field(default_factory=Conversations)
    _replies: dict[str, tuple[Said, ...]] = field(default_factory=dict)
    """Conversation up to each reply, by the reply's id, for calls that continue from a reply (Responses)."""
    _num_asked: int = 0
    _running: set[asyncio.Task[_Turn]] = field(default_factory=set)
    _thread: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    _tool_sets: set[object] = field(default_factory=set)
    _sides: list[Session] = field(default_factory=list)
    """Sessions of calls that are not recorded: one session per call, while the call is answered."""
    _num_sides: int = 0

    async def read(self, read: Callable[[bytes], Ask], body: bytes) -> Ask:
        """Return the body of a request as a call.

        Args:
            read: parses the body; runs in a thread if the body is large.
        Raises:
            RefusedError: the body is not a call of that API.
        """
        if len(body) > self.limits.max_body_bytes:
            raise RefusedError("too_large", f"the body has more than {self.limits.max_body_bytes:,} bytes")
        if sum(map(body.count, (b"[", b"{", b","))) > self.limits.max_body_values:
            raise RefusedError("too_large", f"the body has more than {self.limits.max_body_values:,} JSON values")
        return await self._beside(len(body), lambda: read(body))

    async def ask(self, ask: Ask) -> Reply:
        """Return the policy's reply.

        Raises:
            RefusedError: the call is refused, or the engine failed.
        """
        if self._is_side(ask):
            return await self._asked_aside(ask)
        try:
            reply = await self._asked(ask)
        except RefusedError as refused:
            if refused.kind in ("turns", "tokens"):
                self.limit = refused.kind
            raise
        is_cut = any(choice.finish_reason == "length" for choice in reply.choices)
        self.limit = "tokens" if is_cut and self.tree.size >= self.limits.max_tokens else ""
        return reply

    def _is_side(self, ask: Ask) -> bool:
        return self.only_model not in ("", ask.model)

    async def _asked_aside(self, ask: Ask) -> Reply:
        """Return the reply to a call that is not recorded. The call gets its own session, which ends with it."""
        self._check_open()
        self._num_sides += ask.num_choices
        if self._num_sides > _SIDE_CALLS_A_TURN * self.limits.max_turns:
            raise RefusedError(
                "turns",
                f"the session has had {self._num_sides - ask.num_choices} turns under other models' names, the maximum "
                f"({_SIDE_CALLS_A_TURN} * agent.max_assistant_turns). Name the model {self.only_model!r}",
            )
        side = self._side(self.request_id._replace(side=self._num_sides))
        self._sides.append(side)
        try:
            return await side.ask(ask)
        finally:
            self._sides.remove(side)
            if side.trouble.done() and (error := side.trouble.exception()) is not None:
                self.fail(error)

    def _side(self, request_id: RequestId) -> Session:
        limits = SessionLimits(max_tokens=self.limits.max_tokens, max_turns=MOST_CHOICES)
        return Session(
            formats=self.formats, engine=self.engine, sampling=self.sampling, limits=limits, request_id=request_id
        )

    async def _asked(self, ask: Ask) -> Reply:
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
        if ask.may_be_named:
            self._replies[reply.id] = (*messages, choices[0].said)
        return reply

    async def count(self, ask: Ask) -> int:
        """Return the number of tokens in the prompt of a call, without sampling."""
        if self._is_side(ask):
            return await self._side(self.request_id).count(ask)
        self._check_open()
        return len((await self._wanted(ask, self._messages(ask))).prompt_ids)

    def fail(self, error: BaseException) -> None:
        """Set `trouble`, so that the agent waiting on it ends the trajectory."""
        if not self.trouble.done():
            self.trouble.set_exception(error)

    def end(self) -> None:
        """Serve no more calls, and cancel the turns that wait for the engine. Idempotent."""
        self.is_over = True
        for task in self._running:
            task.cancel()
        for side in self._sides:
            side.end()
        if self.trouble.done() and not self.trouble.cancelled():
            self.trouble.exception()  # mark the error as retrieved

    def trajectory(
        self, *, failure: str = "", answer: str | None = None, ran_out: bool = False, output: str = ""
    ) -> Trajectory:
        """Return the session's record.

        Args:
            failure: reason why the agent's program failed; empty if it ended normally or a limit ended it.
            answer: answer that the agent handed in; None for the text of the last turn.
            ran_out: True if the agent's time was up.
            output: output of its program.
        """
        status = RolloutStatus.ERROR_TASK if failure else RolloutStatus.COMPLETED
        if self.limit == "tokens":
            status = RolloutStatus.TRUNCATED
        elif self.limit == "turns" or ran_out:
            status = RolloutStatus.MAX_TURNS
        return self.tree.trajectory(status, failure, answer=answer, agent_output=output)

    def _messages(self, ask: Ask) -> tuple[Said, ...]:
        if not ask.previous:
            return in_order(ask.messages)
        before = self._replies.get(ask.previous)
        if before is None:
            why = "this server keeps no replies" if self.follows_requests else "this session has no reply with this id"
            raise RefusedError("invalid", f"previous_response_id {ask.previous!r:.60}: {why}. Send the whole input")
        # Instructions belong to one call: those of the previous call are not continued.
        own = ask.messages[:1] if ask.messages and ask.messages[0].role == "system" else ()
        kept = before[1:] if before[0].role == "system" else before
        return in_order((*own, *kept, *ask.messages[len(own) :]))

    def _check(self, ask: Ask, messages: Sequence[Said]) -> None:
        self._check_open()
        if not messages or messages[-1].role == "assistant":
            raise RefusedError("invalid", "the last message must have the role user or tool: the policy replies to it")
        if not 1 <= ask.num_choices <= MOST_CHOICES:
            raise RefusedError("invalid", f"n is {ask.num_choices}: it must be from 1 to {MOST_CHOICES}")
        if ask.form is not None and not self.follows_requests:
            raise RefusedError("invalid", not_in_training(ask.form.field))
        if ask.form is not None and ask.form.problem:
            raise RefusedError("invalid", ask.form.problem)
        if ask.unknown and self.follows_requests:
            raise RefusedError(
                "invalid", f"unknown fields: {', '.join(ask.unknown[:9])}. Leave them out: they have no effect"
            )

    def _take_turns(self, number: int) -> range:
        """Return the numbers of the next turns."""
        if len(self._running) + number > MOST_TURNS_AT_ONCE:
            raise RefusedError("busy", f"more than {MOST_TURNS_AT_ONCE} turns at once: wait until one ends")
        if self._num_asked + number > self.limits.max_turns:
            raise RefusedError(
                "turns",
                f"the session has had {self._num_asked} of its {self.limits.max_turns} turns "
                "(agent.max_assistant_turns): too few are left for this call",
            )
        self._num_asked += number
        return range(self._num_asked - number + 1, self._num_asked + 1)

    def _check_open(self) -> None:
        if self.is_over:
            raise RefusedError("over", "this session is over: its trajectory has ended, and no call is served any more")

    async def _wanted(self, ask: Ask, messages: Sequence[Said]) -> _Wanted:
        num_chars = self._check_size(messages)
        chat_format = await self._format(ask)
        found = self._conversations.find(chat_format.key, messages)
        sampled_ids = self.tree.sampled_ids(found.turn) if found.turn is not None else []
        self._note_results(found, messages)
        read_ids = await self._beside(num_chars, lambda: _read_ids(chat_format, found, messages, sampled_ids))
        prompt_ids = self.tree.context(found.after) + read_ids
        return _Wanted(format=chat_format, after=found.after, read_ids=read_ids, prompt_ids=prompt_ids)

    async def _beside(self, size: int, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread if its input is large; a session runs one such piece of work at a time."""
        if size <= _SMALL:
            return work()
        async with self._thread:
            return await asyncio.get_running_loop().run_in_executor(_READING, work)

    def _check_size(self, messages: Sequence[Said]) -> int:
        """Return the characters of the messages. Raises RefusedError: no template can make them fit."""
        num_chars = sum(len(said.text) + sum(len(call.arguments) for call in said.calls) for said in messages)
        if num_chars > self.limits.max_chars or len(messages) > self.limits.max_tokens:
            raise RefusedError(
                "tokens",
                f"the prompt has {len(messages)} messages and {num_chars} characters: its maximum context length, "
                f"{self.limits.max_tokens} tokens (rollout.max_prompt_tokens + rollout.max_completion_tokens), is "
                "exceeded",
            )
        return num_chars + 64 * len(messages)

    async def _format(self, ask: Ask) -> Format:
        chat_format = await self.formats.with_tools(ask.tools)
        self._tool_sets.add(chat_format.key)
        if len(self._tool_sets) > _MAX_TOOL_SETS:
            raise RefusedError("invalid", f"a session has at most {_MAX_TOOL_SETS} different lists of tools")
        return chat_format

    def _note_results(self, found: Found, messages: Sequence[Said]) -> None:
        """Add the results of the agent's tools to the record of the turn that called them."""
        if found.turn is None:
            return
        turn = self.tree.turns[found.turn]
        told = messages[found.num_messages :]
        outputs = [readable(said.text[:MAX_RECORDED_CHARS]) for said in told if said.role == "tool"]
        calls = [replace(call, output=output) for call, output in zip(turn.calls, outputs, strict=False)]
        self.tree.turns[found.turn] = replace(turn, calls=(*calls, *turn.calls[len(calls) :]))

    async def _sampled(self, ask: Ask, messages: Sequence[Said], wanted: _Wanted) -> tuple[Choice, ...]:
        left = self._left(wanted)
        sampling = replace(
            self.sampling,
            max_tokens=min(self.sampling.max_tokens, left, ask.max_tokens or left),
            stop=(*self.sampling.stop, *ask.stop),
            **(ask.distribution if self.follows_requests else {}),
            json_schema=json.dumps(ask.form.schema) if ask.form is not None else "",
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
        """Return the number of tokens that may still be sampled."""
        num_new = self.tree.num_new(wanted.after, wanted.read_ids)
        left = self.limits.max_tokens - self.tree.size - num_new
        if left < 1:
            raise RefusedError(
                "tokens",
                f"the prompt has {num_new} tokens that are new to the session, and {self.tree.size} of the session's "
                f"{self.limits.max_tokens} (rollout.max_prompt_tokens + rollout.max_completion_tokens) are used: its "
                "maximum context length is reached",
            )
        return left

    async def _turns(self, wanted: _Wanted, sampling: SamplingParams, number: int) -> list[_Turn]:
        """Sample and record `number` turns that follow the same prompt."""
        numbers = self._take_turns(number)
        tasks = [asyncio.create_task(self._turn(wanted, sampling, each)) for each in numbers]
        self._running.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            # Either the client has disconnected, or `end` cancelled the turns.
            self._check_open()
            raise
        except RayappError as error:
            if sampling.json_schema and isinstance(error, EngineError) and not isinstance(error, EngineDeadError):
                raise RefusedError("invalid", f"the engine can't follow this JSON schema: {error!s:.300}") from error
            self.fail(error)
            raise RefusedError("engine", f"the engine failed: {type(error).__name__}") from error
        finally:
            for task in tasks:
                task.cancel()
            self._running.difference_update(tasks)

    async def _turn(self, wanted: _Wanted, sampling: SamplingParams, number: int) -> _Turn:
        if sampling.seed is not None:
            # Give each turn its own seed: the same prompt sent again must get a new answer.
            sampling = replace(sampling, seed=seed_of_call(sampling.seed, number))
        sampling = replace(sampling, num_routed=self.tree.num_routed(wanted.after))
        started_at_s = time.time()
        sampled = await self.engine.generate(self.request_id._replace(turn=number), wanted.prompt_ids, sampling)
        self._check_open()
        # Concurrent turns may have used the rest of the limit. A shortened sample is a valid sample of fewer tokens.
        completion = cut_completion(sampled, self._left(wanted))
        text = wanted.format.chat.turn_text(completion.token_ids.tolist())
        prompt_end, end = self.tree.add_turn(
            wanted.after, wanted.read_ids, completion, text=text, started_at_s=started_at_s
        )
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
        """Return the calls of a turn and the text outside them.

        If one call can't be parsed, return the whole turn as text: the agent could not answer that call.
        """
        if ask.form is not None and ask.form.is_calls:
            return _formed_calls(said)
        if not ask.tools or not ask.reads_calls or ask.form is not None:
            return (), said
        raw, words = await read_turn(chat_format.parser, said, str(self.request_id._replace(turn=number)))
        shown = raw if ask.several_calls else raw[:1]
        self._note_calls(number, raw, len(shown))
        if any(call.problem for call in shown):
            return (), said
        return tuple(_shown_call(call.name, call.arguments) for call in shown), words

    def _note_calls(self, number: int, raw: Sequence[RawCall], num_shown: int) -> None:
        records = tuple(
            CallRecord(
                name=call.name,
                arguments=call.arguments,
                output="",
                failure="malformed" if call.problem else "too_many_calls" if i >= num_shown else "",
            )
            for i, call in enumerate(raw)
        )
        self.tree.turns[number] = replace(self.tree.turns[number], calls=records)


def _read_ids(chat_format: Format, found: Found, messages: Sequence[Said], sampled_ids: Sequence[int]) -> list[int]:
    """Return the ids of the prompt's tokens after the recorded token `found.after`."""
    if found.after < 0:
        return rendered(chat_format.chat, messages)
    if found.turn is None:
        return []
    reply, rest = messages[found.num_messages - 1], messages[found.num_messages :]
    return continued(chat_format.chat, sampled_ids, reply, rest)


def _shown_call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id=uuid.uuid4().hex[:24], name=name, arguments=arguments)


def _formed_calls(said: str) -> tuple[tuple[ToolCall, ...], str]:
    """Return the calls of an answer that had to be a list of calls, and ""; no calls and the text if it was cut."""
    try:
        made: list[dict[str, Any]] = json.loads(said)
        return tuple(_shown_call(str(call["name"]), json.dumps(call["arguments"])) for call in made), ""
    except (ValueError, LookupError, TypeError, RecursionError):
        return (), said


def _before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return the text up to the first stop text in it, and that stop text."""
    places = [(text.find(each), each) for each in stop if each in text]
    if not places:
        return text, ""
    place, stopped_by = min(places)
    return text[:place], stopped_by

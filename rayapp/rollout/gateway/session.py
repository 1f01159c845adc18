"""The conversations of one trajectory with the policy: a session reads calls, makes replies, and records every token.

    Ask -> recorded part (Conversations) -> recorded ids + new ids -> engine -> Recorder, Conversations -> Reply

An agent's mistake raises a `RefusedError`. A failure of the engine also ends the trajectory, through `trouble`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rayapp.core.errors import EngineDeadError, EngineError, RayappError
from rayapp.core.protocols import OnTokens, RolloutEngine
from rayapp.core.syntax import spoken
from rayapp.core.types import RequestId, RolloutStatus, SamplingParams, Trajectory
from rayapp.rollout.gateway.conversation import (
    Ask,
    Begun,
    Choice,
    Conversations,
    Drift,
    Found,
    Key,
    RefusedError,
    Reply,
    Said,
    in_order,
    not_in_training,
)
from rayapp.rollout.gateway.formats import Format, Formats
from rayapp.rollout.gateway.forms import too_large
from rayapp.rollout.gateway.limits import MODEL, MOST_CHOICES, PICTURES_BODY_BYTES, Sending, SessionLimits
from rayapp.rollout.gateway.reading import parsed
from rayapp.rollout.gateway.streams import Live, Splitter
from rayapp.rollout.gateway.turns import (
    SampledTurn,
    Wanted,
    checked_pictures,
    choice_of,
    new_prompt_ids,
    note_results,
    placed_pictures,
)
from rayapp.rollout.order import seed_of_call
from rayapp.rollout.recorder import Recorder, cut_completion
from rayapp.storage.media import moved

if TYPE_CHECKING:
    from rayapp.rollout.gateway.forwarding import Forwarder  # imports aiohttp, which other runs don't need

MOST_TURNS_AT_ONCE = 64
_MAX_TOOL_SETS = 32  # each is prepared in the only thread that all sessions of a worker share
_SIDE_CALLS_A_TURN = 4
_MOST_LEFT, REPEAT_WITHIN_S = 16, 30.0  # abandoned calls that are kept, because their clients may retry them
_MOST_NOTES = 20
_DESCRIBE = ", describe the form of the answer in the prompt, or set agent.external.structured"
_SMALL = 16 << 10  # bytes or characters of input that is read on the event loop, in milliseconds
# Threads that read bodies and render prompts; a session uses at most one at a time.
_READING = ThreadPoolExecutor(2, thread_name_prefix="gateway")
_T = TypeVar("_T")
Structured = Literal["refuse", "free", "guide"]


@dataclass(slots=True, kw_only=True)
class Session:
    formats: Formats
    engine: RolloutEngine
    sampling: SamplingParams  # of every turn; the agent can only set the number of tokens and choices, and stop texts
    limits: SessionLimits
    request_id: RequestId  # of the trajectory; turns are numbered from 1 on
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    tree: Recorder = field(default_factory=Recorder)
    is_over: bool = False
    limit: Literal["", "turns", "tokens"] = ""  # by which the last call was refused or its answer was cut
    # Treatment of calls that name a model other than MODEL; see `agent.external.models`.
    other_models: Literal["train", "untrained", "refuse"] = "train"
    forwarder: Forwarder | None = None  # answers calls under other models' names
    structured: Structured = "refuse"  # see `agent.external.structured`
    counts: Counter[str] = field(default_factory=Counter)  # calls by kind, for `Trajectory.agent_counts`
    # Lines for the agent's output, about calls that did not continue the last conversation.
    notes: list[str] = field(default_factory=list)
    # Future that never gets a result; when the engine fails, it gets the error.
    trouble: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _conversations: Conversations = field(default_factory=Conversations)
    _num_asked: int = 0
    _running: set[asyncio.Task[SampledTurn]] = field(default_factory=set)
    _thread: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    _tool_sets: set[object] = field(default_factory=set)
    # Key of a sending -> call whose client disconnected before the reply.
    _unanswered: OrderedDict[bytes, asyncio.Task[Reply]] = field(default_factory=OrderedDict)
    _sides: list[Session] = field(default_factory=list)  # for calls that are not recorded, each while it is answered
    _num_sides: int = 0
    _shown: dict[str, int] = field(default_factory=dict)  # SHA-256 -> encoded bytes of a picture of any call
    _forwarded: set[asyncio.Task[Any]] = field(default_factory=set)  # forward requests to the endpoint

    async def read(self, read: Callable[[Mapping[str, Any]], Ask], body: bytes) -> Ask | Mapping[str, Any]:
        """Read the body of a request as a call, a large one in a thread. If the endpoint answers it, count it, and
        return the body as data."""
        self._check_body(body)
        ask = await self._beside(len(body), lambda: self._read(read, body))
        if not isinstance(ask, Ask):
            self._check_open()
            self._take_side_calls(1)
            return ask
        if ask.form is None or self.structured != "free":
            return ask
        return replace(ask, form=None, is_freed=True, not_followed=(*ask.not_followed, ask.form.field))

    def _read(self, read: Callable[[Mapping[str, Any]], Ask], body: bytes) -> Ask | Mapping[str, Any]:
        data = parsed(body)
        is_forwarded = self.forwarder is not None and data.get("model", MODEL) != MODEL
        return data if is_forwarded else read(data)

    def _check_body(self, body: bytes) -> None:
        limit = self.limits.max_body_bytes + (PICTURES_BODY_BYTES if self.formats.pictures is not None else 0)
        if len(body) > limit:
            raise RefusedError("too_large", f"the body has more than {limit:,} bytes")
        if sum(map(body.count, (b"[", b"{", b","))) > self.limits.max_body_values:
            raise RefusedError("too_large", f"the body has more than {self.limits.max_body_values:,} JSON values")

    @contextmanager
    def cancelling_at_end(self) -> Iterator[None]:
        """Cancel the current task, inside the block, when the session ends."""
        task = asyncio.current_task()
        assert task is not None, "called in a task"
        self._forwarded.add(task)
        try:
            yield
        finally:
            self._forwarded.discard(task)

    @contextmanager
    def answering(self, ask: Ask, live: Live | None, sending: Sending) -> Iterator[asyncio.Task[Reply]]:
        """Yield the task that makes the reply to a call; for a client's retry that of its first attempt."""
        task = self._unanswered.pop(sending.key, None) if sending.is_repeated else None
        if task is not None and not (task.done() and (task.cancelled() or task.exception() is not None)):
            self.counts["repeated"] += 1
        else:
            task = asyncio.create_task(self.ask(ask, live))
            task.add_done_callback(_retrieved)
        try:
            yield task
        except (asyncio.CancelledError, ConnectionError):
            if task.done() or sending.has_timed_out:
                self._keep(task, sending.key)
            else:
                task.cancel()
            raise
        except BaseException:
            task.cancel()
            raise

    def _keep(self, task: asyncio.Task[Reply], key: bytes) -> None:
        self._unanswered[key] = task
        while len(self._unanswered) > _MOST_LEFT:
            self._unanswered.popitem(last=False)[1].cancel()

        def drop() -> None:
            if self._unanswered.get(key) is task:
                self._unanswered.pop(key).cancel()

        asyncio.get_running_loop().call_later(REPEAT_WITHIN_S, drop)

    async def ask(self, ask: Ask, live: Live | None = None) -> Reply:
        """Return the policy's reply to a call. `live` gets the pieces of the reply while it is sampled."""
        if self._is_side(ask):
            return await self._asked_aside(ask, live)
        try:
            reply = await self._asked(ask, live)
        except RefusedError as refused:
            if refused.kind in ("turns", "tokens"):
                self.limit = refused.kind
            raise
        is_cut = any(choice.finish_reason == "length" for choice in reply.choices)
        self.limit = "tokens" if is_cut and self.tree.size >= self.limits.max_tokens else ""
        return reply

    def _is_side(self, ask: Ask) -> bool:
        return self.other_models != "train" and ask.model != MODEL

    async def _asked_aside(self, ask: Ask, live: Live | None) -> Reply:
        self._check_open()
        if self.other_models == "refuse":
            raise RefusedError("no_model", f"there is no model {ask.model[:200]!r}; the model is {MODEL!r}")
        self._take_side_calls(ask.num_choices)
        side = self._side(self.request_id._replace(side=self._num_sides))
        self._sides.append(side)
        try:
            return await side.ask(ask, live)
        finally:
            self._sides.remove(side)
            if side.trouble.done() and (error := side.trouble.exception()) is not None:
                self.fail(error)

    def _take_side_calls(self, number: int) -> None:
        self.counts["side_calls"] += 1
        self._num_sides += number
        if self._num_sides > _SIDE_CALLS_A_TURN * self.limits.max_turns:
            raise RefusedError(
                "turns",
                f"the session has had {self._num_sides - number} turns under other models' names, and the maximum is "
                f"{_SIDE_CALLS_A_TURN * self.limits.max_turns} ({_SIDE_CALLS_A_TURN} times agent.max_assistant_turns). "
                f"Set `model` to {MODEL!r}",
            )

    def _side(self, request_id: RequestId) -> Session:
        limits = SessionLimits(max_tokens=self.limits.max_tokens, max_turns=MOST_CHOICES)
        # These answers are not trained on, so they may have a form.
        return Session(
            formats=self.formats, engine=self.engine, sampling=self.sampling, limits=limits, request_id=request_id,
            structured="guide",
        )  # fmt: skip

    async def _asked(self, ask: Ask, live: Live | None) -> Reply:
        messages = in_order(ask.messages)
        self._check(ask, messages)
        wanted = await self._wanted(ask, messages)
        num_prompt_tokens = len(wanted.prompt_ids)
        num_cached = num_prompt_tokens - self.tree.num_new(wanted.after, wanted.read_keys)
        if ask.is_freed:
            self.counts["structured_dropped"] += 1
        if ask.form is not None:
            self.counts["structured_guided"] += 1
        begun = Begun(num_prompt_tokens=num_prompt_tokens, num_cached_tokens=num_cached, model=ask.model)
        if live is not None:
            live.begun = begun
        return Reply.of(begun, await self._sampled(ask, messages, wanted, live))

    async def count(self, ask: Ask) -> int:
        """Return the number of tokens in the prompt of a call. Nothing is sampled or recorded."""
        if self._is_side(ask):
            return await self._side(self.request_id).count(ask)
        self._check_open()
        return len((await self._wanted(ask, in_order(ask.messages))).prompt_ids)

    def fail(self, error: BaseException) -> None:
        """Put an error into `trouble`, so that `ExternalAgent` ends the trajectory."""
        if not self.trouble.done():
            self.trouble.set_exception(error)

    def end(self) -> None:
        """Refuse all further calls, and cancel the turns that wait for the engine. Idempotent."""
        self.is_over = True
        for task in self._running:
            task.cancel()
        for side in self._sides:
            side.end()
        for request in self._forwarded:
            request.cancel()
        for left in self._unanswered.values():
            left.cancel()
        self._unanswered.clear()
        if self.trouble.done() and not self.trouble.cancelled():
            self.trouble.exception()  # mark the error as retrieved

    def trajectory(
        self, *, failure: str = "", answer: str | None = None, ran_out: bool = False, output: str = ""
    ) -> Trajectory:
        """Return the recorded tokens as a trajectory. `failure` is why the agent's program failed; without an `answer`
        the last turn's text is the answer."""
        status = RolloutStatus.ERROR_TASK if failure else RolloutStatus.COMPLETED
        if self.limit == "tokens":
            status = RolloutStatus.TRUNCATED
        elif self.limit == "turns" or ran_out:
            status = RolloutStatus.MAX_TURNS
        output = "\n".join([*([output] if output else []), *self.notes[:_MOST_NOTES]])
        played = self.tree.trajectory(status, failure, answer=answer, agent_output=output)
        return replace(played, agent_counts={name: float(count) for name, count in self.counts.items() if count})

    def _check(self, ask: Ask, messages: Sequence[Said]) -> None:
        self._check_open()
        if not messages or messages[-1].role == "assistant":
            raise RefusedError("invalid", "the last message must have the role user or tool: the policy replies to it")
        if not 1 <= ask.num_choices <= MOST_CHOICES:
            raise RefusedError("invalid", f"n is {ask.num_choices}: it must be from 1 to {MOST_CHOICES}")
        if ask.form is not None and self.structured != "guide":
            raise RefusedError("invalid", not_in_training(ask.form.field, _DESCRIBE))
        if ask.form is not None and (problem := ask.form.problem or too_large(ask.form.structured)):
            raise RefusedError("invalid", f"{ask.form.field}: {problem}")

    def _take_turns(self, number: int) -> range:
        if len(self._running) + number > MOST_TURNS_AT_ONCE:
            raise RefusedError(
                "busy", f"more than {MOST_TURNS_AT_ONCE} turns of this session are in progress: wait until one ends"
            )
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

    async def _wanted(self, ask: Ask, messages: Sequence[Said]) -> Wanted:
        num_chars = self._check_size(messages)
        pictures = checked_pictures(messages, self._shown)
        chat_format = await self._format(ask)
        found = self._conversations.find(chat_format.key, messages)
        self._check_placeholders(found)
        sampled_ids = self.tree.sampled_ids(found.turn) if found.turn is not None else []
        note_results(self.tree, found, messages)
        self._note_drift(chat_format.key, messages, found)
        ids = await self._beside(num_chars, lambda: new_prompt_ids(chat_format, found, messages, sampled_ids))
        ids, media = await placed_pictures(self.formats.pictures, ids, found, messages, self._thread)
        before = self.tree.context(found.after)
        return Wanted(
            format=chat_format,
            after=found.after,
            read_keys=self.tree.keys(ids, media),
            prompt_ids=before + ids,
            media=(*self.tree.media(found.after), *moved(media, len(before))),
            pictures=pictures,
        )

    def _check_placeholders(self, found: Found) -> None:
        pictures = self.formats.pictures
        if pictures is not None and self.tree.has_text(found.after, pictures.token_id):
            raise RefusedError(
                "tokens",
                f"the policy wrote {pictures.placeholder}, which the engine takes for a picture: no turn can follow in "
                "this conversation",
            )

    def _note_drift(self, tools: Key, messages: Sequence[Said], found: Found) -> None:
        if found.after >= 0:
            drift = Drift("retry") if found.turn is None else None
        else:
            drift = self._conversations.drift(tools, messages)
        if drift is None:
            return
        self.counts["forks"] += 1
        self.counts["forked"] = 1
        self.counts[f"forks/{drift.reason}"] += 1
        self.notes.append(f"rayapp: turn {self._num_asked + 1} does not continue the conversation: {drift}")

    async def _beside(self, size: int, work: Callable[[], _T]) -> _T:
        # A session runs one such work at a time.
        if size <= _SMALL:
            return work()
        async with self._thread:
            return await asyncio.get_running_loop().run_in_executor(_READING, work)

    def _check_size(self, messages: Sequence[Said]) -> int:
        """Refuse messages that can't fit into the session's tokens."""
        num_chars = sum(len(said.text) + sum(len(call.arguments) for call in said.calls) for said in messages)
        if num_chars > self.limits.max_chars or len(messages) > self.limits.max_tokens:
            raise self._too_long(f"the prompt has {len(messages)} messages and {num_chars} characters")
        return num_chars + 64 * len(messages)

    def _too_long(self, what: str) -> RefusedError:
        return RefusedError(
            "tokens",
            f"{what}: this can't fit into the maximum context length of {self.limits.max_tokens} tokens "
            "(rollout.max_prompt_tokens + rollout.max_completion_tokens)",
        )

    async def _format(self, ask: Ask) -> Format:
        chat_format = await self.formats.of_call(ask.tools, ask.variables)
        self._tool_sets.add(chat_format.key)
        if len(self._tool_sets) > _MAX_TOOL_SETS:
            raise RefusedError(
                "invalid",
                f"this call has new tools or template variables, but a session may use {_MAX_TOOL_SETS} different sets "
                "at most. Send the tools and variables of an earlier call",
            )
        return chat_format

    async def _sampled(
        self, ask: Ask, messages: Sequence[Said], wanted: Wanted, live: Live | None
    ) -> tuple[Choice, ...]:
        left = self._left(wanted)
        sampling = replace(
            self.sampling,
            max_tokens=min(self.sampling.max_tokens, left, ask.max_tokens or left),
            stop=(*self.sampling.stop, *ask.stop),
            structured_outputs=ask.form.structured if ask.form is not None else {},
            wants_allowed=True,
            media=wanted.media,
            pictures=wanted.pictures,
        )
        choices, splitters = list[Choice](), list[Splitter]()
        prompt_end = wanted.format.chat.end_of(wanted.prompt_ids)
        if live is not None:
            is_thinking = prompt_end.rstrip().endswith(("<think>", "<thinking>"))
            splitters = [Splitter(wanted.format, ask, is_thinking=is_thinking) for _ in range(ask.num_choices)]
        listeners = [] if live is None else [live.listener(i, each) for i, each in enumerate(splitters)]
        for i, turn in enumerate(await self._turns(wanted, sampling, ask.num_choices, listeners)):
            text_start = splitters[i].text_start if splitters else None
            choice = await choice_of(ask, wanted.format, self.tree, turn, self.request_id, prompt_end, text_start)
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

    def _left(self, wanted: Wanted) -> int:
        num_new = self.tree.num_new(wanted.after, wanted.read_keys)
        left = self.limits.max_tokens - self.tree.size - num_new
        if left < 1:
            raise RefusedError(
                "tokens",
                f"the session's maximum context length is reached: of {self.limits.max_tokens} tokens "
                f"(rollout.max_prompt_tokens + rollout.max_completion_tokens) {self.tree.size} are used, and the "
                f"prompt has {num_new} more",
            )
        return left

    async def _turns(
        self, wanted: Wanted, sampling: SamplingParams, number: int, listeners: Sequence[OnTokens]
    ) -> list[SampledTurn]:
        numbers = self._take_turns(number)
        on_tokens: Sequence[OnTokens | None] = listeners or [None] * number
        tasks = [
            asyncio.create_task(self._turn(wanted, sampling, *each)) for each in zip(numbers, on_tokens, strict=True)
        ]
        self._running.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            # Raise a refusal if `end` cancelled the turns. Otherwise the client has disconnected.
            self._check_open()
            raise
        except RayappError as error:
            is_alive = isinstance(error, EngineError) and not isinstance(error, EngineDeadError)
            if sampling.structured_outputs and is_alive:
                raise RefusedError("invalid", f"the engine can't follow this request: {error!s:.300}") from error
            self.fail(error)
            raise RefusedError("engine", f"the engine failed: {type(error).__name__}") from error
        finally:
            for task in tasks:
                task.cancel()
            self._running.difference_update(tasks)

    async def _turn(
        self, wanted: Wanted, sampling: SamplingParams, number: int, on_tokens: OnTokens | None
    ) -> SampledTurn:
        # Give each turn its own seed, so that the same prompt gets a new answer when it is sent again.
        seed = None if sampling.seed is None else seed_of_call(sampling.seed, number)
        sampling = replace(sampling, seed=seed, num_routed=self.tree.num_routed(wanted.after))
        started_at_s = time.time()
        request_id = self.request_id._replace(turn=number)
        sampled = await self.engine.generate(request_id, wanted.prompt_ids, sampling, on_tokens)
        self._check_open()
        # Concurrent turns may have used up the limit meanwhile. A cut completion has the same distribution as one with
        # a lower max_tokens.
        completion = cut_completion(sampled, self._left(wanted))
        text = wanted.format.chat.turn_text(completion.token_ids.tolist())
        said = spoken(text, wanted.format.chat.end_of(wanted.prompt_ids))
        prompt_end, end = self.tree.add_turn(
            wanted.after, wanted.read_keys, completion, text=said, started_at_s=started_at_s
        )
        number = len(self.tree.turns) - 1
        return SampledTurn(number=number, prompt_end=prompt_end, end=end, completion=completion, text=text)


def _retrieved(task: asyncio.Task[Reply]) -> None:
    if not task.cancelled():
        task.exception()  # mark the error as retrieved

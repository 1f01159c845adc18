"""Sandboxes that run no code and give scripted answers, to test tasks and the pool without a provider.

    provider = FakeProvider(respond=lambda code: "42\\n")        every run_code prints 42
    provider.fail_next("create", SandboxQuotaError("full"))      the next creation fails
    provider.hang_next("create")                                 the next creation answers only after `let_go()`

`fail_share` is the share of all calls that fail, in every way in which a provider can fail; `seed` makes the failures
repeatable. The attributes `living`, `created`, `killed` and `calls` record the calls. Every call has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from rayapp.core.errors import (
    SandboxDeadlineError,
    SandboxError,
    SandboxGoneError,
    SandboxProtocolError,
    SandboxQuotaError,
    SandboxRateLimitError,
    SandboxUnavailableError,
)
from rayapp.core.types import CallReport, CallResult, ExecOutcome, ExecResult, SandboxSpec
from rayapp.sandbox.leases import Connection

Respond = Callable[[str], ExecResult | str]
"""Function that returns the result of running code. A string stands for a successful run that printed it."""
Call = Callable[[str, str, Sequence[object]], object]
"""Function of (code, function name, arguments) that returns a call's value. An exception becomes the call's error."""

_REMEMBERED = 1000
"""Maximum number of calls in each record, so that memory does not grow in long tests of the pool."""


class FakeProvider:
    """Provider of fake sandboxes. `leases.RemoteProvider` describes its methods.

    Args:
        name: name of the provider in results and in the pool.
        respond: returns the result of running code; by default code prints nothing.
        call: returns the value of a function call; by default None.
        latency_s: duration of each call.
        fail_share: share of calls that fail, in every way in which a provider can fail.
        seed: chooses the calls that fail.
        max_alive: quota of living sandboxes; 0: no quota.
    """

    def __init__(
        self,
        *,
        name: str = "fake",
        respond: Respond | None = None,
        call: Call | None = None,
        latency_s: float = 0.0,
        fail_share: float = 0.0,
        seed: int = 0,
        max_alive: int = 0,
    ) -> None:
        self._name = name
        self.respond: Respond = respond or (lambda code: "")
        self.call: Call = call or (lambda code, function, args: None)
        self.living: dict[str, dict[str, str]] = {}
        """Id of a living sandbox -> its labels."""
        self.created: list[str] = []
        self.killed: list[str] = []
        """Ids of the last _REMEMBERED sandboxes that were killed."""
        self.calls: Counter[str] = Counter()
        self.extended: dict[str, float] = {}
        """Sandbox id -> time to live of its last extension, in seconds."""
        self.max_alive = max_alive
        self.is_closed = False
        self._latency_s = latency_s
        self._fail_share = fail_share
        self._rng = random.Random(seed)
        self._ids = itertools.count(1)
        self._scripted: defaultdict[str, deque[SandboxError | None]] = defaultdict(deque)
        self._gate = asyncio.Event()

    @property
    def name(self) -> str:
        return self._name

    def fail_next(self, method: str, *errors: SandboxError) -> None:
        """Make the next calls of this method raise these errors, in order, one per call."""
        self._scripted[method].extend(errors)

    def hang_next(self, method: str) -> None:
        """Make the next call of this method wait for `let_go`."""
        self._scripted[method].append(None)

    def let_go(self) -> None:
        """Let all calls that hang continue, and later calls too."""
        self._gate.set()

    def lose(self, sandbox_id: str) -> None:
        """Make a sandbox die, as if its provider had lost it."""
        self.living.pop(sandbox_id, None)

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> FakeSandbox:
        await self.answer("create")
        if self.max_alive and len(self.living) >= self.max_alive:
            raise SandboxQuotaError(f"the fake provider's quota is reached: {self.max_alive} sandboxes are alive")
        sandbox_id = f"{self._name}-{next(self._ids)}"
        self.living[sandbox_id] = dict(labels)
        self.created.append(sandbox_id)
        del self.created[:-_REMEMBERED]
        if self._fails():
            # The sandbox exists, but the caller never gets its id, so a sweep must find it.
            raise SandboxDeadlineError("the answer to the request for a sandbox was lost")
        return FakeSandbox(self, Connection(sandbox_id=sandbox_id))

    def attach(self, connection: Connection, spec: SandboxSpec) -> FakeSandbox:
        return FakeSandbox(self, connection)

    async def list(self, labels: Mapping[str, str], *, timeout_s: float = 30.0) -> AsyncIterator[str]:
        await self.answer("list")
        for sandbox_id, own in tuple(self.living.items()):
            if labels.items() <= own.items():
                yield sandbox_id

    async def kill(self, sandbox_id: str, *, timeout_s: float = 10.0) -> None:
        await self.answer("kill")
        if self.living.pop(sandbox_id, None) is not None:
            self.killed.append(sandbox_id)
            del self.killed[:-_REMEMBERED]

    async def close(self) -> None:
        self.is_closed = True

    async def answer(self, method: str) -> None:
        """Delay a call, and raise its failure. Every call goes through this method.

        Raises:
            SandboxError: `fail_next` or `fail_share` makes this call fail.
        """
        self.calls[method] += 1
        await asyncio.sleep(self._latency_s)
        if self._scripted[method]:
            error = self._scripted[method].popleft()
            if error is not None:
                raise error
            await self._gate.wait()
        elif self._fails():
            error = self._rng.choice(_WAYS_TO_FAIL)()
            raise error

    def _fails(self) -> bool:
        return self._fail_share > 0 and self._rng.random() < self._fail_share


def make_provider(options: Mapping[str, Any]) -> FakeProvider:
    """Make a provider from the options of a plug-in's section (`sandbox.providers[].options`)."""
    return FakeProvider(**options)


_WAYS_TO_FAIL: tuple[Callable[[], SandboxError], ...] = (
    lambda: SandboxUnavailableError("502 bad gateway"),
    lambda: SandboxRateLimitError("429 too many requests", retry_after_s=0.05),
    lambda: SandboxRateLimitError("429 too many requests"),
    lambda: SandboxDeadlineError("no answer"),
    lambda: SandboxProtocolError("half an answer"),
)


class FakeSandbox:
    """A sandbox of `FakeProvider`. `core.protocols.Sandbox` describes its methods."""

    def __init__(self, provider: FakeProvider, connection: Connection) -> None:
        self._provider = provider
        self.connection = connection
        self._files: dict[str, bytes] = {}

    @property
    def id(self) -> str:
        return self.connection.sandbox_id

    @property
    def provider(self) -> str:
        return self._provider.name

    async def run_code(
        self, code: str, *, timeout_s: float, stdin: str = "", stateful: bool = False, max_output_bytes: int = 65536
    ) -> ExecResult:
        await self._answer("run_code", timeout_s)
        answer = self._provider.respond(code)
        return answer if isinstance(answer, ExecResult) else self._result(answer)

    async def call_function(
        self, code: str, function: str, inputs: Sequence[Sequence[object]], *, timeout_s: float
    ) -> CallReport:
        await self._answer("call_function", timeout_s)
        calls = tuple(self._call(code, function, args) for args in inputs)
        return CallReport(exec=self._result(""), calls=calls)

    async def run_command(
        self, argv: Sequence[str], *, timeout_s: float, stdin: str = "", max_output_bytes: int = 65536
    ) -> ExecResult:
        await self._answer("run_command", timeout_s)
        return self._result("")

    async def write_file(self, path: str, data: bytes, *, timeout_s: float = 10.0) -> None:
        await self._answer("write_file", timeout_s)
        self._files[path] = data

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, timeout_s: float = 10.0) -> bytes:
        await self._answer("read_file", timeout_s)
        if path not in self._files:
            raise FileNotFoundError(f"sandbox {self.id}: there is no file {path!r}")
        return self._files[path][:max_bytes]

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        return self.id in self._provider.living

    async def extend(self, ttl_s: float, *, timeout_s: float = 5.0) -> None:
        await self._answer("extend", timeout_s)
        self._provider.extended[self.id] = ttl_s

    async def kill(self, *, timeout_s: float = 10.0) -> None:
        await self._provider.kill(self.id, timeout_s=timeout_s)

    def _call(self, code: str, function: str, args: Sequence[object]) -> CallResult:
        try:
            return CallResult(ok=True, value=self._provider.call(code, function, args))
        except Exception as error:  # boundary: the test's function stands for candidate code
            return CallResult(ok=False, error=f"{type(error).__name__}: {error}")

    async def _answer(self, method: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._provider.answer(method)
        except SandboxError:
            raise
        except TimeoutError:
            raise SandboxDeadlineError(f"sandbox {self.id}: no answer within {timeout_s:g} s") from None
        if self.id not in self._provider.living:
            raise SandboxGoneError(f"sandbox {self.id} is gone")

    def _result(self, stdout: str) -> ExecResult:
        return ExecResult(
            outcome=ExecOutcome.OK, exit_code=0, stdout=stdout, stderr="", duration_s=0.0, isolation=self.provider
        )

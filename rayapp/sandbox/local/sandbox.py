"""One sandbox of the local provider: leases a slot and runs code in fresh confined processes."""

from __future__ import annotations

import asyncio
import errno
import marshal
import math
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rayapp.core.errors import SandboxConfigError, SandboxDeadlineError, SandboxError, SandboxGoneError
from rayapp.core.types import CallReport, ExecResult, SandboxSpec
from rayapp.sandbox.images import Image
from rayapp.sandbox.local.inside import guest
from rayapp.sandbox.local.inside.child import GUEST
from rayapp.sandbox.local.levels.limits import MIB, Limits
from rayapp.sandbox.local.levels.loopback import PORT
from rayapp.sandbox.local.slot import Slot
from rayapp.sandbox.loopback import Loopback
from rayapp.sandbox.verdict import harness
from rayapp.sandbox.verdict.codec import encode_inputs, off_the_loop
from rayapp.sandbox.verdict.results import (
    RawResult,
    call_report,
    code_problem,
    failed_calls,
    failure,
    script_result,
    session_result,
)

_CALLS_OUTPUT_BYTES = 65536


def environment_of(image: Image) -> dict[str, str]:
    return {"HOME": image.home, **dict(image.env)}


def working_folder(image: Image) -> str:
    """Return the image's working folder, or /app: relative paths must not lead to the root folder."""
    return image.workdir if image.workdir != "/" else "/app"


@cache
def _harness_source() -> str:
    return Path(harness.__file__).read_text()


class LocalSandbox:
    """One local sandbox. Its calls run one at a time. `core.protocols.Sandbox` describes them."""

    provider = "local"

    def __init__(
        self,
        sandbox_id: str,
        slot: Slot,
        spec: SandboxSpec,
        on_end: Callable[[LocalSandbox], None],
        image: Image | None = None,
    ) -> None:
        self.id = sandbox_id
        self._image = image
        self.slot = slot  # public: the provider uses it again when the sandbox has ended
        self._spec = spec
        self._on_end = on_end
        self._turn = asyncio.Lock()
        self._is_ended = False
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def isolation(self) -> str:
        return self.slot.level

    @asynccontextmanager
    async def loopback(self) -> AsyncIterator[Loopback]:
        """Open the sandbox's loopback (`rayapp.sandbox.loopback`), if its spec asks for one."""
        # Use a copy of the listener, because the sandbox may end and close its own copy while `accept` waits.
        if (own := await self.slot.own_listener()) is None:
            raise SandboxConfigError(f"sandbox {self.id} has no loopback interface: set loopback=True in its spec")
        with own as listener:

            async def accept() -> socket.socket:
                return (await asyncio.get_running_loop().sock_accept(listener))[0]

            yield Loopback(port=PORT, folder=Path("/tmp"), accept=accept)

    async def run_code(
        self, code: str, *, timeout_s: float, stdin: str = "", stateful: bool = False, max_output_bytes: int = 65536
    ) -> ExecResult:
        """Run code; see `Sandbox.run_code`. If a stateful run is stopped, the session's variables are lost."""
        if (problem := code_problem(code)) is not None:
            return failure(problem, self.isolation)
        answer = await self._run_python(
            "session" if stateful else "script", (code,), timeout_s, max_output_bytes, home=True, stdin=stdin
        )
        read = session_result if stateful else script_result
        return await off_the_loop(len(answer.frames), lambda: read(answer, self.isolation))

    async def call_function(
        self, code: str, function: str, inputs: Sequence[Sequence[object]], *, timeout_s: float
    ) -> CallReport:
        """Call a function; see `Sandbox.call_function`. It sees only its inputs, not the sandbox's files."""
        packed = encode_inputs(inputs)
        if (problem := code_problem(code)) is not None:
            return failed_calls(failure(problem, self.isolation), len(inputs))
        answer = await self._run_python("calls", (code, function, packed), timeout_s, _CALLS_OUTPUT_BYTES)
        return await off_the_loop(len(answer.frames), lambda: call_report(answer, self.isolation, len(inputs)))

    async def run_command(
        self, argv: Sequence[str], *, timeout_s: float, stdin: str = "", max_output_bytes: int = 65536
    ) -> ExecResult:
        """Run a program of the image, or of /usr; see `Sandbox.run_command`. At level ll it starts no others."""
        if not argv or not all(type(part) is str for part in argv):
            raise TypeError(f"argv must be a list of one or more strings, not {argv!r}")
        answer = await self._run("command", tuple(argv), timeout_s, max_output_bytes, home=True, stdin=stdin)
        return script_result(answer, self.isolation)

    async def write_file(self, path: str, data: bytes, *, timeout_s: float = 10.0) -> None:
        """Write a file below the sandbox's folder; with an image anywhere, relative to its working folder. See
        `Sandbox`."""
        self._check_size(len(data))
        answer = await self._run("write", (path, bytes(data)), timeout_s, _CALLS_OUTPUT_BYTES, home=True)
        done = script_result(answer, self.isolation)
        if not done.ok:
            raise OSError(f"sandbox {self.id}: {path!r} can't be written: {done.error}")

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, timeout_s: float = 10.0) -> bytes:
        answer = await self._run("read", (path, max_bytes), timeout_s, max_bytes, home=True)
        done = script_result(answer, self.isolation)
        if done.error.startswith("FileNotFoundError"):
            raise FileNotFoundError(f"sandbox {self.id}: there is no file {path!r}")
        if not done.ok:
            raise OSError(f"sandbox {self.id}: {path!r} can't be read: {done.error}")
        return answer.stdout

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        return not self._is_ended and self.slot.is_alive

    async def extend(self, ttl_s: float, *, timeout_s: float = 5.0) -> None:
        self._check_alive()
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(ttl_s, self._end_now)

    async def kill(self, *, timeout_s: float = 10.0) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if self._expiry is not None:
            self._expiry.cancel()
        try:
            if self._turn.locked():
                self.slot.cancel()
            async with asyncio.timeout(timeout_s), self._turn:
                pass  # the running call has ended, so the slot can be used again
        except TimeoutError:
            self.slot.close()
        finally:
            self.slot.reset()
            self._on_end(self)

    def _end_now(self) -> None:
        """End the sandbox when its time to live is over: its slot and a running call end at once."""
        if not self._is_ended:
            self._is_ended = True
            self.slot.close()
            self._on_end(self)

    def _check_size(self, num_bytes: int) -> None:
        most = self._spec.disk_mib * MIB
        if num_bytes > most:
            raise OSError(errno.ENOSPC, f"sandbox {self.id}: {num_bytes} bytes don't fit on its disk of {most} bytes")

    async def _run_python(
        self,
        kind: str,
        given: tuple[object, ...],
        timeout_s: float,
        max_output_bytes: int,
        *,
        stdin: str = "",
        home: bool = False,
    ) -> RawResult:
        is_session = kind == "session"
        if self._image is None or not self._image.python:
            kind = "script" if is_session else kind
        else:
            given, kind = guest.arguments(self._image.python, _harness_source(), kind, given), GUEST
        return await self._run(kind, given, timeout_s, max_output_bytes, home=home, session=is_session, stdin=stdin)

    async def _run(
        self,
        kind: str,
        given: tuple[object, ...],
        timeout_s: float,
        max_output_bytes: int,
        *,
        stdin: str = "",
        home: bool = False,
        session: bool = False,
    ) -> RawResult:
        image = self._image
        folder = self._spec.workdir or working_folder(image) if image else ""
        job: Any = kind, {**(environment_of(image) if image else {}), **dict(self._spec.env)}, given, folder
        limits = Limits(
            cpu_s=math.ceil(timeout_s) + 1,
            memory_mib=self._spec.memory_mib,
            disk_mib=self._spec.disk_mib,
            max_processes=self._spec.max_processes,
            is_of_image=image is not None,
        )
        async with self._turn:
            self._check_alive()
            try:
                return await self.slot.run(
                    marshal.dumps(job),
                    kind=kind,
                    stdin=stdin.encode("utf-8", "surrogatepass"),
                    limits=limits,
                    timeout_s=timeout_s,
                    max_output_bytes=max_output_bytes,
                    home=home,
                    session=session,
                    image=image.tree if image else "",
                )
            except SandboxDeadlineError:
                raise
            except SandboxError:
                self.slot.close()
                raise

    def _check_alive(self) -> None:
        if self._is_ended or not self.slot.is_alive:
            raise SandboxGoneError(f"sandbox {self.id} has ended; lease another one")

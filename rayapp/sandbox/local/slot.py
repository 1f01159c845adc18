"""The provider's handle of one zygote: starts it, sends it jobs, one at a time, and reads its answers.

Failures of the zygote are SandboxErrors; errors of the code are in the answer. A slot that raised an error can't be
used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from rayapp.core.errors import SandboxDeadlineError, SandboxGoneError, SandboxProtocolError
from rayapp.core.types import StopCause
from rayapp.sandbox.local import wire
from rayapp.sandbox.local.levels.limits import Limits, longest_s
from rayapp.sandbox.local.staging import CODE_PATH, Python, readable_python
from rayapp.sandbox.verdict.harness import HASH_SEED
from rayapp.sandbox.verdict.results import RawResult

GRACE_S = 5.0  # after a job's deadline, which the zygote itself enforces
BOOT_TIMEOUT_S = 60.0
# LD_BIND_NOW, which code does not get: libc's functions are resolved once and not in each child.
_ENVIRONMENT = {"LD_BIND_NOW": "1", **HASH_SEED}
_PROGRAM = (
    "import sys; sys.path.insert(0, {path!r}); from rayapp.sandbox.local.inside.boot import main; main({descriptor})"
)


Packet = tuple[dict[str, object], list[int]]


class BootError(Exception):
    """A zygote can't enter its isolation level; the message names the failed step."""


class Slot:
    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, errors: int) -> None:
        self._process = process
        self._channel = channel
        self._errors = errors
        self.num_jobs = 0
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._pending: asyncio.Future[Packet] | None = None
        self._is_reset = asyncio.Event()
        self._is_reset.set()
        self._loop.add_reader(channel, self._on_readable)
        self.level = ""
        self.uid = -1
        self.listener: socket.socket | None = None  # accepts loopback connections of programs in the sandbox

    @classmethod
    async def start(
        cls,
        level: str,
        *,
        packages: tuple[str, ...] = (),
        paths: tuple[str, ...] = (),
        images: Mapping[str, object] | None = None,
    ) -> Slot:
        """Start a zygote and wait until it is ready; `images`: fields of an `ImageView`.

        Raises BootError if it can't enter this level or import a package, so that the caller can try another level.
        """
        python = await asyncio.to_thread(readable_python, packages, paths)
        slot = cls(*await asyncio.to_thread(_spawn, python))
        try:
            settings: dict[str, object] = {"level": level, "code_path": CODE_PATH, "images": images}
            wire.send(slot._channel, {**settings, "packages": packages, "paths": python.paths})
            header, given = await slot._reply(BOOT_TIMEOUT_S)
        except (EOFError, OSError) as error:
            raise BootError(f"the sandbox's interpreter ended while it started: {slot.close_and_explain()}") from error
        except BaseException:
            slot.close()
            raise
        if "failed" in header:
            slot.close()
            raise BootError(str(header["failed"]))
        slot.level, slot.uid = str(header["ready"]), int(str(header["uid"]))
        for descriptor in given:
            slot.listener = socket.socket(fileno=descriptor)
            slot.listener.setblocking(False)
        return slot

    @property
    def is_alive(self) -> bool:
        return not self._is_closed and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def cancel(self) -> None:
        """Kill the job that runs, if there is one. Its answer then has the cause `killed`."""
        with contextlib.suppress(OSError):
            wire.send(self._channel, {"cancel": self.num_jobs})

    def reset(self) -> None:
        """Delete the files and the session of the sandbox that ended on this slot."""
        self._is_reset.clear()
        with contextlib.suppress(OSError):
            wire.send(self._channel, {"reset": True})

    async def own_listener(self) -> socket.socket | None:
        """Return a copy of the listener. Connections that an earlier sandbox on this slot made are closed first."""
        if not await self._is_reset_in_time():
            self.close()
            raise SandboxDeadlineError(
                f"the sandbox's interpreter did not end an earlier sandbox's processes within {GRACE_S:g} s"
            )
        return self.listener.dup() if self.listener is not None else None

    async def _is_reset_in_time(self) -> bool:
        """Wait until the zygote has deleted the last sandbox's files, or has died; False after GRACE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._is_reset.wait()
        return self._is_reset.is_set()

    def _refuse_waiting(self) -> None:
        """Close connections that were not accepted, of programs that are dead."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                while True:
                    self.listener.accept()[0].close()

    async def run(
        self,
        job: bytes,
        *,
        kind: str,
        limits: Limits,
        timeout_s: float,
        max_output_bytes: int,
        stdin: bytes = b"",
        home: bool = False,
        session: bool = False,
        image: str = "",
    ) -> RawResult:
        """Execute one job, in the sandbox's own folder (`home`) or a fresh one; a session keeps variables between jobs.

        An error means that the zygote died or does not answer: the slot must be closed.
        """
        await self._finish_cancelled()
        self.num_jobs += 1
        header: dict[str, object] = {"id": self.num_jobs, "timeout_s": timeout_s, "max_output_bytes": max_output_bytes}
        header |= {"kind": kind, "limits": limits.as_dict(), "home": home, "session": session, "image": image}
        given = (job, stdin) if stdin else (job,)
        reply, bodies = await self._ask(header, *given, within_s=longest_s(timeout_s) + GRACE_S)
        return _read_answer(reply, bodies, self.num_jobs)

    async def own_processes(self) -> set[int]:
        """Return the ids of the zygote, its template and the children that wait. Every other process of the sandbox's
        user was started by candidate code, or serves a session."""
        await self._finish_cancelled()
        reply, _ = await self._ask({"own_processes": True}, within_s=GRACE_S)
        return {self.pid, *reply["own_processes"]}  # type: ignore[misc]

    async def _finish_cancelled(self) -> None:
        if self._pending is None:
            return
        try:
            async with asyncio.timeout(GRACE_S):
                await asyncio.shield(self._pending)
        except TimeoutError:
            self.close()
            raise SandboxDeadlineError(
                f"the sandbox's interpreter did not end a cancelled execution within {GRACE_S:g} s"
            ) from None
        except (EOFError, OSError) as error:
            raise SandboxGoneError(f"the sandbox's interpreter died: {self.close_and_explain()}") from error

    async def _ask(self, header: dict[str, object], *bodies: bytes, within_s: float) -> Packet:
        try:
            self._send(header, *bodies)
            return await self._reply(within_s)
        except (EOFError, OSError) as error:
            raise SandboxGoneError(f"the sandbox's interpreter died: {self.close_and_explain()}") from error

    def _send(self, header: dict[str, object], *bodies: bytes) -> None:
        files: list[int] = []
        try:
            files += map(wire.memory_file, bodies)
            wire.send(self._channel, header, *files)
        finally:
            for file in files:
                os.close(file)

    async def _reply(self, timeout_s: float) -> Packet:
        pending: asyncio.Future[Packet] = self._loop.create_future()
        self._pending = pending
        too_late = self._loop.call_later(timeout_s, self._give_up, timeout_s)
        try:
            return await pending
        except asyncio.CancelledError:
            self._abandon(pending)
            raise
        finally:
            too_late.cancel()

    def _abandon(self, pending: asyncio.Future[Packet]) -> None:
        if self._pending is pending:
            self.cancel()
            self._pending = self._loop.create_future()
            self._pending.add_done_callback(_discard)
        elif not pending.cancelled():
            _discard(pending)

    def _on_readable(self) -> None:
        try:
            packet = wire.receive(self._channel)
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            self._loop.remove_reader(self._channel)
            self._is_reset.set()
            self._settle(error)
        else:
            if "reset" in packet[0]:
                self._refuse_waiting()
                self._is_reset.set()
            else:
                self._settle(packet)

    def _settle(self, outcome: Packet | BaseException) -> None:
        pending, self._pending = self._pending, None
        if pending is None or pending.done():
            if isinstance(outcome, tuple):
                _close_all(outcome[1])
        elif isinstance(outcome, BaseException):
            pending.set_exception(outcome)
        else:
            pending.set_result(outcome)

    def _give_up(self, timeout_s: float) -> None:
        self._settle(SandboxDeadlineError(f"the sandbox's interpreter did not answer within {timeout_s:g} s"))
        self.close()

    def close_and_explain(self) -> str:
        """Close the slot. Return the zygote's exit status and the end of its error output."""
        self.close()
        said = wire.read_memory_file(self._errors)[-2000:].decode(errors="replace").strip() if self._errors >= 0 else ""
        return f"exit status {self._process.returncode}{', ' + said if said else ''}"

    async def finish(self) -> None:
        """Close the slot when the zygote has deleted the last sandbox's files, which at level ll are in the machine's
        /tmp."""
        await self._is_reset_in_time()
        self.close()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._channel)
        self._settle(EOFError("closed"))
        self._channel.close()
        if self.listener is not None:
            self.listener.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __del__(self) -> None:
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1


def _spawn(python: Python) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Return the process, this process's end of the socket (all it inherits is the other), and its error output."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    errors = os.memfd_create("zygote-stderr", os.MFD_CLOEXEC)
    with theirs:
        ours.setblocking(False)
        program = _PROGRAM.format(path=CODE_PATH, descriptor=theirs.fileno())
        # -s, -P and -S are used and not -I, which would ignore the hash seed, the environment's only variable for
        # Python. -X utf8 is used because without LANG the locale would be C. -B is used only if this process has it:
        # without -B, a zygote caches the bytecode of modules that only zygotes import. Once `boot` runs, the zygote
        # writes no files.
        keeps_nothing = ["-B"] if sys.dont_write_bytecode else []
        argv = [python.executable, "-s", "-P", "-S", *keeps_nothing, "-X", "utf8", "-c", program]
        try:
            process = subprocess.Popen(
                argv,
                env={**_ENVIRONMENT, **python.environment},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(errors)
            raise
    return process, ours, errors


def _discard(abandoned: asyncio.Future[Packet]) -> None:
    if abandoned.exception() is None:
        _close_all(abandoned.result()[1])


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read_answer(reply: Mapping[str, object], bodies: list[int], number: int) -> RawResult:
    try:
        if not bodies or reply.get("id") != number:
            raise SandboxProtocolError(
                f"the sandbox's interpreter gave no valid answer to job {number}: it answered job {reply.get('id')} "
                f"with {len(bodies)} files"
            )
        sizes, starts, stopped = reply["sizes"], reply["starts"], reply["stopped"]
        assert isinstance(sizes, list)
        assert isinstance(starts, list)
        parts = zip(sizes, starts, strict=True)
        out, err, frames = (os.pread(bodies[0], size, start) if size else b"" for size, start in parts)
    finally:
        _close_all(bodies)
    return RawResult(
        exit_code=int(str(reply["exit_code"])),
        stopped=None if stopped is None else StopCause(str(stopped)),
        stdout=out,
        stderr=err,
        frames=frames,
        split=wire.split_frames,
        duration_s=float(str(reply["duration_s"])),
        problem=str(reply["problem"]),
    )

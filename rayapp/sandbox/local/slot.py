"""One zygote seen from outside: starts it, hands it jobs, reads answers, replaces nothing. Called by `provider.py`.

Asyncio, one job at a time. Whatever goes wrong with the zygote itself is a SandboxError; what the code did is in the
answer. A slot that raised is finished: close it and start another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rayapp.errors import SandboxDeadlineError, SandboxGoneError, SandboxProtocolError
from rayapp.sandbox.local import wire
from rayapp.sandbox.local.limits import Limits

GRACE_S = 5.0
"""The zygote enforces the deadline of a job; past this much more it is not answering and is killed."""
BOOT_TIMEOUT_S = 60.0
_CODE_PATH = str(Path(__file__).resolve().parents[3])
_PROGRAM = "import sys; sys.path.insert(0, {path!r}); from rayapp.sandbox.local.boot import main; main({descriptor})"


class BootError(Exception):
    """The zygote could not enter its level; the text names the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one execution left behind."""

    wait_status: int
    stopped: str | None
    stdout: bytes
    stderr: bytes
    frames: tuple[bytes, ...]
    duration_s: float
    is_resumed: bool = False
    """Ran in a process that had run candidate code before: even its first frame may be the candidate's."""


class Slot:
    """A running zygote."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, errors: int) -> None:
        self._process = process
        self._channel = channel
        self._errors = errors
        self._num_jobs = 0
        self._is_closed = False
        self._readable: asyncio.Future[None] | None = None
        self.level = ""
        self.uid = -1

    @classmethod
    async def start(cls, level: str, *, packages: tuple[str, ...] = (), paths: tuple[str, ...] = ()) -> Slot:
        """A zygote that is ready.

        Raises:
            BootError: it can't enter this level on this node, or can't import a package.
        """
        slot = await asyncio.to_thread(_spawn)
        try:
            settings: dict[str, object] = {"level": level, "code_path": _CODE_PATH}
            wire.send(slot._channel, {**settings, "packages": packages, "paths": paths})
            header, _ = await asyncio.wait_for(slot._receive(), BOOT_TIMEOUT_S)
        except (EOFError, OSError) as error:
            raise BootError(f"the zygote ended while it started: {slot.close_and_explain()}") from error
        except BaseException:
            slot.close()
            raise
        if "failed" in header:
            slot.close()
            raise BootError(str(header["failed"]))
        slot.level, slot.uid = str(header["ready"]), int(str(header["uid"]))
        return slot

    @property
    def is_alive(self) -> bool:
        return not self._is_closed and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_jobs(self) -> int:
        """Executions so far."""
        return self._num_jobs

    def cancel(self) -> None:
        """Kill what is running, if anything; its answer then says `killed`."""
        with contextlib.suppress(OSError):
            wire.send(self._channel, {"cancel": self._num_jobs})

    def reset(self) -> None:
        """The sandbox on this slot has ended: its files and its session are forgotten."""
        with contextlib.suppress(OSError):
            wire.send(self._channel, {"reset": True})

    async def run(
        self, job: bytes, *, limits: Limits, timeout_s: float, max_output_bytes: int, home: bool, session: bool = False
    ) -> Answer:
        """Execute one job.

        Args:
            home: in the sandbox's own folder, which lasts until `reset`; else in a fresh one.
            session: in the sandbox's long-lived process, where names stay.

        Raises:
            SandboxGoneError: the zygote died.
            SandboxDeadlineError: it does not answer.
            SandboxProtocolError: it answered nonsense.
        """
        self._num_jobs += 1
        header: dict[str, object] = {"id": self._num_jobs, "timeout_s": timeout_s, "max_output_bytes": max_output_bytes}
        header |= {"limits": asdict(limits), "home": home, "session": session}
        try:
            with _memory_file(job) as body:
                wire.send(self._channel, header, body)
            reply, answer_fd = await self._answer(timeout_s + GRACE_S)
        except (EOFError, OSError) as error:
            raise SandboxGoneError(f"the sandbox's interpreter died: {self.close_and_explain()}") from error
        return _read_answer(reply, answer_fd, self._num_jobs)

    async def _answer(self, timeout_s: float) -> tuple[dict[str, object], int | None]:
        waiting = asyncio.ensure_future(self._receive())
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), timeout_s)
        except TimeoutError:
            self.close()
            raise SandboxDeadlineError(f"the sandbox's interpreter did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._abandon(waiting))
            raise
        finally:
            waiting.cancel()

    async def _abandon(self, waiting: asyncio.Future[tuple[dict[str, object], int | None]]) -> None:
        """Kill the running execution and take its answer off the channel, so that the slot can be used again."""
        try:
            wire.send(self._channel, {"cancel": self._num_jobs})
            _, answer_fd = await asyncio.wait_for(waiting, GRACE_S)
        except (OSError, EOFError, TimeoutError):
            self.close()
        else:
            if answer_fd is not None:
                os.close(answer_fd)

    async def _receive(self) -> tuple[dict[str, object], int | None]:
        loop = asyncio.get_running_loop()
        self._readable = loop.create_future()
        loop.add_reader(self._channel, self._wake)
        try:
            await self._readable
        finally:
            if not self._is_closed:
                loop.remove_reader(self._channel)
        if self._is_closed:
            raise EOFError("closed")
        return wire.receive(self._channel)

    def _wake(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)

    def close_and_explain(self) -> str:
        """Close, and tell what the zygote said last."""
        self.close()
        said = wire.read_memory_file(self._errors)[-2000:].decode(errors="replace").strip() if self._errors >= 0 else ""
        return f"exit status {self._process.returncode}{', ' + said if said else ''}"

    def close(self) -> None:
        """End the zygote and all it started. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._readable is not None:
            # Whoever waits for an answer learns that there will be none; the event loop would not tell.
            self._readable.get_loop().remove_reader(self._channel)
            self._wake()
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __del__(self) -> None:
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1


def _spawn() -> Slot:
    """Start the process; the socket is all it inherits."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    errors = os.memfd_create("zygote-stderr", os.MFD_CLOEXEC)
    with theirs:
        ours.setblocking(False)
        program = _PROGRAM.format(path=_CODE_PATH, descriptor=theirs.fileno())
        # -B: a zygote writes nowhere. -X utf8: the environment is empty, so the locale would be C.
        argv = [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", program]
        try:
            process = subprocess.Popen(
                argv,
                env={},
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
    return Slot(process, ours, errors)


@contextlib.contextmanager
def _memory_file(data: bytes) -> Iterator[int]:
    descriptor = wire.memory_file(data)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_answer(reply: Mapping[str, object], answer_fd: int | None, number: int) -> Answer:
    if answer_fd is None or reply.get("id") != number:
        raise SandboxProtocolError(f"answer to job {reply.get('id')} came for job {number}")
    try:
        sizes, starts, stopped = reply["sizes"], reply["starts"], reply["stopped"]
        assert isinstance(sizes, list)
        assert isinstance(starts, list)
        out, err, results = (os.pread(answer_fd, size, start) for size, start in zip(sizes, starts, strict=True))
    finally:
        os.close(answer_fd)
    return Answer(
        wait_status=int(str(reply["wait_status"])),
        stopped=None if stopped is None else str(stopped),
        stdout=out,
        stderr=err,
        frames=tuple(wire.split_frames(results)),
        duration_s=float(str(reply["duration_s"])),
        is_resumed=reply["is_resumed"] is True,
    )

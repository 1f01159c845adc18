"""The process from which executions are forked.

After each fork the kernel copies every page that either process writes to, which is the main cost of an execution. So
the template only forks, kills and reaps; the zygote watches and communicates, by the handle `Template`.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from rayapp.sandbox.local.inside import child
from rayapp.sandbox.local.inside.child import DESCRIPTORS
from rayapp.sandbox.local.inside.execution import Child
from rayapp.sandbox.local.levels import kernel
from rayapp.sandbox.local.levels.level import Level, Place, adopt_orphans
from rayapp.sandbox.verdict.harness import describe

_MAX_REQUEST_BYTES = 64  # a small buffer changes few pages of the heap
_MAX_REPLY_BYTES = 4096
_NUMBERS = struct.pack(f"={len(DESCRIPTORS)}i", *DESCRIPTORS)
_SPACE = socket.CMSG_SPACE(len(_NUMBERS))
# These are plain integers: members of an enumeration are objects, and each child would copy their pages.
_CLOSE_ON_EXEC, _SIGKILL = int(socket.MSG_CMSG_CLOEXEC), int(signal.SIGKILL)

# Requests and replies, in a form that the template reads and writes with the least work.
_RESET, _IS_UNCHANGED = b"reset", b"is unchanged"
_END = struct.Struct("=ii")
_PLACE = struct.Struct("=??i")
_NUMBER = struct.Struct("=i")
_ENDED = struct.Struct("=i?")
_PROBLEM_BYTES = 8  # Every other reply is shorter, so the length tells them apart.


class Template:
    """The zygote's handle of the template process. Its methods raise OSError if the template has failed."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._asked: deque[Child] = deque()
        self.seen_as = str(self._number())  # its process id in the /proc that `Usage` reads

    @classmethod
    def start(cls, level: Level, outside: socket.socket) -> Template:
        """Fork the template process, which ends when this process ends. It closes `outside`, the provider's channel, so
        that the provider gets an end of file when the zygote dies."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            outside.close()
            _live(level, theirs)
        theirs.close()
        return cls(ours)

    def fork(self, child: Child) -> None:
        """Request the fork of a child. Its process id is known after `settle`."""
        place = child.place
        self._ask(_PLACE.pack(place.home, place.writable, place.disk_mib) + place.image.encode(), child.ends.given)
        self._asked.append(child)

    def settle(self) -> None:
        while self._asked:
            self._asked[0].pid = self._number()
            self._asked.popleft()

    def end(self, pid: int = 0, *, session: int = 0) -> tuple[int, bool]:
        """Kill and reap the child `pid`, and remove what its execution left (`Level.sweep`), except the process
        `session`.

        Returns the exit status (0 without a pid), and True if children forked earlier can still be used.
        """
        self.settle()
        self._ask(_END.pack(pid, session))
        status, is_as_new = _ENDED.unpack(self._reply(_ENDED.size))
        return status, is_as_new

    def reset(self) -> None:
        """Remove the folder of the sandbox that was released."""
        self.settle()
        self._ask(_RESET)
        self._number()

    def is_unchanged(self) -> bool:
        """True if the sandbox's folder is as new."""
        self.settle()
        self._ask(_IS_UNCHANGED)
        return bool(self._number())

    def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._channel, [request], descriptors)

    def _number(self) -> int:
        number: int = _NUMBER.unpack(self._reply(_NUMBER.size))[0]
        return number

    def _reply(self, size: int) -> bytes:
        packet = self._channel.recv(_MAX_REPLY_BYTES)
        if len(packet) != size:
            raise OSError(packet.decode() or "the process that forks the sandbox's programs died")
        return packet


def _live(level: Level, channel: socket.socket) -> NoReturn:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    adopt_orphans()
    # The control sockets of all children have the same number, so one object serves all children.
    os.dup2(channel.fileno(), DESCRIPTORS[-1])
    control = socket.socket(fileno=DESCRIPTORS[-1])
    try:
        child.rehearse(control)
        os.closerange(DESCRIPTORS[0], DESCRIPTORS[-1] + 1)
        gc.collect()
        gc.freeze()
        channel.send(_NUMBER.pack(int(level.usage.id_of_this_process() or 0)))
        _serve(level, channel, control)
    except Exception as error:  # boundary: reported to the zygote, which then ends, too
        channel.send(describe(error).encode("utf-8", "replace")[:_MAX_REPLY_BYTES].ljust(_PROBLEM_BYTES))
    finally:
        os._exit(1)


def _serve(level: Level, channel: socket.socket, control: socket.socket) -> None:
    # Few and short calls, because they change few pages.
    receive, send, run = channel.recvmsg, channel.send, child.run
    place_of = functools.cache(_place_of)
    while True:
        request, received, _, _ = receive(_MAX_REQUEST_BYTES, _SPACE, _CLOSE_ON_EXEC)
        if received:
            if received[0][2] != _NUMBERS:
                raise OSError("the file descriptors for a child process did not get their reserved numbers")
            place = place_of(request)
            level.prepare(place)
            pid = level.fork()
            if pid == 0:
                run(level, place, control)
            os.closerange(DESCRIPTORS[0], DESCRIPTORS[-1] + 1)
            send(_NUMBER.pack(pid))
        elif not request:
            return
        elif request == _RESET:
            level.reset()
            send(_NUMBER.pack(0))
        elif request == _IS_UNCHANGED:
            send(_NUMBER.pack(level.is_unchanged()))
        else:
            pid, session = _END.unpack(request)
            status = _kill(pid) if pid else 0
            send(_ENDED.pack(status, level.sweep(session)))


def _place_of(packed: bytes) -> Place:
    home, writable, disk_mib = _PLACE.unpack_from(packed)
    return Place(home=home, writable=writable, disk_mib=disk_mib, image=packed[_PLACE.size :].decode())


def _kill(pid: int) -> int:
    os.kill(pid, _SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

"""The process that executions are forked from. It does nothing else, so that little of its memory changes in between.

    zygote --request, descriptors--> template --fork--> child
           <-process id or status---          --kill, wait-->

After each fork every page that either side writes to is copied, and that is what an execution costs: so the zygote,
which talks and watches, is a process of its own. The template never sees a job, a token or an output. It forks the next
child only when nothing of the one before is alive. `Template` is the zygote's handle.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import struct
from collections.abc import Sequence
from typing import NoReturn

from rayapp.sandbox.harness import describe
from rayapp.sandbox.local import child, kernel
from rayapp.sandbox.local.child import DESCRIPTORS
from rayapp.sandbox.local.level import Level, Place, adopt_orphans

_MAX_BYTES = 4096
_NUMBERS = struct.pack(f"={len(DESCRIPTORS)}i", *DESCRIPTORS)
_SPACE = socket.CMSG_SPACE(len(_NUMBERS))

# Requests and replies, in the form that costs the template least to read and write.
_RESET = b"reset"
_END = struct.Struct("=ii")
_PLACE = struct.Struct("=??i")
_FORK = struct.Struct("=ii??i")
_NUMBER = struct.Struct("=i")


class Template:
    """Requests are answered in order. Its failure is the zygote's: any method raises OSError then."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._num_awaited = 0
        self.seen_as = str(self._reply())
        """Its id in the /proc that `Usage` reads."""

    @classmethod
    def start(cls, level: Level, outside: socket.socket) -> Template:
        """Fork it. It ends with this process.

        Args:
            outside: the provider's channel. Only the zygote may hold it open: its end tells that the zygote is dead.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            outside.close()
            _live(level, theirs)
        theirs.close()
        return cls(ours)

    def fork(self, place: Place, descriptors: Sequence[int], *, ended: int = 0, session: int = 0) -> None:
        """Ask for a child with these descriptors as its DESCRIPTORS; `forked` has its id. First what `end` does."""
        self._ask(_FORK.pack(ended, session, place.home, place.writable, place.disk_mib), descriptors)
        self._num_awaited += 1

    def forked(self) -> int:
        """Process id of the child asked for last."""
        pid = 0
        while self._num_awaited:
            self._num_awaited -= 1
            pid = self._reply()
        return pid

    def end(self, pid: int = 0, *, session: int = 0) -> int:
        """Kill this child, reap it and sweep; `session` is the child that goes on, if one does.

        Returns:
            how it ended, as from `os.waitstatus_to_exitcode`; 0 without a pid.
        """
        assert self._num_awaited == 0
        self._ask(_END.pack(pid, session))
        return self._reply()

    def reset(self) -> None:
        """The sandbox was given back: its own folder is gone."""
        assert self._num_awaited == 0
        self._ask(_RESET)
        self._reply()

    def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._channel, [request], descriptors)

    def _reply(self) -> int:
        packet = self._channel.recv(_MAX_BYTES)
        if len(packet) != _NUMBER.size:
            raise OSError(packet.decode() or "the template of this zygote died")
        number: int = _NUMBER.unpack(packet)[0]
        return number


def _live(level: Level, channel: socket.socket) -> NoReturn:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    adopt_orphans()
    # The control socket of every child has the same number, so this one object will do.
    os.dup2(channel.fileno(), DESCRIPTORS[-1])
    control = socket.socket(fileno=DESCRIPTORS[-1])
    try:
        child.rehearse(control)
        os.closerange(DESCRIPTORS[0], DESCRIPTORS[-1] + 1)
        gc.collect()
        gc.freeze()
        channel.send(_NUMBER.pack(int(level.usage.id_of_this_process() or 0)))
        _serve(level, channel, control)
    except Exception as error:  # boundary: told to the zygote, which ends with it
        channel.send(describe(error).encode("utf-8", "replace")[:_MAX_BYTES].ljust(_NUMBER.size + 1))
    finally:
        os._exit(1)


def _serve(level: Level, channel: socket.socket, control: socket.socket) -> None:
    """Until the zygote is gone. Few calls, and all of them short: see the top of this file."""
    receive, send, number = channel.recvmsg, channel.send, _NUMBER.pack
    place_of = functools.cache(_place_of)
    while True:
        request, received, _, _ = receive(_MAX_BYTES, _SPACE, socket.MSG_CMSG_CLOEXEC)
        if not request:
            return
        if received and received[0][2] != _NUMBERS:
            raise OSError("descriptors for a child did not get the numbers that are kept free for them")
        if request == _RESET:
            level.reset()
            send(number(0))
            continue
        ended, session = _END.unpack_from(request)
        reply = _end(level, ended, session)
        if len(request) == _FORK.size:
            place = place_of(request[_END.size :])
            level.prepare(place)
            reply = level.fork()
            if reply == 0:
                child.run(level, place, control)
            os.closerange(DESCRIPTORS[0], DESCRIPTORS[-1] + 1)
        send(number(reply))


def _place_of(packed: bytes) -> Place:
    home, writable, disk_mib = _PLACE.unpack(packed)
    return Place(home=home, writable=writable, disk_mib=disk_mib)


def _end(level: Level, pid: int, session: int) -> int:
    status = 0
    if pid:
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    level.sweep(session)
    return status

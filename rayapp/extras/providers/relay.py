"""The loopback of a remote sandbox: a relay program in the sandbox carries connections over its stdin and stdout.

    program in the sandbox -- TCP --> relay_program.py -- lines --> hear() -- a pair of sockets --> Loopback.accept()

No port of the sandbox is opened, and the sandbox needs no network. Hostile code can forge lines, but gains nothing:
forged lines only reach the service behind the loopback, to which the code may connect in any case.
"""

from __future__ import annotations

import asyncio
import json
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

from rayapp.core.errors import SandboxDeadlineError, SandboxProtocolError, one_error
from rayapp.extras.providers import relay_program
from rayapp.extras.providers.relay_program import MOST_CONNECTIONS, PIECE_BYTES, line_of, parts_of
from rayapp.sandbox.loopback import Loopback
from rayapp.sandbox.verdict.program import new_nonce

_SOURCE = Path(relay_program.__file__).read_text()
# Largest number of bytes, over all connections, that the service behind the loopback has not read yet.
_MOST_UNREAD_BYTES = 64 << 20
Hear = Callable[[str], Awaitable[None]]
Say = Callable[[str], Awaitable[None]]


class Converse(Protocol):
    """Method of a channel that runs a program with the sandbox's python3, while other calls run, until the program ends
    or the call is cancelled.

    Args:
        hear: called with the program's output, piece by piece.
        started: called with the function that writes to its standard input.
    """

    async def __call__(self, program: str, hear: Hear, started: Callable[[Say], None]) -> None: ...


@asynccontextmanager
async def relayed(converse: Converse, *, timeout_s: float) -> AsyncIterator[Loopback]:
    """Run a relay for the length of a block, and yield the loopback. If the relay fails, the block is cancelled.

    Args:
        timeout_s: longest wait until the relay listens.
    Raises SandboxError: the relay did not start, or has ended.
    """
    with one_error():
        async with asyncio.TaskGroup() as group:
            relay = _Relay(group)
            running = group.create_task(relay.run(converse))
            try:
                async with asyncio.timeout(timeout_s):
                    loopback = await relay.ready
            except TimeoutError:
                raise SandboxDeadlineError(
                    f"agent.external.inside: the relay in the sandbox did not listen within {timeout_s:g} s"
                ) from None
            yield loopback
            running.cancel()
            relay.close()


class _Relay:
    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.ready: asyncio.Future[Loopback] = asyncio.get_running_loop().create_future()
        self._pumps = set[asyncio.Task[None]]()
        self._group = group
        self._mark = new_nonce()
        self._rest = ""
        self._say: Say | None = None
        self._saying = asyncio.Lock()  # lines of different connections must not be interleaved
        self._accepted = asyncio.Queue[socket.socket]()
        self._writers = dict[int, asyncio.StreamWriter]()
        self._seen = set[int]()

    async def run(self, converse: Converse) -> None:
        await converse(f"{_SOURCE}\nasyncio.run(main({self._mark!r}))\n", self._hear, self._started)
        raise SandboxProtocolError("agent.external.inside: the relay in the sandbox has ended")

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        while not self._accepted.empty():
            self._accepted.get_nowait().close()

    def _started(self, say: Say) -> None:
        self._say = say

    async def _hear(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        if len(self._rest) > 4 * PIECE_BYTES:
            raise SandboxProtocolError(
                "agent.external.inside: the relay in the sandbox wrote a line of more than "
                f"{4 * PIECE_BYTES} characters"
            )
        for line in lines:
            mark, _, rest = line.partition(" ")
            if mark == self._mark:
                try:
                    await self._take(*parts_of(rest))
                except (ValueError, KeyError, TypeError, zlib.error) as error:
                    raise SandboxProtocolError(
                        f"agent.external.inside: the relay in the sandbox wrote a malformed line: {error}"
                    ) from None

    async def _take(self, number: int, data: bytes) -> None:
        if number == 0:
            self._listens(json.loads(data))
        elif number > 0 and number not in self._seen:
            await self._open(number)
        if (writer := self._writers.get(number)) is None:
            return
        if data:
            writer.write(data)
            self._check_unread()
        else:
            writer.close()

    def _check_unread(self) -> None:
        """Limit the unread bytes in memory: waiting until they are read would stop all connections."""
        if sum(writer.transport.get_write_buffer_size() for writer in self._writers.values()) > _MOST_UNREAD_BYTES:
            raise SandboxProtocolError(
                "agent.external.inside: the relay in the sandbox sends faster than rayapp reads: more than "
                f"{_MOST_UNREAD_BYTES} bytes, the limit, are waiting to be read"
            )

    def _listens(self, told: dict[str, object]) -> None:
        if not self.ready.done():
            port, folder = int(str(told["port"])), Path(str(told["folder"]))
            self.ready.set_result(Loopback(port=port, folder=folder, accept=self._accepted.get))

    async def _open(self, number: int) -> None:
        self._seen.add(number)
        if len(self._writers) >= MOST_CONNECTIONS:
            raise SandboxProtocolError(
                f"agent.external.inside: the relay in the sandbox holds more than {MOST_CONNECTIONS} connections open, "
                "although it should let others wait: code in the sandbox has changed it"
            )
        own, other = socket.socketpair()
        other.setblocking(False)
        reader, self._writers[number] = await asyncio.open_connection(sock=own)
        self._accepted.put_nowait(other)
        pump = self._group.create_task(self._pump(number, reader))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def _pump(self, number: int, reader: asyncio.StreamReader) -> None:
        try:
            with suppress(ConnectionError):
                while data := await reader.read(PIECE_BYTES):
                    await self._send(number, data)
        finally:
            self._writers.pop(number).close()
        # after `pop`, because the program in the sandbox may then open another connection
        await self._send(number, b"")

    async def _send(self, number: int, data: bytes) -> None:
        assert self._say is not None, "there is no output before the program has started"
        async with self._saying:
            await self._say(line_of(self._mark, number, data).decode())

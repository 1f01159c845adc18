"""Program that runs inside a remote sandbox: it listens on the sandbox's loopback and carries connections over stdin
and stdout.

    program <-- TCP --> relay_program.py <-- lines on stdin and stdout --> relay.py

A line is `MARK NUMBER DATA`: the number of a connection, from 1 on, and a piece of its bytes, compressed by zlib, in
base64. A line without data ends the connection. The line with number 0 gives the port and a folder that only the relay
uses. `relay.py` sends this file's source, so the program uses only Python 3.9's standard library.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import tempfile
import zlib

PIECE_BYTES = 32768  # Bytes of a connection in one line: some servers drop lines of 64 KiB and more.
MOST_CONNECTIONS = 256  # Further connections wait.

Carried = tuple[asyncio.StreamWriter, asyncio.Event]  # Connection, and an event that is set when relay.py has ended it.


def line_of(mark: str, number: int, data: bytes) -> bytes:
    return f"{mark} {number} {base64.b64encode(zlib.compress(data, 1)).decode() if data else ''}\n".encode()


def parts_of(line: str) -> tuple[int, bytes]:
    """Parse a line without its mark. Raises ValueError or zlib.error."""
    number, _, packed = line.strip().partition(" ")
    data = base64.b64decode(packed, validate=True)
    return int(number), zlib.decompressobj().decompress(data, PIECE_BYTES) if data else b""


async def main(mark: str) -> None:
    carried: dict[int, Carried] = {}
    numbers, room = itertools.count(1), asyncio.Semaphore(MOST_CONNECTIONS)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with room:
            number, is_ended = next(numbers), asyncio.Event()
            carried[number] = writer, is_ended
            try:
                while data := await reader.read(PIECE_BYTES):
                    _say(line_of(mark, number, data))
            except OSError:
                pass
            _say(line_of(mark, number, b""))
            await is_ended.wait()  # relay.py counts the connection as open until its own end is closed
            del carried[number]

    server = await asyncio.start_server(carry, "127.0.0.1", 0, backlog=MOST_CONNECTIONS)
    home = os.environ.get("HOME")
    folder = tempfile.mkdtemp(prefix="agent-", dir=home if home and os.access(home, os.W_OK) else None)
    told = {"port": server.sockets[0].getsockname()[1], "folder": folder}
    _say(line_of(mark, 0, json.dumps(told).encode()))
    await _hear(mark, carried)


def _say(line: bytes) -> None:
    while line:
        line = line[os.write(1, line) :]


async def _hear(mark: str, carried: dict[int, Carried]) -> None:
    lines = asyncio.StreamReader(limit=4 * PIECE_BYTES)
    stdin = os.fdopen(0, "rb", 0, closefd=False)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), stdin)
    while line := await lines.readline():
        said, _, rest = line.decode().partition(" ")
        number, data = parts_of(rest) if said == mark else (0, b"")
        if number not in carried:
            continue
        writer, is_ended = carried[number]
        if data:
            writer.write(data)
        else:
            writer.close()
            is_ended.set()

"""The relay of a remote sandbox with hostile or broken lines."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Sequence

import pytest

from rayapp.core.errors import SandboxDeadlineError, SandboxGoneError, SandboxProtocolError
from rayapp.extras.providers.relay import Converse, Hear, Say, relayed
from rayapp.extras.providers.relay_program import MOST_CONNECTIONS, line_of
from rayapp.sandbox.loopback import Accept

LISTENS = json.dumps({"port": 4711, "folder": "/home/user/agent-x"}).encode()


def says(*lines: tuple[int, bytes] | str) -> Converse:
    """A sandbox whose relay writes these lines, well-formed or not, and continues."""

    async def converse(program: str, hear: Hear, started: Callable[[Say], None]) -> None:
        mark = program.rpartition("main('")[2].partition("'")[0]

        async def say(text: str) -> None:
            pass

        started(say)
        for line in lines:
            await hear(line.replace("MARK", mark) if isinstance(line, str) else line_of(mark, *line).decode())
        await asyncio.sleep(60)

    return converse


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["MARK one AAAA\n"], "wrote a malformed line"),
        (["MARK 1 AAAA\n"], "wrote a malformed line"),
        (["MARK 1 !\n"], "wrote a malformed line"),
        (["MARK 0\n"], "wrote a malformed line"),
        ([(0, b'{"port": "x"}')], "wrote a malformed line"),
        (["x" * 1_000_000], "wrote a line of more than"),
        ([(number, b"GET /") for number in range(1, MOST_CONNECTIONS + 2)], "holds more than"),
    ],
)
async def test_nonsense_of_a_relay_ends_the_block_at_once(
    lines: Sequence[tuple[int, bytes] | str], problem: str
) -> None:
    with pytest.raises(SandboxProtocolError, match=problem):
        async with relayed(says(*lines), timeout_s=5.0):
            await asyncio.sleep(60)


async def test_what_others_print_and_late_pieces_of_what_has_ended_are_no_lines_of_it() -> None:
    lines = ["Welcome!\n", (0, LISTENS), (1, b"GET"), "MARK-2 1 AAAA\n", (1, b""), (1, b"late"), (-7, b"x")]
    async with relayed(says(*lines), timeout_s=5.0) as loopback:
        read, one = asyncio.get_running_loop().sock_recv, await loopback.accept()
        assert (loopback.port, str(loopback.folder)) == (4711, "/home/user/agent-x")
        assert [await read(one, 99), await read(one, 99)] == [b"GET", b""]
        one.close()


async def test_a_way_that_breaks_off_ends_the_block_and_a_relay_that_never_listens_is_late() -> None:
    async def breaks(program: str, hear: Hear, started: Callable[[Say], None]) -> None:
        raise SandboxGoneError("it is gone")

    with pytest.raises(SandboxGoneError, match="it is gone"):
        async with relayed(breaks, timeout_s=5.0):
            await asyncio.sleep(60)
    with pytest.raises(SandboxDeadlineError, match="the relay in the sandbox did not listen within"):
        async with relayed(says(), timeout_s=0.01):
            pass
    with pytest.raises(KeyError, match="the block's own"):
        async with relayed(says((0, LISTENS)), timeout_s=5.0):
            raise KeyError("the block's own")


async def _run_here(program: str, hear: Hear, started: Callable[[Say], None]) -> None:
    """Run the relay as a process of this machine."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=PIPE, stdout=PIPE)
    to_relay = process.stdin

    async def say(text: str) -> None:
        to_relay.write(text.encode())
        await to_relay.drain()

    started(say)
    try:
        while heard := await process.stdout.read(1 << 16):
            await hear(heard.decode())
    finally:
        process.kill()
        await process.wait()


async def test_a_connection_that_speaks_before_an_earlier_one_loses_neither() -> None:
    async with relayed(says((0, LISTENS), (2, b"second"), (1, b"first")), timeout_s=5.0) as loopback:
        for expected in (b"second", b"first"):
            async with asyncio.timeout(60):
                connection = await loopback.accept()
                assert await asyncio.get_running_loop().sock_recv(connection, 99) == expected
            connection.close()


@pytest.mark.parametrize(("num_connections", "num_held"), [(200, 200), (MOST_CONNECTIONS + 60, 1)])
async def test_a_relay_holds_200_connections_and_has_more_wait(num_connections: int, num_held: int) -> None:
    """Nothing is answered before `num_held` requests are there."""
    heard, are_held = 0, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        request = await reader.readline()
        heard += 1
        if heard >= num_held:
            are_held.set()
        await are_held.wait()
        writer.write(b"to " + request)
        writer.close()

    async def ask(port: int, number: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{number}\n".encode())
        answered = await reader.read()
        writer.close()
        return answered

    async def serve(accept: Accept) -> None:
        while True:
            reader, writer = await asyncio.open_connection(sock=await accept())
            answering.append(asyncio.create_task(answer(reader, writer)))

    answering = list[asyncio.Task[None]]()
    async with asyncio.timeout(60.0), relayed(_run_here, timeout_s=20.0) as loopback:
        serving = asyncio.create_task(serve(loopback.accept))
        answers = await asyncio.gather(*(ask(loopback.port, number) for number in range(num_connections)))
        serving.cancel()
    assert answers == [f"to {number}\n".encode() for number in range(num_connections)]
    await asyncio.gather(*answering)


async def test_bytes_that_the_gateway_does_not_read_are_limited_and_hold_up_no_other_connection() -> None:
    unread = [(1, b"x" * 32768)] * 100
    async with relayed(says((0, LISTENS), *unread, (2, b"next")), timeout_s=5.0) as loopback:
        first, second = await loopback.accept(), await loopback.accept()
        assert await asyncio.get_running_loop().sock_recv(second, 99) == b"next"
        first.close()
        second.close()
    with pytest.raises(SandboxProtocolError, match="sends faster than rayapp reads"):
        async with relayed(says((0, LISTENS), *unread * 21), timeout_s=5.0):
            await asyncio.sleep(60)

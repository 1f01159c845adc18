"""The relay of a remote sandbox against what hostile code, or a way that breaks off, makes of its lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest

from rayapp.core.errors import SandboxDeadlineError, SandboxGoneError, SandboxProtocolError
from rayapp.sandbox.providers.relay import Converse, Hear, Say, relayed
from rayapp.sandbox.providers.relay_program import MOST_CONNECTIONS, line_of

LISTENS = json.dumps({"port": 4711, "folder": "/home/user/agent-x"}).encode()


def says(*lines: tuple[int, bytes] | str) -> Converse:
    """A sandbox whose relay says these lines, of the relay's form or not, and goes on."""

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
        (["MARK one AAAA\n"], "writes nonsense"),
        (["MARK 1 AAAA\n"], "writes nonsense"),
        (["MARK 1 !\n"], "writes nonsense"),
        (["MARK 0\n"], "writes nonsense"),
        ([(0, b'{"port": "x"}')], "writes nonsense"),
        (["x" * 1_000_000], "writes lines without end"),
        ([(number, b"GET /") for number in range(1, MOST_CONNECTIONS + 2)], "more connections than it may"),
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
    with pytest.raises(SandboxDeadlineError, match="no relay listens in the sandbox after"):
        async with relayed(says(), timeout_s=0.01):
            pass
    with pytest.raises(KeyError, match="the block's own"):
        async with relayed(says((0, LISTENS)), timeout_s=5.0):
            raise KeyError("the block's own")

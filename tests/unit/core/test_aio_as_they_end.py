"""Every result arrives once, with its position, as early as it can; errors travel as values."""

from __future__ import annotations

import asyncio

from rayapp.core.aio import as_they_end
from rayapp.core.errors import EngineError, RayappError


async def test_what_ends_together_arrives_together_and_the_rest_later() -> None:
    late = asyncio.Event()

    async def one(index: int) -> str:
        if index == 1:
            await late.wait()
        return f"result {index}"

    batches = []
    async for batch in as_they_end([one(index) for index in range(3)]):
        batches.append(batch)
        late.set()
    assert batches == [[(0, "result 0"), (2, "result 2")], [(1, "result 1")]]


async def test_errors_are_values_and_others_go_on() -> None:
    async def refused() -> str:
        raise EngineError("too long")

    async def broken() -> str:
        raise KeyError("name")

    async def fine() -> str:
        return "fine"

    found = dict([pair async for batch in as_they_end([refused(), broken(), fine()]) for pair in batch])

    assert found[2] == "fine"
    assert isinstance(found[0], EngineError)
    assert type(found[1]) is RayappError
    assert str(found[1]) == "KeyError: 'name'"


async def test_whoever_stops_listening_ends_the_rest() -> None:
    ended = []

    async def forever() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return ""

    async def soon() -> str:
        return "soon"

    batches = as_they_end([soon(), forever()])
    assert await anext(batches) == [(0, "soon")]
    await batches.aclose()
    await asyncio.sleep(0)
    assert ended == [True]

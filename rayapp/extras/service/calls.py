"""The calls in progress of the sandbox service, to end the code of clients that hang up."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rayapp.core.errors import SandboxDeadlineError

CALL_HEADER = "x-rayapp-call"  # Header with a call's id, which a client can't set.
T = TypeVar("T")


class Calls:
    def __init__(self) -> None:
        self._hangups: dict[str, asyncio.Event] = {}  # Id of a call -> event that is set when its client hangs up.

    @contextmanager
    def calling(self) -> Iterator[tuple[str, asyncio.Event]]:
        """Yield a call's id, and the event to set when the client hangs up."""
        call_id, hangup = secrets.token_hex(16), asyncio.Event()
        self._hangups[call_id] = hangup
        try:
            yield call_id, hangup
        finally:
            hangup.set()
            del self._hangups[call_id]

    async def unless_hung_up(self, call_id: str, work: Coroutine[object, object, T]) -> T:
        """Return the result of a call's work, or cancel it if the client hangs up, which gives its sandbox back: a
        client that tries again would otherwise hold one more sandbox at each try. Raises SandboxDeadlineError then."""
        hangup = self._hangups.get(call_id) or asyncio.Event()
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(hangup.wait())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise SandboxDeadlineError("the client hung up before its code ended")
        finally:
            leaving.cancel()
            working.cancel()
            await asyncio.wait({working, leaving})

"""A parser asked beside the event loop, and what becomes of what it can't take. For the agent loop and the gateway."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from rayapp.tools.calls import MAX_CALLS, RawCall, ToolCallParser

log = logging.getLogger(__name__)

PARSING = ThreadPoolExecutor(1, thread_name_prefix="tool calls")
"""Parsers take up to a second for what a policy can write; their regular expressions release the interpreter's lock, so
other trajectories go on. One thread, because parsers keep state."""


async def read_calls(parser: ToolCallParser, text: str, who: str) -> tuple[RawCall, ...]:
    """The calls in the part of a turn where they count.

    Args:
        who: the request, for the log.
    """
    try:
        calls = await asyncio.get_running_loop().run_in_executor(PARSING, parser.parse, text)
    except Exception as error:  # boundary: a parser is a program that reads whatever a policy writes
        log.warning("%s: the tool parser failed: %s: %s", who, type(error).__name__, error)
        return (RawCall(problem=f"the parser failed ({type(error).__name__})"),)
    if len(calls) <= MAX_CALLS:
        return calls
    return (*calls[:MAX_CALLS], RawCall(problem=f"calls after the first {MAX_CALLS} of a turn are not read"))

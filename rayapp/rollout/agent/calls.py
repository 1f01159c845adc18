"""Runs one tool call for the agent loop: checks the call, runs it with a deadline, and cuts the result to length.

Mistakes of the policy and failures of a tool become the call's result, with a kind that metrics count. Only failed
infrastructure raises: the trajectory then says nothing about the policy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rayapp.core.aio import guarded
from rayapp.core.errors import InputError, RayappError
from rayapp.core.trajectories import storable
from rayapp.core.types import CallRecord
from rayapp.rollout.agent.text import cut, readable
from rayapp.rollout.recorder import AgentLimits
from rayapp.storage.media import by_sha256
from rayapp.tasks.data.pictures import decoded_sizes
from rayapp.tools.base import MAX_CALLS, RawCall, Tool, ToolCallParser, ToolFailedError, ToolOutput
from rayapp.tools.toolset import ToolSet, ToolStates, infrastructure, read_arguments

log = logging.getLogger(__name__)


async def run_call(
    call: RawCall, *, tools: ToolSet, states: ToolStates, limits: AgentLimits, reads_pictures: bool = True
) -> CallRecord:
    """Run or refuse one call. Only failed infrastructure raises."""
    started_at_s, started = time.time(), time.perf_counter()
    record = CallRecord(name=call.name, arguments=call.arguments, output="", started_at_s=started_at_s)
    try:
        record = await _checked(call, record, tools, states)
        if record.pictures and not reads_pictures:
            note = f"[{len(record.pictures)} pictures are left out: this model reads only text]"
            record = replace(record, output=f"{record.output}\n{note}".lstrip(), pictures=())
    except ToolFailedError as failed:
        record = replace(record, output=f"Error: {failed}", failure=failed.kind)
    output = cut(readable(record.output), limits.max_tool_output_chars, limits.cut_side)
    return replace(record, output=output, duration_s=time.perf_counter() - started)


def too_many(call: RawCall, limits: AgentLimits) -> CallRecord:
    """Return the record of a call that is not run because the turn has too many calls."""
    text = f"Error: only the first {limits.max_calls_per_turn} calls of a turn are run"
    return CallRecord(name=call.name, arguments=call.arguments, output=text, failure="too_many_calls")


async def _checked(call: RawCall, record: CallRecord, tools: ToolSet, states: ToolStates) -> CallRecord:
    if call.problem:
        raise ToolFailedError(f"this tool call can't be read: {call.problem}", "malformed")
    tool = tools.get(call.name)
    if tool is None:
        names = ", ".join(schema.name for schema in tools.schemas) or "none"
        raise ToolFailedError(f"there is no tool {call.name!r}; the tools are: {names}", "unknown_tool")
    arguments = read_arguments(call.arguments)
    if problem := tools.problem(call.name, arguments):
        raise ToolFailedError(f"wrong arguments for {call.name}: {problem}", "bad_arguments")
    return await _executed(tool, states, arguments, record)


async def _executed(tool: Tool, states: ToolStates, arguments: dict[str, object], record: CallRecord) -> CallRecord:
    try:
        async with asyncio.timeout(tool.timeout_s):
            output = _usable(await guarded(lambda: tool.execute(states[record.name], arguments)))
    except RayappError as error:
        raise infrastructure(error, f"tool {record.name}") from error
    except ToolFailedError:
        raise
    except TimeoutError:
        raise ToolFailedError(f"{record.name} did not finish within {tool.timeout_s:g} s", "timeout") from None
    except Exception as error:  # boundary: foreign code may raise anything
        log.warning("tool %s crashed: %s: %s", record.name, type(error).__name__, error, exc_info=True)
        raise ToolFailedError(f"{record.name} failed: {type(error).__name__}", "crash") from None
    if states.answer is None:
        states.answer = output.answer
    try:
        shown = by_sha256(output.pictures)
        await decoded_sizes(shown)
    except InputError as error:
        raise ToolFailedError(f"{record.name}: {error}", "picture") from None
    states.pictures |= shown
    record = replace(record, output=output.text, reward=output.reward, waited_s=output.waited_s, execs=output.execs)
    return replace(record, pictures=tuple(shown))


def _usable(output: ToolOutput) -> ToolOutput:
    if not isinstance(output.text, str):
        raise TypeError(f"ToolOutput.text must be a str, not {type(output.text).__name__}")
    reward = None if output.reward is None else storable(output.reward)
    return replace(output, reward=reward, waited_s=storable(output.waited_s), execs=tuple(output.execs))


# One thread, because parsers keep state. They take up to a second for a policy's text, but their regular expressions
# release the interpreter's lock.
PARSING = ThreadPoolExecutor(1, thread_name_prefix="tool calls")


async def read_calls(parser: ToolCallParser, text: str, who: str) -> tuple[RawCall, ...]:
    """Return the tool calls in a turn's text, outside the thoughts. `who` names the request in the log."""
    try:
        calls = await asyncio.get_running_loop().run_in_executor(PARSING, parser.parse, text)
    except Exception as error:  # boundary: a parser may raise anything on a policy's text
        return (_failed(error, who),)
    return _at_most(calls)


async def read_turn(parser: ToolCallParser, text: str, who: str) -> tuple[tuple[RawCall, ...], str]:
    """Return the tool calls in a turn's text, as `read_calls` does, and the text outside the calls."""

    def read() -> tuple[tuple[RawCall, ...], str]:
        calls = parser.parse(text)
        return calls, parser.words(text) if calls else text

    try:
        calls, words = await asyncio.get_running_loop().run_in_executor(PARSING, read)
    except Exception as error:  # boundary: a parser may raise anything on a policy's text
        return (_failed(error, who),), text
    return _at_most(calls), words


def _failed(error: Exception, who: str) -> RawCall:
    log.warning("%s: the tool parser failed: %s: %s", who, type(error).__name__, error)
    return RawCall(problem=f"the parser failed ({type(error).__name__})")


def _at_most(calls: tuple[RawCall, ...]) -> tuple[RawCall, ...]:
    if len(calls) <= MAX_CALLS:
        return calls
    return (*calls[:MAX_CALLS], RawCall(problem=f"calls after the first {MAX_CALLS} of a turn are not read"))

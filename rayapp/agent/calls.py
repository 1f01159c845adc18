"""One tool call from what the policy wrote to what it reads: checked, run under a deadline, cut. Called by the loop.

What the policy does wrong, and what a tool does wrong, becomes the call's result, with a kind that is counted. Only a
service that can't be reached leaves here as an exception: then the trajectory says nothing about the policy.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import replace

from rayapp.agent.cutting import cut
from rayapp.agent.episode import AgentLimits
from rayapp.agent.parsing import RawCall
from rayapp.errors import SandboxError, ToolUnavailableError
from rayapp.tools.base import Tool, ToolFailedError
from rayapp.tools.toolset import ToolSet, ToolStates
from rayapp.types import CallRecord

log = logging.getLogger(__name__)


async def run_call(call: RawCall, *, tools: ToolSet, states: ToolStates, limits: AgentLimits) -> CallRecord:
    """Run one call, or refuse it.

    Raises:
        ToolUnavailableError, SandboxError: infrastructure failed.
    """
    started_at_s, started = time.time(), time.perf_counter()
    record = CallRecord(name=call.name, arguments=call.arguments, output="", started_at_s=started_at_s)
    try:
        record = await _checked(call, record, tools, states)
    except _RefusedError as refusal:
        record = replace(record, output=f"Error: {refusal}", failure=refusal.kind)
    output = cut(record.output, limits.max_tool_output_chars, limits.cut_side)
    return replace(record, output=output, duration_s=time.perf_counter() - started)


def too_many(call: RawCall, limits: AgentLimits) -> CallRecord:
    """The answer to a call beyond the limit of one turn."""
    text = f"Error: only the first {limits.max_calls_per_turn} calls of a turn are run"
    return CallRecord(name=call.name, arguments=call.arguments, output=text, failure="too_many_calls")


class _RefusedError(Exception):
    """The call did not run, or not to its end; the message is for the policy."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


async def _checked(call: RawCall, record: CallRecord, tools: ToolSet, states: ToolStates) -> CallRecord:
    if call.problem:
        raise _RefusedError(f"this tool call can't be read: {call.problem}", "malformed")
    tool = tools.get(call.name)
    if tool is None:
        names = ", ".join(schema.name for schema in tools.schemas) or "none"
        raise _RefusedError(f"there is no tool {call.name!r}; there are: {names}", "unknown_tool")
    arguments = _arguments(call)
    if problem := tools.problem(call.name, arguments):
        raise _RefusedError(f"wrong arguments for {call.name}: {problem}", "bad_arguments")
    return await _executed(tool, states[call.name], arguments, record)


def _arguments(call: RawCall) -> dict[str, object]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise _RefusedError(f"the arguments of {call.name} are not valid JSON: {error}", "malformed") from None
    if not isinstance(arguments, dict):
        raise _RefusedError(f"the arguments of {call.name} must be a JSON object", "bad_arguments")
    return arguments


async def _executed(tool: Tool, state: object, arguments: dict[str, object], record: CallRecord) -> CallRecord:
    try:
        async with asyncio.timeout(tool.timeout_s):
            output = await tool.execute(state, arguments)
    except (ToolUnavailableError, SandboxError):
        raise
    except ToolFailedError as error:
        raise _RefusedError(str(error), error.kind) from None
    except TimeoutError:
        raise _RefusedError(f"{record.name} did not finish within {tool.timeout_s:g} s", "timeout") from None
    except Exception as error:  # boundary: a tool is foreign code; the policy reads that it failed, the log reads why
        log.warning("tool %s crashed: %s: %s", record.name, type(error).__name__, error, exc_info=True)
        raise _RefusedError(f"{record.name} failed: {type(error).__name__}", "crash") from None
    return replace(record, output=output.text, reward=output.reward, waited_s=output.waited_s, execs=output.execs)

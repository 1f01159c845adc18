"""One tool call from what the policy wrote to what it reads: checked, run under a deadline, cut. Called by the loop.

What the policy does wrong, and what a tool does wrong, becomes the call's result, with a kind that is counted. Only
infrastructure that failed leaves here as an exception: then the trajectory says nothing about the policy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from rayapp.core.errors import RayappError
from rayapp.core.types import CallRecord
from rayapp.rollout.agent.cutting import cut, readable
from rayapp.rollout.agent.episode import AgentLimits
from rayapp.tools.arguments import read_arguments
from rayapp.tools.base import Tool, ToolFailedError, ToolOutput, finite
from rayapp.tools.calls import RawCall
from rayapp.tools.toolset import ToolSet, ToolStates, infrastructure

log = logging.getLogger(__name__)


async def run_call(call: RawCall, *, tools: ToolSet, states: ToolStates, limits: AgentLimits) -> CallRecord:
    """Run one call, or refuse it.

    Raises:
        ToolUnavailableError, SandboxError, InputError: infrastructure failed, or the data row lacks what a tool needs.
    """
    started_at_s, started = time.time(), time.perf_counter()
    record = CallRecord(name=call.name, arguments=call.arguments, output="", started_at_s=started_at_s)
    try:
        record = await _checked(call, record, tools, states)
    except ToolFailedError as failed:
        record = replace(record, output=f"Error: {failed}", failure=failed.kind)
    output = cut(readable(record.output), limits.max_tool_output_chars, limits.cut_side)
    return replace(record, output=output, duration_s=time.perf_counter() - started)


def too_many(call: RawCall, limits: AgentLimits) -> CallRecord:
    """The answer to a call beyond the limit of one turn."""
    text = f"Error: only the first {limits.max_calls_per_turn} calls of a turn are run"
    return CallRecord(name=call.name, arguments=call.arguments, output=text, failure="too_many_calls")


async def _checked(call: RawCall, record: CallRecord, tools: ToolSet, states: ToolStates) -> CallRecord:
    if call.problem:
        raise ToolFailedError(f"this tool call can't be read: {call.problem}", "malformed")
    tool = tools.get(call.name)
    if tool is None:
        names = ", ".join(schema.name for schema in tools.schemas) or "none"
        raise ToolFailedError(f"there is no tool {call.name!r}; there are: {names}", "unknown_tool")
    arguments = read_arguments(call.arguments)
    if problem := tools.problem(call.name, arguments):
        raise ToolFailedError(f"wrong arguments for {call.name}: {problem}", "bad_arguments")
    return await _executed(tool, states, arguments, record)


async def _executed(tool: Tool, states: ToolStates, arguments: dict[str, object], record: CallRecord) -> CallRecord:
    try:
        async with asyncio.timeout(tool.timeout_s):
            output = _usable(await tool.execute(states[record.name], arguments))
    except RayappError as error:
        raise infrastructure(error, f"tool {record.name}") from error
    except ToolFailedError:
        raise
    except TimeoutError:
        raise ToolFailedError(f"{record.name} did not finish within {tool.timeout_s:g} s", "timeout") from None
    except Exception as error:  # boundary: a tool is foreign code; the policy reads that it failed, the log reads why
        log.warning("tool %s crashed: %s: %s", record.name, type(error).__name__, error, exc_info=True)
        raise ToolFailedError(f"{record.name} failed: {type(error).__name__}", "crash") from None
    if states.answer is None:
        states.answer = output.answer
    return replace(record, output=output.text, reward=output.reward, waited_s=output.waited_s, execs=output.execs)


def _usable(output: ToolOutput) -> ToolOutput:
    """What a tool gave, if it is what it promised. Raises TypeError, ValueError or OverflowError."""
    if not isinstance(output.text, str):
        raise TypeError(f"ToolOutput.text must be a str, not {type(output.text).__name__}")
    if not isinstance(output.answer, str | None):
        raise TypeError(f"ToolOutput.answer must be a str or None, not {type(output.answer).__name__}")
    return output if output.reward is None else replace(output, reward=finite(output.reward))

"""An agent on Anthropic's SDK, with a tool of its own: does this code parse? See docs/agents.md."""

from __future__ import annotations

import ast
from typing import Any

from anthropic import AsyncAnthropic

PARSE = {
    "name": "parse",
    "description": "Says whether a Python source parses. Use it before you answer.",
    "input_schema": {"type": "object", "properties": {"source": {"type": "string"}}, "required": ["source"]},
}


async def play(call: Any) -> str | None:
    """One trajectory. None: what the policy said last is scored.

    Args:
        call: the task and where the policy is, a `rayapp.rollout.external_program.AgentCall`.
    """
    async with AsyncAnthropic(base_url=call.anthropic_base_url, api_key=call.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": call.prompt}]
        for _ in range(8):
            reply: Any = await client.messages.create(
                model=call.model, max_tokens=1024, messages=messages, tools=[PARSE]
            )
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": parsed(str(block.input.get("source")))}
                for block in reply.content
                if block.type == "tool_use"
            ]
            if not results:
                return None
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
        return None


def parsed(source: str) -> str:
    """What the policy reads. The source is parsed and never run: here is no sandbox."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"It does not parse: {type(error).__name__}: {error}"
    return "It parses."

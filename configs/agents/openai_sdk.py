"""An agent on OpenAI's SDK: the policy answers, reads its answer once more, and says it again. See docs/agents.md."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

AGAIN = "Check your answer: does it do all that was asked? Then give the whole answer again, mended where it must be."


async def play(call: Any) -> str:
    """One trajectory. What it returns is scored.

    Args:
        call: the task and where the policy is, a `rayapp.rollout.external_program.AgentCall`.
    """
    async with AsyncOpenAI(base_url=call.openai_base_url, api_key=call.api_key) as client:
        messages = list(call.messages)
        said = ""
        for asked in ("", AGAIN):
            messages += [{"role": "user", "content": asked}] if asked else []
            reply = await client.chat.completions.create(model=call.model, messages=messages)
            said = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
        return said

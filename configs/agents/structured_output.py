"""An agent on OpenAI's SDK that wants answers in the form of a pydantic model. See docs/agents.md."""

from __future__ import annotations

import json
from typing import Any, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel


class Ticket(BaseModel):
    department: Literal["billing", "delivery", "repairs"]
    urgent: bool


async def play(call: Any) -> str:
    """Sort one message of a customer. Return the parsed answer as JSON."""
    async with AsyncOpenAI(base_url=call.openai_base_url, api_key=call.api_key) as client:
        reply = await client.chat.completions.parse(
            model=call.model, messages=list(call.messages), response_format=Ticket
        )
        ticket = reply.choices[0].message.parsed
        assert ticket is not None, "the policy's answer has the form, or parse() raises"
        return ticket.model_dump_json()


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return the share of fields that are right; 0 for an answer that was cut off before its end."""
    wanted = json.loads(ground_truth)
    try:
        given = Ticket.model_validate_json(solution_str).model_dump()
    except ValueError:
        return 0.0
    return float(sum(given[name] == value for name, value in wanted.items()) / len(wanted))

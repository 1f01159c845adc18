"""Tool `calc_gsm8k_reward`: checks the policy's answer to a GSM8K problem, as verl's Gsm8kTool does.

A call that does not score higher than the trajectory's best so far has a small negative reward, against guessing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayapp.core.errors import InputError
from rayapp.tools.base import ToolBase, ToolOutput, ToolSchema

_NUMBER = re.compile(r"-?[0-9.,]+")
_NO_BETTER = -0.05


@dataclass(slots=True)
class _State:
    ground_truth: str
    best: float = 0.0


class Gsm8kTool(ToolBase):
    """Tool whose state is the row's ground truth and the trajectory's best score so far."""

    schema = ToolSchema(
        name="calc_gsm8k_reward",
        description="Checks an answer to the problem: 1.0 if it is right, 0.0 if it is wrong or can't be read.",
        parameters={
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer to the problem, in digits"}},
            "required": ["answer"],
        },
    )

    async def create(self, kwargs: Mapping[str, Any]) -> _State:
        truth = kwargs.get("ground_truth")
        if truth is None:
            raise InputError(
                f"tool {self.schema.name}: the row has no extra_info.tools_kwargs.{self.schema.name}.create_kwargs."
                "ground_truth (docs/tools.md)"
            )
        return _State(str(truth))

    async def execute(self, state: _State, arguments: Mapping[str, Any]) -> ToolOutput:
        answer = str(arguments.get("answer", ""))
        score = score_answer(answer, state.ground_truth)
        reward = 0.0 if score > state.best else _NO_BETTER
        state.best = max(state.best, score)
        return ToolOutput(text=f"Current parsed answer='{last_number(answer)}' reward={score}", reward=reward)

    async def reward(self, state: _State) -> float | None:
        return state.best


def last_number(text: str) -> str:
    """Return the last number in a text, as it is written there; empty if there is none."""
    found = [number for number in _NUMBER.findall(text) if number not in ("", ".")]
    return found[-1] if found else ""


def score_answer(answer: str, ground_truth: str) -> float:
    """Return 1.0 if the answer's last number has the same text as the ground truth, as verl's `flexible` does."""
    return float(last_number(answer) == ground_truth and bool(ground_truth))

"""Calls in the form of gpt-oss (harmony), which vLLM reads in its server only: its parser `openai` is a stub.

    <|channel|>analysis<|message|>I'll look.<|end|><|start|>assistant<|channel|>commentary to=functions.look
    <|constrain|>json<|message|>{"word": "a"}<|call|>

A message is a call if its head names a recipient. What thoughts (another message) quote is none.
"""

from __future__ import annotations

import re
from itertools import islice

from rayapp.tools.calls import MAX_CALLS, RawCall

_MESSAGE = re.compile(
    r"(?:\A|<\|start\|>)(?P<head>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
    r"(?P<body>.*?)(?=<\|(?:end|call|return|start)\|>|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"(?:^|\s)to=(?:functions\.)?([\w.-]+)")
_BESIDE = re.compile(rf"{_RECIPIENT.pattern}|<\|channel\|>analysis")
"""Head of what is not said to the user: calls, and thoughts."""


class HarmonyParser:
    """See `rayapp.tools.calls.ToolCallParser`."""

    name = "openai"

    def parse(self, text: str) -> tuple[RawCall, ...]:
        found = ((_RECIPIENT.search(message["head"]), message["body"]) for message in _MESSAGE.finditer(text))
        calls = (RawCall(name=to[1], arguments=body.strip() or "{}") for to, body in found if to is not None)
        return tuple(islice(calls, MAX_CALLS + 1))

    def words(self, text: str) -> str:
        said = (message["body"] for message in _MESSAGE.finditer(text) if not _BESIDE.search(message["head"]))
        return "\n".join(said).strip()

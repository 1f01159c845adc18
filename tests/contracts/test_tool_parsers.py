"""vLLM's hermes parser and our own read the same calls, and both survive whatever a policy writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.agent.parsing import HermesParser, ToolCallParser
from rayapp.errors import ConfigError
from rayapp.tools.base import ToolSchema

TOOLS = [ToolSchema(name="add", parameters={"type": "object", "properties": {"a": {"type": "number"}}})]


@pytest.fixture(scope="module")
def vllm_parser(chat_tokenizer: Any) -> ToolCallParser:
    pytest.importorskip("vllm")
    from rayapp.engines.vllm_tool_parser import load_parser

    return load_parser("hermes", chat_tokenizer, TOOLS)


def block(content: str) -> str:
    return f"<tool_call>\n{content}\n</tool_call>"


CASES = {
    "no call": ("The answer is 4.", []),
    "one call": ("Let me add." + block('{"name": "add", "arguments": {"a": 1}}'), [("add", {"a": 1})]),
    "two calls": (
        block('{"name": "add", "arguments": {"a": 1}}') + " and " + block('{"name": "add", "arguments": {"a": "é"}}'),
        [("add", {"a": 1}), ("add", {"a": "é"})],
    ),
    "not closed": ('<tool_call>{"name": "add", "arguments": {}}', [("add", {})]),
    "malformed": (block('{"name": "add"'), [None]),
    "malformed beside a good one": (
        block('{"name": ') + block('{"name": "add", "arguments": {}}'),
        [None, ("add", {})],
    ),
    "no arguments": (block('{"name": "add"}'), [None]),
    "a list": (block("[1, 2]"), [None]),
}


@pytest.mark.parametrize("case", CASES)
def test_both_hermes_parsers_read_the_same_calls(case: str, vllm_parser: ToolCallParser) -> None:
    text, expected = CASES[case]

    for parser in (HermesParser(), vllm_parser):
        calls = parser.parse(text)
        read = [None if call.problem else (call.name, json.loads(call.arguments)) for call in calls]
        assert read == expected, type(parser).__name__


fragment = st.one_of(
    st.text(max_size=20), st.sampled_from(["<tool_call>", "</tool_call>", '{"name": 3, "arguments": {}}'])
)


@settings(max_examples=150, deadline=None)
@given(text=st.lists(fragment, max_size=8).map("".join))
def test_no_text_makes_a_parser_raise(text: str, vllm_parser: ToolCallParser) -> None:
    for parser in (HermesParser(), vllm_parser):
        assert all(call.problem or call.name for call in parser.parse(text))


def test_unknown_parser_is_refused_with_those_there_are(chat_tokenizer: Any, vllm_parser: ToolCallParser) -> None:
    from rayapp.engines.vllm_tool_parser import load_parser

    with pytest.raises(ConfigError, match=r"no tool parser 'hermse'; it has: .*hermes"):
        load_parser("hermse", chat_tokenizer, TOOLS)

"""vLLM's hermes parser and our own read the same calls, and both survive whatever a policy writes."""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.cli.doctor import fitness
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError
from rayapp.rollout.agent.chat import ChatFormat
from rayapp.testing.hermes import HermesParser
from rayapp.tools.base import ToolSchema
from rayapp.tools.calls import MAX_CALLS, ToolCallParser

TOOLS = [ToolSchema(name="add", parameters={"type": "object", "properties": {"a": {"type": "number"}}})]


@pytest.fixture(scope="module")
def vllm_parser(chat_tokenizer: Any) -> ToolCallParser:
    pytest.importorskip("vllm")
    from rayapp.engine.vllm_tool_parser import load_parser

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


def test_both_hermes_parsers_say_the_same_words_beside_calls(vllm_parser: ToolCallParser) -> None:
    for parser in (HermesParser(), vllm_parser):
        assert parser.words("let me see\n" + block('{"name": "add", "arguments": {}}') + " and so on") == "let me see"


fragment = st.one_of(
    st.text(max_size=20), st.sampled_from(["<tool_call>", "</tool_call>", '{"name": 3, "arguments": {}}'])
)


@settings(max_examples=150, deadline=None)
@given(text=st.lists(fragment, max_size=8).map("".join))
def test_no_text_makes_a_parser_raise(text: str, vllm_parser: ToolCallParser) -> None:
    for parser in (HermesParser(), vllm_parser):
        assert all(call.problem or call.name for call in parser.parse(text))


def probed(family: Any, parser: str) -> ToolCallParser:
    from rayapp.engine.vllm_tool_parser import load_parser

    chat = ChatFormat(family.tokenizer, TOOLS, template=family.template)
    return load_parser(parser, family.tokenizer, TOOLS, chat.sample_call())


@pytest.mark.parametrize(
    ("family", "parser", "said"),
    [
        ("llama", "llama3_json", '{"name": "add", "parameters": {"a": 1}}'),
        ("deepseek_v3", "deepseek_v3", None),
        ("qwen3_coder", "qwen3_coder", None),
        ("glm45", "glm45", None),
        ("mistral", "mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'),
    ],
)
def test_a_parser_that_fits_its_family_finds_the_calls_its_template_writes(
    chat_family: Any, vllm_parser: ToolCallParser, family: str, parser: str, said: str | None
) -> None:
    model = chat_family(family)
    found = probed(model, parser)
    if said is None:
        sample = ChatFormat(model.tokenizer, TOOLS, template=model.template).sample_call()
        assert sample is not None
        assert sample.is_found_by(found)
    else:
        assert [(call.name, json.loads(call.arguments)) for call in found.parse(said)] == [("add", {"a": 1})]
    assert found.parse("The answer is 4.") == ()


@pytest.mark.parametrize(
    ("family", "parser", "message"),
    [
        ("qwen3_coder", "hermes", r"'hermes' doesn't find a call.*<function=add>.*one that does: .*qwen3_coder"),
        ("llama", "hermes", r"'hermes' doesn't find a call.*one that does: llama3_json"),
        ("deepseek_v3", "deepseek_v31", r"'deepseek_v31' doesn't find.*one that does: deepseek_v3"),
        ("gpt_oss", "openai", r"'openai' doesn't find.*one that does: vLLM has none"),
    ],
)
def test_a_parser_that_does_not_fit_is_refused_with_those_that_do(
    chat_family: Any, vllm_parser: ToolCallParser, family: str, parser: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        probed(chat_family(family), parser)


@pytest.mark.parametrize(
    ("family", "parser", "said"),
    [
        ("glm45", "glm45", "<tool_call>add\n" + "<arg_key>a</arg_key><arg_value>" * 2000),
        ("qwen3_coder", "qwen3_coder", "<tool_call><function=add>" + "<parameter=" * 5000),
        ("deepseek_v3", "deepseek_v3", "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜>a<｜tool▁sep｜>" * 5000),
    ],
)
def test_a_turn_that_a_parser_would_read_for_minutes_is_a_malformed_call(
    chat_family: Any, vllm_parser: ToolCallParser, family: str, parser: str, said: str
) -> None:
    found = probed(chat_family(family), parser)
    started = time.perf_counter()

    calls = found.parse(said)

    assert time.perf_counter() - started < 5.0
    assert [bool(call.problem) for call in calls] == [True]
    assert sys.getprofile() is None


def test_the_doctor_finds_a_parser_that_does_not_fit_the_model(
    chat_family: Any, vllm_parser: ToolCallParser, tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(chat_family("qwen3_coder").tokenizer)
    tokenizer.chat_template = chat_family("qwen3_coder").template
    tokenizer.save_pretrained(tmp_path)

    def found(parser: str) -> list[str]:
        config = {
            "cluster": {"device": "cpu"},
            "model": {"path": str(tmp_path)},
            "data": {"train_files": ["train.parquet"]},
            "agent": {"tool_file": "tools.yaml", "tool_parser": parser},
        }
        return [finding.detail for finding in fitness(Config.model_validate(config)) if finding.what == "tools"]

    (detail,) = found("hermes")
    assert "Set agent.tool_parser to one that does" in detail
    assert found("qwen3_coder") == []


def test_a_turn_of_nothing_but_calls_is_read_up_to_a_limit(vllm_parser: ToolCallParser) -> None:
    for parser in (HermesParser(), vllm_parser):
        assert len(parser.parse(block('{"name": "add", "arguments": {}}') * 5000)) == MAX_CALLS + 1


def test_unknown_parser_is_refused_with_those_there_are(chat_tokenizer: Any, vllm_parser: ToolCallParser) -> None:
    from rayapp.engine.vllm_tool_parser import load_parser

    with pytest.raises(ConfigError, match=r"no tool parser 'hermse'; it has: .*hermes"):
        load_parser("hermse", chat_tokenizer, TOOLS)

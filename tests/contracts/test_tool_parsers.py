"""vLLM's hermes parser and our own read the same calls, and both survive whatever a policy writes."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.cli.doctor import fitness
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError
from rayapp.core.types import RequestId, RolloutStatus, SamplingParams
from rayapp.rollout.agent.chat import ChatFormat
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agent.vllm_tool_parser import HarmonyParser
from rayapp.rollout.recorder import AgentLimits, AgentPrompt
from rayapp.testing.engine import ScriptedEngine
from rayapp.tools.base import MAX_CALLS, ToolBase, ToolCallParser, ToolOutput, ToolSchema
from rayapp.tools.toolset import ToolSet
from support.hermes import HermesParser
from support.timing import takes_at_most_s

TOOLS = [ToolSchema(name="add", parameters={"type": "object", "properties": {"a": {"type": "number"}}})]


@pytest.fixture(scope="module")
def vllm_parser(chat_tokenizer: Any) -> ToolCallParser:
    pytest.importorskip("vllm")
    from rayapp.rollout.agent.vllm_tool_parser import load_parser

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


HARMONY_CALL = (
    "<|channel|>analysis<|message|>I could write to=functions.sub, but no.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
)


def probed(family: Any, parser: str) -> ToolCallParser:
    from rayapp.rollout.agent.vllm_tool_parser import load_parser

    chat = ChatFormat(family.tokenizer, TOOLS, template=family.template)
    return load_parser(parser, family.tokenizer, TOOLS, chat.sample_call())


LLAMA_CALL = '{"name": "add", "parameters": {"a": 1}}'
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'
FITTING = {
    "llama": ("llama3_json", LLAMA_CALL),
    "mistral": ("mistral", MISTRAL_CALL),
    "gpt_oss": ("openai", HARMONY_CALL),
    **{name: (name, None) for name in ("deepseek_v3", "deepseek_v31", "pythonic", "qwen3_coder", "glm45")},
}
"""By family: its parser, and a call where that is not the one that its template writes."""


@pytest.mark.parametrize(
    ("family", "parser", "said"),
    [(family, each, said) for family, (parser, said) in FITTING.items() for each in (parser, "auto")],
)
def test_a_parser_that_fits_its_family_finds_the_calls_its_template_writes(
    chat_family: Any, vllm_parser: ToolCallParser, family: str, parser: str, said: str | None
) -> None:
    model = chat_family(family)
    found = probed(model, parser)
    if said is None:
        sample = ChatFormat(model.tokenizer, TOOLS, template=model.template).sample_call()
        assert sample.is_found_by(found)
    else:
        assert [(call.name, json.loads(call.arguments)) for call in found.parse(said)] == [("add", {"a": 1})]
    assert found.parse("The answer is 4.") == ()


@pytest.mark.parametrize(
    ("family", "parser", "message"),
    [
        ("qwen3_coder", "hermes", r"'hermes' doesn't recognize.*<function=add>.*that recognizes them: .*qwen3_coder"),
        ("llama", "hermes", r"'hermes' doesn't recognize the tool calls.*a parser that recognizes them: llama3_json"),
        ("deepseek_v3", "deepseek_v31", r"'deepseek_v31' doesn't recognize.*that recognizes them: deepseek_v3"),
        ("gpt_oss", "hermes", r"'hermes' doesn't recognize.*a parser that recognizes them: openai"),
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

    with takes_at_most_s(5, time.process_time):
        calls = found.parse(said)

    assert [bool(call.problem) for call in calls] == [True]
    assert sys.getprofile() is None


def test_the_doctor_finds_a_parser_that_does_not_fit_the_model(
    chat_family: Any, vllm_parser: ToolCallParser, tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(chat_family("qwen3_coder").tokenizer)
    tokenizer.chat_template = chat_family("qwen3_coder").template
    tokenizer.save_pretrained(tmp_path)
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools: [{class_name: rayapp.tools.gsm8k.Gsm8kTool, config: {type: native}}]")

    def found(parser: str) -> list[str]:
        config = {
            "cluster": {"device": "cpu"},
            "model": {"path": str(tmp_path)},
            "tasks": ["train.parquet"],
            "agent": {"tool_file": str(tools), "tool_parser": parser},
        }
        return [finding.detail for finding in fitness(Config.model_validate(config)) if finding.what == "tools"]

    (detail,) = found("hermes")
    assert "Set agent.tool_parser to a parser that recognizes them" in detail
    assert found("qwen3_coder") == []


def test_a_turn_of_nothing_but_calls_is_read_up_to_a_limit(vllm_parser: ToolCallParser) -> None:
    for parser in (HermesParser(), vllm_parser):
        assert len(parser.parse(block('{"name": "add", "arguments": {}}') * 5000)) == MAX_CALLS + 1


@pytest.mark.parametrize(
    ("family", "text"),
    [(family, text) for family in ("llama", "mistral", "deepseek_v3", "pythonic", "qwen3_coder", "glm45")
     for text in ("a</tool_call>b", "<tool_call>{}", "[TOOL_CALLS]", '}}]"\\', "é\n```json\n{}\n```")],
)  # fmt: skip
def test_marks_of_calls_in_an_argument_are_text(
    chat_family: Any, vllm_parser: ToolCallParser, family: str, text: str
) -> None:
    from rayapp.rollout.agent.vllm_tool_parser import load_parser

    model = chat_family(family)
    tools = [ToolSchema(name="run", parameters={"type": "object", "properties": {"code": {"type": "string"}}})]
    sample = ChatFormat(model.tokenizer, tools, template=model.template).sample_call()
    written, value = sample.texts[0], str(sample.arguments["code"])
    quoted = [(json.dumps(value), json.dumps(text, ensure_ascii=False)), (repr(value), repr(text)), (value, text)]
    said = next(written.replace(old, new) for old, new in quoted if old in written)

    (call,) = load_parser("auto", model.tokenizer, tools, sample).parse(said)
    assert (call.name, json.loads(call.arguments)) == ("run", {"code": text})


class Add(ToolBase):
    """Adds one."""

    schema = ToolSchema(name="add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
    timeout_s = 5.0

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        return ToolOutput(text=f"the sum is {arguments['a'] + 1}")


TURNS = {
    "llama": (LLAMA_CALL.replace("1", "3"), "<|eom_id|>"),
    "deepseek_v3": ("", "<｜end▁of▁sentence｜>"),
    "deepseek_v31": ("", "<｜end▁of▁sentence｜>"),
    "pythonic": ("", "<|eom_id|>"),
    "qwen3_coder": ("", "<|im_end|>"),
    "glm45": ("", "<|observation|>"),
    "mistral": (MISTRAL_CALL.replace("1", "3"), "</s>"),
    "gpt_oss": (HARMONY_CALL.replace("1", "3"), "<|call|>"),
}
"""By family: a turn that calls, empty for the one that its template writes; and the token that ends it."""


@pytest.mark.parametrize("family", TURNS)
async def test_a_family_calls_a_tool_in_its_own_form_and_reads_the_result(
    chat_family: Any, vllm_parser: ToolCallParser, family: str
) -> None:
    from rayapp.rollout.agent.vllm_tool_parser import load_parser

    model, (said, end) = chat_family(family), TURNS[family]
    chat = ChatFormat(model.tokenizer, [Add.schema], template=model.template)
    sample = chat.sample_call()
    assert sample.arguments == {"a": 3}
    asked = chat.prompt_ids([{"role": "user", "content": "3 + 1?"}])
    begins_thought = chat.tokenizer.decode(asked, skip_special_tokens=False).rstrip().endswith("<think>")
    said = "</think>\n\n" * begins_thought + (said or sample.texts[0])
    loop = AgentLoop(
        chat=chat,
        parser=load_parser("auto", model.tokenizer, [Add.schema], sample),
        tools=ToolSet([Add()]),
        limits=AgentLimits(max_response_tokens=100_000),
    )
    turns = iter([chat.tokenizer.encode(text + end, add_special_tokens=False) for text in (said, "It is 4.")])
    engine = ScriptedEngine(chat.tokenizer.encode, chat.tokenizer.decode, lambda *_: next(turns), end_id=0)
    engine.record = True
    prompt = AgentPrompt(token_ids=tuple(asked))
    played = await loop.run(
        prompt, engine=engine, sampling=SamplingParams(max_tokens=10_000), request_id=RequestId("group", 0)
    )
    assert played.status is RolloutStatus.COMPLETED
    (first, second) = (list(prompt_ids) for _, prompt_ids, _ in engine.requests)
    sampled = chat.tokenizer.encode(said + end, add_special_tokens=False)
    assert second[: len(first) + len(sampled)] == first + sampled
    read = chat.tokenizer.decode(second[len(first) + len(sampled) :])
    assert "the sum is 4" in read
    ends = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|call|>", "<|return|>", "</s>", "<｜end▁of▁sentence｜>")
    assert not read.startswith((*ends, "<|observation|>")), "the end of the turn is there twice"


def test_without_tools_any_model_has_a_parser(chat_tokenizer: Any, vllm_parser: ToolCallParser) -> None:
    from rayapp.rollout.agent.vllm_tool_parser import load_parser

    assert load_parser("auto", chat_tokenizer, []).parse("The answer is 4.") == ()


def test_calls_of_gpt_oss_are_messages_with_a_recipient() -> None:
    read = HarmonyParser().parse
    assert [(call.name, call.arguments) for call in read(HARMONY_CALL)] == [("add", '{"a": 1}')]
    assert read(" to=functions.add<|channel|>commentary json<|message|>{}<|call|>")[0].name == "add"
    assert read("<|channel|>final<|message|>Write to=functions.add<|return|>") == ()
    assert len(read("<|start|>assistant to=f<|message|>{}<|call|>" * 5000)) == MAX_CALLS + 1


def test_what_gpt_oss_says_beside_a_call_is_neither_the_call_nor_a_thought() -> None:
    thought, call = HARMONY_CALL.split("<|start|>")
    told = "<|start|>assistant<|channel|>commentary<|message|>I add them.<|end|>"
    assert HarmonyParser().words(f"{thought}{told}<|start|>{call}<|call|>") == "I add them."
    assert HarmonyParser().words(HARMONY_CALL) == ""


def test_unknown_parser_is_refused_with_those_there_are(chat_tokenizer: Any, vllm_parser: ToolCallParser) -> None:
    from rayapp.rollout.agent.vllm_tool_parser import load_parser

    with pytest.raises(ConfigError, match=r"no tool parser 'hermse'; it has: .*hermes"):
        load_parser("hermse", chat_tokenizer, TOOLS)

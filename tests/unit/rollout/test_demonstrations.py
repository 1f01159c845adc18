"""Rows to learn from become the token ids of a rollout, and unusable rows are named."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.core.types import Trajectory
from rayapp.rollout import demonstrations
from rayapp.rollout.demonstrations import read_demonstrations
from rayapp.storage.base import hash_bytes
from rayapp.storage.models.tokenizer import load_tokenizer
from support.picture_models import picture, save_picture_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3 does: thoughts of turns that are not the last are left out.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
AGAIN, SECOND = {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}
Read = Callable[..., demonstrations.Demonstrations]


@pytest.fixture
def read(chat_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads rows as a run of that tokenizer does, from a JSONL file."""
    monkeypatch.setattr(demonstrations, "load_tokenizer", lambda *_: chat_tokenizer)

    def read_rows(
        *rows: Any, template: str = CHATML, drops: bool = False, **warmup: Any
    ) -> demonstrations.Demonstrations:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "template.jinja").write_text(template)
        agent = {"chat_template": str(tmp_path / "template.jinja")} if template else {}
        section = {"num_steps": 1, "files": [str(file)], "max_tokens": 300} | warmup
        data = {"filter_overlong_prompts": drops}
        config = Config.model_validate({"agent": agent, "data": data, "warmup": section})
        return read_demonstrations(config, config.warmup.files)

    return read_rows


def text(tokenizer: Any, row: Trajectory, *, learned: bool) -> str:
    return str(tokenizer.decode(row.token_ids[row.response_mask == learned], skip_special_tokens=False))


def test_every_turn_of_the_assistant_is_learned_with_the_token_that_ends_it(read: Read, chat_tokenizer: Any) -> None:
    [row] = read({"messages": [ASK, ANSWER, AGAIN, SECOND]}).rows
    assert text(chat_tokenizer, row, learned=True) == "4<|im_end|>6<|im_end|>"
    whole = chat_tokenizer.decode(row.token_ids, skip_special_tokens=False)
    assert whole + "\n" == chat_tokenizer.apply_chat_template(
        [ASK, ANSWER, AGAIN, SECOND], chat_template=CHATML, tokenize=False
    )


def test_a_template_that_forgets_thoughts_makes_each_turn_its_own_sequence(read: Read, chat_tokenizer: Any) -> None:
    thought = {"role": "assistant", "content": "<think>easy</think>4"}
    first, second = read({"messages": [ASK, thought, AGAIN, SECOND]}, template=FORGETS).rows
    assert text(chat_tokenizer, first, learned=True) == "<think>easy</think>4<|im_end|>"
    assert text(chat_tokenizer, second, learned=True) == "6<|im_end|>"
    assert "easy" not in text(chat_tokenizer, second, learned=False)


def test_of_prompt_and_completion_only_the_completion_is_learned(read: Read, chat_tokenizer: Any) -> None:
    [plain] = read({"prompt": "2+2=", "completion": "4"}).rows
    assert text(chat_tokenizer, plain, learned=False) == "2+2="
    assert text(chat_tokenizer, plain, learned=True) == "4<|im_end|>"
    parts = {"role": "user", "content": [{"type": "text", "text": "3+3?"}]}
    [chat] = read({"prompt": [ASK, ANSWER, parts], "completion": [SECOND]}).rows
    assert "<|im_start|>user\n3+3?<|im_end|>" in text(chat_tokenizer, chat, learned=False)
    assert text(chat_tokenizer, chat, learned=True) == "6<|im_end|>"


def test_token_ids_are_taken_as_they_are_also_from_parquet(read: Read, tmp_path: Path) -> None:
    file = tmp_path / "best.parquet"
    row = {"token_ids": [5, 6, 7, 8], "response_mask": [False, True, False, True], "completion": "x"}
    pq.write_table(pa.Table.from_pylist([row]), file)
    [found] = read(files=[str(file)]).rows
    assert found.token_ids.tolist() == row["token_ids"]
    assert found.response_mask.tolist() == row["response_mask"]
    assert found.token_ids.dtype == np.int32


def test_tool_calls_and_tools_reach_the_template(read: Read, chat_tokenizer: Any) -> None:
    template = (
        "{% if tools %}tools:{{ tools[0].name }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content or m.tool_calls[0].name }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    [row] = read({"messages": [ASK, call], "tools": [{"name": "add"}]}, template=template).rows
    assert text(chat_tokenizer, row, learned=False).startswith("tools:add\n")
    assert text(chat_tokenizer, row, learned=True) == "add<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [ASK]}, r"rows.jsonl: row 1: the row has no assistant message"),
        (
            {"messages": [ASK, {"role": "assistant", "content": "  "}]},
            "row 1: the content of message 1 .*must have text",
        ),
        ({"prompt": "a", "completion": ""}, r"row 1: completion is '': it must have text"),
        ({"prompt": "a", "completion": [ANSWER]}, r"row 1: prompt is a string, so completion must be a string"),
        ({"question": "a"}, r"row 1: the row has question: it must have messages; prompt and completion; or"),
        ({"messages": "hello"}, r"row 1: messages must be a list of messages"),
        ({"token_ids": [1, 2], "response_mask": [True]}, r"row 1: token_ids .* same length; .*\(2,\) and \(1,\)"),
        ({"token_ids": [1, 2], "response_mask": [True, True]}, r"row 1: response_mask begins with true"),
        (["a"], r"row 1: the row is a list: it must be an object with"),
        ({"prompt": "a" * 400, "completion": "b"}, r"row 1 has 402 tokens, but warmup.max_tokens is 300"),
    ],
)
def test_a_row_that_can_not_be_learned_from_is_named(read: Read, row: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read({"prompt": "a", "completion": "b"}, row)


def test_longer_rows_are_left_out_and_counted_where_that_is_asked_for(read: Read) -> None:
    short, long = {"prompt": "a", "completion": "b"}, {"prompt": "a" * 400, "completion": "b"}
    found = read(short, long, drops=True)
    assert (len(found.rows), found.num_left_out) == (1, 1)
    with pytest.raises(InputError, match=r"all 1 rows are longer than warmup\.max_tokens = 300"):
        read(long, drops=True)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("", r"the row has messages, but the model has no chat template .*agent.chat_template"),
        ("{{ raise_exception('no users here') }}", "row 0: the chat template can't render .*no users here"),
        (CHATML.replace("<|im_end|>", ""), "has no token that ends a turn"),
    ],
)
def test_a_chat_template_that_cannot_write_the_row_is_told(read: Read, template: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read({"messages": [ASK, ANSWER]}, template=template)


def test_a_file_that_is_missing_or_no_json_is_named(read: Read, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent.jsonl: there is no such file"):
        read(files=[str(tmp_path / "absent.jsonl")])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a", "completion": "b"}\n{"prompt"\n')
    with pytest.raises(InputError, match=r"broken.jsonl, line 2 is not JSON"):
        read(files=[str(broken)])


def test_the_tasks_own_demonstrations_end_as_the_policy_ends(read: Read, chat_tokenizer: Any) -> None:
    config = {"rollout": {"max_completion_tokens": 2000}, "warmup": {"num_steps": 1}}
    own = Config.model_validate(config | {"tasks": ["sort_numbers", "max_subarray_sum"]})
    chat_tokenizer.chat_template = CHATML
    try:
        rows = read_demonstrations(own, ()).rows
    finally:
        chat_tokenizer.chat_template = None
    assert len(rows) == 24
    assert text(chat_tokenizer, rows[0], learned=False).endswith("```python\ndef sort_numbers(xs):")
    assert text(chat_tokenizer, rows[0], learned=True).startswith("\n    n = len(xs)")
    assert all(row.completion_text.endswith("\n```") for row in rows)
    with pytest.raises(InputError, match=r"these tasks have no demonstrations: .*sort_numbers_reworded"):
        read_demonstrations(Config.model_validate(config | {"tasks": ["sort_numbers_reworded"]}), ())


def test_a_turn_ends_at_a_special_token_that_has_no_role(
    read: Read, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in SmolLM2's tokenizers, where <|im_end|> is neither eos nor named elsewhere."""
    own = PreTrainedTokenizerFast(tokenizer_object=chat_tokenizer.backend_tokenizer, eos_token="<|im_start|>")
    monkeypatch.setattr(demonstrations, "load_tokenizer", lambda *_: own)
    assert "<|im_end|>" not in own.all_special_tokens
    [row] = read({"messages": [ASK, ANSWER]}).rows
    assert text(own, row, learned=True) == "4<|im_end|>"


CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ tools | tojson }}{{ m.content }}{{ m.tool_calls | tojson }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ tools | tojson }}{% endif %}"
)


def test_arguments_of_other_tools_are_not_learned_from_parquet(read: Read, tmp_path: Path) -> None:
    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        tool = {"type": "function", "function": {"name": name, "parameters": {key: {"type": "x"} for key in arguments}}}
        return {"messages": [ASK | {"tool_calls": []}, ANSWER | {"tool_calls": calls}], "tools": [tool]}

    rows = [row("read", {"path": "p"}), row("run", {"code": "c", "more": [{"x": 1}, {"y": 2}]})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    from_lines = read(*rows, template=CALLS, max_tokens=900).rows
    from_parquet = read(template=CALLS, files=[str(tmp_path / "rows.parquet")], max_tokens=900).rows
    assert [a.token_ids.tolist() for a in from_lines] == [b.token_ids.tolist() for b in from_parquet]


@pytest.mark.parametrize("wrong", [2**70, 2**40, 999_999, -5, 2.7, math.nan, "7", None, [1]])
def test_a_token_id_that_the_model_does_not_have_is_named(read: Read, wrong: Any) -> None:
    with pytest.raises(InputError, match=r"row 0: token_ids\[1\] is .* must be an integer from 0 to "):
        read({"token_ids": [5, wrong], "response_mask": [False, True]})
    with pytest.raises(InputError, match=r"response_mask\[0\] is 'no'"):
        read({"token_ids": [5, 6], "response_mask": ["no", True]})


ARGUMENTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]}


@pytest.mark.parametrize("arguments", [{"t": "a"}, '{"t": "a"}', ' {"t":"a"} \n'])
def test_arguments_of_a_call_are_learned_as_data(read: Read, chat_tokenizer: Any, arguments: Any) -> None:
    (row,) = read(calling(arguments), template=ARGUMENTS).rows

    assert text(chat_tokenizer, row, learned=True) == '{"t": "a"}<|im_end|>'


def test_tools_and_calls_are_read_from_json_text(read: Read) -> None:
    row = calling({"t": "a"}) | {"tools": [{"type": "function", "function": {"name": "look"}}]}
    ask, call = row["messages"]
    texts = {
        "messages": [ask, call | {"tool_calls": json.dumps(call["tool_calls"])}],
        "tools": json.dumps(row["tools"]),
    }
    listed = row | {"tools": [json.dumps(row["tools"][0])]}

    template = CALLS.replace("m.tool_calls", "(m.tool_calls or [])")
    of_data, *others = (read(each, template=template).rows[0].token_ids.tolist() for each in (row, texts, listed))
    assert others == [of_data, of_data]


@pytest.mark.parametrize(
    ("change", "why"),
    [({"tools": "look"}, r"row 0: tools is 'look', which is not the JSON of a list"),
     ({"messages": [ASK, ANSWER | {"tool_calls": "look"}]}, r"row 0: messages\[1\]\.tool_calls is 'look'"),
     ({"messages": [ASK, ANSWER | {"function_call": {"name": "look", "arguments": "{}"}}]}, "give tool_calls")],
)  # fmt: skip
def test_tools_and_calls_in_another_form_are_refused_by_row(read: Read, change: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        read(calling({}) | change, template=CALLS)


CONTENT = [{"type": "text", "text": "4"}]


@pytest.mark.parametrize(
    ("change", "why"),
    [({"content": [*CONTENT, {"type": "tool_use", "name": "look", "input": {}}]}, "part of type tool_use, which"),
     ({"content": [{"type": "thinking", "thinking": "hm"}, *CONTENT]}, "part of type thinking, which"),
     ({"content": {"text": "4"}}, r"messages\[1\]\.content is {'text': '4'}: it must be text, or a list of parts"),
     ({"reasoning": "easy"}, "leaves out its thoughts"), ({"thinking": "easy"}, "leaves out its thoughts")],
)  # fmt: skip
def test_what_a_template_would_leave_out_is_refused_by_row(read: Read, change: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=f"row 0: .*{why}"):
        read({"messages": [ASK, ANSWER | change]})
    with pytest.raises(InputError, match="row 0: functions is OpenAI's old form"):
        read({"messages": [ASK, ANSWER], "functions": [{"name": "look"}]})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_learned_whatever_their_name(read: Read, chat_tokenizer: Any, name: str) -> None:
    template = CHATML.replace("{{ m.content }}", "{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}")
    (row,) = read({"messages": [ASK, ANSWER | {name: "easy"}]}, template=template).rows

    assert text(chat_tokenizer, row, learned=True) == "(easy)4<|im_end|>"


def test_a_turn_of_weight_0_is_not_learned(read: Read, chat_tokenizer: Any) -> None:
    (row,) = read({"messages": [ASK, ANSWER | {"weight": 0}, AGAIN, SECOND | {"weight": 1}]}).rows

    assert text(chat_tokenizer, row, learned=True) == "6<|im_end|>"


@pytest.mark.parametrize("arguments", ["t=a", '["a"]', '{"t": ', ["a"], 5, "null", '{"t": NaN}'])
def test_arguments_that_are_no_json_are_refused_by_row(read: Read, arguments: str) -> None:
    with pytest.raises(InputError, match=r"row 0: messages\[1\]\.tool_calls\[0\].* is not the JSON of an object"):
        read(calling(arguments), template=ARGUMENTS)


@pytest.mark.parametrize(
    "content", ["Close the block with `</think>`.", "Write </think> at the end.", "<think>a `</think>` b</think>4"]
)
def test_a_quoted_tag_in_a_content_is_never_torn_into_a_thought(read: Read, chat_tokenizer: Any, content: str) -> None:
    row = {"messages": [ASK, {"role": "assistant", "content": content}]}

    (learned,) = read(row).rows
    assert text(chat_tokenizer, learned, learned=True) == f"{content}<|im_end|>"
    tearing = ARGUMENTS.replace("{{ m.content or '' }}", "{{ (m.content or '').split('</think>')[-1] }}")
    with pytest.raises(InputError, match="takes a </think> in its content for the end of a thought"):
        read(row, template=tearing)


def pictured_rows(tmp_path: Path, *rows: Any, **data: Any) -> tuple[Any, demonstrations.Demonstrations]:
    """Read rows as a model that reads pictures does. Return its tokenizer and the demonstrations."""
    model = save_picture_model(tmp_path / "model", "qwen2_5_vl")
    (tmp_path / "blue.png").write_bytes(picture((0, 0, 255)))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    warmup = {"num_steps": 1, "files": [str(tmp_path / "rows.jsonl")], "max_tokens": 300}
    config = Config.model_validate({"model": {"path": str(model)}, "warmup": warmup, "data": data})
    return load_tokenizer(config.model), read_demonstrations(config, config.warmup.files)


def test_pictures_of_a_conversation_are_read_and_not_learned(tmp_path: Path) -> None:
    red = f"data:image/png;base64,{base64.b64encode(picture(size=(112, 56))).decode()}"
    asked = [{"role": "user", "content": "<image>Which?"}, ANSWER, {"role": "user", "content": "And <image>?"}, SECOND]
    tokenizer, found = pictured_rows(
        tmp_path, {"messages": asked, "images": [red, "blue.png"]}, {"messages": [ASK, ANSWER]}
    )

    with_pictures, plain = found.rows
    assert text(tokenizer, with_pictures, learned=True) == "4<|im_end|>6<|im_end|>"
    told = text(tokenizer, with_pictures, learned=False)
    assert told.count("<|vision_start|>" + "<|image_pad|>" * 8 + "<|vision_end|>Which?") == 1
    assert told.count("And <|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>?") == 1
    wide, blue = picture(size=(112, 56)), picture((0, 0, 255))
    assert [each.sha256 for each in with_pictures.media] == [hash_bytes(wide), hash_bytes(blue)]
    assert found.pictures == {hash_bytes(wide): wide, hash_bytes(blue): blue}
    assert plain.media == ()


def test_rows_whose_pictures_cannot_be_placed_are_named(read: Read, tmp_path: Path) -> None:
    conversation = {"messages": [ASK, ANSWER], "images": ["blue.png"]}
    with pytest.raises(InputError, match=r"rows\.jsonl: row 0: the row has images, which need a model"):
        read(conversation)
    with pytest.raises(InputError, match="row 0: the row has images, which need messages"):
        pictured_rows(tmp_path, {"prompt": "2+2=", "completion": "4", "images": ["blue.png"]})
    with pytest.raises(InputError, match=r"row 0: picture .*lost\.png can't be read"):
        pictured_rows(tmp_path, conversation | {"images": ["lost.png"]})

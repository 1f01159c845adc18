"""A model's tokenizer as we read it and as transformers does: the same ids, texts and prompts, for every template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from rayapp.config.sections import ModelSection
from rayapp.storage.models.tokenizer import ModelTokenizer, load_tokenizer

DATA = Path(__file__).parents[2] / "data"
SHIPPED = Path(__file__).parents[3] / "rayapp" / "rollout" / "agent" / "templates"
TEMPLATES = {
    file.stem: file for folder in (DATA / "chat_templates", SHIPPED) for file in sorted(folder.glob("*.jinja"))
}
TEXTS = [
    "",
    " ",
    "a b\n\n c",
    "é漢😀\u0301",
    "<|im_end|><s>[INST] x</s>",
    "don't 12,345 !",
    "\ud7ff\u2028\x00",
    "<think>\n",
]
CALL = {"id": "call00000", "type": "function", "function": {"name": "run", "arguments": {"code": "a < b & 'é'"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Runs <code>.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
USER, SYSTEM = {"role": "user", "content": "2 + 2 < 5?"}, {"role": "system", "content": "Be brief."}
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([USER], None),
    ([SYSTEM, USER, {"role": "assistant", "content": "Yes."}, USER], None),
    ([USER], [TOOL]),
    ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
      {"role": "tool", "content": "4", "name": "run", "tool_call_id": "call00000"}], [TOOL]),
]  # fmt: skip


def both(folder: Path) -> tuple[ModelTokenizer, Any]:
    ours = load_tokenizer(ModelSection(path=str(folder)))
    assert isinstance(ours, ModelTokenizer)
    return ours, AutoTokenizer.from_pretrained(folder)


def same(folder: Path) -> ModelTokenizer:
    """Compare what does not depend on a template."""
    ours, theirs = both(folder)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.get_vocab() == theirs.get_vocab()
    assert {key: str(token) for key, token in ours.added_tokens_decoder.items()} == {
        key: str(token) for key, token in theirs.added_tokens_decoder.items()
    }
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    return ours


def written(render: Callable[[], Any]) -> tuple[str, str]:
    """Return the text, or the name and beginning of the error."""
    try:
        return "", str(render())
    except Exception as error:
        return type(error).__name__, str(error)[:40]


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_of_every_template_are_transformers_own(chat_family: Any, tmp_path: Path, name: str) -> None:
    family = chat_family(name) if name != "chatml_hermes" else chat_family("qwen3_coder")
    family.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name].read_text())

    same(tmp_path)

    ours, theirs = both(tmp_path)
    for messages, tools in CONVERSATIONS:
        for opened in (True, False):
            options: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": opened}
            expected = written(lambda m=messages, o=options: theirs.apply_chat_template(m, **o))
            assert written(lambda m=messages, o=options: ours.apply_chat_template(m, **o)) == expected


ODD = """{%- generation %}{{ bos_token }}{% endgeneration %}
{% for message in messages %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {{ message | tojson }}{{ message.content | tojson(indent=2) }}{{ extra }}
{% endfor %}
{{ strftime_now('%Y') }}{{ eos_token }}{{ documents is none }}
{% if add_generation_prompt %}{{ raise_exception('no') }}{% endif %}
"""


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """A tokenizer with all that files may say: merges, normalizer, tokens before a text, tokens that it lacks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate([*alphabet, "ab", "Ġa", "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "a")]))
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(r"\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": False, "normalized": False,
                      "single_word": False},
        "eos_token": "</s>",
        "unk_token": None,
        "pad_token": "[PAD]",
        "image_token": "<image>",
        "additional_special_tokens": ["<tool>"],
        "clean_up_tokenization_spaces": True,
        "chat_template": [{"name": "default", "template": ODD}, {"name": "tool_use", "template": "{{ tools|tojson }}"}],
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_all_that_a_tokenizers_files_may_say_is_read_as_transformers_does(pieces: Path) -> None:
    same(pieces)
    ours, theirs = both(pieces)

    @given(text=st.text(max_size=40))
    def is_read_alike(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))

    is_read_alike()


def test_a_template_finds_the_environment_of_transformers(pieces: Path) -> None:
    ours, theirs = both(pieces)
    for tools in (None, [TOOL]):
        options: dict[str, Any] = {"tools": tools, "tokenize": False, "extra": "é<"}
        assert ours.apply_chat_template([USER, SYSTEM, USER], **options) == theirs.apply_chat_template(
            [USER, SYSTEM, USER], **options
        )
    with pytest.raises(jinja2.TemplateError, match="no"):
        ours.apply_chat_template([USER], add_generation_prompt=True)
    own: dict[str, Any] = {"chat_template": "{{ messages[0].content }}{{ eos_token }}", "tokenize": False}
    assert ours.apply_chat_template([USER], **own) == theirs.apply_chat_template([USER], **own)


def test_a_model_without_a_template_says_so(tiny_model: Path) -> None:
    ours, _ = both(tiny_model)
    same(tiny_model)

    assert not ours.chat_template
    with pytest.raises(ValueError, match="has no chat template"):
        ours.apply_chat_template([USER])
    with pytest.raises(ValueError, match="there are no messages"):
        ours.apply_chat_template([], chat_template="{{ messages }}")


def test_variables_of_the_config_are_in_every_rendering(tmp_path: Path, chat_family: Any, pieces: Path) -> None:
    fast = tmp_path / "fast"
    chat_family("qwen3_coder").tokenizer.save_pretrained(fast)
    plain = json.loads((pieces / "tokenizer_config.json").read_text()) | {"auto_map": {}}
    (pieces / "tokenizer_config.json").write_text(json.dumps(plain))
    for folder in (fast, pieces):  # the second one is read by transformers
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}:{{ enable_thinking }}")
        tokenizer: Any = load_tokenizer(ModelSection(path=str(folder)), {"enable_thinking": False})
        options = {"tokenize": False, "add_generation_prompt": True}
        assert isinstance(tokenizer, ModelTokenizer) is (folder == fast)
        assert tokenizer.apply_chat_template([USER], **options) == f"{USER['content']}:False"
        assert tokenizer.apply_chat_template([USER], **options, enable_thinking=True).endswith(":True")


def test_what_only_transformers_can_read_is_read_by_it(pieces: Path, tiny_model: Path) -> None:
    settings = json.loads((pieces / "tokenizer_config.json").read_text())
    tokenizer = json.loads((tiny_model / "tokenizer.json").read_text())
    (pieces / "tokenizer.json").write_text(json.dumps(tokenizer))  # of words: blanks would be removed
    (pieces / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))

    assert not isinstance(load_tokenizer(ModelSection(path=str(pieces))), ModelTokenizer)

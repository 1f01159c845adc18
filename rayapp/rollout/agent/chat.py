"""Renders the model's chat template to token ids: the prompt with its tools, and the tokens after a sampled turn.

Sampled tokens are never rendered again: the prompt of turn n + 1 is exactly the prompt of turn n + sampled ids +
suffix. The suffix is the text that the template writes after a placeholder for the assistant's message; the placeholder
has calls for templates that write tool results only after calls (Mistral, gpt-oss).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from rayapp.core.errors import ConfigError
from rayapp.rollout.agent.text import Neutralizer, frame, join, marks
from rayapp.tools.base import SampleCall, ToolSchema

Message = Mapping[str, Any]
Content = str | list[dict[str, str]]  # a text, or parts with pictures
_STAND_IN = "Stand-in-for-what-was-sampled"
_END_TOKENS = 32
_QUESTION: Message = {"role": "user", "content": "Question"}
_ANSWER: Message = {"role": "assistant", "content": _STAND_IN}
_WORD, _NO_WORD = re.compile(r"\w"), re.compile(r"[^\w\s\u2581]")
_RESULTS = ("result-of-the-first-call", "result-of-the-second-call")
# Limits of frames in the cache, of messages of a frame, and of characters of its names and ids, for hostile agents.
_MOST_FRAMES, _MOST_FRAMED, _MOST_KEY_CHARS = 256, 64, 4096
_FRAMED = {"role", "name", "content", "tool_call_id"}


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer's interface that multi-turn rollouts use."""

    @property
    def all_special_tokens(self) -> list[str]: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


class ChatFormat:
    """Renders the chat template of a model, with one set of tools, to token ids. `template` is Jinja text (empty: the
    tokenizer's own), `name` the model's. ConfigError: there is none, or it ignores tools or their results."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        tools: Sequence[ToolSchema] = (),
        *,
        template: str = "",
        name: str = "the model",
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.tokenizer = tokenizer
        self._name = name
        self._template = template
        self._schemas = tuple(tools)
        self._tools = [tool.as_openai() for tool in tools]
        self._options: dict[str, Any] = dict(variables) | ({"chat_template": template} if template else {})
        self._special_ids = special_ids(tokenizer)
        self._wants_parts = False  # the template writes contents only as lists of parts, as SmolVLM2's does
        self._end_text = self._end_of_turn()
        self._end_ids = self._encode(self._end_text)
        self._needs_calls = False
        self._head_ids = self._end_ids
        self._neutralize = Neutralizer(_added_tokens(tokenizer))
        # Roles, names and call ids of messages -> the texts around their contents (`text.frame`); None if not
        # cacheable.
        self._frames: dict[tuple[tuple[str | None, ...], ...], tuple[str, ...] | None] = {}
        if tools:
            self._check_tools()

    def without_tools(self) -> ChatFormat:
        return ChatFormat(self.tokenizer, (), template=self._template, name=self._name)

    def may_read(self, variable: str) -> bool:
        texts = self._template or getattr(self.tokenizer, "chat_template", None) or ""
        text = "\n".join(map(str, texts.values())) if isinstance(texts, dict) else str(texts)
        return re.search(rf"\b{re.escape(variable)}\b", text) is not None

    @property
    def has_tools(self) -> bool:
        return bool(self._schemas)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a prompt: tools, conversation so far, and the beginning of the policy's turn."""
        return self._encode(self.render(messages))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the text that `prompt_ids` encodes."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                self._given(messages),
                tools=self._tools or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._options,
            )
        except Exception as error:  # boundary: a template is a program that may raise anything
            raise ConfigError(f"the chat template of {self._name} fails: {type(error).__name__}: {error}") from error
        return text

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a sampled turn, with special tokens (for tool parsers) but not those that end the turn."""
        return self.tokenizer.decode(list(token_ids[: self.num_said(token_ids)]), skip_special_tokens=False)

    def end_of(self, prompt_ids: Sequence[int]) -> str:
        """Return the end of a prompt's text. Some templates write `<think>` at the beginning of the policy's turn."""
        return str(self.tokenizer.decode(list(prompt_ids[-_END_TOKENS:]), skip_special_tokens=False))

    def num_said(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens before those that end the turn, or only begin the template's end of a turn."""
        kept = len(token_ids) - _overlap(token_ids, self._end_ids)
        return kept - 1 if kept == len(token_ids) and self._ends_otherwise(token_ids) else kept

    def suffix_ids(
        self, sampled_ids: Sequence[int], tool_results: Sequence[Content], tool_names: Sequence[str] = ()
    ) -> list[int]:
        """Return the tokens between a sampled turn and the next one, for results of tools in the order of the calls."""
        return self.continuation_ids(sampled_ids, _results(tool_results, tool_names))

    def continuation_ids(self, sampled_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens between a sampled turn and the next one, which are not trained on. Control tokens in the
        messages are broken up; a part of the turn's end that was sampled is not repeated."""
        ids = self._encode(self._written([self.harmless(message) for message in messages]))
        repeated = _overlap(sampled_ids, ids[: len(self._head_ids)])
        if not repeated and self._end_ids and self._ends_otherwise(sampled_ids):
            # Llama ends a turn with calls by <|eom_id|>; the template's <|eot_id|> would end the turn twice.
            repeated = 1
        return ids[repeated:]

    def harmless(self, data: Any) -> Any:
        """Return a copy of a message, or of other JSON data, with the model's control tokens broken up."""
        if isinstance(data, str):
            return self._neutralize(data)
        if isinstance(data, Mapping):
            return {self.harmless(key): self.harmless(value) for key, value in data.items()}
        return [self.harmless(each) for each in data] if isinstance(data, list | tuple) else data

    def sample_call(self) -> SampleCall | None:
        """Return an example call of one of the tools, as the template writes it; None if it writes none."""
        tool = next((tool for tool in self._schemas if _sample_arguments(tool)), self._schemas[0])
        arguments = _sample_arguments(tool)
        texts = [
            text
            for content in ("", None)
            for given in (arguments, json.dumps(arguments))
            if (text := self._said(_call(tool.name, given), content)) and tool.name in text
        ]
        return SampleCall(texts=tuple(dict.fromkeys(texts)), name=tool.name, arguments=arguments) if texts else None

    def _said(self, call: Message, content: str | None) -> str:
        try:
            asked = self.render([_QUESTION])
            told = self.render(
                [_QUESTION, {"role": "assistant", "content": content, "tool_calls": [call]}],
                add_generation_prompt=False,
            )
        except ConfigError:
            return ""
        asked_ids, told_ids = self._encode(asked), self._encode(told)
        # Compare token by token, because the generation prompt may differ from the beginning of a finished turn: it may
        # open a thought, and finished turns may have no thoughts.
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(asked_ids, told_ids, strict=False))
        return self.turn_text(told_ids[len(list(shared)) :])

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _ends_otherwise(self, token_ids: Sequence[int]) -> bool:
        # An engine stops only at tokens that end turns, so any other special token at the end does so, too.
        return bool(token_ids) and token_ids[-1] in self._special_ids

    def _written(self, messages: Sequence[Message]) -> str:
        """Return the text of `_after_turn`, from a cached frame if there is one."""
        has_parts = any(not isinstance(message["content"], str) for message in messages)
        if has_parts or len(messages) > _MOST_FRAMED or any(message.keys() - _FRAMED for message in messages):
            return self._after_turn(messages)
        key = tuple((message["role"], message.get("name"), message.get("tool_call_id")) for message in messages)
        if sum(len(part or "") for parts in key for part in parts) > _MOST_KEY_CHARS:
            return self._after_turn(messages)
        frames = self._frames  # keep a local reference: threads of several sessions call this method
        if key not in frames:
            if len(frames) >= _MOST_FRAMES:
                self._frames = frames = {}
            frames[key] = frame(lambda texts: self._after_turn(_saying(messages, texts)), len(messages))
        around = frames[key]
        if around is None:
            return self._after_turn(messages)
        return join(around, [message["content"] for message in messages])

    def _after_turn(self, messages: Sequence[Message]) -> str:
        results = list(takewhile(lambda message: message["role"] == "tool", messages))
        told: list[Message] = [{**result, "tool_call_id": _call_id(i)} for i, result in enumerate(results)]
        told += messages[len(results) :]
        if not results or not self._needs_calls:
            return self._plain([_QUESTION, _ANSWER, *told]).partition(_STAND_IN)[2]
        calls = [_call(result["name"], {}, i) for i, result in enumerate(results)]
        asked: list[Message] = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
        before = self._plain(asked, add_generation_prompt=False)
        return self._end_text + self._plain([*asked, *told]).removeprefix(before)

    def _plain(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        # Templates write tools above the first message; callers need only text below it.
        text: str = self.tokenizer.apply_chat_template(
            self._given(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._options,
        )
        return text

    def _given(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        texts = [each.get("content") if self._wants_parts else None for each in messages]
        parts = [{} if not isinstance(text, str) else {"content": [{"type": "text", "text": text}]} for text in texts]
        return [{**message, **part} for message, part in zip(messages, parts, strict=True)]

    def _end_of_turn(self) -> str:
        text = self.render([_QUESTION, _ANSWER], add_generation_prompt=False)
        if _STAND_IN not in text:
            self._wants_parts = True
            text = self.render([_QUESTION, _ANSWER], add_generation_prompt=False)
        if _STAND_IN not in text:
            raise ConfigError(
                f"the chat template of {self._name} does not write the content of assistant messages: name another "
                "template in agent.chat_template"
            )
        return text.rpartition(_STAND_IN)[2]

    def _check_tools(self) -> None:
        cure = (
            "Choose a model whose template writes tools (e.g. Qwen2.5-Instruct), or name such a template in "
            "agent.chat_template: a .jinja file, or the shipped chatml_hermes for models with ChatML"
        )
        prompt = self.render([_QUESTION])
        if missing := [tool.name for tool in self._schemas if tool.name not in prompt]:
            raise ConfigError(
                f"the chat template of {self._name} does not write the tools {', '.join(missing)}. {cure}."
            )
        try:
            rest = self._choose_form()
        except Exception as error:  # boundary: a template is a program that may raise anything
            raise ConfigError(
                f"the chat template of {self._name} can't write tool results: {type(error).__name__}: {error}. {cure}."
            ) from error
        if not self._is_whole(rest):
            raise ConfigError(f"the chat template of {self._name} does not write the results of tools. {cure}.")
        head, between, end = re.split("|".join(_RESULTS), rest, maxsplit=2)
        self._head_ids = self._encode(head)
        written = [head, between, end, *self._plain([_QUESTION]).split(_QUESTION["content"])]
        self._neutralize = Neutralizer({*_added_tokens(self.tokenizer), *marks(written)})

    def _choose_form(self) -> str:
        # Tries a turn with text first. If the template fails on it, later calls use a turn with calls, too.
        try:
            rest = self._after_turn(_results(_RESULTS))
            if self._is_whole(rest):
                return rest
        except (
            Exception
        ):  # boundary: a template may raise anything. If both forms fail, the error of the second one is raised
            rest = ""
        self._needs_calls = True
        return self._after_turn(_results(_RESULTS))

    def _is_whole(self, rest: str) -> bool:
        return all(text in rest for text in _RESULTS) and rest.startswith(self._end_text.rstrip())


def load_template(name_or_path: str) -> str:
    """Return the Jinja text of a file, or of a shipped template (`chatml_hermes`)."""
    folder = files("rayapp.rollout.agent") / "templates"
    shipped = {Path(entry.name).stem: entry for entry in folder.iterdir() if entry.name.endswith(".jinja")}
    if name_or_path in shipped:
        return shipped[name_or_path].read_text(encoding="utf-8")
    try:
        return Path(name_or_path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"chat template {name_or_path!r} can't be read: {error.strerror}. Name a .jinja file or one of: "
            f"{', '.join(shipped)}"
        ) from error


def _overlap(head: Sequence[int], tail: Sequence[int]) -> int:
    """Return the length of the longest sequence that ends `head` and begins `tail`."""
    for length in range(min(len(head), len(tail)), 0, -1):
        if list(head[len(head) - length :]) == list(tail[:length]):
            return length
    return 0


def _added(tokenizer: ChatTokenizer) -> Mapping[int, Any]:
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return added


def special_ids(tokenizer: ChatTokenizer) -> set[int]:
    """Return the ids of tokens with a role, such as eos, and of added tokens marked as special."""
    marked = (token_id for token_id, token in _added(tokenizer).items() if getattr(token, "special", False))
    return {*tokenizer.all_special_ids, *marked}


def _added_tokens(tokenizer: ChatTokenizer) -> set[str]:
    # Also control tokens that are not marked as special, such as DeepSeek's <｜User｜>; no plain words or blanks.
    tokens = {*tokenizer.all_special_tokens, *(str(token) for token in _added(tokenizer).values())}
    return {token for token in tokens if _WORD.search(token) and _NO_WORD.search(token)}


def _results(texts: Sequence[Content], names: Sequence[str] = ()) -> list[Message]:
    known = [*names, *("unknown" for _ in texts[len(names) :])]
    return [{"role": "tool", "content": text, "name": name} for text, name in zip(texts, known, strict=True)]


def _saying(messages: Sequence[Message], texts: Sequence[str]) -> list[Message]:
    return [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]


def _call_id(index: int) -> str:
    # Mistral's templates require nine letters and digits.
    return f"call{index:05d}"


def _call(name: str, arguments: object, index: int = 0) -> Message:
    return {"id": _call_id(index), "type": "function", "function": {"name": name, "arguments": arguments}}


def _sample_arguments(tool: ToolSchema) -> dict[str, object]:
    """Return strings and integers, the types that every call format can write."""
    samples: Mapping[object, object] = {"string": "some text", "integer": 3}
    properties = tool.parameters.get("properties") or {}
    return {
        name: samples[part["type"]]
        for name, part in properties.items()
        if isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in samples
    }

"""The model's chat template as token ids: the prompt with its tools, and what follows a sampled turn.

    prompt_ids(messages, tools)                    rendered once per trajectory
    suffix_ids(sampled ids, tool messages)         end of the turn, tool results, opening of the next turn

Called by the agent loop. What the policy sampled is never rendered again: the suffix is what the template writes after
a stand-in for the assistant's text, so turn n+1's prompt is turn n's prompt + sampled ids + suffix, id by id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from rayapp.agent.cutting import Neutralizer
from rayapp.errors import ConfigError
from rayapp.tools.base import ToolSchema

Message = Mapping[str, Any]
_STAND_IN = "Stand-in-for-what-was-sampled"
_QUESTION: Message = {"role": "user", "content": "Question"}
_ANSWER: Message = {"role": "assistant", "content": _STAND_IN}


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that multi-turn rollouts use."""

    @property
    def all_special_tokens(self) -> list[str]: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


class ChatFormat:
    """See the module.

    Args:
        tokenizer: of the model.
        tools: all that the policy may call.
        template: Jinja text that replaces the tokenizer's own template; empty keeps that.
        name: of the model, for messages.
    Raises:
        ConfigError: there is no template, or it has no place for tools or for their results.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, tools: Sequence[ToolSchema] = (), *, template: str = "", name: str = "the model"
    ) -> None:
        self.tokenizer = tokenizer
        self._name = name
        self._template = template
        self._tools = [tool.as_openai() for tool in tools]
        self._options: dict[str, Any] = {"chat_template": template} if template else {}
        self._eos_id: int | None = getattr(tokenizer, "eos_token_id", None)
        self._neutralize = Neutralizer(_control_tokens(tokenizer))
        self._end_text = self._end_of_turn()
        self._end_ids = tokenizer.encode(self._end_text, add_special_tokens=False)
        self._check_tools(tools)

    def without_tools(self) -> ChatFormat:
        """The same for prompts that tell of no tools."""
        return ChatFormat(self.tokenizer, (), template=self._template, name=self._name)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The conversation so far, the tools, and the opening of the policy's turn."""
        text = self.render(messages)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """As `prompt_ids`, as text.

        Raises:
            ConfigError: the template refuses these messages.
        """
        try:
            text: str = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._tools or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._options,
            )
        except Exception as error:  # boundary: a template is a program that may raise anything
            raise ConfigError(f"the chat template of {self._name} fails: {type(error).__name__}: {error}") from error
        return text

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """What the policy wrote, with the tokens that a tool parser looks for and without the end of the turn."""
        kept = len(token_ids) - _overlap(token_ids, self._end_ids)
        if kept and token_ids[kept - 1] == self._eos_id:
            kept -= 1
        return self.tokenizer.decode(list(token_ids[:kept]), skip_special_tokens=False)

    def suffix_ids(self, sampled_ids: Sequence[int], tool_texts: Sequence[str]) -> list[int]:
        """What stands between a sampled turn and the next: never sampled, so never trained on.

        Args:
            sampled_ids: the turn; what it already holds of the turn's end is not repeated.
            tool_texts: results in the order of the calls. Control tokens of the model in them are broken up.
        """
        rest = self._after_answer([{"role": "tool", "content": self._neutralize(text)} for text in tool_texts])
        ids = self.tokenizer.encode(rest, add_special_tokens=False)
        return ids[_overlap(sampled_ids, ids[: len(self._end_ids)]) :]

    def _after_answer(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        # Without the tools, which templates put before the first message: the text would be long, and is cut off.
        text: str = self.tokenizer.apply_chat_template(
            [dict(message) for message in (_QUESTION, _ANSWER, *messages)],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._options,
        )
        return text.partition(_STAND_IN)[2]

    def _end_of_turn(self) -> str:
        text = self.render([_QUESTION, _ANSWER], add_generation_prompt=False)
        if _STAND_IN not in text:
            raise ConfigError(f"the chat template of {self._name} does not write out what the assistant said")
        return text.rpartition(_STAND_IN)[2]

    def _check_tools(self, tools: Sequence[ToolSchema]) -> None:
        cure = (
            "Choose a model whose template has tools (e.g. Qwen2.5-Instruct), or name a template that has: a .jinja "
            "file, or the shipped chatml_hermes for models that speak ChatML"
        )
        prompt = self.render([_QUESTION])
        if missing := [tool.name for tool in tools if tool.name not in prompt]:
            raise ConfigError(
                f"the chat template of {self._name} has no place for tools: it leaves out {', '.join(missing)}. {cure}."
            )
        if not tools:
            return
        results = ["result-of-the-first-call", "result-of-the-second-call"]
        try:
            rest = self._after_answer([{"role": "tool", "content": text} for text in results])
        except Exception as error:  # boundary: as in render
            raise ConfigError(
                f"the chat template of {self._name} can't write tool results: {type(error).__name__}: {error}. {cure}."
            ) from error
        if not all(text in rest for text in results) or not rest.startswith(self._end_text.rstrip()):
            raise ConfigError(f"the chat template of {self._name} leaves out the results of tools. {cure}.")


def load_template(name_or_path: str) -> str:
    """Jinja text: of a file, or of a template shipped with this application (`chatml_hermes`).

    Raises:
        ConfigError: there is neither.
    """
    folder = files("rayapp.agent") / "templates"
    shipped = {Path(entry.name).stem: entry for entry in folder.iterdir() if entry.name.endswith(".jinja")}
    if name_or_path in shipped:
        return shipped[name_or_path].read_text(encoding="utf-8")
    try:
        return Path(name_or_path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"chat template {name_or_path!r}: {error.strerror}. Give a .jinja file or one of: {', '.join(shipped)}"
        ) from error


def _overlap(head: Sequence[int], tail: Sequence[int]) -> int:
    """Length of the longest end of `head` that `tail` begins with."""
    for length in range(min(len(head), len(tail)), 0, -1):
        if list(head[len(head) - length :]) == list(tail[:length]):
            return length
    return 0


def _control_tokens(tokenizer: ChatTokenizer) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        *tokenizer.all_special_tokens,
        *(str(token) for token in added.values() if getattr(token, "special", False)),
    }

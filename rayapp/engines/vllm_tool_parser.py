"""vLLM's tool-call parsers as a `ToolCallParser`: one per model family, chosen by name (hermes for Qwen2.5 and 3).

Called by rollout workers through `load_parser`. Importing vLLM takes seconds and half a gigabyte, so nothing else
imports this module at its top. A parser is asked about one call at a time where its format marks calls' ends: vLLM's
own give up on a whole turn for one call that is malformed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from rayapp.agent.parsing import RawCall
from rayapp.errors import ConfigError
from rayapp.tools.base import ToolSchema

_START = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "start_token")
_END = ("tool_call_end_token", "tool_calls_end_token", "end_token")
_MALFORMED = "the parser {name} can't read it: it must be complete, valid JSON in the form the system prompt shows"


class VllmToolParser:
    """See `rayapp.agent.parsing.ToolCallParser`.

    Args:
        name: vLLM's name of the parser, e.g. hermes.
        tokenizer: of the model.
        tools: what the policy may call; some formats need the schemas to read argument types.
    Raises:
        ConfigError: vLLM has no such parser, or it doesn't fit the tokenizer.
    """

    def __init__(self, name: str, tokenizer: Any, tools: Sequence[ToolSchema]) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._name = name
        self._request = ChatCompletionRequest(
            model="policy",
            messages=[{"role": "user", "content": ""}],
            tools=[tool.as_openai() for tool in tools] or None,
        )
        self._parser = _make(name, tokenizer, self._request.tools)
        self._start = _token(self._parser, _START)
        self._block = _block_pattern(self._start, _token(self._parser, _END))
        # It logs a traceback for each malformed call, which is daily bread here.
        logging.getLogger(type(self._parser).__module__).setLevel(logging.CRITICAL)

    def parse(self, text: str) -> tuple[RawCall, ...]:
        if self._start and self._start not in text:
            return ()
        if self._block is None:
            return self._read(text)
        return tuple(call for match in self._block.finditer(text) for call in self._read(match.group()))

    def _read(self, text: str) -> tuple[RawCall, ...]:
        try:
            found = self._parser.extract_tool_calls(text, self._request)
        except Exception as error:  # boundary: what the policy wrote may break any parser
            return (RawCall(problem=f"{_MALFORMED.format(name=self._name)} ({type(error).__name__})"),)
        if not found.tools_called:
            return (RawCall(problem=_MALFORMED.format(name=self._name)),) if self._start else ()
        return tuple(RawCall(name=call.function.name, arguments=call.function.arguments) for call in found.tool_calls)


def load_parser(name: str, tokenizer: Any, tools: Sequence[ToolSchema]) -> VllmToolParser:
    """See `VllmToolParser`."""
    return VllmToolParser(name, tokenizer, tools)


def _make(name: str, tokenizer: Any, tools: Any) -> Any:
    from vllm.tool_parsers import ToolParserManager

    try:
        kind = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ConfigError(f"vLLM has no tool parser {name!r}; it has: {known}") from None
    try:
        return kind(tokenizer, tools)
    except Exception as error:  # boundary: parsers look up tokens of their family in the tokenizer
        raise ConfigError(
            f"vLLM's tool parser {name!r} doesn't fit this model's tokenizer: {type(error).__name__}: {error}"
        ) from error


def _token(parser: Any, names: Sequence[str]) -> str:
    found = (getattr(parser, name, None) for name in names)
    return next((token for token in found if isinstance(token, str) and token), "")


def _block_pattern(start: str, end: str) -> re.Pattern[str] | None:
    if not start or not end:
        return None
    begin, stop = re.escape(start), re.escape(end)
    return re.compile(f"{begin}.*?(?:{stop}|(?={begin})|\\Z)", re.DOTALL)

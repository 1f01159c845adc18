"""vLLM's tool-call parsers as a `ToolCallParser`: one per model family, chosen by name (hermes for Qwen2.5 and 3).

Called by rollout workers through `load_parser`. Importing vLLM takes seconds and half a gigabyte, so nothing else
imports this module at its top. A parser is asked about one call at a time where its format marks calls' ends: vLLM's
own give up on a whole turn for one call that is malformed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from rayapp.agent.parsing import MAX_CALLS, RawCall, SampleCall
from rayapp.errors import ConfigError
from rayapp.tools.base import ToolSchema

log = logging.getLogger(__name__)
_START = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "start_token")
_END = ("tool_call_end_token", "tool_calls_end_token", "end_token")
_MALFORMED = "the parser {name} can't read it: it must be complete, valid JSON in the form the system prompt shows"


class VllmToolParser:
    """See `rayapp.agent.parsing.ToolCallParser`.

    Args:
        name: vLLM's name of the parser, e.g. hermes.
        tokenizer: of the model.
        tools: what the policy may call; some formats need the schemas to read argument types.
        by_call: show it one call at a time, where its format marks where calls begin and end; else the whole turn.
    Raises:
        ConfigError: vLLM has no such parser, or it doesn't fit the tokenizer.
    """

    def __init__(self, name: str, tokenizer: Any, tools: Sequence[ToolSchema], *, by_call: bool = True) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._name = name
        self._request = ChatCompletionRequest(
            model="policy",
            messages=[{"role": "user", "content": ""}],
            tools=[tool.as_openai() for tool in tools] or None,
        )
        self._parser = _make(name, tokenizer, self._request.tools)
        self._start = _token(self._parser, _START)
        self._is_gated = by_call
        self._block = _block_pattern(self._start, _token(self._parser, _END)) if by_call else None
        # It logs a traceback for each malformed call, which is daily bread here.
        logging.getLogger(type(self._parser).__module__).setLevel(logging.CRITICAL)

    def parse(self, text: str) -> tuple[RawCall, ...]:
        if self._is_gated and self._start and self._start not in text:
            return ()
        if self._block is None:
            return self._read(text)
        blocks = islice(self._block.finditer(text), MAX_CALLS + 1)
        return tuple(call for match in blocks for call in self._read(match.group()))

    def _read(self, text: str) -> tuple[RawCall, ...]:
        try:
            found = self._parser.extract_tool_calls(text, self._request)
        except Exception as error:  # boundary: what the policy wrote may break any parser
            return (RawCall(problem=f"{_MALFORMED.format(name=self._name)} ({type(error).__name__})"),)
        if not found.tools_called:
            is_meant = bool(self._start) and self._start in text
            return (RawCall(problem=_MALFORMED.format(name=self._name)),) if is_meant else ()
        return tuple(RawCall(name=call.function.name, arguments=call.function.arguments) for call in found.tool_calls)


def load_parser(
    name: str, tokenizer: Any, tools: Sequence[ToolSchema], sample: SampleCall | None = None
) -> VllmToolParser:
    """The parser of that name, in a way of asking it that finds the sample.

    Args:
        sample: a call as the model's template writes it; None takes the parser as it is.
    Raises:
        ConfigError: as `VllmToolParser`, or it doesn't find the sample; the message names parsers that do.
    """
    parser = VllmToolParser(name, tokenizer, tools)
    if sample is None:
        return parser
    found = _fitting(name, tokenizer, tools, sample)
    if found is None:
        others = [other for other in _known() if other != name and _fitting(other, tokenizer, tools, sample)]
        raise ConfigError(
            f"vLLM's tool parser {name!r} doesn't find a call that this model's chat template writes: "
            f"{sample.texts[0][:300]!r}. Set agent.tool_parser to one that does: {', '.join(others) or 'vLLM has none'}"
        )
    return found


def _fitting(name: str, tokenizer: Any, tools: Sequence[ToolSchema], sample: SampleCall) -> VllmToolParser | None:
    """Call by call if that works: then one that is malformed doesn't take the others along."""
    for by_call in (True, False):
        try:
            parser = VllmToolParser(name, tokenizer, tools, by_call=by_call)
            if sample.is_found_by(parser):
                return parser
        except Exception:  # boundary: as in _make, and a parser may need packages that are not here
            log.debug("tool parser %s", name, exc_info=True)
    return None


def _known() -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    return sorted(ToolParserManager.list_registered())


def _make(name: str, tokenizer: Any, tools: Any) -> Any:
    from vllm.tool_parsers import ToolParserManager

    try:
        kind = ToolParserManager.get_tool_parser(name)
    except KeyError:
        raise ConfigError(f"vLLM has no tool parser {name!r}; it has: {', '.join(_known())}") from None
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

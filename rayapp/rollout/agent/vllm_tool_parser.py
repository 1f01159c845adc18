"""vLLM's tool-call parsers as a `ToolCallParser`: one per model family, by name, or automatically for the template.

Importing vLLM takes seconds, so import this module only where it is used. If a format marks the ends of calls, each
call is parsed by itself: vLLM's parsers reject a whole turn for one malformed call. `HarmonyParser` reads the calls of
gpt-oss (vLLM's `openai` is a stub): messages whose head names a recipient, without thoughts.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import regex

from rayapp.core.errors import ConfigError
from rayapp.storage.models.families import family_of
from rayapp.tools.base import MAX_CALLS, RawCall, SampleCall, ToolCallParser, ToolSchema, with_whole_strings

_MESSAGE = re.compile(
    r"(?:\A|<\|start\|>)(?P<head>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
    r"(?P<body>.*?)(?=<\|(?:end|call|return|start)\|>|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"(?:^|\s)to=(?:functions\.)?([\w.-]+)")
# Head of a message that is not for the user: a call, or thoughts.
_BESIDE = re.compile(rf"{_RECIPIENT.pattern}|<\|channel\|>analysis")


class HarmonyParser:
    name = "openai"
    start = ""

    def parse(self, text: str) -> tuple[RawCall, ...]:
        found = ((_RECIPIENT.search(message["head"]), message["body"]) for message in _MESSAGE.finditer(text))
        calls = (RawCall(name=to[1], arguments=body.strip() or "{}") for to, body in found if to is not None)
        return tuple(islice(calls, MAX_CALLS + 1))

    def words(self, text: str) -> str:
        said = (message["body"] for message in _MESSAGE.finditer(text) if not _BESIDE.search(message["head"]))
        return "\n".join(said).strip()


log = logging.getLogger(__name__)
AUTO, DEFAULT = "auto", "hermes"
# Value of an argument in GLM's format, which has no escapes; and what stands in it for the end of a call's tags.
_VALUE, _HIDDEN = re.compile(r"<arg_value>.*?</arg_value>", re.DOTALL), "\ue000call>"
_START = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "start_token")
_END = ("tool_call_end_token", "tool_calls_end_token", "end_token")
_SEARCHES = ("search", "match", "fullmatch", "findall", "finditer", "split", "sub", "subn")
_PARSE_TIMEOUT_S = 1.0  # processor time for the calls of one turn; wall-clock time would depend on the load
_EVENTS_PER_LOOK = 16  # function calls and returns between two readings of the clock, which are system calls
_OTHER_TEMPLATE = "Set agent.chat_template to a template whose calls can be parsed, such as the shipped chatml_hermes."
_MALFORMED = (
    "the parser {name} can't read it: a call must be complete, valid JSON in the form that the system prompt shows"
)


class VllmToolParser:
    """Parser of tool calls that uses a parser of vLLM; `by_call` parses one call at a time if the format marks calls.
    ConfigError: vLLM has no such parser, or it doesn't fit the tokenizer."""

    def __init__(self, name: str, tokenizer: Any, tools: Sequence[ToolSchema], *, by_call: bool = True) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self.name = name
        self._request = ChatCompletionRequest(
            model="policy",
            messages=[{"role": "user", "content": ""}],
            tools=[tool.as_openai() for tool in tools] or None,
        )
        self._parser = _make(name, tokenizer, self._request.tools)
        self._start = _token(self._parser, _START)
        self._is_gated = by_call
        self._block = _block_pattern(self._start, _token(self._parser, _END)) if by_call else None
        _set_deadlines(self._parser)
        # vLLM's parser logs a traceback for each malformed call, and a policy writes many malformed calls.
        logging.getLogger(type(self._parser).__module__).setLevel(logging.CRITICAL)

    @property
    def start(self) -> str:
        return self._start if self._is_gated else ""

    def parse(self, text: str) -> tuple[RawCall, ...]:
        if self._is_gated and self._start and self._start not in text:
            return ()
        _DEADLINE.begin()
        text = _VALUE.sub(lambda value: value[0].replace("tool_call>", _HIDDEN), with_whole_strings(text, self._start))
        if self._block is None:
            return self._read(text)
        blocks = islice(self._block.finditer(text), MAX_CALLS + 1)
        return tuple(call for match in blocks for call in self._read(match.group()))

    def words(self, text: str) -> str:
        """Return the text before the first call, or what vLLM's parser returns if the format doesn't mark calls."""
        if self._start:
            return text.partition(self._start)[0].rstrip()
        _DEADLINE.begin()
        try:
            return _DEADLINE.keep(self._parser.extract_tool_calls, text, self._request).content or ""
        except Exception:  # the policy's text may break any parser
            return text

    def _read(self, text: str) -> tuple[RawCall, ...]:
        try:
            found = _DEADLINE.keep(self._parser.extract_tool_calls, text, self._request)
        except Exception as error:  # the policy's text may break any parser
            return (RawCall(problem=f"{_MALFORMED.format(name=self.name)} ({type(error).__name__})"),)
        if not found.tools_called:
            is_meant = bool(self._start) and self._start in text
            return (RawCall(problem=_MALFORMED.format(name=self.name)),) if is_meant else ()
        calls = (call.function for call in found.tool_calls)
        return tuple(RawCall(name=each.name, arguments=_shown(each.arguments)) for each in calls)


def _shown(arguments: str) -> str:
    return arguments.replace(_HIDDEN, "tool_call>").replace(json.dumps(_HIDDEN)[1:-1], "tool_call>")


def load_parser(
    name: str, tokenizer: Any, tools: Sequence[ToolSchema], sample: SampleCall | None = None
) -> ToolCallParser:
    """Return the parser of that name (auto: the first, from the model's family on), if it finds the sample call. A
    ConfigError names parsers that do."""
    if name == AUTO:
        return _chosen(tokenizer, tools, sample)
    parser = _open(name, tokenizer, tools)
    if sample is None:
        return parser
    found = _fitting(name, tokenizer, tools, sample)
    if found is None:
        others = [other for other in _known() if other != name and _fitting(other, tokenizer, tools, sample)]
        raise ConfigError(
            f"vLLM's tool parser {name!r} doesn't recognize the tool calls of this model's chat template, such as "
            f"{sample.texts[0][:300]!r}. "
            + (
                f"Set agent.tool_parser to a parser that recognizes them: {', '.join(others)}."
                if others
                else f"No other parser recognizes them. {_OTHER_TEMPLATE}"
            )
        )
    return found


def _chosen(tokenizer: Any, tools: Sequence[ToolSchema], sample: SampleCall | None) -> ToolCallParser:
    likely = dict.fromkeys([*_of_family(tokenizer), DEFAULT])
    if sample is None:
        return _open(DEFAULT if not tools else next(iter(likely)), tokenizer, tools)
    for name in dict.fromkeys([*likely, *_known()]):
        if (found := _fitting(name, tokenizer, tools, sample)) is not None:
            log.info("tool parser: %s", name)
            return found
    raise ConfigError(
        "none of vLLM's tool parsers recognizes the tool calls of this model's chat template, such as "
        f"{sample.texts[0][:300]!r}. {_OTHER_TEMPLATE}"
    )


def _of_family(tokenizer: Any) -> tuple[str, ...]:
    try:
        architecture = json.loads((Path(getattr(tokenizer, "name_or_path", "")) / "config.json").read_text())
        family = family_of(architecture)
    except (OSError, ValueError, AttributeError):
        return ()
    return family.parsers if family is not None else ()


def _open(name: str, tokenizer: Any, tools: Sequence[ToolSchema], *, by_call: bool = True) -> ToolCallParser:
    return HarmonyParser() if name == HarmonyParser.name else VllmToolParser(name, tokenizer, tools, by_call=by_call)


def _fitting(name: str, tokenizer: Any, tools: Sequence[ToolSchema], sample: SampleCall) -> ToolCallParser | None:
    """Return a parser that finds the sample, call by call first, where a malformed call does not affect others."""
    for by_call in (True, False):
        try:
            parser = _open(name, tokenizer, tools, by_call=by_call)
            if sample.is_found_by(parser):
                return parser
        except Exception:  # a parser may need tokens or packages that are missing
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
    except Exception as error:  # parsers look up tokens of their family in the tokenizer
        raise ConfigError(
            f"vLLM's tool parser {name!r} doesn't fit this model's tokenizer: {type(error).__name__}: {error}. Set "
            "agent.tool_parser to another parser."
        ) from error


class _Deadline:
    """Time limit of the current parse, one for the process: the agent loop runs parsers in one thread.

    Parsers take quadratic or cubic time for some texts (GLM's 14 s for 6 kB), and hold the GIL in regular expressions.
    So each search gets a timeout, and a profile function checks the limit at every few function calls.
    """

    def __init__(self) -> None:
        self._ends_at = 0.0
        self._num_events = 0
        self._is_kept = False

    def begin(self) -> None:
        self._ends_at = time.thread_time() + _PARSE_TIMEOUT_S

    def left_s(self) -> float | None:
        """Return the processor time left; None if no parse is running."""
        return max(0.001, self._ends_at - time.thread_time()) if self._is_kept else None

    def keep(self, extract: Callable[..., Any], *args: Any) -> Any:
        """Call `extract` under the deadline, whose TimeoutError is raised again if the parser catches it."""
        before, self._is_kept = sys.getprofile(), True
        sys.setprofile(self._check)
        try:
            return extract(*args)
        finally:
            sys.setprofile(before)
            self._is_kept = False

    def _check(self, frame: object, event: str, called: object) -> None:
        self._num_events += 1
        if self._num_events % _EVENTS_PER_LOOK or called is sys.setprofile:
            return
        if time.thread_time() > self._ends_at:
            raise TimeoutError(f"the parser used more than {_PARSE_TIMEOUT_S:g} s of processor time")


class _TimedPattern:
    """Pattern of the package regex, which vLLM's parsers use, with the deadline as its timeout."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._pattern, name)
        return partial(found, timeout=_DEADLINE.left_s()) if name in _SEARCHES else found


def _set_deadlines(parser: Any) -> None:
    kind = type(regex.compile(""))
    modules = [module for name, module in sys.modules.items() if name.startswith(("vllm.parser", "vllm.tool_parsers"))]
    for owner in [parser, *modules]:
        for name in dir(owner):
            if isinstance(pattern := getattr(owner, name, None), kind):
                setattr(owner, name, _TimedPattern(pattern))


def _token(parser: Any, names: Sequence[str]) -> str:
    found = (getattr(parser, name, None) for name in names)
    return next((token for token in found if isinstance(token, str) and token), "")


def _block_pattern(start: str, end: str) -> re.Pattern[str] | None:
    if not start or not end:
        return None
    begin, stop = re.escape(start), re.escape(end)
    return re.compile(f"{begin}.*?(?:{stop}|(?={begin})|\\Z)", re.DOTALL)


_DEADLINE = _Deadline()

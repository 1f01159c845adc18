"""Limits the forms that requests demand of answers (regular expressions, JSON schemas, grammars).

vLLM compiles a form inside its engine, which serves all requests: with 120,000 tokens, `[a-z]{1,10000}` needs 1.7 s and
24 MB. A form with too many states is refused; they are counted without building the automaton: a repetition multiplies
the states of its content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_STATES = 4_096  # each character of a pattern and each value of a JSON schema count as one
MAX_GRAMMAR_CHARS = 16 << 10
MAX_DEPTH = 32  # of a JSON schema
MAX_LOOPS = 2  # nested unlimited repetitions: an automaton tracks every way in which they can divide a text
_BOUNDS = ("maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties")
_REPEATED = re.compile(r"\{(\d{1,9})(?:(,)(\d{1,9})?)?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")


class _TooLargeError(Exception):
    """A form has too many states."""


def too_large(structured: Mapping[str, Any]) -> str:
    """Return why `SamplingParams.structured_outputs` is too large for the engine; empty if it is not."""
    try:
        for name, value in structured.items():
            _check(name, value)
    except _TooLargeError as error:
        return f"this constraint is too large for the engine: {error}"
    return ""


def _check(name: str, value: Any) -> None:
    if name == "regex":
        _limited(_pattern_states(value))
    elif name == "grammar":
        if len(value) > MAX_GRAMMAR_CHARS:
            raise _TooLargeError(
                f"its grammar has {len(value):,} characters: at most {MAX_GRAMMAR_CHARS:,} are allowed"
            )
        _limited(max((_times(found) for found in _REPEATED.finditer(value)), default=1))
    elif name in ("json", "structural_tag") and isinstance(value, str):
        try:
            _limited(_schema_states(json.loads(value), 0))
        except (ValueError, RecursionError):
            return  # not valid JSON: the engine reports what is wrong
    else:
        _limited(_schema_states(value, 0))


def _limited(states: int) -> int:
    if states > MAX_STATES:
        raise _TooLargeError(
            f"its automaton needs {states:,} or more states, and the maximum is {MAX_STATES:,}. Lower its repetition "
            "counts, e.g. maxItems, maxLength or {n,m}"
        )
    return states


def _schema_states(value: Any, depth: int) -> int:
    if depth > MAX_DEPTH:
        raise _TooLargeError(f"its schema is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return _limited(1 + sum(_schema_states(each, depth + 1) for each in value))
    if not isinstance(value, dict):
        return 1
    states = sum(_schema_states(each, depth + 1) for each in value.values())
    for name in ("pattern", "regex"):
        if isinstance(pattern := value.get(name), str):
            states += _pattern_states(pattern)
    states += sum(_pattern_states(each) for each in value.get("patternProperties") or ())
    bounds = [value[name] for name in _BOUNDS if isinstance(value.get(name), int)]
    return _limited((1 + states) * max([1, *bounds]))


def _pattern_states(pattern: str) -> int:
    # An item is a pair (states, depth of nested unlimited repetitions). `open_groups` has an item for each open group,
    # and `last` is the item to which a repetition would apply.
    open_groups, last, place = [(0, 0)], (0, 0), 0
    while place < len(pattern):
        states, loops = open_groups[-1]
        if repeated := _REPEATED.match(pattern, place):
            item = _limited(last[0] * _times(repeated)), last[1] + (repeated[2] == "," and not repeated[3])
            open_groups[-1], last, place = _with(states - last[0], loops, item), item, repeated.end()
            continue
        if pattern[place] in "*+":
            last = last[0], last[1] + 1
            open_groups[-1] = states, max(loops, last[1])
        elif pattern[place] == "(":
            open_groups.append((0, 0))
        elif pattern[place] == ")" and len(open_groups) > 1:
            last = open_groups.pop()
            open_groups[-1] = _with(*open_groups[-1], last)
        elif pattern[place] not in "?|^$":
            last = 1, 0
            open_groups[-1] = _with(states, loops, last)
        in_class = _CLASS.match(pattern, place)
        place = in_class.end() if in_class else place + (2 if pattern[place] == "\\" else 1)
        if open_groups[-1][1] > MAX_LOOPS:
            raise _TooLargeError(f"its pattern has more than {MAX_LOOPS} unlimited repetitions nested in each other")
        _limited(open_groups[-1][0])
    return sum(states for states, _ in open_groups)


def _with(states: int, loops: int, item: tuple[int, int]) -> tuple[int, int]:
    return states + item[0], max(loops, item[1])


def _times(repeated: re.Match[str]) -> int:
    return max(1, int(repeated[3] or repeated[1]))

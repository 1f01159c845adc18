"""Calls of a turn whose strings hold the tags of calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rayapp.tools.base import with_whole_strings
from support.hermes import HermesParser
from support.timing import takes_at_most_s

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def call(arguments: Any, **how: Any) -> str:
    return f"{OPEN}\n{json.dumps({'name': 'echo', 'arguments': arguments}, **how)}\n{CLOSE}"


@pytest.mark.parametrize(
    "arguments",
    [
        {"t": CLOSE},
        {"t": f"a{CLOSE}\n{OPEN}b"},
        {"t": [{"u": f"{CLOSE}{CLOSE}"}]},
        {CLOSE: 1},
        {"t": f'"{CLOSE}"'},
        {"t": f"\\{CLOSE}\\"},
        {"t": "\\u003c<"},
        {"t": f"é✓{CLOSE}"},
        {"t": call({"t": CLOSE})},
    ],
    ids=str,
)
@pytest.mark.parametrize("how", [{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}], ids=str)
def test_a_tag_in_a_string_of_a_call_does_not_end_it(arguments: Any, how: Any) -> None:
    made = call(arguments, **how)

    found = HermesParser().parse(f"Go.\n{made}\n{made}")

    assert [json.loads(each.arguments) for each in found] == [arguments, arguments]
    assert not any(each.problem for each in found)


@pytest.mark.parametrize(
    "text", ["a < b", f"{OPEN}f(a='<'){CLOSE}", f"{OPEN}<function=f>", OPEN, f'{OPEN}{{"a": "<', ""]
)
def test_text_outside_of_json_stays(text: str) -> None:
    assert with_whole_strings(text, OPEN) == text
    assert with_whole_strings(text, "") == text


@pytest.mark.parametrize("piece", [OPEN, f"{OPEN}{{", f'{OPEN}{{"a":"', f"{OPEN} ", "{", f'{OPEN}{{"a":' + "[" * 90])
def test_strings_are_found_in_linear_time(piece: str) -> None:
    with takes_at_most_s(1):
        with_whole_strings(piece * (1_000_000 // len(piece)), OPEN)

"""Files with a JSON value a line."""

from __future__ import annotations

import json

import pytest

from rayapp.core.errors import InputError
from rayapp.core.files import json_lines


def test_values_come_with_their_lines_and_empty_lines_without() -> None:
    text = '{"a": 1}\n\n[2]\r\n'

    assert list(json_lines(text.split("\n"), "rows.jsonl")) == [(1, {"a": 1}), (3, [2])]


def test_a_text_may_hold_what_python_calls_the_end_of_a_line() -> None:
    text = json.dumps("one\u2028two\x85three", ensure_ascii=False)

    assert list(json_lines(text.split("\n"), "rows.jsonl")) == [(1, "one\u2028two\x85three")]


def test_a_line_that_is_no_json_is_named() -> None:
    with pytest.raises(InputError, match=r"^rows.jsonl, line 2 is not JSON: "):
        list(json_lines(["1", "{"], "rows.jsonl"))

"""Files with a JSON value a line."""

from __future__ import annotations

import json

from rayapp.core.files import json_lines


def test_a_text_may_hold_what_python_calls_the_end_of_a_line() -> None:
    text = json.dumps("one\u2028two\x85three", ensure_ascii=False)

    assert list(json_lines(text.split("\n"), "rows.jsonl")) == [(1, "one\u2028two\x85three")]

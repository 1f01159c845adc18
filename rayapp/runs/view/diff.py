"""What changed between two texts, line by line and inside a line. Pure; called by the server for two completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

# difflib's time grows with the product of both lengths.
MAX_LINES = 1500
MAX_LINE_CHARS = 1000
_WORDS = re.compile(r"\w+|\s+|.", re.DOTALL)


def diff_lines(left: str, right: str) -> list[dict[str, Any]]:
    """Rows of a side-by-side view.

    Returns:
        {"op": equal | change | delete | insert, "left": pieces or None, "right": pieces or None}; a piece is
        [text, whether it differs].

    Example: "a\\nb" against "a\\nc" -> an equal row a, a change row [["b", True]] against [["c", True]].
    """
    left_lines, right_lines = _lines(left), _lines(right)
    rows: list[dict[str, Any]] = []
    for op, i1, i2, j1, j2 in SequenceMatcher(None, left_lines, right_lines, autojunk=False).get_opcodes():
        if op == "equal":
            rows += [_row("equal", [[line, False]], [[line, False]]) for line in left_lines[i1:i2]]
        else:
            rows += _changed(left_lines[i1:i2], right_lines[j1:j2])
    return rows


def _changed(left: Sequence[str], right: Sequence[str]) -> list[dict[str, Any]]:
    paired = min(len(left), len(right))
    rows = [_row("change", *_inside(a, b)) for a, b in zip(left[:paired], right[:paired], strict=True)]
    rows += [_row("delete", [[line, True]], None) for line in left[paired:]]
    rows += [_row("insert", None, [[line, True]]) for line in right[paired:]]
    return rows


def _inside(left: str, right: str) -> tuple[list[list[Any]], list[list[Any]]]:
    """Pieces of two lines, marked where they differ."""
    a, b = _WORDS.findall(left), _WORDS.findall(right)
    opcodes = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    pieces_left = [["".join(a[i1:i2]), op != "equal"] for op, i1, i2, _, _ in opcodes if i2 > i1]
    pieces_right = [["".join(b[j1:j2]), op != "equal"] for op, _, _, j1, j2 in opcodes if j2 > j1]
    return pieces_left, pieces_right


def _row(op: str, left: list[list[Any]] | None, right: list[list[Any]] | None) -> dict[str, Any]:
    return {"op": op, "left": left, "right": right}


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    shown = [line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]} …" for line in lines[:MAX_LINES]]
    return shown if len(lines) <= MAX_LINES else [*shown, f"… {len(lines) - MAX_LINES:,} more lines"]

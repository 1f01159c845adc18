"""Find the answer in a completion, and parse Python source in a process that has other threads.

Before Python 3.11.8 and 3.12.2 `ast.parse` fails if another thread parses at the same time (CPython's issue 106905), as
`traceback` does. So rayapp calls only the functions of this module.
"""

from __future__ import annotations

import ast
import gc
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
_ONE_PARSE = threading.Lock()
_MOST_SHOWN = 80
# Tags of thoughts. `"<think>`, `'</think>'` and `(.*)</think>"` are parts of strings. Both branches begin with `<`, as
# `re` is faster then.
_THOUGHTS = ("<think>", "<thinking>", "<thought>", "<reasoning>", "<seed:think>", "[THINK]")
_NAME = "(?:think(?:ing)?|thought|reasoning|seed:think)>"
_THOUGHT_TAG = re.compile(
    rf"""<(?<!["'`]<){_NAME}|<(?!(?<=(["'`])<)/[\w:]+>\1|(?<=[)*?}}\]]<)/[\w:]+>["'])(/{_NAME})"""
)


def answer_of(completion: str) -> str:
    """Return the answer of a completion, which rules, tests, tools and judges read: the text after the thoughts.

    Thoughts are the text up to the last `</think>`, and the text from a `<think>` that is never closed. Tags in quotes
    are plain text.
    """
    begin, end = 0, None
    for tag in _tags(completion):
        if tag[2]:
            begin, end = tag.end(), None
        elif end is None:
            end = tag.start()
    return completion[begin:end]


def _tags(text: str) -> Iterator[re.Match[str]]:
    # Mistral's tags are as long as the others: places stay.
    return _THOUGHT_TAG.finditer(text.replace("[THINK]", "<think>").replace("[/THINK]", "</think>"))


def spoken(completion: str, prompt: str) -> str:
    """Return a completion with the `<think>` with which its prompt (or its end) ends, unless it closes the thought."""
    is_open = prompt.rstrip().endswith(_THOUGHTS) and not thoughts_end(completion)
    return f"<think>{completion}" if is_open and not completion.lstrip().startswith(_THOUGHTS) else completion


def thoughts_end(completion: str) -> int:
    """Return the index after the last `</think>` that is not in quotes; 0 if there is none."""
    return max((tag.end() for tag in _tags(completion) if tag[2]), default=0)


def module(source: str) -> ast.Module:
    return _undisturbed(lambda: ast.parse(source))


def expression(source: str) -> ast.expr:
    """Return the syntax tree of one expression; spaces around it don't matter."""
    return _undisturbed(lambda: ast.parse(source.strip(), mode="eval").body)


def parse(source: str) -> ast.Module | None:
    """Return the syntax tree; None if the source does not parse."""
    try:
        return module(source)
    # NUL bytes and lone surrogates raise ValueError; deep nesting raises RecursionError or MemoryError.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def syntax_problem(source: str) -> str:
    """Return why `source` does not parse: line number, the parser's message, and the line. Empty if it parses."""
    try:
        module(source)
    except SyntaxError as error:
        line = (error.text or "").strip()[:_MOST_SHOWN]
        return f"line {error.lineno}: {error.msg}" + (f": `{line}`" if line else "")
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _undisturbed(parse: Callable[[], T]) -> T:
    # No other thread can run meanwhile; a garbage collection could run Python code, so collections are paused.
    with _ONE_PARSE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return parse()
        finally:
            if was_enabled:
                gc.enable()

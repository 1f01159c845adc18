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
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
_ONE_PARSE = threading.Lock()
_MOST_SHOWN = 80
# Tags of thoughts, as models and prompts write them. `"<think>`, `'</think>'` and `(.*)</think>"` are parts of strings;
# `Vec<Thought>` is a type. Tags with a prefix or suffix: `<seed:think>`, `<think_fast>`, `<ifm|think>`.
_WORD = "(?=[acrst])(?:think(?:ing)?|thoughts?|reason(?:ing)?|analysis|reflection|rationale|scratch_?pad|cot)"
_NAME = rf"(?:\w{{1,20}}[:|_])?(?:ant)?{_WORD}(?:[:_]\w{{1,20}})?"
_PLAIN = "(?-i:think(?:ing)?|thought|reasoning|seed:think)"  # written as text too: `Well.<think>`, `a<think>`
_IN_QUOTES = r"""(?<=(?P<mark>["'`])<)/[\w:]+>(?P=mark)|(?<=[)*?}\]]<)/[\w:]+>["']"""
# The rest of a tag that begins with `<`.
_OPENS = (
    rf"""(?<!["'`]<){_PLAIN}>""",
    rf"""(?<![\w:"'`]<)(?:\||(?<![^\n]<)[ \t])?{_NAME}(?:[ \t][^<>\n]{{0,80}})?\|?>""",
    rf"\|?(?:start|begin)_(?:of_)?(?:{_NAME}|working_out)\|?>",
    rf"\|(?:{_NAME}_(?:start|begin)|inner_prefix|content_thinking)\|>|unused94>",
    r"\|channel\|?>(?:analysis(?:<\|message\|>)?|thought)|\|open\|>think<\|sep\|>",  # of gpt-oss, Gemma and Kimi
)
_CLOSES = (
    rf"(?=[ \t|]{{0,2}}/)(?!{_IN_QUOTES})[ \t|]{{0,2}}/[ \t]?{_NAME}[ \t]?\|?>",
    rf"\|?end_(?:of_)?(?:{_NAME}|working_out)\|?>",
    rf"\|?{_NAME}_end\|?>|\|(?:inner_suffix|content_text)\|>|unused95>",
    r"\|end\|>(?=\s*<\|start\|>)|\|channel\|>(?=final)|channel\|>|\|close\|>think<\|sep\|>",
)
_CLOSES_BRACKET = r"(?<=\[)/think(?:ing)?\]|(?<=◁)/think▷"
_OPENS_BRACKET = r"(?<=\[)(?:(?<![\w\])]\[)(?-i:THINK(?:ING)?)|(?<![^\n]\[)think(?:ing)?)\]|(?<=◁)think▷"
_TAG, _ANY_TAG = (  # the search for one first character is twenty times as fast as for one of three
    re.compile(
        rf"{first}(?=[ \t|]{{0,2}}/?[ \t]?\w[\w:|]{{2}})(?:(?P<closes>(?<=<)(?:{'|'.join(_CLOSES)})|{_CLOSES_BRACKET})"
        rf"|(?P<opens>(?<=<)(?:{'|'.join(_OPENS)})|{_OPENS_BRACKET}))",
        re.IGNORECASE,
    )
    for first in ("<", r"[<\[◁]")
)
_BRACKET = re.compile(r"\[/?think", re.IGNORECASE)
_NO_NAME = re.compile(
    r"(?<=\w)[ \t].*|(?:start|begin|end)_(?:of_)?|_(?:start|begin|end|prefix|suffix)|content_(?:text)?|open|close"
    r"|channel|\|end\||[^a-z]",
    re.DOTALL,
)


def answer_of(completion: str) -> str:
    """Return the answer of a completion, which rules, tests, tools and judges read: the text after the thoughts.

    Thoughts are the text up to the last `</think>`, and the text from a `<think>` that is never closed; of other tags
    too. A tag within a thought of another tag closes only its own. Tags in quotes are plain text.
    """
    _, begin, end = _answer_place(completion)
    return completion[begin:end]


def _tags(text: str) -> Iterator[re.Match[str]]:
    return (_ANY_TAG if "◁" in text or _BRACKET.search(text) else _TAG).finditer(text)


@lru_cache(256)
def _name(tag: str) -> str:
    return _NO_NAME.sub("", tag.lower())


def _answer_place(text: str) -> tuple[int, int, int | None]:
    """Return where the tag after the last thought begins and ends, and where a thought begins that is never closed."""
    closes, begin, end, is_open = 0, 0, None, list[str]()
    for tag in _tags(text):
        name = _name(tag[0])
        if tag["opens"]:
            end = tag.start() if end is None else end
            is_open += [name] if name not in is_open else []
            continue
        is_open = is_open[: is_open.index(name) if name in is_open else 0] if name else is_open[:-1]
        if not is_open:
            closes, begin, end = tag.start(), tag.end(), None
    return closes, begin, end


def spoken(completion: str, prompt: str) -> str:
    """Return a completion with the `<think>` with which its prompt (or its end) ends, unless it closes the thought."""
    tags = list(_ANY_TAG.finditer(prompt, max(0, len(prompt) - 200)))
    is_open = bool(tags) and bool(tags[-1]["opens"]) and not prompt[tags[-1].end() :].strip()
    if not is_open or _answer_place(completion)[1]:
        return completion
    begins = _ANY_TAG.match(completion.lstrip())
    return completion if begins and begins["opens"] else f"{tags[-1][0].strip()}{completion}"


def parted(turn: str) -> tuple[str, str]:
    """Return the thoughts with which a turn begins, without their tags, and the rest."""
    begins, (closes, end, _) = _ANY_TAG.match(turn.lstrip()), _answer_place(turn)
    opening = begins[0] if begins and begins["opens"] else ""
    if not end and not opening:
        return "", turn
    return turn[: closes if end else None].strip().removeprefix(opening).strip(), turn[end:] if end else ""


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


def values_of_names(tree: ast.Module, function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, list[ast.expr]]:
    """Return name -> the expressions of its values, for names that a function reads once: parameters of pytest, loops'
    variables, and names set in the function or the module."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    loads = [node.id for node in names if isinstance(node.ctx, ast.Load)]
    found: dict[str, list[ast.expr]] = {}
    for node in (*tree.body, *ast.walk(function)):
        match node:
            case ast.Assign(targets=[target], value=value):
                rows = [value]
            case (
                ast.For(target=target, iter=ast.List(elts=rows) | ast.Tuple(elts=rows))
                | ast.Call(func=ast.Attribute(attr="parametrize"), args=[target, ast.List(elts=rows), *_])
            ):
                pass
            case _:
                continue
        for name, each in (pair for row in rows for pair in _bound(target, row)):
            found.setdefault(name, []).append(each)
    is_set_once = {name for name in found if sum(each.id == name for each in names) - loads.count(name) < 2}
    return {name: found[name] for name in is_set_once if loads.count(name) == 1}


def _bound(target: ast.expr, row: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    names = re.findall(r"\w+", " ".join(str(getattr(part, "id", getattr(part, "value", ""))) for part in parts))
    values = row.elts if len(names) > 1 and isinstance(row, ast.Tuple | ast.List) else [row]
    return zip(names, values, strict=False) if len(names) == len(values) else iter(())


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

"""Finds the code in a completion. Called by `screening.py` before anything is parsed, banned or run.

What counts as code, in this order:
1. The answer was prefilled (`prefill` is not empty): prefill and completion together, without the opening fence, up to
   the first closing fence.
2. Fenced blocks: the last Python block that defines the function. A model that corrects itself does so below.
3. Above any fence: from the first line that begins Python and leads to the function's `def`.
Then whatever follows the function is cut, unless it is another definition: models like to append prose or an example
call, which are not the answer and would only raise. Nothing here runs or repairs code: a body cut off by the token
limit stays broken. Fences are looked for line by line: the time is proportional to the text's length, but for the
parses, which are few.
"""

from __future__ import annotations

import ast
import re
import textwrap
import threading
import warnings

_PYTHON_LANGUAGES = frozenset({"python", "py", "python3", "pycon", "ipython"})
_STARTS_CODE = re.compile(r"(?:(?:async\s+)?def|class|import|from)\b|@")
_ONE_PARSE = threading.Lock()
_MOST_SHOWN = 80
_MAX_TRIES = 12
"""Parses spent on finding where the code ends (or begins): a hostile completion must not cost seconds."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def extract_code(completion: str, func_name: str, *, prefill: str = "") -> str | None:
    """The part of a completion that is the answer.

    Args:
        prefill: the beginning of the answer that the prompt already holds.
    Returns:
        Source that mentions `def func_name`, perhaps with a syntax error; None when there is no such thing.
    """
    text = completion.replace("\r\n", "\n").replace("\r", "\n")
    if prefill:
        candidates = [_until_fence(_after_fence(prefill) + text)]
    else:
        candidates = [*reversed(_fenced_blocks(text)), _unfenced(_until_fence(text), func_name)]
    for candidate in candidates:
        if _def_pattern(func_name).search(candidate):
            return cut_after_function(candidate, func_name)
    return None


def extract_program(completion: str) -> str | None:
    """The part of a completion that is a whole program: its last block marked as Python, else its last block that
    parses, else all of it where there is no fence.

    Returns:
        Source, perhaps with a syntax error; None when there is no such thing.
    """
    text = completion.replace("\r\n", "\n").replace("\r", "\n")
    marked = [block for block in _fenced_blocks(text, only_marked=True) if block.strip()]
    if marked:
        return marked[-1]
    blocks = [block for block in _fenced_blocks(text) if block.strip()]
    parsing = (block for block in blocks[:-_MAX_TRIES:-1] if parse(block) is not None)
    return next(parsing, blocks[-1]) if blocks else textwrap.dedent(text).strip() or None


def cut_after_function(source: str, func_name: str) -> str:
    """`source` through the end of the function, and of the definitions and imports below it.

    Statements below the function that define nothing (an example call, a print) are dropped. Text below it that is not
    Python is dropped too, as a whole: cutting happens only at lines that begin in column 0.
    """
    lines = source.split("\n")
    tree = parse(source)
    if tree is not None:
        return _definitions_only(tree, lines, func_name)
    ends = _cuts(lines, func_name)
    for end in ends[:-_MAX_TRIES:-1]:
        tree = parse("\n".join(lines[:end]))
        if tree is not None:
            return _definitions_only(tree, lines[:end], func_name)
    return _joined(lines[: ends[0]] if ends else lines)


def parse(source: str) -> ast.Module | None:
    """The syntax tree, or None. Python's warnings about the code (`"\\d"`) are not ours to print."""
    try:
        return _parsed(source)
    # Besides SyntaxError: NUL bytes and lone surrogates are ValueError, deep nesting RecursionError or MemoryError.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def syntax_problem(source: str) -> str:
    """Why `source` does not parse, for a person: the line, the parser's words and what stands there; empty if it
    does."""
    try:
        _parsed(source)
    except SyntaxError as error:
        line = (error.text or "").strip()[:_MOST_SHOWN]
        return f"line {error.lineno}: {error.msg}" + (f": `{line}`" if line else "")
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _parsed(source: str) -> ast.Module:
    # Completions are read in threads, and two at a time fail in Python 3.11 ("AST constructor recursion
    # depth mismatch"): it counts the depth for all threads together.
    with _ONE_PARSE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _after_fence(prefill: str) -> str:
    """The part of a prefill below its opening fence: prose above the fence is no code."""
    lines = prefill.split("\n")
    openings = [number for number, line in enumerate(lines) if _fence(line)]
    return "\n".join(lines[openings[-1] + 1 :]) if openings else prefill


def _until_fence(text: str) -> str:
    lines = text.split("\n")
    closing = next((number for number, line in enumerate(lines) if _fence(line)), None)
    return text if closing is None else "\n".join([*lines[:closing], ""])


def _fenced_blocks(text: str, *, only_marked: bool = False) -> list[str]:
    """Contents of the blocks that may be Python, in order. A block never closed goes to the end of the text.

    Args:
        only_marked: leave out those that name no language.
    """
    blocks: list[str] = []
    opening, body = None, list[str]()
    for line in text.split("\n"):
        if opening is None:
            opening, body = _fence(line), []
        elif (text := line.strip(" \t")).startswith(opening[0]) and not text.strip("`~"):
            blocks += _python_block(opening[1], [*body, ""], only_marked)
            opening = None
        else:
            body.append(line)
    return blocks + (_python_block(opening[1], body, only_marked) if opening else [])


def _python_block(language: str, body: list[str], only_marked: bool) -> list[str]:
    words = language.split()
    is_python = bool(words and words[0].lower() in _PYTHON_LANGUAGES) or not (words or only_marked)
    return [textwrap.dedent("\n".join(body))] if is_python else []


def _fence(line: str) -> tuple[str, str] | None:
    """Marks and language of a line that opens a block: three or more ` or ~, then no ` any more."""
    text = line.lstrip(" \t")
    language = text.lstrip(text[:1]) if text[:1] in ("`", "~") else text
    num_marks = len(text) - len(language)
    return (text[:num_marks], language) if num_marks >= 3 and "`" not in language else None


def _unfenced(text: str, func_name: str) -> str:
    """The code from the first line above the function that begins Python (a definition, import, decorator) and parses.

    When nothing parses it is the function itself, so that the verdict is its syntax error.
    """
    lines = textwrap.dedent(text).split("\n")
    pattern = _def_pattern(func_name)
    target = next((number for number, line in enumerate(lines) if pattern.match(line)), None)
    if target is None:
        return ""
    starts = [number for number, line in enumerate(lines[:target]) if _STARTS_CODE.match(line)]
    for start in starts[-_MAX_TRIES:]:
        if parse("\n".join(lines[start : target + 1]) + " pass") is not None:
            return "\n".join(lines[start:])
    return "\n".join(lines[target:])


def _def_pattern(func_name: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(func_name)}\b", re.MULTILINE)


def _cuts(lines: list[str], func_name: str) -> list[int]:
    """Line numbers below the function's `def` where a new line in column 0 begins: all places where a cut is honest."""
    pattern = _def_pattern(func_name)
    start = next((number for number, line in enumerate(lines) if pattern.match(line)), None)
    if start is None:
        return []
    return [
        number for number in range(start + 1, len(lines)) if lines[number][:1].strip() and lines[number][0] not in ")]}"
    ]


def _definitions_only(tree: ast.Module, lines: list[str], func_name: str) -> str:
    """Everything through the function, then only what defines or imports. All of it when the function is nested."""
    kept: list[str] = []
    end = 0
    for node in tree.body:
        if kept:
            # Several may stand on one line, which is kept once.
            if isinstance(node, _DEFINITIONS) and (first := max(_first_line(node) - 1, end)) < _last_line(node):
                kept += ["", "", *lines[first : _last_line(node)]]
                end = _last_line(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == func_name:
            end = _last_line(node)
            kept = lines[:end]
    return _joined(kept or lines)


def _joined(lines: list[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _last_line(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno

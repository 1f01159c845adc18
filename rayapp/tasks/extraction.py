"""Finds the code in a completion. Called by `banned.py` before anything is parsed, banned or run.

These count as code, in this order:
1. The answer was prefilled (`prefill` is not empty): prefill and completion together, without the opening fence, up to
   the first closing fence.
2. Fenced blocks: the last Python block that defines the function, as models correct themselves in a later block.
3. Above any fence: from the first line that begins Python and leads to the function's `def`.
Text after the function is cut, unless it is another definition: models often append prose or an example call, which are
not part of the answer and would only raise. Nothing here runs or repairs code: a body cut off by the token limit stays
broken. Fences are found line by line in time proportional to the text's length; the number of parses is limited.
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
"""Most parses to find the end (or beginning) of the code: a hostile completion must not cost seconds."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def extract_code(completion: str, func_name: str, *, prefill: str = "") -> str | None:
    """Return the part of a completion that is the answer.

    Args:
        prefill: the part of the answer that the prompt already contains.
    Returns:
        Source that contains `def func_name`, perhaps with a syntax error; None if there is none.
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


def extract_module(completion: str, func_name: str, *, prefill: str = "") -> str | None:
    """Return the part of a completion that is a module with the function, as the checkers of data sets run it.

    This is the last block that binds the function's name, uncut. If the answer has no fence, text that is not Python is
    cut.

    Args:
        prefill: the part of the answer that the prompt already contains.
    Returns:
        Source, perhaps with a syntax error; None if nothing in the completion binds the name.
    """
    text = completion.replace("\r\n", "\n").replace("\r", "\n")
    blocks = [] if prefill else _fenced_blocks(text)
    for block in blocks[: -_MAX_TRIES - 1 : -1]:
        if _binds(block, func_name):
            return block
    if prefill:
        loose = _until_fence(_after_fence(prefill) + text)
    else:
        loose = textwrap.dedent(text)
        loose = loose if not blocks and parse(loose) is not None else _unfenced(_until_fence(text), func_name)
    return _through_last_python(loose, func_name) if _binds(loose, func_name) else None


def extract_program(completion: str) -> str | None:
    """Return the part of a completion that is a whole program.

    This is the last block marked as Python; if there is none, the last block that parses; without any fence, all of it.

    Returns:
        Source, perhaps with a syntax error; None if there is none.
    """
    text = completion.replace("\r\n", "\n").replace("\r", "\n")
    marked = [block for block in _fenced_blocks(text, only_marked=True) if block.strip()]
    if marked:
        return marked[-1]
    blocks = [block for block in _fenced_blocks(text) if block.strip()]
    parsing = (block for block in blocks[:-_MAX_TRIES:-1] if parse(block) is not None)
    return next(parsing, blocks[-1]) if blocks else textwrap.dedent(text).strip() or None


def marked_block(completion: str, languages: frozenset[str]) -> str:
    """Return the last block marked with one of these languages; if there is none, the last block that names no
    language; without any fence, all of the text. Empty if there is none."""
    text = completion.replace("\r\n", "\n").replace("\r", "\n")
    blocks = [(language.lower(), body) for language, body in _blocks(text) if body.strip()]
    marked = [body for language, body in blocks if language in languages]
    unmarked = [body for language, body in blocks if not language]
    found = marked or unmarked
    return found[-1] if found else "" if blocks else textwrap.dedent(text).strip()


def cut_after_function(source: str, func_name: str) -> str:
    """Return `source` up to the end of the function, with the definitions and imports below it.

    Statements below the function that define nothing (an example call, a print) are dropped. Text below it that is not
    Python is dropped as a whole: cuts are made only at lines that begin in column 0.
    """
    python = _through_last_python(source, func_name)
    tree = parse(python)
    return python if tree is None else _definitions_only(tree, python.split("\n"), func_name)


def _through_last_python(source: str, func_name: str) -> str:
    """Return `source` without the non-Python text below the function; if nothing parses, only the function."""
    lines = source.split("\n")
    if parse(source) is not None:
        return source
    ends = _cuts(lines, func_name)
    for end in ends[:-_MAX_TRIES:-1]:
        if parse("\n".join(lines[:end])) is not None:
            return _joined(lines[:end])
    return _joined(lines[: ends[0]] if ends else lines)


def _binds(source: str, func_name: str) -> bool:
    """True if the source defines, imports or assigns the name anywhere."""
    if _def_pattern(func_name).search(source):
        return True
    tree = parse(source) if func_name in source else None
    if tree is None:
        return False
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.alias(name=name, asname=None) | ast.alias(asname=name):
                if name == func_name:
                    return True
    return False


def parse(source: str) -> ast.Module | None:
    """Return the syntax tree, or None. Python's warnings about the code (`"\\d"`) are suppressed."""
    try:
        return _parsed(source)
    # Besides SyntaxError: NUL bytes and lone surrogates are ValueError, deep nesting RecursionError or MemoryError.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def syntax_problem(source: str) -> str:
    """Return why `source` does not parse: line number, the parser's message and the line's text; empty if it parses."""
    try:
        _parsed(source)
    except SyntaxError as error:
        line = (error.text or "").strip()[:_MOST_SHOWN]
        return f"line {error.lineno}: {error.msg}" + (f": `{line}`" if line else "")
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _parsed(source: str) -> ast.Module:
    # Completions are read in threads. In Python 3.11 two parses at the same time fail ("AST constructor recursion
    # depth mismatch"), because one counter of the depth serves all threads.
    with _ONE_PARSE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _after_fence(prefill: str) -> str:
    """Return the part of a prefill below its opening fence: prose above the fence is not code."""
    lines = prefill.split("\n")
    openings = [number for number, line in enumerate(lines) if _fence(line)]
    return "\n".join(lines[openings[-1] + 1 :]) if openings else prefill


def _until_fence(text: str) -> str:
    lines = text.split("\n")
    closing = next((number for number, line in enumerate(lines) if _fence(line)), None)
    return text if closing is None else "\n".join([*lines[:closing], ""])


def _fenced_blocks(text: str, *, only_marked: bool = False) -> list[str]:
    """Return the contents of the blocks that may be Python, in order. An unclosed block extends to the end of the text.

    Args:
        only_marked: leave out blocks that name no language.
    """
    return [
        body
        for language, body in _blocks(text)
        if language.lower() in _PYTHON_LANGUAGES or not (language or only_marked)
    ]


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return the language, empty if none is named, and the dedented contents of every block."""
    blocks: list[tuple[str, str]] = []
    opening, body = None, list[str]()
    for line in text.split("\n"):
        if opening is None:
            opening, body = _fence(line), []
        elif (text := line.strip(" \t")).startswith(opening[0]) and not text.strip("`~"):
            blocks.append(_block(opening[1], [*body, ""]))
            opening = None
        else:
            body.append(line)
    return [*blocks, *([_block(opening[1], body)] if opening else [])]


def _block(marks: str, body: list[str]) -> tuple[str, str]:
    return next(iter(marks.split()), ""), textwrap.dedent("\n".join(body))


def _fence(line: str) -> tuple[str, str] | None:
    """Return marks and language of a line that opens a block: three or more ` or ~, then text without `."""
    text = line.lstrip(" \t")
    language = text.lstrip(text[:1]) if text[:1] in ("`", "~") else text
    num_marks = len(text) - len(language)
    return (text[:num_marks], language) if num_marks >= 3 and "`" not in language else None


def _unfenced(text: str, func_name: str) -> str:
    """Return the code from the first line above the function that begins Python (definition, import, decorator).

    The lines from there to the function's `def` must parse. If none do, the code begins at the `def`, so that the
    verdict is the function's own syntax error.
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
    """Return the numbers of the lines below the function's `def` that begin in column 0: the permitted cuts."""
    pattern = _def_pattern(func_name)
    start = next((number for number, line in enumerate(lines) if pattern.match(line)), None)
    if start is None:
        return []
    return [
        number for number in range(start + 1, len(lines)) if lines[number][:1].strip() and lines[number][0] not in ")]}"
    ]


def _definitions_only(tree: ast.Module, lines: list[str], func_name: str) -> str:
    """Return all lines up to the end of the function, then only definitions and imports; all if it is nested."""
    kept: list[str] = []
    end = 0
    for node in tree.body:
        if kept:
            # One line may hold several definitions; keep it once.
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

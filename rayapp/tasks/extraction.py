"""Finds the code in a completion. The code of a function is the first of these parts that exists:

1. with a `prefill` (the answer's beginning in the prompt): prefill and completion, up to the first closing fence;
2. the last fenced Python block that defines the function: models correct themselves in later blocks;
3. the text above any fence, from the first line of Python that leads to the function's `def`.

Only the answer counts, without the thoughts. Text after the function is cut, except definitions and imports: models
often append prose or an example call. Code is neither run nor repaired. Blocks are CommonMark's.
"""

from __future__ import annotations

import ast
import functools
import html
import re
import textwrap
from collections.abc import Sequence
from itertools import chain, islice, takewhile

from markdown_it import MarkdownIt

from rayapp.core.syntax import answer_of, parse

_PYTHON_LANGUAGES = frozenset({"python", "py", "pycon", "ipython", "cpython", "pypy", "python_code", "tool_code"})
_NO_LANGUAGE = frozenset({"", "text", "txt", "plaintext", "plain", "none", "code", "solution"})
_LANGUAGE = re.compile(r"(?:\{code[\w-]*\}\s*|[{.]|lang(?:uage)?[-=:])*([\w+#-]*?)[\d-]*(?![\w+#-])", re.IGNORECASE)
_FILE = re.compile(r"(?:file(?:name)?\s*[:=]\s*)?[\w./-]+\.([a-z]\w*)", re.IGNORECASE)  # e.g. `main.py`
# A language on the line below its fence.
_NAMED_INSIDE = re.compile(r"\A\s*(?:python3?|py)[ \t]*\n", re.IGNORECASE)
# A fence behind prose or code, or before a tag: models write it, CommonMark knows none.
_GLUED = re.compile(
    r"^(?![ \t>]*(?:(?:[-*+]|\d+[.)])[ \t>]*)?[`~])([^\n`#]*[^\s`#])[ \t]*(`{3,}[\w+#.-]*)[ \t]*$"
    r"|^([ \t]*`{3,})[ \t]*(</\w.*)$",
    re.MULTILINE,
)
_TAGGED = re.compile(
    r"^[ \t]*(?:<pre\b[^<>]*>\s*)?(?:<(code|answer|solution|pre)\b[^<>]*>\n?(.*?)(?:</\1>|\Z)"
    r"|\[(?:PYTHON|BEGIN)\]\n?(.*?)(?:\[/PYTHON\]|\[DONE\]|\Z))",
    re.MULTILINE | re.DOTALL,
)
_STARTS_CODE = re.compile(r"(?:(?:async\s+)?def|class|import|from)\b|@")
_MARKUP = frozenset({"markdown", "md"})
_MAX_TRIES = 12  # A hostile completion must not take seconds to find where the code ends (or begins).
_MAX_CUTS = 4  # paragraphs of prose below a program without a fence
_MARKDOWN = MarkdownIt("zero").enable(["blockquote", "code", "fence", "list"])
_MARKDOWN.core.ruler.enableOnly(["block"])
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def extract_code(completion: str, func_name: str, *, prefill: str = "") -> str | None:
    """Return source that contains `def func_name`, perhaps with a syntax error; None if there is no such `def`."""
    text = _answer(completion)
    if prefill:
        candidates = [_after_fence(prefill) + text]
    else:
        candidates = [*reversed(_fenced_blocks(text)), _unfenced(_before_fences(text), func_name)]
    for candidate in candidates:
        if _def_pattern(func_name).search(candidate):
            return cut_after_function(_until_fence(candidate), func_name)
    return None


def extract_module(completion: str, func_name: str, *, prefill: str = "") -> str | None:
    """Return the code as a whole module, uncut, as the checkers of data sets run it: the last fenced block that binds
    the function's name, or, without a fence, the text that is Python. None if nothing binds the name."""
    text = _answer(completion)
    blocks = [] if prefill else _fenced_blocks(text)
    for block in blocks[: -_MAX_TRIES - 1 : -1]:
        if _binds(block, func_name):
            return _until_fence(block)
    if prefill:
        loose = _until_fence(_after_fence(prefill) + text)
    else:
        loose = textwrap.dedent(text)
        loose = loose if not blocks and parse(loose) is not None else _unfenced(_before_fences(text), func_name)
    return _through_last_python(loose, func_name) if _binds(loose, func_name) else None


def extract_program(completion: str) -> str | None:
    """Return the code of a whole program: the last block marked as Python, else the last block that parses; without a
    fence the whole completion. None if there is no code."""
    text = _answer(completion)
    marked = [block for block in _fenced_blocks(text, only_marked=True) if block.strip()]
    if marked:
        return _until_fence(marked[-1])
    above = textwrap.dedent(_before_fences(text)).strip()
    program = _program_in_prose(above)
    blocks = [_until_fence(block) for block in _fenced_blocks(text)[:-_MAX_TRIES:-1] if block.strip()]
    programs = list(filter(_is_program, blocks))
    # A first fence without a language may close the program, and later "blocks" may be the text between blocks.
    if program and not _first_language(text) and not programs:
        return program
    parsing = (block for block in blocks if parse(block) is not None)
    return next(chain(programs, parsing, blocks), program or above or None)


def marked_block(completion: str, languages: frozenset[str]) -> str:
    """Return the last block marked with one of these languages, else the last one without a language, else an empty
    string; without any fence the whole text."""
    text = _answer(completion)
    blocks = [(language, body) for language, body in _blocks(text) if body.strip()]
    marked = [body for language, body in blocks if language in languages]
    unmarked = [body for language, body in blocks if language in _NO_LANGUAGE]
    unmarked = [body for body in unmarked if _num_code_marks(body)] or unmarked
    found = marked or unmarked
    above = textwrap.dedent(_before_fences(text)).strip()
    if not marked and _only_closes(text) and _num_code_marks(above) > _num_code_marks("".join(unmarked)):
        return above
    return found[-1] if found else "" if blocks else above


def _answer(completion: str) -> str:
    text = answer_of(completion.replace("\r\n", "\n").replace("\r", "\n")).lstrip("\ufeff\u200b\u00a0")
    return _GLUED.sub(_apart, text, _MAX_TRIES)


def _apart(found: re.Match[str]) -> str:
    """Return a line with its fence on a line of its own; unchanged in a string of Python."""
    is_in_string = _cuts_string(found.string[: found.start()] + (found[1] or ""))
    return found[0] if is_in_string else "\n".join(part for part in found.groups() if part is not None)


def _only_closes(text: str) -> bool:
    """Return True for one fence without a language: it may close code that no fence opens."""
    blocks = _fences(text)
    return len(blocks) == 1 and not blocks[0][0] and text.rstrip().count("\n") + 1 in (blocks[0][2], blocks[0][3])


def _first_language(text: str) -> str:
    return next((language for language, _, _, _ in _fences(text)), "")


def _program_in_prose(text: str) -> str:
    """Return the program in a text without fences; empty if there is none."""
    if _is_program(text):
        return text
    lines = text.split("\n")
    prose = list(takewhile(lambda line: "=" not in line, lines))
    ends = [number for number, line in enumerate(prose, 1) if not line.strip() or line.rstrip()[-1] in ":.!"]
    below = [textwrap.dedent("\n".join(lines[end:])).strip().split("\n\n") for end in [0, *ends][:_MAX_TRIES]]
    tries = ("\n\n".join(parts[:end]) for parts in below for end in range(len(parts), 0, -1)[:_MAX_CUTS])
    return next(filter(_is_program, tries), "")


def _is_program(text: str) -> bool:
    # Python that does more than name values: a heading such as `Solution` is no program
    tree = parse(text)
    return tree is not None and any(
        not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body
    )


def _num_code_marks(text: str) -> int:
    return sum(map(text.count, ";{}()="))


def cut_after_function(source: str, func_name: str) -> str:
    """Return `source` up to the end of the function, and the definitions and imports below it. Cuts are made only at
    lines that begin in column 0."""
    python = _through_last_python(source, func_name)
    tree = parse(python)
    return python if tree is None else _definitions_only(tree, python.split("\n"), func_name)


def _through_last_python(source: str, func_name: str) -> str:
    """Cut the text below the last Python; if nothing parses, return only the function."""
    lines = source.split("\n")
    if parse(source) is not None:
        return source
    ends = _cuts(lines, func_name)
    for end in ends[:-_MAX_TRIES:-1]:
        if parse("\n".join(lines[:end])) is not None:
            return _joined(lines[:end])
    return _joined(lines[: ends[0]] if ends else lines)


def _binds(source: str, func_name: str) -> bool:
    """Return True if the source defines, imports or assigns the name anywhere."""
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


def _after_fence(prefill: str) -> str:
    """Return the code below the fence; the prose above it is not code."""
    lines = prefill.split("\n")
    openings = [number for number, line in enumerate(lines) if _fence(line)]
    return "\n".join(lines[openings[-1] + 1 :]) if openings else prefill


def _until_fence(source: str) -> str:
    # If it doesn't parse with a line like a fence: up to the first such line above which it parses, or the first one.
    lines = source.split("\n")
    ends = [number for number, line in enumerate(lines) if _fence(line)]
    if not ends or parse(source) is not None:
        return source
    tries = ("\n".join([*lines[:end], ""]) for end in ends[:_MAX_TRIES])
    return next((cut for cut in tries if parse(cut) is not None), "\n".join([*lines[: ends[0]], ""]))


def _before_fences(text: str) -> str:
    blocks = _fences(text)
    above = "\n".join([*text.split("\n")[: blocks[0][2]], ""]) if blocks else text
    whole = _until_fence(text) if _cuts_string(above) else above
    return whole if parse(whole) is not None else above


def _fenced_blocks(text: str, *, only_marked: bool = False) -> list[str]:
    # An unclosed block extends to the end of the text; `only_marked`: without blocks that name no language.
    return [
        body
        for language, body in _blocks(text)
        if language in _PYTHON_LANGUAGES or (not only_marked and language in _NO_LANGUAGE)
    ]


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return language (empty if none is named) and dedented contents of each block; without a fence, of tags with
    nothing but Python inside."""
    found = [(language, textwrap.dedent(body)) for language, body, _, _ in _fences(text)]
    tagged = [] if found else [html.unescape(tag[2]) if tag[1] else tag[3] for tag in _TAGGED.finditer(text)]
    found += [("", body) for body in map(textwrap.dedent, tagged[:_MAX_TRIES]) if parse(body) is not None]
    return [(language, _without_prompts(_NAMED_INSIDE.sub("", body))) for language, body in found]


def _without_prompts(body: str) -> str:
    """Return the code of a Python session."""
    lines = [line[4:] for line in body.split("\n") if line.startswith((">>>", "..."))]
    return "\n".join([*lines, ""]) if body.startswith(">>>") else body


@functools.lru_cache(maxsize=2)
def _fences(text: str) -> list[tuple[str, str, int, int]]:
    """Return language, contents, first line and end of each block; an unclosed one extends to the end of the text.

    Blocks are those of CommonMark, but a fence in a string of Python closes no block. Blocks inside a block of Markdown
    or an indented one replace it."""
    found = list[tuple[str, str, int, int]]()
    for language, content, first, end in _outer_fences(text):
        has_inner = language in _MARKUP or _begins_with_fence(content)
        inner = _outer_fences(textwrap.dedent(content)) if has_inner else []
        found += [(*block[:2], first, end) for block in inner] or [(language, content, first, end)]
    return found


def _outer_fences(text: str) -> list[tuple[str, str, int, int]]:
    lines, found, start, tries = text.split("\n"), list[tuple[str, str, int, int]](), 0, _MAX_TRIES
    while start < len(lines):
        for token in _MARKDOWN.parse("\n".join(lines[start:])):
            is_indented = token.type == "code_block" and _begins_with_fence(token.content)
            if not (token.type == "fence" or is_indented) or not token.map:
                continue
            (first, end), language = (start + place for place in token.map), _language(token.info)
            is_unopened = not found and _cuts_string("\n".join(lines[:first]))
            is_cut = tries > 0 and _may_be_python(language) and _cuts_string(token.content)
            tries -= is_cut
            opening, language = (-1, "") if is_unopened else (first, language)
            if (is_unopened or is_cut) and (closing := _end_after_strings(lines, opening)) is not None:
                found.append((language, "\n".join([*lines[opening + 1 : closing], ""]), opening, closing + 1))
                start = closing + 1
                break
            found.append((language, token.content, first, end))
        else:
            break
    return found


def _begins_with_fence(text: str) -> bool:
    return _fence(text.lstrip().partition("\n")[0]) is not None


def _language(info: str) -> str:
    # of `python`, `{.python}`, `python:main.py`, `main.py`, `python, runnable`, `{code-cell} python`, `py3`, `c++17`
    found = _FILE.fullmatch(info.strip()) or _LANGUAGE.match(info.strip())
    return found[1].lower() if found else ""


def _may_be_python(language: str) -> bool:
    return language in _PYTHON_LANGUAGES | _NO_LANGUAGE


def _end_after_strings(lines: Sequence[str], first: int) -> int | None:
    """Return the line of the fence (or of the text's end) above which the block that line `first` opens parses, if it
    is one of the next."""
    fences = (place for place in range(first + 1, len(lines)) if _fence(lines[place]))
    for place in chain(islice(fences, _MAX_TRIES), [len(lines) - (not lines[-1])]):
        if parse(textwrap.dedent("\n".join(lines[first + 1 : place]))) is not None:
            return place
    return None


def _cuts_string(source: str) -> bool:
    return any(source.count(quotes) % 2 for quotes in ('"""', "'''"))


def _fence(line: str) -> tuple[str, str] | None:
    """Return fence and language of a line that opens a block: three or more ` or ~, and then text without `."""
    text = line.lstrip(" \t")
    language = text.lstrip(text[:1]) if text[:1] in ("`", "~") else text
    num_marks = len(text) - len(language)
    return (text[:num_marks], language) if num_marks >= 3 and "`" not in language else None


def _unfenced(text: str, func_name: str) -> str:
    """Return the code of a text without fences, from the first definition, import or decorator above the function.

    If the lines down to the function's `def` don't parse, the code begins at the `def`, so that the verdict names a
    syntax error of the function and not of the prose.
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
    indent = lines[target][: -len(lines[target].lstrip())]
    if not indent:
        return "\n".join(lines[target:])
    # An indented block below prose.
    first, end = (
        next((place for place in places if lines[place].strip() and not lines[place].startswith(indent)), last)
        for places, last in ((range(target, -1, -1), -1), (range(target, len(lines)), len(lines)))
    )
    return _unfenced("\n".join(lines[first + 1 : end]), func_name)


def _def_pattern(func_name: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(func_name)}\b", re.MULTILINE)


def _cuts(lines: list[str], func_name: str) -> list[int]:
    """Return the lines below the `def`, in column 0."""
    pattern = _def_pattern(func_name)
    start = next((number for number, line in enumerate(lines) if pattern.match(line)), None)
    if start is None:
        return []
    return [
        number for number in range(start + 1, len(lines)) if lines[number][:1].strip() and lines[number][0] not in ")]}"
    ]


def _definitions_only(tree: ast.Module, lines: list[str], func_name: str) -> str:
    """Keep only definitions and imports below the function; all lines if it is nested."""
    kept: list[str] = []
    end = 0
    for node in tree.body:
        if kept:
            # Keep each line once, even if it has several definitions.
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

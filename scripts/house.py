"""Prints how large the code is: `python -m scripts.house`; files by size: `python -m scripts.house rayapp/runs`.

Lines are all lines of Python files, those of the task library's repositories aside, which are data.
"""

from __future__ import annotations

import ast
import heapq
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from rayapp.cli.main import COMMANDS, app, load_command
from rayapp.config.config import Config
from rayapp.core import syntax

ROOT = Path(__file__).parents[1]
BELOW = ("rollout", "learner", "engine", "runs", "tasks", "tools", "sandbox", "storage", "config", "extras")
"""Rooms below driver and actors: their functions take sections or values, not the whole `Config`."""


def main() -> None:
    """Print the table, or the files of the folders that the command names."""
    if folders := sys.argv[1:]:
        _print_largest(_files(*folders), most=1000)
        return
    product, extras, tests = _files("rayapp", "actors"), _files("rayapp/extras"), _files("tests")
    core = {*product} - {*extras}
    for what, files in {"product": product, "core": core, "extras": extras, "tests": tests}.items():
        _print(what, sum(map(_lines, files)), f"lines in {len(files)} files")
    keys = [*_keys(Config)]
    own = {key for key in keys if not key.startswith("sources.")}
    _print("config keys", len(own), f"{len(keys)} with the copies of each source and provider")
    _print("commands and subcommands", *_commands())
    taking = Counter(_room(file).partition("/")[0] for file in product for node in _nodes(file) if _takes_config(node))
    by_room = ", ".join(f"{room} {number}" for room, number in taking.most_common())
    _print("functions below the driver that take Config", sum(taking[room] for room in BELOW), by_room)
    arrows = {(_room(file).partition("/")[0], imported) for file in product for imported in _rooms_imported(file)}
    rooms = {room for room, _ in arrows}
    _print("arrows between rooms", sum(upper != lower in rooms for upper, lower in arrows))
    docstrings, code = _docstrings_and_code(product)
    _print("docstring lines per 100 of code", round(100 * docstrings / code), f"{docstrings:,} of {code:,}")
    guides = {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "configure.md"}
    _print("words of guides without generated pages", sum(len(_text(file).split()) for file in guides))
    print("\nlargest files")
    _print_largest(product, most=12)
    print("\nrooms")
    _print_rooms([*product, *tests])


def _print(what: str, number: int, note: str = "") -> None:
    print(f"{what:48} {number:7,}  {note}".rstrip())


def _print_largest(files: Iterable[Path], most: int) -> None:
    for file in heapq.nlargest(most, files, key=_lines):
        _print(str(file.relative_to(ROOT)), _lines(file))


def _print_rooms(files: Iterable[Path]) -> None:
    for room, lines in Counter(room for file in files for room in [_room(file)] * _lines(file)).most_common():
        _print(room, lines)


def _files(*folders: str) -> list[Path]:
    """Return the Python files in these folders and below."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [file for file in files if not file.is_relative_to(ROOT / "rayapp/tasks/library/repositories")]


def _room(file: Path) -> str:
    """`rayapp/core/types.py` -> core, `rayapp/extras/view/page.py` -> extras/view, `actors/spawn.py` -> actors,
    `tests/unit/core/test_aio.py` -> unit/core."""
    first, *folders = file.relative_to(ROOT).parts[:-1]
    if first in ("rayapp", "tests"):
        return "/".join(folders[: 2 if folders and folders[0] in ("extras", "unit") else 1]) or first
    return first


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _lines(file: Path) -> int:
    return _text(file).count("\n")


@cache
def _nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(syntax.module(_text(file))))


def _takes_config(node: ast.AST) -> bool:
    """Return whether a node is a function with a parameter annotated `Config`, or `Config | None`."""
    parts = ast.walk(node.args) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ()
    return any(isinstance(part, ast.Name) and part.id == "Config" for part in parts)


def _rooms_imported(file: Path) -> Iterator[str]:
    """Yield the rooms of all imports, those inside functions and for types included."""
    for node in _nodes(file):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for first, *rest in (f"{module}{alias.name}".split(".") for alias in node.names):
                yield rest[0] if first == "rayapp" and rest else first


def _docstrings_and_code(files: Iterable[Path]) -> tuple[int, int]:
    """Count lines of docstrings, a field's included, and lines of code: neither docstring, comment nor blank."""
    docstrings = code = 0
    for file in files:
        statements = [node for node in _nodes(file) if isinstance(node, ast.Expr)]
        texts = [node for node in statements if isinstance(node.value, ast.Constant) and type(node.value.value) is str]
        lines = {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        docstrings += len(lines)
        rest = (line.strip() for number, line in enumerate(_text(file).splitlines(), 1) if number not in lines)
        code += sum(1 for line in rest if line and not line.startswith("#"))
    return docstrings, code


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every key; a list of sections is a key itself, and so is each key of each kind of section in it."""
    for name, field in section.model_fields.items():
        sections = [each for each in _types(field.annotation) if issubclass(each, BaseModel)]
        if sections != [field.annotation]:
            yield f"{prefix}{name}"
        for inner in sections:
            yield from _keys(inner, f"{prefix}{name}.")


def _types(annotation: object) -> list[type]:
    inner = [each for part in get_args(annotation) for each in _types(part)]
    return [annotation] if isinstance(annotation, type) and not inner else inner


def _commands() -> tuple[int, str]:
    """Count commands, each group as its subcommands; and the names that `rayapp --help` lists."""
    names, own = [name for name in COMMANDS if " " not in name], len(app.registered_commands)
    total = own + sum(len(getattr(load_command(name), "commands", ())) or 1 for name in names)
    return total, f"{len(names) + own} names"


if __name__ == "__main__":
    main()

"""Writes docs/configure.md from the schema: `python -m scripts.config_docs > docs/configure.md`. Tested."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayapp.config.config import Config

HEADER = """# Every key

Generated from `rayapp/config/` by `python -m scripts.config_docs`. A config file states only what differs from these
defaults; `key.sub=value` on the command line wins over the file. `rayapp config show CONFIG` prints the result.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([HEADER, *_section(Config, "")])


def _section(model: type[BaseModel], prefix: str) -> Iterator[str]:
    notes = _docstrings(model)
    plain = {name: field for name, field in model.model_fields.items() if not _is_section(field)}
    if plain:
        yield from _table(plain, notes, prefix)
    for name, field in model.model_fields.items():
        if _is_section(field):
            assert isinstance(field.annotation, type)
            assert issubclass(field.annotation, BaseModel)
            yield f"## `{prefix}{name}`\n"
            yield from _section(field.annotation, f"{prefix}{name}.")

    for name, field in model.model_fields.items():
        element = next((each for each in get_args(field.annotation) if _is_model(each)), None)
        if element is not None and not _is_model(field.annotation):
            yield f"## `{prefix}{name}[…]`\n"
            yield from _element(element, f"{prefix}{name}[…].")


def _element(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """A section in a list: its own keys. Those of the sections that the whole run has too are theirs."""
    of_run = {field.annotation for field in Config.model_fields.values()}
    parts = {name: field for name, field in model.model_fields.items() if _is_section(field)}
    own = {name: field for name, field in parts.items() if field.annotation not in of_run}
    yield from _table({k: v for k, v in model.model_fields.items() if k not in own}, _docstrings(model), prefix)
    for name, field in own.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        yield from _table(field.annotation.model_fields, _docstrings(field.annotation), f"{prefix}{name}.")


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _is_section(field: FieldInfo) -> bool:
    return _is_model(field.annotation)


def _table(fields: dict[str, FieldInfo], notes: dict[str, str], prefix: str) -> Iterator[str]:
    yield "| key | default | bounds | meaning |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        bounds = ", ".join(str(constraint) for constraint in field.metadata)
        value = field.get_default(call_default_factory=True)
        default = "" if field.is_required() or _is_section(field) else f"`{value}`"
        cells = (f"`{prefix}{name}`", default, f"`{bounds}`" if bounds else "", notes.get(name, ""))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string under each field, which Python itself does not keep."""
    source = Path(inspect.getfile(model)).read_text(encoding="utf-8")
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in classes if node.name == model.__name__)
    found: dict[str, str] = {}
    for field, note in itertools.pairwise(body):
        is_note = isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_note:
            assert isinstance(note, ast.Expr)
            assert isinstance(note.value, ast.Constant)
            found[field.target.id] = " ".join(str(note.value.value).split())
    return found


if __name__ == "__main__":
    print(render(), end="")

"""Says what is wrong with a user's file in the user's own words: keys, values and ranges instead of pydantic's report.

Used by config and task loading. It reads the schema only to explain; the schema stays the one place with the rules.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping

import annotated_types as at
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

_INDEX = re.compile(r"\[\d+\]")
_SHOWN = 80
"""Characters of a wrong value that a message repeats."""


def explain(error: ValidationError, schema: type[BaseModel]) -> str:
    """The error in the user's words: one line for each thing that is wrong."""
    lines = (_explain_one(details, schema) for details in error.errors(include_url=False))
    return "\n".join(dict.fromkeys(lines))


def valid_keys(schema: type[BaseModel], prefix: str = "", *, in_lists: bool = False) -> Iterator[str]:
    """Every dotted key of a schema, sections included.

    Args:
        in_lists: those of sections in lists too, as if there were no list.
    """
    for name, field in schema.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        for section in _models_in(field.annotation, in_lists=in_lists):
            yield from valid_keys(section, f"{path}.", in_lists=in_lists)


def nearest_key(path: str, schema: type[BaseModel]) -> str | None:
    """The valid key that a mistyped one most likely meant: near as a whole, or the same name in one or two other
    sections.

    Example: `sources[0].agent.max_turns` -> `sources.agent.max_assistant_turns`.
    """
    keys = list(dict.fromkeys(valid_keys(schema, in_lists="[" in path)))
    path = _INDEX.sub("", path)
    if path in keys:
        return path
    leaf = path.rpartition(".")[2]
    elsewhere = [key for key in keys if key.rpartition(".")[2] == leaf]
    if elsewhere:
        return " or ".join(sorted(difflib.get_close_matches(path, elsewhere, n=2, cutoff=0.0)))
    section = path.rpartition(".")[0]
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    close = difflib.get_close_matches(path, siblings, n=1, cutoff=0.75) or difflib.get_close_matches(path, keys, n=1)
    if close:
        return close[0]
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys)}
    return next((leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1)), None)


def _explain_one(details: ErrorDetails, schema: type[BaseModel]) -> str:
    path = _path(details["loc"], schema)
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        near = nearest_key(path, schema)
        return f"unknown key {path}" + (
            f"; did you mean {near}?" if near else "; see `rayapp config show` for all keys"
        )
    if kind == "value_error":
        text = str(details.get("ctx", {}).get("error", details["msg"]))
        return f"{path}: {text}" if path else text
    if kind == "missing":
        return f"{path} is missing"
    rule = _rule(_field(path, schema)) or details["msg"][:1].lower() + details["msg"][1:]
    return f"{path} = {_shown(value)}: {rule}"


def _path(loc: tuple[int | str, ...], schema: type[BaseModel]) -> str:
    """`("sandbox", "local", "num")` -> `sandbox.num`: pydantic names the member of a union, which is no key."""
    keys = set(valid_keys(schema, in_lists=True))
    parts: list[str] = []
    for number, part in enumerate(loc):
        is_last = number == len(loc) - 1
        if isinstance(part, int):
            parts[-1:] = [f"{parts[-1] if parts else ''}[{part}]"]
        elif is_last or not parts or _INDEX.sub("", ".".join([*parts, part])) in keys:
            parts.append(part)
    return ".".join(parts)


def _field(path: str, schema: type[BaseModel]) -> FieldInfo | None:
    head, _, rest = _INDEX.sub("", path).partition(".")
    field = schema.model_fields.get(head)
    if field is None or not rest:
        return field
    sections = _models_in(field.annotation, in_lists=True)
    return next((found for section in sections if (found := _field(rest, section))), None)


def _models_in(annotation: object, *, in_lists: bool = False) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, *((tuple,) * in_lists)):
        for argument in typing.get_args(annotation):
            yield from _models_in(argument, in_lists=in_lists)


def _rule(field: FieldInfo | None) -> str:
    """`must be an integer, at least 2`; empty when the annotation says nothing that helps."""
    if field is None:
        return ""
    sections = list(_models_in(field.annotation))
    if sections:
        return f"must be a section with {', '.join(dict.fromkeys(key for s in sections for key in s.model_fields))}"
    choices = _choices(field.annotation)
    if choices:
        return f"must be one of {', '.join(choices)}"
    kinds: Mapping[object, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    inner = [argument for argument in typing.get_args(field.annotation) if argument is not type(None)]
    kind = kinds.get(field.annotation) or (kinds.get(inner[0]) if len(inner) == 1 else None)
    limits = list(_limits(field))
    if kind is None:
        return f"must be {' and '.join(limits)}" if limits else ""
    return f"must be {kind}" + (f", {' and '.join(limits)}" if limits else "")


def _limits(field: FieldInfo) -> Iterator[str]:
    for rule in field.metadata:
        match rule:
            case at.Ge(ge=bound):
                yield f"at least {bound}"
            case at.Gt(gt=bound):
                yield f"above {bound}"
            case at.Le(le=bound):
                yield f"at most {bound}"
            case at.Lt(lt=bound):
                yield f"below {bound}"
            case at.MinLen(min_length=length):
                yield f"not shorter than {length}"
        pattern = getattr(rule, "pattern", None)
        if pattern is not None:
            yield f"of the form {pattern}"


def _choices(annotation: object) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    return []


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

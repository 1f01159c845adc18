"""Explain pydantic's errors about a user's file: which key, which value, and which values are allowed."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import annotated_types as at
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

_INDEX = re.compile(r"\[\d+\]")
_SHOWN = 80  # of a wrong value in a message


EMPTY: Mapping[str, str] = types.MappingProxyType({})


def explain(error: ValidationError, schema: type[BaseModel], aliases: Mapping[str, str] = EMPTY) -> str:
    """Return one line for each mistake. `aliases`: key of other programs (verl, TRL) -> key of this schema."""
    lines = (_explain_one(details, schema, aliases) for details in error.errors(include_url=False))
    return "\n".join(dict.fromkeys(lines))


def valid_keys(schema: type[BaseModel], prefix: str = "", *, in_lists: bool = False) -> Iterator[str]:
    """Yield every dotted key of a schema, including sections; with `in_lists` also those of lists' items."""
    for name, field in schema.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        for section in _models_in(field.annotation, in_lists=in_lists):
            yield from valid_keys(section, f"{path}.", in_lists=in_lists)


def nearest_key(path: str, schema: type[BaseModel], aliases: Mapping[str, str] = EMPTY) -> str | None:
    """Return the valid key that a mistyped one most likely means; None if none is likely. Candidates are similar keys,
    and a key of the same name that only one or two other sections have.

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
    if leaf in aliases:
        return aliases[leaf]
    section = path.rpartition(".")[0]
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    close = difflib.get_close_matches(path, siblings, n=1, cutoff=0.75) or difflib.get_close_matches(path, keys, n=1)
    if close:
        return close[0]
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys)}
    return next((leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1)), None)


def _explain_one(details: ErrorDetails, schema: type[BaseModel], aliases: Mapping[str, str]) -> str:
    path = _path(details["loc"], schema)
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        near = nearest_key(path, schema, aliases)
        return f"unknown key {path}" + (
            f"; did you mean {near}?" if near else "; see `rayapp config show` for all keys"
        )
    if kind == "value_error":
        text = str(details.get("ctx", {}).get("error", details["msg"]))
        return f"{path}: {text}" if path else text
    if kind == "missing":
        return f"{path} is missing"
    rule = _rule(_field(path, schema)) or details["msg"][:1].lower() + details["msg"][1:]
    if kind == "tuple_type" and isinstance(value, str):
        rule += f", e.g. {path}=[{value}]"
    return f"{path} = {_shown(value)}: {rule}"


def _path(loc: tuple[int | str, ...], schema: type[BaseModel]) -> str:
    """Return pydantic's location without names of a union's members: `("sandbox", "local", "num")` -> `sandbox.num`."""
    keys = set(valid_keys(schema, in_lists=True))
    parts: list[str] = []
    for number, part in enumerate(loc):
        is_last = number == len(loc) - 1
        if isinstance(part, int):
            parts[-1:] = [f"{parts[-1] if parts else ''}[{part}]"]
        elif (
            _INDEX.sub("", ".".join([*parts, part])) in keys
            or (is_last and not _is_choice(".".join(parts), schema))
            or not parts
        ):
            parts.append(part)
    return ".".join(parts)


def _is_choice(path: str, schema: type[BaseModel]) -> bool:
    # Pydantic adds the type to the location of such a key's error.
    field = _field(path, schema)
    return field is not None and typing.get_origin(field.annotation) in (typing.Union, types.UnionType)


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
    """Return `must be an integer, at least 2`; empty if no helpful rule follows from the annotation."""
    if field is None:
        return ""
    sections = list(_models_in(field.annotation))
    if sections:
        return f"must be a section with {', '.join(dict.fromkeys(key for s in sections for key in s.model_fields))}"
    values = values_of(field)
    return f"must be {values}" if values else ""


def values_of(field: FieldInfo) -> str:
    """Return the values that a field takes, e.g. `an integer, at least 2`, `one of a, b`; empty for a section."""
    return _values(field.annotation, field.metadata)


_KINDS: Mapping[object, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
}


_PLURALS: Mapping[str, str] = {"text": "texts", "a number": "numbers", "": "sections"}
# Pattern of a key -> the same rule in words.
_FORMS: Mapping[str, str] = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$": "1 to 63 letters, digits, '.', '_' and '-', the first a letter or digit",
    r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$": "1 to 63 letters, digits, '_' and '-', the first a letter or digit",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "a Python name",
}


def _values(annotation: object, rules: Sequence[object] = ()) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = [rule for each in arguments[1:] for rule in getattr(each, "metadata", [each])]
        return _values(arguments[0], (*inner, *rules))
    if origin in (typing.Union, types.UnionType):
        kinds = [_values(each, rules) for each in arguments if each is not type(None)]
        return ", or ".join([*filter(None, kinds), *["null"] * (type(None) in arguments)])
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin is tuple:
        each = _values(arguments[0])
        number = "" if ... in arguments else f"{len(arguments)} "
        kind = f"a list of {number}{_PLURALS[each]}" if each in _PLURALS else f"a list, each {each}"
    elif origin is dict:
        value = "anything" if arguments[1] is typing.Any else _values(arguments[1])
        kind = f"a mapping from text to {value}"
    else:
        kind = _KINDS.get(annotation, "")
    limits = " and ".join(_limits(rules))
    return f"{kind}, {limits}" if kind and limits else kind or limits


def _limits(rules: Sequence[object]) -> Iterator[str]:
    for rule in rules:
        match rule:
            case at.Ge(ge=bound):
                yield f"at least {_number(bound)}"
            case at.Gt(gt=bound):
                yield f"above {_number(bound)}"
            case at.Le(le=bound):
                yield f"at most {_number(bound)}"
            case at.Lt(lt=bound):
                yield f"below {_number(bound)}"
            case at.MinLen(min_length=length):
                yield "not empty" if length == 1 else f"not shorter than {length}"
            case at.MultipleOf(multiple_of=number):
                yield f"a multiple of {number}"
        pattern = getattr(rule, "pattern", None)
        if pattern is not None:
            yield _FORMS.get(pattern, f"of the form {pattern}")


def _number(bound: object) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

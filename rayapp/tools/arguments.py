"""Reads and checks the arguments of a tool call, from the policy's JSON text. Called by the agent loop.

Both the text and its values are hostile: every step here is linear in a text of capped size, or has a deadline, because
the event loop waits for it; and what can't be read or checked is told to the policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import regex
from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from referencing.jsonschema import EMPTY_REGISTRY

from rayapp.tools.base import ToolFailedError

MAX_CHARS = 1 << 18
MAX_VALUES = 5_000
"""Most names and values in a call. jsonschema needs some 25 us for each, which the event loop waits for: 0.13 s."""
_MAX_DIGITS = 300
"""Most digits of a number: more don't fit a float, which keywords like multipleOf compute with."""
_MAX_ERRORS = 16
"""Most errors to collect before the policy is told of one."""
_PATTERN_TIMEOUT_S = 0.1


def read_arguments(text: str) -> dict[str, object]:
    """The arguments that a JSON text holds: only values that JSON, UTF-8 and floats have room for.

    Raises:
        ToolFailedError: they are malformed, or bad_arguments where they are JSON of a form that no tool takes.
    """
    if len(text) > MAX_CHARS:
        raise ToolFailedError(f"the arguments are longer than {MAX_CHARS} characters", "bad_arguments")
    try:
        arguments = json.loads(text or "{}", parse_constant=_constant, parse_int=_integer, parse_float=_number)
        num_values = sum(1 for _ in _values(arguments))
    except UnicodeEncodeError:
        raise ToolFailedError("the arguments hold half of a surrogate pair, which is no text", "malformed") from None
    except (ValueError, RecursionError) as error:
        raise ToolFailedError(f"the arguments are not valid JSON: {error}", "malformed") from None
    if not isinstance(arguments, dict):
        raise ToolFailedError("the arguments must be a JSON object", "bad_arguments")
    if num_values > MAX_VALUES:
        raise ToolFailedError(f"the arguments hold more than {MAX_VALUES} values", "bad_arguments")
    return arguments


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{digits[:20]} is too large")
    return value


def _values(value: object) -> Iterator[object]:
    """Every name and value inside a value, itself included. Raises UnicodeEncodeError for what is no text."""
    pending = [value]
    while pending:
        one = pending.pop()
        yield one
        if isinstance(one, str):
            one.encode()
        elif isinstance(one, dict):
            pending += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            pending += one


class ArgumentChecker:
    """Says why arguments don't fit a tool's schema.

    Args:
        schema: JSON schema of the arguments.
    Raises:
        SchemaError: it is none, or one that can't be checked safely.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        _Validator.check_schema(dict(schema))
        if any(isinstance(part, dict) and "patternProperties" in part for part in _values(dict(schema))):
            raise SchemaError("patternProperties can't be checked within a deadline: name the properties")
        # An empty registry: the default one would fetch a `$ref` from the network.
        self._validator = _Validator(dict(schema), registry=EMPTY_REGISTRY)

    def problem(self, arguments: object) -> str:
        """Why these arguments don't fit; empty if they do."""
        try:
            error = best_match(islice(self._validator.iter_errors(arguments), _MAX_ERRORS))
        except Exception as reason:  # boundary: jsonschema computes with values and schemas of others
            return f"they can't be checked: {type(reason).__name__}: {reason}"
        if error is None:
            return ""
        where = "/".join(str(part) for part in error.absolute_path)
        return f"{where}: {error.message}" if where else str(error.message)


def _pattern(validator: Any, pattern: str, text: object, schema: object) -> Iterator[ValidationError]:
    """The keyword `pattern` with a deadline, which jsonschema's lacks: `(a+)+$` is a valid pattern."""
    if isinstance(text, str) and not regex.search(pattern, text, timeout=_PATTERN_TIMEOUT_S):
        yield ValidationError(f"{text!r} does not match {pattern!r}")


def _unique_items(validator: Any, is_wanted: bool, items: object, schema: object) -> Iterator[ValidationError]:
    """The keyword `uniqueItems` in linear time; jsonschema's takes quadratic time for objects."""
    if is_wanted and isinstance(items, list) and len({_key(item) for item in items}) < len(items):
        yield ValidationError("there are equal items")


def _key(value: object) -> object:
    """A key that is equal for equal JSON values only: True is not 1, and 1.0 is."""
    if isinstance(value, dict):
        return "object", frozenset((name, _key(part)) for name, part in value.items())
    if isinstance(value, list):
        return "array", tuple(_key(part) for part in value)
    return isinstance(value, bool), value


_extend: Any = validators.extend  # untyped
_Validator = _extend(Draft202012Validator, {"pattern": _pattern, "uniqueItems": _unique_items})

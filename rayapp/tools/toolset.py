"""The tools of one process, their states in each trajectory, and the checks of a call's arguments.

A call's arguments are a JSON text that may be hostile, and the event loop is blocked while they are read: the size is
limited, and each step takes linear time or has a deadline. If they are refused, the policy reads the reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Self

import regex
from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from referencing import Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY

from rayapp.core.aio import guarded
from rayapp.core.errors import ConfigError, InputError, RayappError, SandboxError, ToolUnavailableError
from rayapp.core.trajectories import storable
from rayapp.core.types import SandboxSpec
from rayapp.tools.base import Tool, ToolFailedError, ToolSchema
from rayapp.tools.workspace import Workspace, WorkspaceTool, open_workspace

MAX_CHARS = 1 << 18
MAX_VALUES = 5_000  # names and values: jsonschema takes about 25 us for each, so at most 0.13 s on the event loop
_MAX_DIGITS = 300  # a longer number may not fit a float, which keywords such as multipleOf need
_MAX_ERRORS = 16  # collected; the policy reads the one that jsonschema ranks as most relevant
_PATTERN_TIMEOUT_S = 0.1


def read_arguments(text: str) -> dict[str, object]:
    """Parse the JSON object with a call's arguments: strings of valid UTF-8, numbers that fit a float. ToolFailedError:
    it is `malformed`, or has `bad_arguments` (too long, no object, too many values)."""
    if len(text) > MAX_CHARS:
        raise ToolFailedError(f"the arguments are longer than {MAX_CHARS} characters", "bad_arguments")
    try:
        arguments = json.loads(text or "{}", parse_constant=_constant, parse_int=_integer, parse_float=_number)
        num_values = sum(1 for _ in _values(arguments))
    except UnicodeEncodeError:
        raise ToolFailedError("the arguments contain half of a surrogate pair", "malformed") from None
    except (ValueError, RecursionError) as error:
        raise ToolFailedError(f"the arguments are not valid JSON: {error}", "malformed") from None
    if not isinstance(arguments, dict):
        raise ToolFailedError("the arguments must be a JSON object", "bad_arguments")
    if num_values > MAX_VALUES:
        raise ToolFailedError(f"the arguments have more than {MAX_VALUES} values", "bad_arguments")
    return arguments


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits: at most {_MAX_DIGITS} are allowed")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits[:20]} is too large for a float")
    return value


def _values(value: object) -> Iterator[object]:
    """Yield a value and all names and values inside it. UnicodeEncodeError: a string is not valid UTF-8."""
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
    """Checks whether arguments fit a tool's schema. SchemaError: it is no JSON schema, or can't be checked safely."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        kind = _extend(validators.validator_for(schema, Draft202012Validator), _LIMITED)
        kind.check_schema(dict(schema))
        if any(isinstance(part, dict) and "patternProperties" in part for part in _values(dict(schema))):
            raise SchemaError(
                "patternProperties is not supported, because matching a pattern can take forever. List the properties "
                "by name"
            )
        # The registry is empty, because the default registry would fetch a `$ref` from the network.
        self._validator = kind(dict(schema), registry=EMPTY_REGISTRY)
        _check_references(dict(schema))

    def problem(self, arguments: object) -> str:
        """Return why these arguments don't fit the schema; empty if they fit."""
        try:
            error = best_match(islice(self._validator.iter_errors(arguments), _MAX_ERRORS))
        except Exception as reason:  # boundary: jsonschema may raise anything for hostile values and schemas
            return f"the arguments can't be checked: {type(reason).__name__}: {reason}"
        if error is None:
            return ""
        where = "/".join(str(part) for part in error.absolute_path)
        return f"{where}: {error.message}" if where else str(error.message)


def _check_references(schema: dict[str, Any]) -> None:
    """Raise SchemaError for a reference without a target, or in a circle, with which no call could be checked."""
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    base = resource.id() or ""
    resolver = EMPTY_REGISTRY.with_resource(base, resource).resolver(base)
    for part in _values(schema):
        target, passed = part, list[str]()
        while isinstance(target, dict) and isinstance(name := target.get("$ref"), str):
            if name in passed:
                raise SchemaError(f"$ref {name!r} leads back to itself")
            passed.append(name)
            try:
                target = resolver.lookup(name).contents
            except Unresolvable:
                raise SchemaError(f"$ref {name!r} names nothing in the schema") from None


def _pattern(validator: Any, pattern: str, text: object, schema: object) -> Iterator[ValidationError]:
    """Check `pattern` with a deadline: jsonschema has none, and a pattern like `(a+)+$` can take hours."""
    if isinstance(text, str) and not regex.search(pattern, text, timeout=_PATTERN_TIMEOUT_S):
        yield ValidationError(f"{text!r} does not match {pattern!r}")


def _unique_items(validator: Any, is_wanted: bool, items: object, schema: object) -> Iterator[ValidationError]:
    """Check `uniqueItems` in linear time; jsonschema takes quadratic time for objects."""
    if is_wanted and isinstance(items, list) and len({_key(item) for item in items}) < len(items):
        yield ValidationError("some items are equal")


def _key(value: object) -> object:
    """Return a key that is the same only for equal JSON values: True differs from 1, but 1.0 equals 1."""
    if isinstance(value, dict):
        return "object", frozenset((name, _key(part)) for name, part in value.items())
    if isinstance(value, list):
        return "array", tuple(_key(part) for part in value)
    return isinstance(value, bool), value


def _type(validator: Any, types: Any, value: object, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    """Check `type`, where OpenAPI's `nullable` allows null."""
    if value is not None or schema.get("nullable") is not True:
        yield from Draft202012Validator.VALIDATORS["type"](validator, types, value, schema)


_extend: Any = validators.extend  # jsonschema has no type information
_LIMITED = {"pattern": _pattern, "uniqueItems": _unique_items, "type": _type}


log = logging.getLogger(__name__)
_CREATE_TIMEOUT_S = 30.0
_RELEASE_TIMEOUT_S = 30.0


class ToolSet:
    """The tools of one process, of different names. `on_close` closes what they share, e.g. an MCP session."""

    def __init__(self, tools: Sequence[Tool] = (), *, on_close: Sequence[Callable[[], Awaitable[None]]] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        self._checkers: dict[str, ArgumentChecker] = {}
        self._on_close = tuple(on_close)
        for tool in tools:
            self._add(tool)

    def _add(self, tool: Tool) -> None:
        name = tool.schema.name
        if name in self._tools:
            raise ConfigError(f"two tools have the name {name!r}: leave one out, e.g. with tool_selected_list")
        try:
            self._checkers[name] = ArgumentChecker(tool.schema.parameters)
        except SchemaError as error:
            raise ConfigError(
                f"tool {name!r}: its parameters can't be used as a JSON schema: {error.message}"
            ) from error
        self._tools[name] = tool

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        return tuple(tool.schema for tool in self._tools.values())

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def problem(self, name: str, arguments: object) -> str:
        """Return why these arguments don't fit the tool's schema; empty if they fit."""
        return self._checkers[name].problem(arguments)

    def ends_episode(self, name: str) -> bool:
        """True if an output of this tool may contain the trajectory's answer."""
        # The attribute is optional, because it is not part of the protocol `Tool`.
        return bool(getattr(self._tools.get(name), "ends_episode", False))

    def trajectory(
        self,
        tools_kwargs: Mapping[str, Mapping[str, Any]],
        *,
        files: Mapping[str, str] | None = None,
        packages: tuple[str, ...] = (),
        spec: SandboxSpec | None = None,
        setup: tuple[str, ...] = (),
    ) -> ToolStates:
        """Return a context manager that holds the tools' states for one trajectory. `tools_kwargs` are the data row's,
        by tool; the others are for `open_workspace`."""
        working = [tool for tool in self._tools.values() if isinstance(tool, WorkspaceTool)]
        workspace = open_workspace(working, files=files, packages=packages, spec=spec, setup=setup) if working else None
        return ToolStates(self._tools, tools_kwargs, workspace)

    async def close(self) -> None:
        closing, self._on_close = self._on_close, ()
        await asyncio.gather(*(close() for close in closing))


@dataclass(slots=True, eq=False, repr=False)
class ToolStates:
    """The states of the tools in one trajectory: `async with tools.trajectory(kwargs) as states: states["calc"]`."""

    tools: Mapping[str, Tool]
    kwargs: Mapping[str, Mapping[str, Any]]
    workspace: Workspace | None  # shared by the tools; closed when the first of them is released
    answer: str | None = None  # of the first output that contains one
    pictures: dict[str, bytes] = field(default_factory=dict)  # of all outputs, by SHA-256
    _states: dict[str, Any] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        try:
            for name, tool in self.tools.items():
                self._states[name] = await _guarded(self._create(name, tool), f"tool {name}: create")
        except BaseException:
            await self._release()
            raise
        return self

    async def _create(self, name: str, tool: Tool) -> Any:
        create_kwargs = self.kwargs.get(name, {}).get("create_kwargs") or {}
        if isinstance(tool, WorkspaceTool) and self.workspace is not None:
            return await tool.join(self.workspace, create_kwargs)
        return await tool.create(create_kwargs)

    def __getitem__(self, name: str) -> Any:
        return self._states[name]

    async def rewards(self) -> dict[str, float]:
        """Return the tools' verdicts on the whole trajectory, by tool. ToolFailedError: one can't be used."""
        found = {
            name: await _guarded(_verdict(self.tools[name], state), f"tool {name}: reward")
            for name, state in self._states.items()
        }
        return {name: value for name, value in found.items() if value is not None}

    async def __aexit__(self, *exc: object) -> None:
        # The release is shielded, because a cancelled trajectory must also return its sandboxes.
        await asyncio.shield(self._release())

    async def _release(self) -> None:
        states, self._states = self._states, {}
        for name, state in states.items():
            try:
                async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                    await guarded(partial(self.tools[name].release, state))
            # boundary: if a tool fails, the states of the other tools must still be released
            except Exception as error:
                log.warning("tool %s: its state was not released: %s: %s", name, type(error).__name__, error)


def infrastructure(error: RayappError, what: str) -> RayappError:
    """Convert a tool's RayappError to one that ends the trajectory without a verdict on the policy; a dead or silent
    process is a ToolUnavailableError."""
    if isinstance(error, SandboxError | ToolUnavailableError | InputError):
        return error
    return ToolUnavailableError(f"{what}: {type(error).__name__}: {error}")


async def _verdict(tool: Tool, state: Any) -> float | None:
    value = await tool.reward(state)
    return None if value is None else storable(value)


async def _guarded(call: Coroutine[Any, Any, Any], what: str) -> Any:
    try:
        async with asyncio.timeout(_CREATE_TIMEOUT_S):
            return await guarded(lambda: call)
    except RayappError as error:
        raise infrastructure(error, what) from error
    except ToolFailedError:
        raise
    # boundary: a tool is foreign code, and its crash must end only one trajectory, not the group
    except Exception as error:
        log.warning("%s crashed", what, exc_info=True)
        raise ToolFailedError(f"{what} crashed: {type(error).__name__}: {error}", "crash") from error

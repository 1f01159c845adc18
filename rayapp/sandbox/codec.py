"""Rebuilds plain data from bytes that hostile code may have written. Called by providers, outside the sandbox.

`decode_frames` never raises and never runs long, whatever the bytes: results that make no sense are results that are
missing. Values are built here from JSON, one exact type after the other; no candidate object ever crosses.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rayapp.sandbox.harness import MAX_DEPTH, MAX_ERROR_CHARS, MAX_VALUE_BYTES, pack
from rayapp.types import CallResult

MAX_NODES = 200_000
"""Values in one frame. A byte of JSON can cost 30 of memory, so bytes alone are no bound."""
_MAX_COLLISIONS = 100
_LEAVES = (type(None), bool, int, float, str)
_write = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(slots=True)
class Frames:
    """What the harness (or a candidate in its name) reported."""

    is_defined: bool = False
    is_done: bool = False
    definition_error: str = ""
    script_error: str = ""
    exit_status: int | None = None
    """What a script ended with; None when it did not say."""
    calls: dict[int, CallResult] = field(default_factory=dict)


def encode_inputs(inputs: Iterable[Sequence[object]]) -> list[str]:
    """Argument lists as the harness reads them.

    Raises:
        TypeError: an argument is not plain data.
        ValueError: nested too deep.
    """
    return [_write(pack(list(args))) for args in inputs]


def decode_frames(frames: Iterable[bytes], num_calls: int) -> Frames:
    """Read frames in order. A second result for the same call makes that call fail: an honest harness sends one."""
    seen = Frames()
    for raw in frames:
        try:
            _take(seen, _load(raw), num_calls)
        except (ValueError, TypeError, RecursionError, OverflowError):
            # Whatever hostile code sent, the calls it could have been about are simply without a result.
            continue
    return seen


def call_results(seen: Frames, num_calls: int, why_missing: str) -> tuple[CallResult, ...]:
    """Exactly one result per input, in order."""
    missing = CallResult(ok=False, error=why_missing)
    return tuple(seen.calls.get(index, missing) for index in range(num_calls))


def _load(raw: bytes) -> list[object]:
    if len(raw) > MAX_VALUE_BYTES:
        raise ValueError("frame too large")
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_NODES:
        raise ValueError("frame has too many values")
    parsed = _read(raw.decode())
    if type(parsed) is not list:
        raise ValueError("a frame is an array")
    return parsed


def _take(seen: Frames, parts: list[object], num_calls: int) -> None:
    match parts:
        case ["defined"]:
            seen.is_defined = True
        case ["done"]:
            seen.is_done = True
        case ["undefined", str(error)]:
            seen.definition_error = _clean(error)
        case ["failed", str(error), int(status)]:
            seen.script_error, seen.exit_status = _clean(error), status & 0xFF
        case ["exited", int(status)]:
            seen.exit_status = status & 0xFF
        case ["raised", int(index), str(error)] if type(index) is int and 0 <= index < num_calls:
            _put(seen, index, CallResult(ok=False, error=_clean(error)))
        case ["value", int(index), packed] if type(index) is int and 0 <= index < num_calls:
            _put(seen, index, _value(packed))
        case _:
            raise ValueError("unknown frame")


def _put(seen: Frames, index: int, result: CallResult) -> None:
    twice = CallResult(ok=False, error="more than one result came back for this call")
    seen.calls[index] = twice if index in seen.calls else result


def _value(packed: object) -> CallResult:
    try:
        return CallResult(ok=True, value=decode_value(packed))
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        return CallResult(ok=False, error=_clean(f"the result can't be read: {error}"))


def decode_value(packed: object, depth: int = 0) -> object:
    """The plain value behind what `harness.pack` wrote, trusting nothing.

    Raises:
        ValueError, TypeError: these bytes were not written by `pack`.
    """
    if depth > MAX_DEPTH + 1:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(packed, list):
        return [decode_value(part, depth + 1) for part in packed]
    if not isinstance(packed, tuple):
        if type(packed) not in _LEAVES:
            raise TypeError(f"unexpected {type(packed).__name__}")
        return packed
    tag, content = packed
    if isinstance(content, str):
        return _decode_text(tag, content)
    if not isinstance(content, list):
        raise TypeError(f"content of {tag!r} has to be text or an array")
    return _decode_container(tag, content, depth)


def _decode_text(tag: str, content: str) -> object:
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "i":
        return int(content, 16)
    if tag == "f" and content in ("nan", "inf", "-inf"):
        return float(content)
    raise ValueError(f"unknown tag {tag!r}")


def _decode_container(tag: str, content: list[object], depth: int) -> object:
    if tag == "d":
        pairs = [_pair(item, depth) for item in content]
        _check_hashes([key for key, _ in pairs])
        built = dict(pairs)
        _check_size(len(built), len(pairs))
        return built
    parts = [decode_value(part, depth + 1) for part in content]
    if tag == "t":
        return tuple(parts)
    if tag == "s":
        _check_hashes(parts)
        members = set(parts)
        _check_size(len(members), len(parts))
        return members
    raise ValueError(f"unknown tag {tag!r}")


def _pair(item: object, depth: int) -> tuple[object, object]:
    if not isinstance(item, list) or len(item) != 2:
        raise ValueError("a dict is an array of pairs")
    return decode_value(item[0], depth + 1), decode_value(item[1], depth + 1)


def _check_hashes(keys: list[object]) -> None:
    """Refuse keys made to collide: 100,000 multiples of 2**61 - 1 all hash to 0: such a dict takes hours."""
    if len(keys) > _MAX_COLLISIONS and max(Counter(map(hash, keys)).values()) > _MAX_COLLISIONS:
        raise ValueError("keys collide")


def _check_size(built: int, sent: int) -> None:
    if built != sent:
        raise ValueError("the same key came twice")


def _one_pair(pairs: list[tuple[str, object]]) -> tuple[str, object]:
    """JSON objects become (tag, content) tuples: what is no tagged value is refused while parsing."""
    if len(pairs) != 1:
        raise ValueError("an object holds one tag")
    return pairs[0]


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


_read = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_one_pair).decode


def _clean(text: str) -> str:
    """One line of printable text: it is shown to people and logged."""
    text = text[: MAX_ERROR_CHARS + 100]
    return "".join(letter if letter.isprintable() else " " for letter in text)

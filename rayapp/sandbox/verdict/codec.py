"""Rebuilds plain data from bytes that hostile code may have written. This module runs outside the sandbox.

`decode_frames` raises no error for any bytes; malformed results count as missing. Values are rebuilt from JSON by exact
type: objects of the candidate never leave the sandbox.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from rayapp.core.types import CallResult
from rayapp.sandbox.verdict.compare import check_hashes
from rayapp.sandbox.verdict.harness import MAX_DEPTH, MAX_ERROR_CHARS, MAX_NODES, MAX_VALUE_BYTES, count_nodes, pack

T = TypeVar("T")
_OTHER_FRAMES = 4  # of an honest run, in addition to one per call
_LITTLE_BYTES = 1 << 14  # decoded on the event loop, in less than ten milliseconds
_LEAVES = (type(None), bool, int, float, str)
_write = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(slots=True)
class Frames:
    """Decoded frames of the harness. A candidate may have forged them."""

    is_defined: bool = False
    is_done: bool = False
    definition_error: str = ""
    script_error: str = ""
    exit_status: int | None = None  # of a script; None if no frame reports it
    calls: dict[int, CallResult] = field(default_factory=dict)


def encode_inputs(inputs: Iterable[Sequence[object]]) -> list[str]:
    """Encode argument lists for the harness. TypeError or ValueError: not plain data, or nested too deeply."""
    return [_write(pack(list(args))) for args in inputs]


def max_frames(num_calls: int) -> int:
    """Return the maximum number of frames to read from one run."""
    return num_calls + _OTHER_FRAMES


async def off_the_loop(num_bytes: int, read: Callable[[], T]) -> T:
    """Return the result of `read`, which decodes hostile output: large output in a thread, off the event loop."""
    return read() if num_bytes <= _LITTLE_BYTES else await asyncio.to_thread(read)


def decode_frames(frames: Iterable[bytes], num_calls: int) -> Frames:
    """Decode frames up to the first malformed one. A call with two results failed: an honest harness sends one."""
    seen = Frames()
    for raw in islice(frames, max_frames(num_calls)):
        try:
            _take(seen, _load(raw), num_calls)
        except (ValueError, TypeError, RecursionError, OverflowError):
            # calls after a malformed frame have no result
            break
    return seen


def call_results(seen: Frames, num_calls: int, why_missing: str) -> tuple[CallResult, ...]:
    """Return exactly one result per call, in order; a missing one is a failure with the reason `why_missing`."""
    missing = CallResult(ok=False, error=why_missing)
    return tuple(seen.calls.get(index, missing) for index in range(num_calls))


def _load(raw: bytes) -> list[object]:
    if len(raw) > MAX_VALUE_BYTES:
        raise ValueError(f"the message has more than {MAX_VALUE_BYTES} bytes")
    if count_nodes(raw) > MAX_NODES:
        raise ValueError(f"the message has more than {MAX_NODES} values")
    parsed = _read(raw.decode())
    if type(parsed) is not list:
        raise ValueError("the message is not a JSON array")
    return parsed


def _take(seen: Frames, parts: list[object], num_calls: int) -> None:
    match parts:
        case ["defined"]:
            seen.is_defined = True
        case ["done"]:
            seen.is_done = True
        case ["undefined", str(error)]:
            seen.definition_error = clean(error)
        case ["failed", str(error), int(status)]:
            seen.script_error, seen.exit_status = clean(error), status & 0xFF
        case ["exited", int(status)]:
            seen.exit_status = status & 0xFF
        case ["raised", int(index), str(error)] if type(index) is int and 0 <= index < num_calls:
            _put(seen, index, CallResult(ok=False, error=clean(error)))
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
        return CallResult(ok=False, error=clean(f"the result can't be read: {error}"))


def decode_value(packed: object, depth: int = 0) -> object:
    """Return the value that `harness.pack` encoded, without trusting the input: ValueError or TypeError if it is
    forged."""
    if depth > MAX_DEPTH + 1:
        raise ValueError(f"the value is nested more than {MAX_DEPTH} levels deep")
    if isinstance(packed, list):
        return [decode_value(part, depth + 1) for part in packed]
    if not isinstance(packed, tuple):
        if type(packed) not in _LEAVES:
            raise TypeError(f"values of type {type(packed).__name__} are not allowed")
        return packed
    tag, content = packed
    if isinstance(content, str):
        return _decode_text(tag, content)
    if not isinstance(content, list):
        raise TypeError(f"the value with tag {tag!r} is neither a string nor an array")
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
        check_hashes([key for key, _ in pairs])
        built = dict(pairs)
        _check_size(len(built), len(pairs))
        return built
    parts = [decode_value(part, depth + 1) for part in content]
    if tag == "t":
        return tuple(parts)
    if tag == "s":
        check_hashes(parts)
        members = set(parts)
        _check_size(len(members), len(parts))
        return members
    raise ValueError(f"unknown tag {tag!r}")


def _pair(item: object, depth: int) -> tuple[object, object]:
    if not isinstance(item, list) or len(item) != 2:
        raise ValueError("a dict was not sent as an array of pairs")
    return decode_value(item[0], depth + 1), decode_value(item[1], depth + 1)


def _check_size(built: int, sent: int) -> None:
    if built != sent:
        raise ValueError("a dict has a key twice, or a set has a member twice")


def _one_pair(pairs: list[tuple[str, object]]) -> tuple[str, object]:
    if len(pairs) != 1:
        raise ValueError(f"a JSON object has {len(pairs)} keys, not only its type tag")
    return pairs[0]


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


_read = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_one_pair).decode


def clean(text: str) -> str:
    """Return the text as one printable line, for users and logs."""
    text = text[: MAX_ERROR_CHARS + 100]
    return "".join(letter if letter.isprintable() else " " for letter in text)

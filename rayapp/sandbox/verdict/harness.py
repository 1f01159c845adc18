"""Runs candidate code and calls its function, inside the sandbox, in the same process as hostile code.

It imports only the standard library, so that its source can be sent to a remote sandbox. The candidate can write the
same frames; this process has no expected value, so forged frames don't help. A frame is one JSON array.
"""

from __future__ import annotations

import atexit
import builtins
import json
import sys
import threading
import types
from collections.abc import Callable, Sequence

MAX_DEPTH = 100  # a deeper value is an attack on the code that reads it
MAX_VALUE_BYTES = 1 << 20  # one packed value
MAX_NODES = 200_000  # in one frame: one byte of JSON can take 30 bytes of memory
MAX_ERROR_CHARS = 500
# The iteration order of a set of strings, and so a verdict, is then the same in every interpreter.
HASH_SEED = {"PYTHONHASHSEED": "0"}
_EXACT_INT = 1 << 53
_SIZED = (str, bytes, list, tuple, set, dict)
_INFINITIES = (float("inf"), float("-inf"))

# These functions are bound before candidate code runs, so that a candidate that patches json does not break its own
# answers.
_read = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # typeshed lacks it
_escape = json.encoder.encode_basestring_ascii
_encoder_type = json.encoder.c_make_encoder  # type: ignore[attr-defined]  # typeshed lacks it
if _encoder_type is None:  # this interpreter lacks the C part of json
    _encode = json.JSONEncoder(separators=(",", ":")).iterencode
else:
    # The encoder is made once. `JSONEncoder.encode` would make one for each call, which would copy pages of memory in a
    # fork.
    _encode = _encoder_type(None, None, _escape, None, ":", ",", False, False, True)

Emit = Callable[[bytes], None]


def pack(value: object, depth: int = 0) -> object:
    """Encode a plain value as JSON that keeps its types.

    None, bool, str, small int, finite float and list stand for themselves. Other values are `{tag: content}`, where the
    tag is i (big int in hex), f (float that is not finite), t (tuple), s (set), d (dict as pairs) or b (bytes in hex).
    A TypeError refuses all else, e.g. instances of subclasses, which may override `==`.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind in _SIZED and len(value) > MAX_VALUE_BYTES:  # type: ignore[arg-type]
        # check the size before encoding, because encoding would use up the time of later calls
        raise ValueError(f"the value takes more than {MAX_VALUE_BYTES} bytes")
    if kind is str:
        return value
    if kind is int:
        return value if -_EXACT_INT < value < _EXACT_INT else {"i": hex(value)}  # type: ignore[operator, arg-type]
    if kind is float:
        return {"f": repr(value)} if value != value or value in _INFINITIES else value
    if kind is bytes:
        return {"b": value.hex()}  # type: ignore[attr-defined]
    if depth >= MAX_DEPTH:
        raise ValueError(f"the value is nested more than {MAX_DEPTH} levels deep")
    if kind is list:
        return [pack(part, depth + 1) for part in value]  # type: ignore[attr-defined]
    if kind is tuple or kind is set:
        return {"t" if kind is tuple else "s": [pack(part, depth + 1) for part in value]}  # type: ignore[attr-defined]
    if kind is dict:
        items = value.items()  # type: ignore[attr-defined]
        return {"d": [[pack(key, depth + 1), pack(item, depth + 1)] for key, item in items]}
    raise TypeError(f"{kind.__name__} is not plain data")


def unpack(packed: object) -> object:
    """Decode a trusted value that `pack` wrote. For a candidate's output use `codec.decode_value`."""
    if isinstance(packed, list):
        return [unpack(part) for part in packed]
    if not isinstance(packed, dict):
        return packed
    ((tag, content),) = packed.items()
    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float(content)
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "d":
        return {unpack(key): unpack(item) for key, item in content}
    parts = [unpack(part) for part in content]
    return tuple(parts) if tag == "t" else set(parts)


def describe(error: BaseException) -> str:
    """Return the last line of an exception's traceback (`ValueError: …`), even if its own `__str__` fails."""
    try:
        text = str(error)
    except BaseException:  # boundary: the candidate's __str__ may raise anything
        text = "<its message can't be shown>"
    text = text[:MAX_ERROR_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def count_nodes(answer: bytes) -> int:
    """Return an upper bound of the number of values in an answer."""
    return answer.count(b",") + answer.count(b"[") + answer.count(b"{")


def frame(*parts: object) -> bytes:
    return "".join(_encode(parts, 0)).encode()  # type: ignore[arg-type]


def define(code: str, name: str) -> dict[str, object]:
    """Run code as a module and return its global names. Dataclasses and pickle look it up in sys.modules."""
    names = _new_module(name)
    exec(compile(code, "<candidate>", "exec"), names)
    return names


def _new_module(name: str) -> dict[str, object]:
    for end in ("exit", "quit"):  # `site`, which defines both, is not imported
        vars(builtins).setdefault(end, sys.exit)
    sys.modules[name] = module = types.ModuleType(name)
    return module.__dict__


def run_calls(code: str, function: str, inputs: Sequence[str], emit: Emit) -> None:
    """Run the code, and call its function on each input (arguments as JSON). Each result is sent at once."""
    try:
        target = define(code, "candidate").get(function)
        if not callable(target):
            raise NameError(f"the code defines no function {function}")  # noqa: TRY004  (what Python raises)
    except BaseException as error:  # boundary: candidate code may raise anything, e.g. SystemExit
        emit(frame("undefined", describe(error)))
        return
    emit(frame("defined"))
    for index, text in enumerate(inputs):
        emit(_call(target, index, unpack(_read(text, 0)[0])))  # type: ignore[arg-type]
    emit(frame("done"))


def _call(target: Callable[..., object], index: int, args: Sequence[object]) -> bytes:
    try:
        answer = frame("value", index, pack(target(*args)))
    except BaseException as error:  # boundary: candidate code may raise anything, e.g. SystemExit
        return frame("raised", index, describe(error))
    if len(answer) > MAX_VALUE_BYTES:
        return frame("raised", index, f"ValueError: the value takes more than {MAX_VALUE_BYTES} bytes")
    if count_nodes(answer) > MAX_NODES:
        return frame("raised", index, f"ValueError: the value has more than {MAX_NODES} parts")
    return answer


def main_names() -> dict[str, object]:
    """Return the global names of a new module `__main__`.

    The script's folder is last in the search path: its files can't replace Python's modules. Bytecode is not cached:
    Python detects a change by size and whole seconds, and an agent may edit a file twice in a second.
    """
    sys.dont_write_bytecode = True
    if sys.path[-1:] != [""]:
        sys.path.append("")
    return _new_module("__main__")


def run_script(code: str, names: dict[str, object], emit: Emit) -> int:
    """Run code as a script in `names`, print an uncaught exception as Python does, and return the exit status."""
    try:
        exec(compile(code, "<candidate>", "exec"), names)
    except SystemExit as error:
        status = _exit_status(error)
        emit(frame("failed", describe(error), status) if status else frame("exited", 0))
        return status
    except BaseException as error:  # boundary: candidate code may raise anything
        text = describe(error)
        _print_traceback(error)
        emit(frame("failed", text, 1))
        return 1
    emit(frame("exited", 0))
    return 0


def end_script() -> None:
    """Do as Python at the end of a script: end idle workers of executors, wait for threads, run exit handlers."""
    for end in reversed(getattr(threading, "_threading_atexits", ())):
        end()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()  # noqa: SLF001  (Python has no public one)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except BaseException:  # boundary: the candidate may have replaced or closed the stream
            continue


def _exit_status(error: SystemExit) -> int:
    if error.code is None or type(error.code) is int:
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    try:
        import traceback

        # Leave this module's own stack frame out of the candidate's traceback.
        entries = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, entries)
    except BaseException:
        pass

"""Makes the program that a remote sandbox runs, and reads the report it prints. Pure; called by `remote.py`.

    job -> source(): one Python text (harness + watcher + job) -> any provider that runs Python -> stdout -> parse()

Whatever comes back was written next to hostile code: every field is checked for its type and its size.
"""

from __future__ import annotations

import base64
import json
import secrets
import shlex
import signal
import uuid
import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path

from rayapp.core.errors import SandboxProtocolError
from rayapp.core.types import StopCause
from rayapp.sandbox.verdict import harness, watcher
from rayapp.sandbox.verdict.results import Answer
from rayapp.sandbox.verdict.watcher import MAX_FRAME_BYTES

_SOURCE = """import sys
# The folder it was started in, before Python 3.11: what earlier code left there is not imported.
sys.path[:] = [folder for folder in sys.path if folder]
import base64, json, zlib
parts = json.loads(zlib.decompress(base64.b64decode("{packed}")))
harness, watcher = {{"__name__": "rayapp_harness"}}, {{"__name__": "rayapp_watcher"}}
exec(compile(parts["harness"], "<harness>", "exec"), harness)
exec(compile(parts["watcher"], "<watcher>", "exec"), watcher)
watcher["main"](parts["job"], harness)
"""
KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH")
"""What an interpreter gets of the sandbox's environment: nothing of Python's."""
ADDED = {"LANG": "C.UTF-8", "PYTHONSAFEPATH": "1", **harness.HASH_SEED}
"""What it gets besides, with -s in place of -I, which would ignore the hash seed. The watcher hands no more than that
seed on."""
_ENV = " ".join((*(f'${{{name}:+{name}="${name}"}}' for name in KEPT), *(f"{name}={ADDED[name]}" for name in ADDED)))
_SPARE_CHARS = 1 << 16
_MAX_INLINE_CHARS = 90_000
"""Longest program that goes into a command line: Linux allows 128 KiB per argument."""
_MAX_DURATION_S = 86_400.0
Job = Mapping[str, object]


def shell_command(program: str) -> str:
    """What a shell runs to start a program in an interpreter of its own."""
    return f"exec env -i {_ENV} python3 -s -c {shlex.quote(program)}"


async def command_of(program: str, write: Callable[[str], Awaitable[None]]) -> str:
    """`shell_command`; of a program that is too long for a command line, from a file that is removed.

    Args:
        write: writes the program to this path in the sandbox.
    """
    if len(program) <= _MAX_INLINE_CHARS:
        return shell_command(program)
    path = f"/tmp/rayapp-{uuid.uuid4().hex}.py"
    await write(path)
    return f"env -i {_ENV} python3 -s - < {path}; rm -f {path}"


def max_report_chars(num_bytes: int) -> int:
    """Longest output of a program that may hold a report of so many bytes: each is coded twice, in lines."""
    return 2 * num_bytes + _SPARE_CHARS


def new_nonce() -> str:
    """What marks report lines, so that nothing else on stdout is taken for one."""
    return f"rayapp-{secrets.token_hex(12)}"


def source(job: Job) -> str:
    """The program for one job. Standard library only, any Python from 3.9 on.

    Args:
        job: see `watcher.main`.
    """
    parts = {"harness": _text_of(harness.__file__), "watcher": _text_of(watcher.__file__), "job": dict(job)}
    packed = base64.b64encode(zlib.compress(json.dumps(parts).encode(), 1)).decode()
    return _SOURCE.format(packed=packed)


@cache
def _text_of(path: str) -> str:
    return Path(path).read_text()


def find_report(stdout: str, nonce: str) -> dict[str, object] | None:
    """The JSON object between the marks; None if there is no whole one.

    Raises:
        SandboxProtocolError: marked, but nonsense.
    """
    lines = [line.strip() for line in stdout.splitlines() if line.startswith(nonce)]
    if not lines or lines[-1] != f"{nonce}.":
        return None
    text = "".join(line[len(nonce) + 1 :] for line in lines[:-1])
    try:
        found = json.loads(base64.b64decode(text, validate=True))
    except (ValueError, RecursionError) as error:
        raise SandboxProtocolError(f"the sandbox's report can't be read: {type(error).__name__}") from None
    if type(found) is not dict:
        raise SandboxProtocolError("the sandbox's report is no object")
    return found


def read_report(found: dict[str, object], *, max_output_bytes: int) -> Answer:
    """Check every field of a report.

    Raises:
        SandboxProtocolError: it makes no sense.
    """
    status, stopped = found.get("status"), found.get("stopped")
    if type(status) is not int or stopped not in ("", "timeout", "output"):
        raise SandboxProtocolError(f"the sandbox's report makes no sense: {str(found)[:200]}")
    return Answer(
        # Code that was stopped was killed, whatever it was about to end with.
        exit_code=-signal.SIGKILL if stopped else max(-64, min(255, status)),
        stopped=StopCause(str(stopped)) if stopped else None,
        duration_s=_duration_s(found.get("duration_s")),
        stdout=read_bytes(found, "stdout", max_output_bytes),
        stderr=read_bytes(found, "stderr", max_output_bytes),
        frames=read_bytes(found, "frames", MAX_FRAME_BYTES),
    )


def _duration_s(value: object) -> float:
    """Seconds by the sandbox's own clock, which can say anything: between nothing and a day."""
    if not isinstance(value, int | float):
        raise SandboxProtocolError(f"the sandbox's report has no duration but {str(value)[:50]!r}")
    return float(max(0, min(_MAX_DURATION_S, value))) if value == value else 0.0


def read_bytes(found: dict[str, object], key: str, max_bytes: int) -> bytes:
    """A field that holds bytes.

    Raises:
        SandboxProtocolError: it does not, or too many.
    """
    text = found.get(key)
    try:
        if type(text) is not str or len(text) > max_bytes * 4 // 3 + 8:
            raise ValueError(key)
        return base64.b64decode(text, validate=True)[:max_bytes]
    except ValueError:
        raise SandboxProtocolError(f"the sandbox's report has no readable {key}") from None

"""Makes the program that a remote sandbox runs, and reads the report that it prints. No I/O.

job -> source(): one Python text (harness + supervisor + watcher + job)
-> any provider that runs Python -> stdout -> find_report(), read_report(), which trust no field
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

from rayapp.core import supervisor
from rayapp.core.errors import SandboxProtocolError
from rayapp.core.types import StopCause
from rayapp.sandbox.verdict import harness, watcher
from rayapp.sandbox.verdict.results import RawResult
from rayapp.sandbox.verdict.watcher import MAX_FRAME_BYTES

_SOURCE = """import sys
# The folder it was started in, before Python 3.11: what earlier code left there is not imported.
sys.path[:] = [folder for folder in sys.path if folder]
import base64, json, zlib
parts = json.loads(zlib.decompress(base64.b64decode("{packed}")))
names = {{name: {{"__name__": "rayapp_" + name}} for name in ("harness", "supervisor", "watcher")}}
for name in names:
    exec(compile(parts[name], "<" + name + ">", "exec"), names[name])
names["watcher"]["main"](parts["job"], names["harness"], names["supervisor"])
"""
KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH")  # of the sandbox; none for Python (PYTHON…)
# Started with -s: -I would ignore the hash seed, all that the watcher passes on to candidate code.
ADDED = {"LANG": "C.UTF-8", "PYTHONSAFEPATH": "1", **harness.HASH_SEED}
_ENV = " ".join((*(f'${{{name}:+{name}="${name}"}}' for name in KEPT), *(f"{name}={ADDED[name]}" for name in ADDED)))
_SPARE_CHARS = 1 << 16
_MAX_INLINE_CHARS = 90_000  # in a command line: Linux allows 128 KiB per argument
_MAX_DURATION_S = 86_400.0
Job = Mapping[str, object]


def shell_command(program: str) -> str:
    return f"exec env -i {_ENV} python3 -s -c {shlex.quote(program)}"


async def command_of(program: str, write: Callable[[str], Awaitable[None]]) -> str:
    """Return the shell command that runs a program; `write` first puts one that is too long into a file, which is
    removed."""
    if len(program) <= _MAX_INLINE_CHARS:
        return shell_command(program)
    path = f"/tmp/rayapp-{uuid.uuid4().hex}.py"
    await write(path)
    return f"env -i {_ENV} python3 -s - < {path}; rm -f {path}"


def max_report_chars(num_bytes: int) -> int:
    """Return how many characters a program prints for a report of `num_bytes`, encoded twice and in lines."""
    return 2 * num_bytes + _SPARE_CHARS


def new_nonce() -> str:
    """Return a random mark for the lines of a report, so that no other output is taken for one."""
    return f"rayapp-{secrets.token_hex(12)}"


def source(job: Job) -> str:
    """Return the program for one job (`watcher.main` has its fields), for Python 3.9 or newer."""
    texts = {"harness": harness.__file__, "supervisor": supervisor.__file__, "watcher": watcher.__file__}
    parts = {name: _text_of(path) for name, path in texts.items()} | {"job": dict(job)}
    packed = base64.b64encode(zlib.compress(json.dumps(parts).encode(), 1)).decode()
    return _SOURCE.format(packed=packed)


@cache
def _text_of(path: str) -> str:
    return Path(path).read_text()


def find_report(stdout: str, nonce: str) -> dict[str, object] | None:
    """Return the JSON object between the marks; None if the output has no complete report."""
    lines = [line.strip() for line in stdout.splitlines() if line.startswith(nonce)]
    if not lines or lines[-1] != f"{nonce}.":
        return None
    text = "".join(line[len(nonce) + 1 :] for line in lines[:-1])
    try:
        found = json.loads(base64.b64decode(text, validate=True))
    except (ValueError, RecursionError) as error:
        raise SandboxProtocolError(f"the sandbox's report can't be read: {type(error).__name__}") from None
    if type(found) is not dict:
        raise SandboxProtocolError("the sandbox's report is not a JSON object")
    return found


def read_report(found: dict[str, object], *, max_output_bytes: int) -> RawResult:
    """Check every field of a report, and return it as a RawResult."""
    status, stopped = found.get("status"), found.get("stopped")
    if type(status) is not int or stopped not in ("", "timeout", "output"):
        raise SandboxProtocolError(f"the sandbox's report is malformed: {str(found)[:200]}")
    return RawResult(
        # Code that was stopped counts as killed by SIGKILL, whatever exit status it returned.
        exit_code=-signal.SIGKILL if stopped else max(-64, min(255, status)),
        stopped=StopCause(str(stopped)) if stopped else None,
        duration_s=_duration_s(found.get("duration_s")),
        stdout=read_bytes(found, "stdout", max_output_bytes),
        stderr=read_bytes(found, "stderr", max_output_bytes),
        frames=read_bytes(found, "frames", MAX_FRAME_BYTES),
    )


def _duration_s(value: object) -> float:
    # Not trusted, so limited to one day.
    if not isinstance(value, int | float):
        raise SandboxProtocolError(f"the duration in the sandbox's report is {str(value)[:50]!r}, not a number")
    return float(max(0, min(_MAX_DURATION_S, value))) if value == value else 0.0


def read_bytes(found: dict[str, object], key: str, max_bytes: int) -> bytes:
    text = found.get(key)
    try:
        if type(text) is not str or len(text) > max_bytes * 4 // 3 + 8:
            raise ValueError(key)
        return base64.b64decode(text, validate=True)[:max_bytes]
    except ValueError:
        raise SandboxProtocolError(f"{key} in the sandbox's report is missing, too long or not base64") from None

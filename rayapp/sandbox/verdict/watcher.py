"""Program inside a remote sandbox: runs candidate code as a child, watches it, and prints one report at its end.

It uses only the standard library; `program.py` sends its source. It enforces the deadline inside the sandbox, so a slow
network never counts as slow code. The candidate could forge the report, which doesn't help: no expected value is here.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

MAX_FRAME_BYTES = 8 << 20  # all frames of one job
LINE_CHARS = 16384  # some servers drop lines of 64 KiB and more
_PR_SET_PDEATHSIG = 1
_END_ROUNDS = 100
_PIPES = ("stdout", "stderr", "frames")
Job = dict[str, Any]


def main(job: Job, harness: Job, supervisor: Job) -> None:
    """Run one job and print its report; `harness` and `supervisor` are the global names of these modules.

    A job has kind (script, calls, command or read), the kind's inputs, env, timeout_s, max_output_bytes, and the nonce
    that marks report lines.
    """
    report = _read_file(job) if job["kind"] == "read" else _watch(job, harness, supervisor)
    text = base64.b64encode(json.dumps(report).encode()).decode()
    for start in range(0, len(text), LINE_CHARS):
        os.write(1, f"{job['nonce']}:{text[start : start + LINE_CHARS]}\n".encode())
    os.write(1, f"{job['nonce']}.\n".encode())


def _end_with(watcher: int) -> None:
    with contextlib.suppress(Exception):  # boundary: this is not Linux, or Python lacks ctypes
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != watcher:
        os._exit(70)


def _read_file(job: Job) -> Job:
    try:
        with Path(job["path"]).open("rb") as file:
            return {"data": base64.b64encode(file.read(job["max_bytes"])).decode()}
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error.strerror}"}


def _watch(job: Job, harness: Job, supervisor: Job) -> Job:
    # boundary: this is not Linux, or Python lacks ctypes; then only the child's process group is ended
    with contextlib.suppress(Exception):
        supervisor["adopt_orphans"]()
    pipes = {name: os.pipe() for name in _PIPES}
    started = time.monotonic()
    watcher = os.getpid()
    child = os.fork()
    if child == 0:
        _become_candidate(job, harness, {name: write for name, (_, write) in pipes.items()}, watcher)
    readers = {}
    for name, (read, write) in pipes.items():
        os.close(write)
        readers[read] = name
    caps = {"stdout": job["max_output_bytes"], "stderr": job["max_output_bytes"], "frames": MAX_FRAME_BYTES}
    taken, stopped = _drain(child, readers, caps, started + job["timeout_s"])
    duration_s = time.monotonic() - started
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    return _report(taken, supervisor["end_tree"](child, most_rounds=_END_ROUNDS), stopped, duration_s)


def _report(taken: Job, status: int, stopped: str, duration_s: float) -> Job:
    return {
        "status": status,
        "stopped": stopped,
        "duration_s": duration_s,
        **{name: base64.b64encode(bytes(taken[name])).decode() for name in _PIPES},
    }


def _drain(child: int, readers: dict[int, str], caps: Job, deadline: float) -> tuple[dict[str, bytearray], str]:
    """Read the child's output until it ends, its time is over, or it wrote too much. Return the output and the stop
    cause."""
    taken = {name: bytearray() for name in _PIPES}
    ended_at = None
    while True:
        now = time.monotonic()
        if now >= deadline and ended_at is None:
            return taken, "timeout"
        # Stop reading soon after the child has ended, because a daemon that it left may keep a pipe open.
        if ended_at is not None and (not readers or now > ended_at + 0.05):
            return taken, ""
        for ready in select.select(list(readers), [], [], 0.02 if readers else 0.001)[0]:
            name = readers[ready]
            chunk = os.read(ready, 65536)
            if not chunk:
                del readers[ready]
            is_over = len(taken[name]) + len(chunk) > caps[name]
            taken[name] += chunk[: caps[name] - len(taken[name])]
            if is_over:
                return taken, "output"
        if ended_at is None and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            ended_at = time.monotonic()


def _become_candidate(job: Job, harness: Job, writers: Job, watcher: int) -> None:
    status = 70
    try:
        _end_with(watcher)
        try:
            os.setsid()
        except PermissionError:
            # A local sandbox (e.g. behind an MCP server) refuses setsid; a separate process group is enough there.
            os.setpgid(0, 0)
        _open_stdin(job["stdin"])
        os.dup2(writers["stdout"], 1)
        os.dup2(writers["stderr"], 2)
        frames = os.dup2(writers["frames"], 9, inheritable=False)
        os.closerange(3, 9)
        os.closerange(10, 4096)
        _clear_environment(job["env"])
        status = _run(job, harness, frames)
    finally:
        os._exit(status)


def _run(job: Job, harness: Job, frames: int) -> int:
    def emit(frame: bytes) -> None:
        line = frame + b"\n"
        while line:
            line = line[os.write(frames, line) :]

    if job["kind"] == "command":
        return _run_command(job["argv"])
    if job["kind"] == "script":
        status: int = harness["run_script"](job["code"], harness["main_names"](), emit)
        harness["end_script"]()
    else:
        harness["run_calls"](job["code"], job["function"], job["inputs"], emit)
        status = 0
    harness["flush"]()
    return status


def _run_command(argv: list[str]) -> int:
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        return 127 if isinstance(error, FileNotFoundError) else 126


def _open_stdin(text: str) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)


def _clear_environment(env: Job) -> None:
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "PYTHONHASHSEED") if name in os.environ}
    os.environ.clear()
    os.environ.update({"LANG": "C.UTF-8", **kept, **env})

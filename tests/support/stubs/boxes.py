"""Stand-in for a provider's machines: a folder and plain processes per sandbox. For the stub servers only.

It isolates nothing. If started as root, it runs processes as an unprivileged user; even so, use it only for programs of
our own tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
import uuid
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

UNPRIVILEGED_ID = 60001
_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(slots=True, eq=False, kw_only=True)
class Box:
    """One sandbox."""

    id: str
    labels: dict[str, str]
    template: str
    home: Path
    ends_at: float
    """Unix seconds."""
    processes: set[Process] = field(default_factory=set)
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that the server keeps, e.g. the request that created it."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        merge_stderr: bool = False,
        stdin: int = DEVNULL,
    ) -> Process:
        """Start a program in its folder, in a process group of its own."""
        process = await asyncio.create_subprocess_exec(
            *_as_unprivileged(argv),
            stdin=stdin,
            limit=1 << 24,
            stdout=PIPE,
            stderr=asyncio.subprocess.STDOUT if merge_stderr else PIPE,
            cwd=self.home,
            env={"PATH": _PATH, "HOME": str(self.home), "TMPDIR": str(self.home), **(env or {})},
            start_new_session=True,
        )
        self.processes.add(process)
        return process

    def stop(self, process: Process) -> None:
        """End a program, its group, and descendants in sessions of their own, as a machine's end would."""
        self.processes.discard(process)
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, merge_stderr: bool = False
    ) -> tuple[int, bytes, bytes]:
        """Run a program to its end. Returns status, stdout, stderr.

        Raises:
            TimeoutError: its time is up.
        """
        process = await self.start(argv, env=env, merge_stderr=merge_stderr)
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate()
            return process.returncode or 0, out, err or b""
        finally:
            self.stop(process)

    def resolve(self, path: str) -> Path:
        """Return the local path of a path in the sandbox."""
        return self.home / path

    def write(self, path: str, data: bytes) -> Path:
        """Write a file as the sandbox's user would own it."""
        target = self.resolve(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        if os.geteuid() == 0:
            os.chown(target, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
        return target


def _as_unprivileged(argv: Sequence[str]) -> list[str]:
    if os.geteuid() != 0:
        return list(argv)
    # Not subprocess's own `user`: with it Python forks the whole process instead of using vfork.
    become = ("--reuid", str(UNPRIVILEGED_ID), "--regid", str(UNPRIVILEGED_ID), "--clear-groups")
    return ["setpriv", *become, *argv]


class Boxes:
    """All sandboxes of one stub server."""

    def __init__(self) -> None:
        self.living: dict[str, Box] = {}
        self.num_created = 0
        self._root = Path(tempfile.mkdtemp(prefix="rayapp-stub-"))
        self._root.chmod(0o711)

    def create(self, *, template: str, labels: Mapping[str, str], ttl_s: float, **facts: Any) -> Box:
        """Make a sandbox."""
        box_id = uuid.uuid4().hex[:20]
        home = self._root / box_id
        home.mkdir()
        if os.geteuid() == 0:
            os.chown(home, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
        box = Box(
            id=box_id, labels=dict(labels), template=template, home=home, ends_at=time.time() + ttl_s, facts=facts
        )
        self.living[box_id] = box
        self.num_created += 1
        return box

    def get(self, box_id: str) -> Box | None:
        """Return a living sandbox; end it first if its time is over."""
        box = self.living.get(box_id)
        if box is not None and time.time() >= box.ends_at:
            self.end(box_id)
            return None
        return box

    def end(self, box_id: str) -> bool:
        """End a sandbox. False if there is none."""
        box = self.living.pop(box_id, None)
        if box is None:
            return False
        box.ended.set()
        for process in tuple(box.processes):
            box.stop(process)
        shutil.rmtree(box.home, ignore_errors=True)
        return True

    def with_labels(self, labels: Mapping[str, str]) -> list[Box]:
        """Return the living sandboxes that carry all these labels, in the order they were made."""
        return [box for box in list(self.living.values()) if labels.items() <= box.labels.items() and self.get(box.id)]

    def close(self) -> None:
        """End all."""
        for box_id in tuple(self.living):
            self.end(box_id)
        shutil.rmtree(self._root, ignore_errors=True)

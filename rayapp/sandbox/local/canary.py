"""Decoys on this machine that candidate code must neither reach nor change: attacks try to, then decoys are checked.

    with Canary(slot) as canary:  facts -> attack;  canary.damage() -> list of changes

A secret file, folders and files that everyone may write, listening sockets of every kind, shared memory, and a
neighbour: a process of the sandbox's own user with a secret in its environment. Used by the doctor and the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from rayapp.sandbox.local.levels import seccomp
from rayapp.sandbox.local.levels.landlock import Landlocked
from rayapp.sandbox.local.levels.namespaces import Namespaces
from rayapp.sandbox.local.slot import Slot

_IPC_CREAT, _IPC_RMID = 0o1000, 0
_WRITABLE = "as it was"
_SETTLED_AFTER_S = 2.0


class Canary:
    """The decoys to attack: made on entry, removed on exit."""

    def __init__(self, slot: Slot) -> None:
        """
        Args:
            slot: slot of the attacking sandbox.
        """
        self._uid = slot.uid
        self._zygote = slot.pid
        self._is_nested = slot.level.startswith("ns")
        self._has_loopback = slot.listener is not None
        self._stack = contextlib.ExitStack()
        self.facts: dict[str, object] = {}
        """Plain data for each attack: paths, ports and ids of the decoys."""

    def __enter__(self) -> Canary:
        with contextlib.ExitStack() as stack:
            secret = secrets.token_hex(16)
            folder = self._make_folder(stack, secret)
            self._neighbour = self._start_neighbour(stack, secret)
            self.facts = {
                "secret": secret,
                "folder": str(folder),
                "file": str(folder / "secret"),
                "writable": str(folder / "writable"),
                "own": str(folder / "own"),
                "pid": os.getpid(),
                "group": os.getpgrp(),
                "neighbour": self._neighbour.pid,
                "has_loopback": self._has_loopback,
                "numbers": dict(seccomp.NUMBERS[seccomp.this_machine()]),
                **_make_sockets(stack, folder),
                **_make_shared_memory(stack, secret),
            }
            self._before = self._state()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def damage(self) -> list[str]:
        """Return the changes that attacks have made to the decoys; empty if there are none.

        Processes that an execution leaves behind are killed just after its answer is sent, so this waits a moment.
        """
        until = time.monotonic() + _SETTLED_AFTER_S
        while (found := self._differences()) and time.monotonic() < until:
            time.sleep(0.01)
        return found

    def _differences(self) -> list[str]:
        now = self._state()
        return [
            f"{what}: {self._before.get(what)} before, {now[what]} after"
            for what in now
            if now[what] != self._before.get(what)
        ]

    def _state(self) -> dict[str, object]:
        folder = Path(str(self.facts["folder"]))
        return {
            "files": sorted(path.name for path in folder.iterdir()),
            "a file of the sandbox's user": _owned(folder / "own"),
            "a file's content": (folder / "writable").read_text() if (folder / "writable").exists() else "gone",
            "host name": socket.gethostname(),
            **_state_of("this process", os.getpid()),
            **_state_of("the neighbour", self._neighbour.pid),
            "the neighbour ended": self._neighbour.poll() is not None,
            "processes of the sandbox's user": _survivors(self._uid, self._zygote, is_nested=self._is_nested),
        }

    def _make_folder(self, stack: contextlib.ExitStack, secret: str) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="rayapp-canary-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o777)
        for name, text, mode in (("secret", secret, 0o644), ("writable", _WRITABLE, 0o666)):
            (folder / name).write_text(text)
            (folder / name).chmod(mode)
        (folder / "own").write_text(_WRITABLE)
        if os.geteuid() == 0:
            os.chown(folder / "own", self._uid, self._uid)
        return folder

    def _start_neighbour(self, stack: contextlib.ExitStack, secret: str) -> subprocess.Popen[bytes]:
        neighbour = subprocess.Popen(
            ["/bin/sleep", "600"],
            env={"SECRET": secret},
            user=self._uid if os.geteuid() == 0 else None,
            start_new_session=True,
        )
        stack.callback(neighbour.wait)
        stack.callback(neighbour.kill)
        return neighbour


def _owned(path: Path) -> object:
    status = path.stat()
    return path.read_text(), oct(status.st_mode), status.st_gid, status.st_mtime_ns, os.listxattr(path)


def _state_of(who: str, pid: int) -> dict[str, object]:
    try:
        return {
            f"priority of {who}": os.getpriority(os.PRIO_PROCESS, pid),
            f"cores of {who}": sorted(os.sched_getaffinity(pid)),
            f"limits of {who}": Path(f"/proc/{pid}/limits").read_text(),
        }
    except (ProcessLookupError, FileNotFoundError):
        return {f"{who} is gone": True}


def _survivors(uid: int, zygote: int, *, is_nested: bool) -> int:
    """Count processes of the sandbox's user besides the zygote's own. Return 0 if other programs share its user id.

    The zygote's own processes are the one that was started, a second one inside namespaces, the template, and the
    template's children that wait for the next jobs.
    """
    if uid == os.getuid():
        return 0  # this user has other processes, which come and go
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                stat = Path(entry.path, "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    chain = [zygote]
    for _ in range(2 if is_nested else 1):
        chain += sorted(child for child, parent in parents.items() if parent == chain[-1])[:1]
    waiting = [child for child, parent in parents.items() if parent == chain[-1]]
    level = Namespaces if is_nested else Landlocked
    return len(set(parents) - set(chain)) - min(level.num_spares, len(waiting))


def _make_sockets(stack: contextlib.ExitStack, folder: Path) -> dict[str, object]:
    names = {name: f"rayapp-canary-{secrets.token_hex(8)}" for name in ("abstract", "abstract_datagram")}
    paths = {name: str(folder / name) for name in ("unix", "unix_datagram")}
    port = 0
    for kind, address in (
        (socket.SOCK_STREAM, f"\0{names['abstract']}"),
        (socket.SOCK_DGRAM, f"\0{names['abstract_datagram']}"),
        (socket.SOCK_STREAM, paths["unix"]),
        (socket.SOCK_DGRAM, paths["unix_datagram"]),
    ):
        listening = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        listening.bind(address)
        if kind == socket.SOCK_STREAM:
            listening.listen(100)
    for path in paths.values():
        Path(path).chmod(0o777)
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
    port = server.getsockname()[1]
    return {"tcp_port": port, **names, **paths}


def _make_shared_memory(stack: contextlib.ExitStack, secret: str) -> dict[str, object]:
    libc = ctypes.CDLL(None, use_errno=True)
    key = secrets.randbelow(1 << 30) + 1
    identifier = libc.shmget(key, 4096, _IPC_CREAT | 0o666)
    if identifier >= 0:
        stack.callback(libc.shmctl, identifier, _IPC_RMID, None)
    file = Path("/dev/shm", f"rayapp-canary-{secrets.token_hex(8)}")
    file.write_text(secret)
    file.chmod(0o644)
    stack.callback(file.unlink, missing_ok=True)
    return {"shm_key": key, "shm_file": str(file)}

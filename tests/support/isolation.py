"""Attacks isolation levels with the programs of tests/adversarial/battery.

    battery/*.yaml (one file per family) -> Attack -> PRELUDE and source, called as attack(canary) -> things reached
    for each level: start a zygote -> for each attack: run it, judge it, run an honest program -> AttackResult

An attack returns the things that it reached: an empty list means that everything was refused. A broken attack also
returns an empty list. So the tests also run each attack without isolation, where it must reach something (`unisolated:
must-reach`). Nothing on the node changes, unless an attack breaks out of its sandbox.

`Canary` makes decoys on this machine that candidate code must neither reach nor change: a secret file, folders and
files that everyone may write, listening sockets of every kind, shared memory, and a process of the sandbox's own user
with a secret in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import yaml

from rayapp.core.errors import SandboxError
from rayapp.core.types import CallReport
from rayapp.sandbox.local.levels import seccomp
from rayapp.sandbox.local.levels.limits import longest_s
from rayapp.sandbox.local.provider import LEVELS
from rayapp.sandbox.local.sandbox import LocalSandbox
from rayapp.sandbox.local.slot import Slot

_IPC_CREAT, _IPC_RMID = 0o1000, 0
_WRITABLE = "as it was"
_SETTLED_AFTER_S = 10.0
"""Longest wait for the end of an execution's processes, which a busy machine ends late."""


class Canary:
    """Asynchronous context manager that makes the decoys to attack, and removes them at its end."""

    def __init__(self, slot: Slot) -> None:
        """
        Args:
            slot: slot of the attacking sandbox.
        """
        self._slot = slot
        self._stack = contextlib.ExitStack()
        self.facts: dict[str, object] = {}
        """Paths, ports and ids of the decoys, as plain data that each attack gets."""

    async def __aenter__(self) -> Canary:
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
                "has_loopback": self._slot.listener is not None,
                "numbers": dict(seccomp.NUMBERS[seccomp.this_machine()]),
                **_make_sockets(stack, folder),
                **_make_shared_memory(stack, secret),
            }
            self._before = self._state(await _own_processes(self._slot))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    async def damage(self) -> list[str]:
        """Return the changes that attacks have made to the decoys; empty if there are none.

        This function waits a moment, because processes that an execution leaves are killed just after its answer is
        sent.
        """
        until = time.monotonic() + _SETTLED_AFTER_S
        while True:
            found = self._differences(await _own_processes(self._slot))
            if not found or time.monotonic() > until:
                return found
            await asyncio.sleep(0.01)

    def _differences(self, own_processes: set[int]) -> list[str]:
        now = self._state(own_processes)
        return [
            f"{what}: {self._before.get(what)} before, {now[what]} after"
            for what in now
            if now[what] != self._before.get(what)
        ]

    def _state(self, own_processes: set[int]) -> dict[str, object]:
        folder = Path(str(self.facts["folder"]))
        return {
            "files": sorted(path.name for path in folder.iterdir()),
            "a file of the sandbox's user": _owned(folder / "own"),
            "a file's content": (folder / "writable").read_text() if (folder / "writable").exists() else "gone",
            "host name": socket.gethostname(),
            **_state_of("this process", os.getpid()),
            **_state_of("the neighbour", self._neighbour.pid),
            "the neighbour ended": self._neighbour.poll() is not None,
            "processes of the sandbox's user": _num_survivors(self._slot, own_processes | {self._neighbour.pid}),
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
            os.chown(folder / "own", self._slot.uid, self._slot.uid)
        return folder

    def _start_neighbour(self, stack: contextlib.ExitStack, secret: str) -> subprocess.Popen[bytes]:
        neighbour = subprocess.Popen(
            ["/bin/sleep", "600"],
            env={"SECRET": secret},
            user=self._slot.uid if os.geteuid() == 0 else None,
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


def _has_own_user(slot: Slot) -> bool:
    """Return False if this process has the sandbox's user: then that user has other processes, which start and end at
    any time.
    """
    return slot.uid != os.getuid()


async def _own_processes(slot: Slot) -> set[int]:
    """Return the processes that are not counted as survivors."""
    return await slot.own_processes() if _has_own_user(slot) else set()


def _num_survivors(slot: Slot, own: set[int]) -> int:
    """Return the number of processes of the sandbox's user besides `own`; 0 if the sandbox has no user of its own."""
    if not _has_own_user(slot):
        return 0
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == slot.uid:
                stat = Path(entry.path, "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = set(parents)
    if slot.level.startswith("ns"):
        # Count only descendants of this zygote: zygotes for images share one user. A process can't leave its pid
        # namespace.
        below = {slot.pid}
        while more := {pid for pid, parent in parents.items() if parent in below} - below:
            below |= more
        found &= below
    return len(found - own)


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


FOLDER = Path(__file__).parents[1] / "adversarial/battery"

PRELUDE = '''
import ctypes, errno, os, signal, socket, struct, sys, time

_libc = ctypes.CDLL(None, use_errno=True)
reached = []

def attempt(what, action):
    """Call `action`; if it succeeds, append `what` to `reached`. OSError and IndexError mean that it was refused; any
    other error means that the attack is broken."""
    try:
        action()
    except (OSError, IndexError):
        return
    reached.append(what)

def text_of(path):
    """Return a file's text; empty if the file can't be read."""
    try:
        return open(path, "rb").read().decode(errors="replace")
    except OSError:
        return ""

def names_in(path):
    try:
        return os.listdir(path)
    except OSError:
        return []

def fail():
    raise PermissionError

def call(name, *args):
    """Call a function of libc; raise OSError if it returns -1."""
    result = getattr(_libc, name)(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def syscall(name, *args):
    """Make a system call by its name. A call that this architecture lacks counts as refused."""
    if name not in NUMBERS:
        raise PermissionError(name)
    result = _libc.syscall(ctypes.c_long(NUMBERS[name]), *args)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def attack(given):
    global canary, NUMBERS
    canary, NUMBERS = given, given["numbers"]
    exec(compile(PROGRAM, "<attack>", "exec"), globals())
    return [str(what)[:200] for what in reached[:20]]
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Required end of an attack if the sandbox withstands it. All fields that are given must hold; if none is given,
    the attack must return an empty list.
    """

    stopped: tuple[str, ...] = ()
    """Causes for one of which the sandbox must have stopped the attack."""
    ended: bool = False
    """True if the attack may end in any way, as long as it returns nothing."""
    any_end: bool = False
    """True if the attack may return anything: only the state after the attack counts."""
    within_s: float | None = None
    """Maximum wall-clock seconds of the attack. None: as many as code with this time limit may take on a busy
    machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One program that tries to break out."""

    family: str
    name: str
    code: str
    because: str = ""
    """Reason for the attack, or for leaving a level out of `levels`."""
    levels: tuple[str, ...] = LEVELS
    """Levels that must withstand the attack. A name without `+lo` stands for the level both with and without a
    loopback."""
    unisolated: Literal["must-reach", "may-fail", "never"] = "must-reach"
    """Required result without isolation, as an ordinary user. must-reach: reach something; may-fail: any result; never:
    not run."""
    needs: tuple[str, ...] = ()
    """Parts of the canary that the attack needs and that are not always made."""
    also_held: tuple[str, ...] = ()
    """Names of further exceptions that show that the attack was refused."""
    on_image: Literal["same", "any-end", "never"] = "same"
    """Required result on an image. same: as without an image; any-end: any, as code may change its image, so only the
    decoys and the next program count; never: not run, for the reason in `because`."""
    timeout_s: float = 3.0
    expect: Expected = field(default_factory=Expected)

    def is_for(self, level: str) -> bool:
        """Return True if this level must withstand the attack."""
        return level in self.levels or level.removesuffix("+lo") in self.levels

    @property
    def source(self) -> str:
        return f"PROGRAM = {self.code!r}\n{PRELUDE}"


@functools.cache
def load_attacks() -> tuple[Attack, ...]:
    """Return all attacks, family by family.

    Raises:
        ValueError: two attacks have the same name.
    """
    found: list[Attack] = []
    for path in sorted(FOLDER.glob("*.yaml")):
        found += [_attack(path.stem, entry) for entry in yaml.safe_load(path.read_text())]
    names = [attack.name for attack in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two attacks have the same name: {sorted({name for name in names if names.count(name) > 1})}")
    return tuple(found)


def _attack(family: str, entry: dict[str, object]) -> Attack:
    fields = _fields(entry)
    expect = fields.pop("expect", {})
    assert isinstance(expect, dict)
    return Attack(family=family, expect=Expected(**_fields(expect)), **fields)


def _fields(entry: dict[str, object]) -> dict[str, Any]:
    """Convert a YAML entry to arguments of `Attack`."""
    return {key.replace("-", "_"): tuple(value) if isinstance(value, list) else value for key, value in entry.items()}


_HONEST = """
import json, math
def f(items):
    print("honest")
    return json.loads(json.dumps([math.floor(item) for item in sorted(items)]))
"""
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackResult:
    """One attack and its result."""

    name: str
    passed: bool
    found: str
    """Things that the attack reached or broke, as text; empty if the sandbox withstood the attack."""


async def try_attack(sandbox: LocalSandbox, attack: Attack, canary: Canary) -> AttackResult:
    """Run one attack, then an honest program, then check that the decoys are unchanged."""
    try:
        facts = {**canary.facts, "has_image": sandbox._image is not None, **await _earlier_execution(sandbox, attack)}
        report = await sandbox.call_function(attack.source, "attack", [[facts]], timeout_s=attack.timeout_s)
        problems = [
            *judge(attack, report, on_image=sandbox._image is not None),
            *await canary.damage(),
            *await _honest_problems(sandbox),
        ]
    except SandboxError as error:
        # A dead sandbox counts as a finding, because code that can end its own sandbox may be able to end others.
        problems = [f"the sandbox failed: {error}"]
    return AttackResult(name=attack.name, passed=not problems, found="; ".join(problems))


def judge(attack: Attack, report: CallReport, *, on_image: bool = False) -> list[str]:
    """Return the differences between an attack's end and its expected end; empty if the sandbox withstood the
    attack.
    """
    expect, ran, call = attack.expect, report.exec, report.calls[0]
    problems = []
    within_s = expect.within_s if expect.within_s is not None else longest_s(attack.timeout_s) + _GRACE_S
    if ran.duration_s > within_s:
        problems.append(f"took {ran.duration_s:.2f} s, at most {within_s:g} s were allowed")
    if expect.any_end or (on_image and attack.on_image == "any-end"):
        return problems
    if expect.stopped:
        if ran.stopped_for is None or ran.stopped_for.value not in expect.stopped:
            problems.append(f"ended with {ran.stopped_for or ran.outcome}, not stopped for {', '.join(expect.stopped)}")
    elif expect.ended:
        problems += [f"it was not stopped and returned {call.value!r}"] if call.ok else []
    elif call.ok:
        problems += (
            [f"reached {', '.join(map(str, call.value))}"] if isinstance(call.value, list) and call.value else []
        )
    elif not call.error.startswith(attack.also_held or ("\0",)):
        problems.append(f"the attack itself broke: {call.error or ran.error}")
    return problems


async def _earlier_execution(sandbox: LocalSandbox, attack: Attack) -> dict[str, object]:
    """Run the execution for whose traces the attack searches, and return the mark that it left; empty for other
    attacks.
    """
    if "previous" not in attack.needs:
        return {}
    mark = secrets.token_hex(24)
    await sandbox.call_function("def f(x):\n    return [x, x + x]", "f", [[mark]], timeout_s=5.0)
    return {"previous_xor": [code ^ 1 for code in mark.encode()]}


async def _honest_problems(sandbox: LocalSandbox) -> list[str]:
    report = await sandbox.call_function(_HONEST, "f", [[[2.5, 1.5]], [[]]], timeout_s=10.0)
    if (
        report.exec.ok
        and report.exec.stdout == "honest\nhonest\n"
        and [call.value for call in report.calls] == [[1, 2], []]
    ):
        return []
    return [f"the next honest program failed: {report.exec.error or report.calls}"]

"""Shows that code in a sandbox of this node can't read, write or reach what is outside, for `rayapp doctor`.

One program tries the decoys that this process makes. tests/adversarial attacks the same levels with a hundred programs.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rayapp.core.errors import IsolationUnavailableError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.local.levels import landlock
from rayapp.sandbox.local.provider import LEVELS, LocalProvider

_PROGRAM = """
import socket

def try_all(folder, port, name):
    ways = {
        "read a file": lambda: open(folder + "/readable").close(),
        "wrote a file": lambda: open(folder + "/writable", "a").close(),
        "connected to a TCP port": lambda: socket.create_connection(("127.0.0.1", port), 2).close(),
        "connected to a Unix socket": lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + name),
    }
    reached = []
    for way, action in ways.items():
        try:
            action()
            reached.append(way)
        except OSError:
            pass
    return [len(ways), reached]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """Isolation of candidate code on this node."""

    level: str  # if it is none, `refused` has the reasons
    uid: int = -1  # of candidate code on this machine; -1 if no code can run
    landlock_abi: int
    num_tried: int = 0
    reached: tuple[str, ...] = ()  # things outside the sandbox that the program read, wrote or reached
    # Stronger levels that this node does not offer, each with its failed step.
    refused: tuple[tuple[str, str], ...] = ()


async def examine(*, levels: tuple[str, ...] = LEVELS, template: str = "") -> IsolationReport:
    """Try what code can reach at the strongest of `levels` that this node offers; `template` may name an image."""
    provider = LocalProvider(levels=levels)
    try:
        sandbox = await provider.create(SandboxSpec(template=template), labels={}, ttl_s=600.0, timeout_s=60.0)
        with ExitStack() as stack:
            ran = await sandbox.call_function(_PROGRAM, "try_all", [_decoys(stack)], timeout_s=20.0)
        found = ran.calls[0].value if ran.calls[0].ok else [0, [f"the program broke: {ran.calls[0].error}"]]
        assert isinstance(found, list)
        level, uid, num_tried, reached = sandbox.isolation, sandbox.slot.uid, found[0], tuple(found[1])
    except IsolationUnavailableError:
        level, uid, num_tried, reached = "none", -1, 0, ()
    finally:
        await provider.close()
    return IsolationReport(
        level=level, uid=uid, landlock_abi=landlock.abi(), num_tried=num_tried, reached=reached,
        refused=tuple(provider.refused.items()),
    )  # fmt: skip


def _decoys(stack: ExitStack) -> list[object]:
    """Make the decoys, which last until the stack closes. Return the arguments of the program."""
    folder = Path(tempfile.mkdtemp(prefix="rayapp-decoys-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o777)
    for name, mode in (("readable", 0o644), ("writable", 0o666)):
        (folder / name).touch()
        (folder / name).chmod(mode)
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    name = f"rayapp-{secrets.token_hex(8)}"
    listening = stack.enter_context(socket.socket(socket.AF_UNIX))
    listening.bind(f"\0{name}")
    listening.listen()
    return [str(folder), server.getsockname()[1], name]

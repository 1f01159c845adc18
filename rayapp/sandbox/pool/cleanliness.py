"""Checks that a used sandbox is in the same state as when it was new, before it is leased again.

The check compares what a candidate can leave behind: processes, and files where its user may write. The check program
runs in the sandbox, so a candidate that controls the interpreter there can forge its output. Therefore a sandbox is
used once unless `max_uses` allows more, and a verdict never depends on what a sandbox reports about itself.
"""

from __future__ import annotations

import re

from rayapp.core.errors import SandboxProtocolError
from rayapp.core.protocols import Sandbox

_LOOK = r"""
import hashlib, itertools, os, stat
own = {os.getpid(), os.getppid()}
seen = []
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in own:
        try:
            line = open(f"/proc/{name}/cmdline", "rb").read().replace(b"\0", b" ").decode("utf-8", "replace")
            parent = int(open(f"/proc/{name}/stat").read().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if line and parent not in own and "rayapp-" not in line:
            seen.append(f"process {name} {line}")

def files_below(root):
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if n not in ("__pycache__", ".cache") and not n.startswith("rayapp-"))
        for file in files:
            path = os.path.join(folder, file)
            try:
                info = os.lstat(path)
            except OSError:
                continue
            if not file.startswith("rayapp-"):
                yield f"file {path} {info.st_size} {info.st_mtime_ns} {stat.filemode(info.st_mode)}"

roots = {os.path.expanduser("~"), "/tmp", "/var/tmp", "/dev/shm", os.getcwd()}
found = (line for root in sorted(roots) for line in files_below(root))
seen += itertools.islice(found, MOST_FILES)
# More than are looked at: never the same again, so this sandbox serves once.
is_whole = next(found, None) is None
look = hashlib.sha256("\n".join(sorted(seen)).encode(errors="surrogateescape")).hexdigest()
print("look:" + (look if is_whole else os.urandom(32).hex()))
"""
MOST_FILES = 50_000
"""Maximum files of a sandbox that is checked. A sandbox with more is used once: reading its disk would take longer than
making another sandbox."""
_ANSWER = re.compile(r"look:([0-9a-f]{64})\s*\Z")


def look_program(most_files: int) -> str:
    """Return the source of the check program, which prints `look:` and 64 hex digits."""
    return _LOOK.replace("MOST_FILES", str(most_files))


async def fingerprint(sandbox: Sandbox, *, timeout_s: float) -> str:
    """Return a hash of the processes and files in a sandbox. With more than MOST_FILES files it differs at every call.

    Raises:
        SandboxError: the check failed.
    """
    result = await sandbox.run_code(look_program(MOST_FILES), timeout_s=timeout_s)
    found = _ANSWER.search(result.stdout)
    if not result.ok or found is None:
        raise SandboxProtocolError(
            f"sandbox {sandbox.id} could not be checked for leftovers: exit status {result.exit_code}, "
            f"{result.error[:200]}"
        )
    return found.group(1)

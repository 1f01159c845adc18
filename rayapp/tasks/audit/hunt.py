"""Looks for a task's oracle where model-written code runs: in the files, the environment and the processes there.

    workspace filled as for an agent -> program inside lists and reads what it can -> texts come out -> compared here

Nothing secret goes in: the program looks for words that anybody knows, such as the function's name, and reads out the
files that hold them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from rayapp.core.errors import SandboxProtocolError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import AgentStart, SandboxSpec
from rayapp.tasks.sandboxed import LEASE_TIMEOUT_S

_TIMEOUT_S = 60.0
_MAX_OUTPUT_BYTES = 8 << 20
_PROGRAM = """
import json, os, sys
words = json.loads(sys.stdin.read())
seen, here = {}, os.path.realpath('.')
def look(path, always):
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > 1 << 20:
            return
        with open(path, errors='replace') as file:
            text = file.read()
    except (OSError, ValueError):
        return
    if always or any(word in text for word in words):
        seen[path] = text
def walk(root, always):
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in SKIPPED]
        for name in names:
            look(os.path.join(folder, name), always)
SKIPPED = {'/proc', '/sys', '/dev', '/usr', '/bin', '/sbin', '/lib', '/lib64', here, sys.base_prefix}
walk(here, True)
walk('/', False)
for number in os.listdir('/proc') if os.path.isdir('/proc') else ():
    if number.isdigit():
        for name in ('cmdline', 'environ'):
            try:
                with open('/proc/%s/%s' % (number, name), errors='replace') as file:
                    seen['/proc/%s/%s' % (number, name)] = file.read(1 << 16)
            except OSError:
                pass
seen['its environment'] = repr(dict(os.environ))
print(json.dumps(seen))
"""
# The system's own programs and Python are skipped: they are the same for every task, and take minutes to read.


async def texts_in_sandbox(start: AgentStart, words: Iterable[str], sandboxes: SandboxSource) -> dict[str, str]:
    """What code can read in a workspace that was filled for an agent, by path.

    Args:
        words: outside the workspace, files that hold one of them are read.
    Raises:
        SandboxError: the sandbox failed.
    """
    asked = start.spec or SandboxSpec()
    spec = replace(asked, packages=(*asked.packages, *start.packages))
    async with sandboxes.lease(spec, timeout_s=LEASE_TIMEOUT_S) as sandbox:
        for path, text in start.files.items():
            await sandbox.write_file(path, text.encode())
        if start.setup:
            await sandbox.run_command(start.setup, timeout_s=_TIMEOUT_S)
        ran = await sandbox.run_code(
            _PROGRAM, timeout_s=_TIMEOUT_S, stdin=json.dumps(sorted(words)), max_output_bytes=_MAX_OUTPUT_BYTES
        )
    try:
        found = json.loads(ran.stdout)
    except ValueError:
        why = ran.error or (ran.stopped_for.value if ran.stopped_for else "no answer")
        raise SandboxProtocolError(f"its files could not be read out: {why}") from None
    return {str(path): str(text) for path, text in found.items()}


def places_of(secrets: Iterable[str], texts: dict[str, str]) -> list[str]:
    """Where a secret is, white space aside."""
    known = [_squeezed(secret) for secret in secrets]
    return [path for path, text in texts.items() if any(secret in _squeezed(text) for secret in known)]


def _squeezed(text: str) -> str:
    return " ".join(text.split())

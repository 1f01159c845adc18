"""A stand-in for a Jupyter kernel: one Python process per sandbox, whose variables persist. For the stubs."""

from __future__ import annotations

import json
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from typing import Any

from support.stubs.boxes import Box

_LOOP = r"""
import json, sys, time, traceback
names = {"__name__": "__main__"}
def say(kind, **parts):
    if kind in ("stdout", "stderr"): parts["timestamp"] = time.time_ns() // 1000000
    real.write(json.dumps({"type": kind, **parts}) + "\n"); real.flush()
class Stream:
    def __init__(self, kind): self.kind = kind
    def write(self, text): say(self.kind, text=text); return len(text)
    def flush(self): pass
real, sys.stdout, sys.stderr = sys.stdout, Stream("stdout"), Stream("stderr")
for line in sys.stdin:
    try:
        exec(compile(json.loads(line), "<cell>", "exec"), names)
    except BaseException as error:
        say("error", name=type(error).__name__, value=str(error), traceback=traceback.format_exc())
    say("done")
"""


class Kernel:
    """Runs pieces of code one after the other. A cancelled run restarts it, as an interrupt would."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._process: Process | None = None

    async def run(self, code: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of one run: stdout, stderr, error."""
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        is_done = False
        try:
            process.stdin.write(json.dumps(code).encode() + b"\n")
            while line := await process.stdout.readline():
                event = json.loads(line)
                if event["type"] == "done":
                    is_done = True
                    return
                yield event
        finally:
            if not is_done:
                self._box.stop(process)
                self._process = None

    async def _start(self) -> Process:
        self._process = await self._box.start(["python3", "-I", "-u", "-c", _LOOP], stdin=PIPE)
        return self._process

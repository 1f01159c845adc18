"""Why an engine's process failed, read from what it has written.

vLLM's exceptions in the server say "see root cause above": the cause was raised in another process, which logs it to
the standard output that it shares with the server. That is a file of Ray's, which nobody has before their eyes.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

_PROCESS = rb"^\((?:EngineCore|Worker)[^)]*\) ERROR [^\]]*\] "
_CAUSE = re.compile(_PROCESS + rb"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*)", re.MULTILINE)
"""The last line of a traceback, which alone is not indented."""
_CACHE = re.compile(r"\bkv\b|\bcache\b", re.IGNORECASE)
_MOST_READ = 1 << 20
_MOST_CHARS = 500


class EngineOutput:
    """What this process and its children write from now on.

    Args:
        descriptor: that they write to; nothing is known of one that is no file.
    """

    def __init__(self, descriptor: int = 1) -> None:
        self._path = Path(f"/proc/self/fd/{descriptor}")
        self._start = _size(self._path)

    def cause(self) -> str:
        """`, because ` and the first exception that a process of the engine has logged; empty where there is none."""
        found = _CAUSE.search(self._text())
        return _because(found[1]) if found else ""

    def last_line(self) -> str:
        """The same of the last line, whatever that is: of standard error, where a program ends with what is wrong."""
        lines = self._text().split(b"\n")
        return next((_because(line) for line in reversed(lines) if line.strip()), "")

    def _text(self) -> bytes:
        if self._start is None:
            return b""
        with self._path.open("rb") as output:
            output.seek(self._start)
            return output.read(_MOST_READ)


def way_out(why: str) -> str:
    """What to set, where vLLM says that its KV cache is too small or too large: it names none of a run's keys."""
    return " The KV cache is server.kv_cache_gib, on a GPU server.gpu_memory_utilization." if _CACHE.search(why) else ""


def _because(line: bytes) -> str:
    return f", because {line.decode(errors='replace')[:_MOST_CHARS]}"


def _size(path: Path) -> int | None:
    """None where it is a pipe or a terminal: what is read from those is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None

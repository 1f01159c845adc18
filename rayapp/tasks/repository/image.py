"""What a task folder says of its container: whether any sandbox with Python will do, or which image it needs. Pure.

Nothing is built here. A Dockerfile that only takes Python, or a bare Debian or Ubuntu, and copies its folder needs no
image of its own: the local provider honours it. Any other needs one that was built elsewhere (docs/environments.md).
"""

from __future__ import annotations

import re
import sys

_PYTHON = re.compile(r"(?:docker\.io/)?(?:library/)?python:(\d+\.\d+)[\w.-]*")
_BARE = re.compile(r"(?:docker\.io/)?(?:library/)?(?:debian|ubuntu|python)(?::[\w.-]*)?")
_HARMLESS = frozenset({"WORKDIR", "ENV", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "USER", "SHELL"})
_HERE = frozenset({".", "./"})


def why_an_image(dockerfile: str) -> str:
    """The first line that a sandbox with Python alone can't honour, and why; empty where it can honour all."""
    for number, words in _instructions(dockerfile):
        name, rest = words[0].upper(), words[1:]
        why = ""
        if name == "FROM":
            why = _of_base(rest[0] if rest else "")
        elif name == "COPY":
            why = "" if len(rest) == 2 and rest[0] in _HERE else "it copies other things than its folder"
        elif name not in _HARMLESS:
            why = "nothing is built or run here"
        if why:
            return f"line {number}, `{' '.join(words)[:80]}`: {why}"
    return ""


def workdir_of(dockerfile: str) -> str:
    """The last WORKDIR; empty where there is none."""
    return next((words[-1] for _, words in reversed(_instructions(dockerfile)) if words[0].upper() == "WORKDIR"), "")


def _of_base(image: str) -> str:
    if (found := _PYTHON.fullmatch(image)) is not None:
        have = f"{sys.version_info.major}.{sys.version_info.minor}"
        return "" if found[1] == have else f"this node has Python {have}"
    return "" if _BARE.fullmatch(image) else "it is no plain Python, Debian or Ubuntu"


def _instructions(dockerfile: str) -> list[tuple[int, list[str]]]:
    """The number of the line that each begins on, and its words."""
    found: list[tuple[int, list[str]]] = []
    begun, words = 0, list[str]()
    for number, line in enumerate(dockerfile.splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        begun = begun or number
        words += text.removesuffix("\\").split()
        if not text.endswith("\\"):
            found.append((begun, words))
            begun, words = 0, []
    return [*found, *([(begun, words)] if words else [])]

"""First code of a zygote process: read the settings, enter the isolation level, preload packages, serve.

Started as `python -I -S -c … FD` with an empty environment and one inherited socket; see `slot.py`. Answers one packet,
{"ready": …} or {"failed": the step that this node refuses}, and then belongs to `zygote.py`.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys

from rayapp.sandbox.harness import describe
from rayapp.sandbox.local import level as levels
from rayapp.sandbox.local import wire
from rayapp.sandbox.local.zygote import Zygote

WARM_MODULES = (
    "abc", "array", "ast", "asyncio", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math", "operator", "random", "re", "statistics",
    "string", "time", "traceback", "typing", "types", "unicodedata", "linecache", "tokenize",
)  # fmt: skip
"""What model-written code imports most: paid for once here, not in each execution."""


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as channel:
        settings, _ = wire.receive(channel)
        try:
            level = _prepare(settings, channel)
        except Exception as error:  # boundary: told to the provider, which decides
            wire.send(channel, {"failed": describe(error)})
            return
        wire.send(channel, {"ready": level.name, "pid": os.getpid(), "uid": os.getuid()})
        Zygote(channel, level).serve()


def _prepare(settings: dict[str, object], channel: socket.socket) -> levels.Level:
    packages, paths = settings["packages"], settings["paths"]
    assert isinstance(packages, list)
    assert isinstance(paths, list)
    level = make_level(str(settings["level"]))
    for name in WARM_MODULES:
        importlib.import_module(name)
    level.enter()
    sys.path[:] = [entry for entry in sys.path if entry != settings["code_path"]] + paths
    for name in packages:
        importlib.import_module(name)
    levels.mapped_bytes()
    # Out of the collector's sight: a collection in a child would write to, and so copy, every page of the warm heap.
    gc.collect()
    gc.freeze()
    return level


def make_level(name: str) -> levels.Level:
    if name == "unisolated":
        return levels.Unisolated()
    raise ValueError(f"unknown isolation level {name!r}")

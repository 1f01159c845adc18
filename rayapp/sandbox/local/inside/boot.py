"""First code of a zygote, a warm interpreter from which executions are forked (`slot.py` starts it).

It reads the settings, warms up, becomes an unprivileged user and enters the isolation level. Then it sends one packet,
{"ready": …} or {"failed": the step that this node refuses}, and runs `zygote.py`.
"""

# Paths in this module are strings for mount(), so it uses os and not pathlib.
# ruff: noqa: PTH120
from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence

from rayapp.sandbox.local import wire
from rayapp.sandbox.local.inside import privileges
from rayapp.sandbox.local.inside.zygote import Zygote
from rayapp.sandbox.local.levels import kernel, visible_files
from rayapp.sandbox.local.levels import level as levels
from rayapp.sandbox.local.levels.landlock import Landlocked
from rayapp.sandbox.local.levels.limits import mapped_bytes, set_standing_limits
from rayapp.sandbox.local.levels.namespaces import NAMES as NAMESPACES
from rayapp.sandbox.local.levels.namespaces import Namespaces
from rayapp.sandbox.local.levels.visible_files import ImageView
from rayapp.sandbox.verdict.harness import HASH_SEED, describe

# Modules that candidate code imports often.
WARM_MODULES = (
    "abc", "array", "ast", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math", "operator", "random", "re",
    "statistics", "string", "time", "traceback", "typing", "types", "linecache",
)  # fmt: skip

# Without PATH, bash would also search the working folder for programs.
_ENVIRONMENT = {**HASH_SEED, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def main(descriptor: int) -> None:
    sys.dont_write_bytecode = True
    _forget_inherited()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=kernel.reserve_descriptors(descriptor)) as channel:
        settings, _ = wire.receive(channel)
        try:
            level, uid = _prepare(settings)
        except Exception as error:  # boundary: reported to the provider, which tries the next level or raises
            wire.send(channel, {"failed": describe(error)})
            return
        ready: dict[str, object] = {"ready": level.name, "pid": os.getpid(), "uid": uid}
        if level.listener is None:
            wire.send(channel, ready)
        else:
            with level.listener as listener:
                wire.send(channel, ready, listener.fileno())
        zygote = Zygote(channel, level, is_for_images=bool(settings["images"]))
        zygote.serve()
        zygote.forget()


def _forget_inherited() -> None:
    """Reset the umask (with 077 the code's user could not enter the sandbox's folders) and blocked signals."""
    os.umask(0o022)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _prepare(settings: dict[str, object]) -> tuple[levels.Level, int]:
    """Enter the isolation level. Return it with the user id that executions have outside its user namespace."""
    packages, paths = settings["packages"], settings["paths"]
    assert isinstance(packages, list)
    assert isinstance(paths, list)
    for name in WARM_MODULES:
        importlib.import_module(name)
    sys.path[:] = [entry for entry in sys.path if entry != settings["code_path"]]
    paths = import_packages(packages, paths)
    # Make the view after importing the packages: they have loaded shared libraries, which candidate code must see.
    here = visible_files.of_this_interpreter(paths)
    images = ImageView(**settings["images"]) if settings["images"] else None  # type: ignore[arg-type]
    level = make_level(str(settings["level"]), here, images)
    if level.name != "unisolated":
        uid, trees = (privileges.images_uid(), [images.trees]) if images else (None, [])
        privileges.leave_root([here.library, *here.shared, *here.packages, *trees], uid)
    mapped_bytes()
    set_standing_limits()
    # Freeze the heap: a garbage collection in a child would write to every page of the heap, and so copy it. Freeze
    # before enter(): it may fork, and later writes copy pages.
    gc.collect()
    gc.freeze()
    uid = os.getuid()
    level.enter()
    if images:
        _move_library(here.library, visible_files.LIBRARY_IN_IMAGES)
    return level, uid


def _move_library(old: str, new: str) -> None:
    sys.path[:] = [entry.replace(old, new) for entry in sys.path]
    for module in list(sys.modules.values()):
        if isinstance(path := getattr(module, "__path__", None), list):
            path[:] = [entry.replace(old, new) for entry in path]
        if file := getattr(module, "__file__", None):
            module.__file__ = file.replace(old, new)
    sys.path_importer_cache.clear()


def import_packages(packages: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Import the packages and return the files that candidate code may see: `paths` and those of dependencies."""
    # Keep numerical libraries at one thread: with more threads a zygote can't enter a user namespace, and a fork has
    # only one of them.
    os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    folders, before = {os.path.dirname(path) for path in paths}, _top_modules()
    sys.path += sorted(folders)
    for name in packages:
        importlib.import_module(name)
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)
    with_them = [path for name in _top_modules() - before for path in _files_of(sys.modules.get(name))]
    return [*paths, *sorted(path for path in {*with_them} - {*paths} if os.path.dirname(path) in folders)]


def _top_modules() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


def _files_of(module: object) -> list[str]:
    file = getattr(module, "__file__", None)
    return list(getattr(module, "__path__", [])) or [file for file in (file,) if file]


def make_level(name: str, here: visible_files.View, images: ImageView | None = None) -> levels.Level:
    if name in NAMESPACES:
        return Namespaces(here, with_proc="+proc" in name, with_loopback="+lo" in name, images=images)
    if name == "ll":
        return Landlocked(here)
    if name == "unisolated":
        return levels.Unisolated()
    raise ValueError(f"unknown isolation level {name!r}")

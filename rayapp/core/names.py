"""Find objects by the names that a configuration gives them: objects of the calling program, plug-ins, Python files.

Tasks and reward functions of a program that are not in files are kept in this module's registry, one for each process.
cloudpickle sends them to rollout workers, even if their classes are defined in a notebook or in `__main__`.

    rayapp.train(tasks=[task], reward=fn)     config.tasks = ("python:add",)   config.reward.custom = "python:fn"
             |                                            | looked up here when a task or a reward is loaded
             '-- with giving({...}) --> this registry ----'--> sent to each rollout worker, which adds them

Plug-ins are entry points of other installed packages. All kinds of plug-ins are found and loaded in the same way.

    pyproject.toml of a package:   [project.entry-points."rayapp.tasks"]
                                   reverse = "my_package.tasks:REVERSE"
    here:                          load_plugin("tasks", "reverse") -> the object

Names are read from the packages' metadata; a package is imported only when its plug-in is loaded. A broken package is
an error only for runs that use its plug-in. A name that rayapp ships is preferred to a plug-in's.

Extras are features of rayapp that most runs don't use (`rayapp.extras`). The core reaches them only through tables of
names, such as the table of sandbox providers, and imports one when a configuration names it:

    load_extra("providers.e2b:E2BProvider") -> the class of rayapp/extras/providers/e2b.py

This module also suggests names for mistyped ones.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from rayapp.core.errors import ConfigError, InputError

PREFIX = "python:"
_OBJECTS: dict[str, object] = {}


def is_given(name: str) -> bool:
    """Return True if the name is one of the registry's: `python:NAME`."""
    return name.startswith(PREFIX)


def given(name: str) -> object:
    """Return the registry's object of this name.

    Raises:
        InputError: this process has no object of this name.
    """
    try:
        return _OBJECTS[name]
    except KeyError:
        raise InputError(
            f"{name} is an object of the Python program that started the run: no other program can load it. Start "
            "the run from that program (rayapp.train), or write the object into a file and name the file."
        ) from None


def all_given() -> dict[str, object]:
    """Return all objects of this process's registry, so that they can be sent to another process."""
    return dict(_OBJECTS)


def add_given(objects: Mapping[str, object]) -> None:
    """Add objects that another process sent to this process's registry."""
    _OBJECTS.update(objects)


@contextmanager
def giving(objects: Mapping[str, object]) -> Iterator[None]:
    """Register a program's objects for the length of the block."""
    before = dict(_OBJECTS)
    _OBJECTS.update(objects)
    try:
        yield
    finally:
        _OBJECTS.clear()
        _OBJECTS.update(before)


def load_extra(place: str) -> Any:
    """Import an object of `rayapp.extras`: its place in this package, as `module:attribute`."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(f"rayapp.extras.{module}"), attribute)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: `; did you mean x?`, or a full stop if no known name is
    similar.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else "."


Kind = Literal["tasks", "agents", "rewards", "tools", "sandbox_providers", "trackers", "losses", "estimators"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point of an installed package."""

    kind: Kind
    name: str
    place: str
    """Place of the plug-in's object, as `module:attribute`."""
    package: str
    """Name and version of the package."""

    def load(self) -> Any:
        """Import and return the object.

        Raises:
            ConfigError: the module can't be imported, or does not have the attribute.
        """
        try:
            return importlib.metadata.EntryPoint(self.name, self.place, f"rayapp.{self.kind}").load()
        except (Exception, SystemExit) as error:  # boundary: a foreign module may raise anything
            raise ConfigError(
                f"plug-in {self.name} of {self.package} is broken: {self.place} can't be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error


def plugins(kind: Kind | None = None) -> list[Plugin]:
    """Return the plug-ins of one kind, or of all kinds, sorted by kind and name."""
    return [found for found in _all_plugins() if kind is None or found.kind == kind]


def is_plugin(kind: Kind, name: str) -> bool:
    """Return True if an installed package offers a plug-in of this kind and name."""
    return any(found.name == name for found in plugins(kind))


def load_plugin(kind: Kind, name: str) -> Any:
    """Load the plug-in of this kind and name and return its object.

    Raises:
        ConfigError: no package or more than one package offers the plug-in, or the plug-in can't be loaded.
    """
    found = [each for each in plugins(kind) if each.name == name]
    if not found:
        raise ConfigError(
            f"plug-in {name!r}: no installed package offers it in the entry-point group "
            f"rayapp.{kind}{did_you_mean(name, plugin_names(kind))}"
        )
    if len(found) > 1:
        packages = ", ".join(each.package for each in found)
        raise ConfigError(
            f"plug-in {name!r}: several packages offer it in the entry-point group rayapp.{kind} ({packages}). "
            "Uninstall all of them but one."
        )
    return found[0].load()


def plugin_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of all plug-ins of a kind, each once."""
    return tuple(dict.fromkeys(found.name for found in plugins(kind)))


def check_name(kind: Kind, name: str, shipped: Iterable[str]) -> None:
    """Check a name of a configuration. Raises ValueError: neither rayapp nor a plug-in has this name."""
    known = (*shipped, *plugin_names(kind)) if name not in shipped else (name,)
    if name not in known:
        raise ValueError(
            f"{name!r} is unknown{did_you_mean(name, known)} Use one of {', '.join(known)}, or the name of a plug-in "
            "(rayapp doctor lists them)"
        )


@functools.cache
def _all_plugins() -> tuple[Plugin, ...]:
    found = {
        Plugin(kind=kind, name=point.name, place=point.value, package=_package(point))
        for kind in KINDS
        for point in importlib.metadata.entry_points(group=f"rayapp.{kind}")
    }
    return tuple(sorted(found, key=lambda each: (KINDS.index(each.kind), each.name, each.package)))


def _package(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"


def module_of(file: str | Path, name: str) -> ModuleType:
    """Run a Python file as a module of this name and return it. The module is added to sys.modules, where pydantic and
    dataclasses look up annotations that are texts.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

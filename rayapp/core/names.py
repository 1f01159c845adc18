"""Find objects by the names that a configuration gives them, and suggest names for mistyped ones.

Objects of the calling program (`giving`) are in this process's registry, which cloudpickle sends to rollout workers.
Plug-ins are entry points of other packages, imported only when used; a name that rayapp ships is preferred. Extras
(`rayapp.extras`) are reached through tables of names: `load_extra("providers.e2b:E2BProvider")`.
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
    return name.startswith(PREFIX)


def given(name: str) -> object:
    """Return the registry's object of this name."""
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
    """Return the end of a sentence about an unknown name: `; did you mean x?`, or a full stop."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else "."


Kind = Literal["sandbox_providers", "trackers", "losses", "estimators"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    kind: Kind
    name: str
    place: str  # of its object, `module:attribute`
    package: str  # name and version

    def load(self) -> Any:
        """Import and return the object. ConfigError: it can't be imported."""
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
    return any(found.name == name for found in plugins(kind))


def load_plugin(kind: Kind, name: str) -> Any:
    """Return a plug-in's object. ConfigError: none or several packages offer it, or it can't be loaded."""
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
    return tuple(dict.fromkeys(found.name for found in plugins(kind)))


def check_name(kind: Kind, name: str, shipped: Iterable[str]) -> None:
    """Raise ValueError if neither rayapp nor a plug-in has this name."""
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
    """Run a Python file as a module of this name, added to sys.modules, where pydantic and dataclasses look up
    annotations that are texts."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

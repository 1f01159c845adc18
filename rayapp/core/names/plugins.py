"""Plug-ins: what packages installed beside this one offer by name, through entry points. One mechanism for all kinds.

    pyproject.toml of a package:   [project.entry-points."rayapp.tasks"]
                                   reverse = "my_package.tasks:REVERSE"
    here:                          load_plugin("tasks", "reverse") -> the object

Names are read from the packages' metadata; nothing of theirs is imported before it is asked for. A package that is
broken is an error of whoever asks for its plug-in, with its name, and of nobody else. Names that ship come first.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rayapp.core.errors import ConfigError
from rayapp.core.names.near import did_you_mean

Kind = Literal["tasks", "agents", "rewards", "tools", "sandbox_providers", "trackers", "losses", "estimators"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry of a package's metadata."""

    kind: Kind
    name: str
    place: str
    """`module:attribute`."""
    package: str
    """Name and version of the package."""

    def load(self) -> Any:
        """The object.

        Raises:
            ConfigError: its package can't be imported, or has no such thing.
        """
        try:
            return importlib.metadata.EntryPoint(self.name, self.place, f"rayapp.{self.kind}").load()
        except (Exception, SystemExit) as error:  # boundary: a foreign module raises what it likes
            raise ConfigError(
                f"plug-in {self.name} of {self.package} is broken: {self.place} can't be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error


def plugins(kind: Kind | None = None) -> list[Plugin]:
    """Every plug-in, or those of a kind, by kind and name."""
    return [found for found in _all_plugins() if kind is None or found.kind == kind]


def is_plugin(kind: Kind, name: str) -> bool:
    """Whether an installed package offers this."""
    return any(found.name == name for found in plugins(kind))


def load_plugin(kind: Kind, name: str) -> Any:
    """The object of that name.

    Raises:
        ConfigError: no package offers it, several do, or it can't be loaded.
    """
    found = [each for each in plugins(kind) if each.name == name]
    if not found:
        raise ConfigError(f"no plug-in of rayapp.{kind} is called {name!r}{did_you_mean(name, plugin_names(kind))}")
    if len(found) > 1:
        packages = " and ".join(each.package for each in found)
        raise ConfigError(f"{packages} both offer {name!r} as rayapp.{kind}: uninstall one of them")
    return found[0].load()


def plugin_names(kind: Kind) -> tuple[str, ...]:
    """For messages and choices."""
    return tuple(dict.fromkeys(found.name for found in plugins(kind)))


def check_name(kind: Kind, name: str, shipped: Iterable[str]) -> None:
    """Raises ValueError: the name is neither one that ships nor a plug-in's."""
    known = (*shipped, *plugin_names(kind)) if name not in shipped else (name,)
    if name not in known:
        raise ValueError(
            f"{name!r} is unknown{did_you_mean(name, known)} It is one of {', '.join(known)}, or a plug-in's "
            "(rayapp plugins)"
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

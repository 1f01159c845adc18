"""Finds the files of packages that candidate code may import. Called by the local provider, outside the sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from rayapp.core.errors import SandboxConfigError


def locate(packages: Sequence[str]) -> tuple[str, ...]:
    """Folders and files of these packages, with the folder of libraries that a wheel puts beside one (numpy.libs).

    What a package imports in turn is found where it is imported (`inside/boot.py`).

    Raises:
        SandboxConfigError: a package is not installed here.
    """
    found: list[str] = []
    for package in packages:
        # Not importlib.util.find_spec: that answers from modules already imported, and imports parents.
        spec = PathFinder.find_spec(package) if package.isidentifier() else None
        if spec is None:
            raise SandboxConfigError(
                f"package {package!r} of the sandbox spec is not installed in this environment: install it, or leave "
                "it out"
            )
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        found += map(str, folders)
        found += [str(libs) for folder in folders if (libs := folder.parent / f"{package}.libs").is_dir()]
        if not folders and spec.origin is not None:
            found.append(spec.origin)
    return tuple(found)

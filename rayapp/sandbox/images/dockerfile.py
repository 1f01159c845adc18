"""Builds Dockerfiles into the cache with buildah, podman or docker, whichever is on this machine.

The tool runs the Dockerfile's commands, with its own network and isolation: build only what you would build by hand.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rayapp.core.errors import ImageError, one_line
from rayapp.sandbox.images.pull import pull
from rayapp.sandbox.images.reference import parse
from rayapp.sandbox.images.store import Image, Store

TOOLS = ("buildah", "podman", "docker")


def build(store: Store, folder: Path, name: str, *, tool: str = "", options: Sequence[str] = ()) -> Image:
    """Build a folder's Dockerfile and unpack the image into the cache as `image:build:NAME`. The tool inherits this
    process's stdout and stderr.

    Args:
        tool: one of `TOOLS`; empty takes the first one that is installed.
        options: passed to the tool's build command.
    Raises:
        ImageError: no tool is installed, or the build failed.
    """
    reference = parse(f"build:{name}")
    if not (folder / "Dockerfile").is_file():
        raise ImageError(f"image {reference}: there is no {folder / 'Dockerfile'}")
    chosen = tool or next((each for each in TOOLS if shutil.which(each)), "")
    if not chosen or shutil.which(chosen) is None:
        raise ImageError(
            f"image {reference}: it can't be built, because {chosen or 'none of buildah, podman and docker'} is not "
            "installed"
        )
    with tempfile.TemporaryDirectory(prefix="rayapp-build-") as place:
        tag, archive = f"rayapp.local/{name.lower()}:built", f"{place}/image.tar"
        for argv in _commands(chosen, folder, tag, archive, options):
            _run(argv, f"image {reference}")
        with pull(store, parse(f"archive:{archive}")) as hold:
            store.put(hold.image, reference)
            return hold.image


def _commands(tool: str, folder: Path, tag: str, archive: str, options: Sequence[str]) -> list[list[str]]:
    """Return the commands that build an image and write it to an archive."""
    if tool == "buildah":
        return [
            ["buildah", "build", "-t", tag, *options, str(folder)],
            ["buildah", "push", tag, f"oci-archive:{archive}"],
        ]
    form = ["--format", "oci-archive"] if tool == "podman" else []
    return [[tool, "build", "-t", tag, *options, str(folder)], [tool, "save", *form, "-o", archive, tag]]


def _run(argv: Sequence[str], what: str) -> None:
    try:
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ImageError(f"{what} can't be built: {one_line(error)}") from error

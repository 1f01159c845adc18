"""`rayapp images`: the cache of images that local sandboxes run on.

pull    bring images into the cache                  exit 0 all are there, 2 one is missing, damaged or too large
list    what the cache holds
prune   remove what nothing uses
build   build a Dockerfile into the cache, with buildah, podman or docker
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from rayapp.config.loading import load_config
from rayapp.config.sandbox import LocalConfig
from rayapp.core.logs import visible
from rayapp.sandbox.images.dockerfile import TOOLS, build
from rayapp.sandbox.images.pull import Wanted, pull
from rayapp.sandbox.images.reference import parse
from rayapp.sandbox.images.store import Store, open_store

app = typer.Typer(no_args_is_help=True, help="The cache of images that local sandboxes run on.")
_MIB, _SHOW_EVERY_S = 1 << 20, 0.5
ConfigOption = Annotated[Path | None, typer.Option(help="Take the cache's folder, size and mirrors from this config")]


@app.command(
    name="pull",
    epilog="Examples:\n\n  rayapp images pull python:3.12-slim\n\n"
    "  rayapp images pull registry.example/team/env@sha256:… oci:./layout archive:saved.tar",
)
def pull_images(
    images: Annotated[list[str], typer.Argument(help="REGISTRY/NAME:TAG, …@sha256:…, oci:FOLDER or archive:FILE.tar")],
    config: ConfigOption = None,
    platform: Annotated[str, typer.Option(help="In place of this machine's, e.g. linux/arm64")] = "",
) -> None:
    """Bring images into the cache and print the digest that each name stands for now."""
    section = _section(config)
    store = _store(section)
    for name in images:
        wanted = Wanted(platform=platform, mirrors=section.image_mirrors, on_bytes=_progress(name))
        with pull(store, parse(name), wanted) as hold:
            print(visible(f"image:{hold.image.name}"), flush=True)


@app.command(name="list")
def list_images(
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per image")] = False,
) -> None:
    """List the images of the cache, least recently used first."""
    store = _store(_section(config))
    names = store.names()
    found = store.images()
    for image, used in found:
        own = sorted(name for name, digest in names.items() if digest == image.digest) or [image.name]
        if as_json:
            facts = {"names": own, "digest": image.digest, "bytes": image.num_bytes, "used": used}
            print(json.dumps({**facts, "python": image.python}))
        else:
            age = timedelta(seconds=max(0, int(time.time() - used)))
            print(visible(f"{image.digest[7:19]}  {image.num_bytes / _MIB:9.1f} MiB  used {age} ago  {', '.join(own)}"))
    if not as_json:
        total, most = store.num_bytes() / (1 << 30), store.max_bytes / (1 << 30)
        print(f"{len(found)} images, {total:.2f} of {most:g} GiB (layers that images share count once): {store.folder}")


@app.command()
def prune(
    unused_h: Annotated[float, typer.Option(min=0, help="Only images that were not used for so many hours")] = 0.0,
    config: ConfigOption = None,
) -> None:
    """Remove the images that no sandbox and no pull uses, and what cut pulls left."""
    store = _store(_section(config))
    for image in store.prune(unused_s=3600 * unused_h):
        print(visible(f"removed {image.name}"))


@app.command(name="build", epilog="Example:\n\n  rayapp images build my_task/environment --name my_task")
def build_image(
    folder: Annotated[Path, typer.Argument(help="Folder with a Dockerfile, or a task folder in Harbor's layout")],
    name: Annotated[str, typer.Option(help="Name of the image; default: the folder's, as tasks call it")] = "",
    tool: Annotated[str, typer.Option(help=f"{', '.join(TOOLS)}; default: the first that is installed")] = "",
    config: ConfigOption = None,
) -> None:
    """Build a Dockerfile into the cache, as image:build:NAME. Its commands run as the tool runs them."""
    inner = folder / "environment"
    context = inner if (inner / "Dockerfile").is_file() else folder
    image = build(_store(_section(config)), context, name or folder.resolve().name, tool=tool)
    print(visible(f"image:build:{name or folder.resolve().name} {image.digest}"))


def _section(config: Path | None) -> LocalConfig:
    return (load_config(config).sandbox.local if config is not None else None) or LocalConfig()


def _store(section: LocalConfig) -> Store:
    return open_store(section.image_cache, section.image_cache_gib)


def _progress(name: str) -> Callable[[int], None]:
    """Return a function that shows downloaded bytes on standard error, if that is a terminal."""
    done, shown = 0, time.monotonic()

    def add(num_bytes: int) -> None:
        nonlocal done, shown
        done += num_bytes
        if sys.stderr.isatty() and time.monotonic() - shown > _SHOW_EVERY_S:
            shown = time.monotonic()
            sys.stderr.write(visible(f"{name}: {done / _MIB:.0f} MiB") + "\r")

    return add

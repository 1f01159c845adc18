"""`rayapp images`: the commands for the cache of images that local sandboxes run on."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from rayapp.config.loading import load_config
from rayapp.config.sandbox import LocalConfig
from rayapp.core.logs import visible
from rayapp.extras.images.pull import TOOLS, build, pull
from rayapp.extras.images.store import Store, open_store
from rayapp.sandbox.images import parse

app = typer.Typer(no_args_is_help=True, help="The cache of images that local sandboxes run on.")
_MIB = 1 << 20
ConfigOption = Annotated[Path | None, typer.Option(help="Take the cache's folder and size from this config")]


@app.command(
    name="pull",
    epilog="Examples:\n\n  rayapp images pull python:3.12-slim\n\n"
    "  rayapp images pull registry.example/team/env@sha256:… oci:./layout archive:saved.tar",
)
def pull_images(
    images: Annotated[list[str], typer.Argument(help="REGISTRY/NAME:TAG, …@sha256:…, oci:FOLDER or archive:FILE.tar")],
    config: ConfigOption = None,
) -> None:
    """Download images into the cache; print the digest of each name."""
    store = _store(_local_section(config))
    for name in images:
        with pull(store, parse(name), progress=sys.stderr.fileno()) as hold:
            print(visible(f"image:{hold.image.name}"), flush=True)


@app.command()
def prune(
    unused_h: Annotated[
        float, typer.Option(min=0, help="Remove only images that were not used for this many hours")
    ] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the cache, least recently used first")] = False,
    config: ConfigOption = None,
) -> None:
    """Remove the images that no sandbox and no pull uses, and leftovers of interrupted pulls."""
    store = _store(_local_section(config))
    if dry_run:
        _list_images(store)
        return
    for image in store.prune(unused_s=3600 * unused_h):
        print(visible(f"removed {image.name}"))


@app.command(name="build", epilog="Example:\n\n  rayapp images build my_task/environment --name my_task")
def build_image(
    folder: Annotated[Path, typer.Argument(help="Folder with a Dockerfile, or a task folder in Harbor's layout")],
    name: Annotated[str, typer.Option(help="Name of the image; default: the folder's name, which tasks use")] = "",
    tool: Annotated[str, typer.Option(help=f"{', '.join(TOOLS)}; default: the first that is installed")] = "",
    config: ConfigOption = None,
) -> None:
    """Build a Dockerfile into the cache, as image:build:NAME. The build tool runs the Dockerfile's commands, without
    rayapp's isolation.
    """
    inner = folder / "environment"
    context = inner if (inner / "Dockerfile").is_file() else folder
    image = build(_store(_local_section(config)), context, name or folder.resolve().name, tool=tool)
    print(visible(f"image:build:{name or folder.resolve().name} {image.digest}"))


def _local_section(config: Path | None) -> LocalConfig:
    return (load_config(config).sandbox.local if config is not None else None) or LocalConfig()


def _store(section: LocalConfig) -> Store:
    return open_store(section.image_cache, section.image_cache_gib)


def _list_images(store: Store) -> None:
    names, found = store.names(), store.images()
    for image, used in found:
        own = sorted(name for name, digest in names.items() if digest == image.digest) or [image.name]
        age = timedelta(seconds=max(0, int(time.time() - used)))
        print(visible(f"{image.digest[7:19]}  {image.num_bytes / _MIB:9.1f} MiB  used {age} ago  {', '.join(own)}"))
    total, most = store.num_bytes() / (1 << 30), store.max_bytes / (1 << 30)
    print(f"{len(found)} images, {total:.2f} of {most:g} GiB: {store.folder}")

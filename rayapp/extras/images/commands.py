"""`rayapp images`: the commands for the cache of images that local sandboxes run on."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from rayapp.config.loading import load_config
from rayapp.config.sandbox import LocalConfig
from rayapp.core.errors import InputError
from rayapp.core.logs import visible
from rayapp.extras.images.pull import Wanted, pull
from rayapp.extras.images.store import Store, open_store
from rayapp.sandbox.images import parse

app = typer.Typer(no_args_is_help=True, help="The cache of images that local sandboxes run on.")
_MIB = 1 << 20
ConfigOption = Annotated[Path | None, typer.Option(help="Take the cache's folder and size from this config")]


@app.command(
    name="pull",
    epilog="Examples:\n\n  rayapp images pull python:3.12-slim\n\n"
    "  rayapp images pull registry.example/team/env@sha256:… oci:./layout archive:saved.tar\n\n"
    "  docker build -t my_task my_task/environment && docker save -o my_task.tar my_task\n\n"
    "  rayapp images pull archive:my_task.tar --name my_task",
)
def pull_images(
    images: Annotated[list[str], typer.Argument(help="REGISTRY/NAME:TAG, …@sha256:…, oci:FOLDER or archive:FILE.tar")],
    name: Annotated[str, typer.Option(help="Also store the image as image:build:NAME, which a task NAME uses")] = "",
    config: ConfigOption = None,
) -> None:
    """Download images into the cache; print the digest of each name."""
    if name and len(images) > 1:
        raise InputError(f"--name {name} names one image, but {len(images)} are given: pull them one by one")
    store = _store(_local_section(config))
    for image in images:
        wanted = Wanted(progress=2)  # standard error
        with pull(store, parse(image), wanted) as hold:
            if name:
                store.put(hold.image, parse(f"build:{name}"))
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

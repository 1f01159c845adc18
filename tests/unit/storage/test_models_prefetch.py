"""A model on s3:// is copied here once, completely, by the first process. On moto."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.config import Config
from rayapp.core.errors import InputError, StorageCorruptError
from rayapp.storage.folders import put_folder
from rayapp.storage.models.fetch import check_remote_model, with_local_model
from rayapp.storage.opening import open_storage

pytestmark = pytest.mark.usefixtures("s3_environment")
BUCKET = "models"


@pytest.fixture(scope="module", autouse=True)
def bucket(s3_server: Any) -> None:
    s3_server.make_bucket(BUCKET)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    return folder


def config(uri: str, tmp_path: Path) -> Config:
    return Config.model_validate({"model": {"path": uri}, "data": {"cache_dir": tmp_path / "cache"}})


def upload(folder: Path, uri: str) -> None:
    """Upload as another program does: without a manifest."""

    async def put() -> None:
        async with open_storage(uri) as storage:
            for path in folder.iterdir():
                await storage.put_file(path, path.name)

    asyncio.run(put())


def test_a_model_in_a_bucket_becomes_a_folder_and_the_configuration_keeps_its_uri(model: Path, tmp_path: Path) -> None:
    upload(model, f"s3://{BUCKET}/plain")
    remote = config(f"s3://{BUCKET}/plain", tmp_path)

    local = Path(with_local_model(remote).model.path)

    assert remote.model.path == f"s3://{BUCKET}/plain"
    assert {path.name for path in local.iterdir()} >= {"config.json", "model.safetensors"}
    assert (local / "model.safetensors").read_bytes() == b"w" * 1000


def test_it_is_fetched_once_and_again_when_it_changes_there(model: Path, tmp_path: Path) -> None:
    uri = f"s3://{BUCKET}/once"
    upload(model, uri)
    weights = Path(with_local_model(config(uri, tmp_path)).model.path) / "model.safetensors"
    first = weights.stat().st_mtime_ns
    with ThreadPoolExecutor(4) as threads:  # four processes of one machine
        list(threads.map(lambda _: with_local_model(config(uri, tmp_path)), range(4)))
    assert weights.stat().st_mtime_ns == first

    (model / "model.safetensors").write_bytes(b"v" * 1001)
    upload(model, uri)
    with_local_model(config(uri, tmp_path))
    assert weights.read_bytes() == b"v" * 1001


def test_a_whole_folder_is_verified_against_its_manifest(model: Path, tmp_path: Path) -> None:
    uri = f"s3://{BUCKET}/manifest"

    async def put_and_damage() -> None:
        async with open_storage(uri) as storage:
            await put_folder(model, storage)
            await storage.put_bytes(b"x" * 1000, "model.safetensors")

    asyncio.run(put_and_damage())
    with pytest.raises(StorageCorruptError, match=r"model\.safetensors"):
        with_local_model(config(uri, tmp_path))


def test_a_prefix_without_a_model_says_what_is_there(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing is there, but a model needs"):
        with_local_model(config(f"s3://{BUCKET}/nowhere", tmp_path))
    (model / "model.safetensors").unlink()
    upload(model, f"s3://{BUCKET}/half")
    with pytest.raises(InputError, match=r"it holds config\.json, but"):
        check_remote_model(f"s3://{BUCKET}/half")


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    for path in ("models/smollm2-135m", "Qwen/Qwen3-8B"):
        assert with_local_model(config(path, tmp_path)).model.path == path

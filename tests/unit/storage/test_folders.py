"""Local storage, locations, settings from the environment, and folders that count only with their manifest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.core.errors import (
    StorageConfigError,
    StorageCorruptError,
    StorageCredentialsError,
    StorageError,
    StorageExistsError,
    StorageNotFoundError,
)
from rayapp.core.files import Location, check_key
from rayapp.storage.base import ObjectInfo, Storage
from rayapp.storage.folders import MANIFEST, get_folder, put_folder, read_manifest
from rayapp.storage.opening import LocalStorage, open_storage
from rayapp.storage.settings import settings_from_environment


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    async with open_storage(str(tmp_path / "store")) as storage:
        yield storage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("alpha")
    (folder / "deep" / "b.bin").write_bytes(bytes(range(256)))
    return folder


class Breaking(LocalStorage):
    """A local storage whose `num_left`-th write of a file fails, as a full disk or a lost mount would."""

    def __init__(self, root: Path, num_left: int) -> None:
        super().__init__(root)
        self.num_left = num_left

    async def put_file(self, path: Path, key: str) -> ObjectInfo:
        self.num_left -= 1
        if self.num_left < 0:
            raise StorageError("the disk went away")
        return await super().put_file(path, key)


async def test_local_objects_come_back_and_are_listed_in_order(storage: Storage, folder: Path, tmp_path: Path) -> None:
    await storage.put_file(folder / "a.txt", "x/2")
    await storage.put_bytes(b"one", "x/1")

    assert [info.key async for info in storage.list()] == ["x/1", "x/2"]
    assert [info.key async for info in storage.list("x/2")] == ["x/2"]
    assert await storage.get_bytes("x/2") == b"alpha"
    assert (await storage.get_file("x/1", tmp_path / "one")).num_bytes == 3
    assert not await storage.exists("x")
    with pytest.raises(StorageError, match="4 bytes"):
        await storage.get_bytes("x/2", max_bytes=4)


async def test_of_many_local_creators_exactly_one_wins(storage: Storage) -> None:
    results = await asyncio.gather(
        *(storage.put_bytes(str(i).encode(), "claim", if_absent=True) for i in range(8)), return_exceptions=True
    )

    winners = [i for i, result in enumerate(results) if isinstance(result, ObjectInfo)]
    assert len(winners) == 1
    assert await storage.get_bytes("claim") == str(winners[0]).encode()
    assert sum(isinstance(result, StorageExistsError) for result in results) == 7


async def test_a_local_copy_that_is_not_what_was_expected_leaves_no_file(storage: Storage, tmp_path: Path) -> None:
    await storage.put_bytes(b"x", "a")

    with pytest.raises(StorageCorruptError):
        await storage.get_file("a", tmp_path / "to" / "a", sha256="0" * 64)

    assert list((tmp_path / "to").iterdir()) == []


async def test_places_that_cannot_be_stored_in_or_from_say_so(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "none").mkdir()

    async with open_storage(str(tmp_path / "file")) as at_a_file:
        with pytest.raises(StorageError, match="file"):
            await at_a_file.check()
    with pytest.raises(StorageNotFoundError, match="no files"):
        await put_folder(tmp_path / "none", storage)


async def test_a_folder_comes_back_whole_and_files_that_are_here_already_are_not_read_again(
    storage: Storage, folder: Path, tmp_path: Path
) -> None:
    written = await put_folder(folder, storage)

    assert await get_folder(storage, tmp_path / "back") == written
    assert (tmp_path / "back" / "deep" / "b.bin").read_bytes() == bytes(range(256))
    assert sorted(written.files) == ["a.txt", "deep/b.bin"]
    await storage.delete("a.txt")
    await get_folder(storage, tmp_path / "back")


async def test_other_content_is_written_only_when_asked_to_and_meanwhile_the_folder_has_no_manifest(
    storage: Storage, folder: Path, tmp_path: Path
) -> None:
    broken = Breaking(tmp_path / "store", 0)
    await put_folder(folder, storage)
    await put_folder(folder, broken)  # the same folder again writes nothing
    (folder / "a.txt").write_text("other")

    with pytest.raises(StorageExistsError, match="overwrite"):
        await put_folder(folder, storage)
    with pytest.raises(StorageError, match="went away"):
        await put_folder(folder, broken, overwrite=True)
    assert await read_manifest(storage) is None
    await put_folder(folder, storage, overwrite=True)
    assert await storage.get_bytes("a.txt") == b"other"


async def test_a_folder_whose_upload_broke_does_not_count_and_can_be_finished(folder: Path, tmp_path: Path) -> None:
    broken = Breaking(tmp_path / "store", 1)
    with pytest.raises(StorageError, match="went away"):
        await put_folder(folder, broken)
    with pytest.raises(StorageNotFoundError, match="did not finish"):
        await get_folder(broken, tmp_path / "back")

    await put_folder(folder, LocalStorage(tmp_path / "store"))

    assert len((await get_folder(broken, tmp_path / "back")).files) == 2


async def test_a_damaged_file_is_found_when_the_folder_is_read(storage: Storage, folder: Path, tmp_path: Path) -> None:
    await put_folder(folder, storage)
    await storage.put_bytes(b"alphb", "a.txt")

    with pytest.raises(StorageCorruptError, match=r"a\.txt"):
        await get_folder(storage, tmp_path / "back")


OUTSIDE = '{"format": 1, "files": {"../../etc/passwd": {}}}'


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        *((text, StorageCorruptError, "") for text in ("", "[]", "{}", "{")),
        (OUTSIDE, StorageConfigError, ""),
        ('{"format": 2, "files": {}}', StorageError, "this version of rayapp reads only format 1"),
    ],
)
async def test_a_manifest_that_is_none_or_newer_is_refused(
    storage: Storage, text: str, error: type[Exception], said: str
) -> None:
    await storage.put_bytes(text.encode(), MANIFEST)

    with pytest.raises(error, match=said):
        await read_manifest(storage)


def test_locations_are_taken_apart() -> None:
    assert Location.parse("s3://my-bucket/a/b/") == Location(bucket="my-bucket", key="a/b")
    assert Location.parse("s3://my-bucket") == Location(bucket="my-bucket", key="")
    assert Location.parse("/data/x") == Location(key="/data/x")
    assert Location.parse("file:///data/x") == Location(key="/data/x")
    assert str(Location.parse("s3://my-bucket/a").join("b/c")) == "s3://my-bucket/a/b/c"


@pytest.mark.parametrize("uri", ["", "s3://", "s3:///key", "s3://Upper/x", "oss://bucket/x", "https://x/y"])
def test_locations_that_cannot_be_are_refused(uri: str) -> None:
    with pytest.raises(StorageConfigError):
        Location.parse(uri)


@given(st.text(alphabet="ab./\\\0", min_size=1, max_size=12))
def test_a_key_that_passes_stays_in_its_folder(key: str) -> None:
    try:
        check_key(key)
    except StorageConfigError:
        return
    assert Path("/root", key).resolve().is_relative_to("/root")
    assert str(Path(key)) == key


def test_the_presets_differ_where_the_services_do() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    aws = settings_from_environment(keys | {"AWS_REGION": "eu-west-1"})
    minio = settings_from_environment(keys | {"RAYAPP_S3_PRESET": "minio", "AWS_ENDPOINT_URL": "http://minio:9000"})
    oss = settings_from_environment(
        {"RAYAPP_S3_PRESET": "oss", "OSS_REGION": "cn-beijing", "OSS_ACCESS_KEY_ID": "o", "OSS_ACCESS_KEY_SECRET": "p"}
    )

    assert (aws.endpoint_url, aws.region, aws.checksums) == (None, "eu-west-1", "when_supported")
    assert (minio.endpoint_url, minio.addressing_style) == ("http://minio:9000", "path")
    assert (oss.endpoint_url, oss.addressing_style) == ("https://s3.oss-cn-beijing.aliyuncs.com", "virtual")
    assert (oss.access_key_id, oss.checksums, oss.signature_version) == ("o", "when_required", "s3")


def test_settings_never_show_the_secret() -> None:
    settings = settings_from_environment({"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "hunter2"})

    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ({"RAYAPP_S3_PRESET": "gcs"}, StorageConfigError),
        ({"RAYAPP_S3_PRESET": "minio"}, StorageConfigError),
        ({"RAYAPP_S3_PRESET": "oss"}, StorageConfigError),
        ({"AWS_ACCESS_KEY_ID": "k"}, StorageCredentialsError),
    ],
)
def test_settings_that_cannot_work_are_refused(environment: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        settings_from_environment(environment)


async def test_a_folder_is_listed_while_another_process_deletes_files_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, stat = LocalStorage(tmp_path), Path.stat
    for name in ("kept", "probe"):
        (tmp_path / name).write_text("x")

    def stat_at_the_last_moment(path: Path, **options: Any) -> Any:
        """Delete the file right after somebody has looked at it."""
        found = stat(path, **options)
        if path.name == "probe":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", stat_at_the_last_moment)

    assert "kept" in [info.key async for info in storage.list()]

"""`S3Storage` against moto's HTTP server, straight and through a proxy that fails on purpose."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rayapp.core.errors import (
    RayappError,
    StorageBucketError,
    StorageCorruptError,
    StorageCredentialsError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnreachableError,
)
from rayapp.extras.s3.storage import part_bytes_for, s3_client
from rayapp.storage.base import ObjectInfo, Storage
from rayapp.storage.folders import get_folder, put_folder, read_manifest
from rayapp.storage.opening import open_storage
from rayapp.storage.settings import MIB, S3Settings, Transfer
from support.storage.faulty_proxy import Fault, FaultyProxy, Plan, Seen
from support.storage.moto_server import KEY, REGION, SECRET, MotoServer

# 5 MiB is the smallest part that S3 takes: 17 MiB make three whole parts and a short one.
TRANSFER = Transfer(part_bytes=5 * MIB, num_parallel=3, max_attempts=3, connect_timeout_s=5, read_timeout_s=30)
BIG_BYTES = 17 * MIB


@pytest.fixture
def bucket(s3_server: MotoServer, request: pytest.FixtureRequest) -> str:
    name = f"b-{hashlib.md5(request.node.name.encode()).hexdigest()[:12]}"
    s3_server.make_bucket(name)
    return name


@pytest.fixture
async def proxy(s3_server: MotoServer) -> AsyncIterator[FaultyProxy]:
    async with FaultyProxy(s3_server.url) as proxy:
        yield proxy


@pytest.fixture
async def storage(proxy: FaultyProxy, bucket: str) -> AsyncIterator[Storage]:
    async with open_storage(f"s3://{bucket}/run", settings=settings(proxy.url)) as storage:
        yield storage


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big.bin"
    path.write_bytes(random.Random(0).randbytes(BIG_BYTES))
    return path


def settings(url: str, **changes: object) -> S3Settings:
    known = {"endpoint_url": url, "region": REGION, "access_key_id": KEY, "secret_access_key": SECRET}
    return S3Settings(**{**known, "addressing_style": "path", "transfer": TRANSFER, **changes})  # type: ignore[arg-type]


def first(fault: Fault, times: int = 1, *, of: str = "") -> Plan:
    """A plan that fails the first requests whose method and query begin so."""
    left = [times]

    def plan(seen: Seen) -> Fault | None:
        if not f"{seen.method} {seen.query}".startswith(of) or not left[0]:
            return None
        left[0] -= 1
        return fault

    return plan


async def test_objects_come_back_as_they_were_written_are_listed_in_order_and_gone_when_deleted(
    storage: Storage, tmp_path: Path
) -> None:
    odd = "ordner/größe 1+2 ✓.txt"
    written = [await storage.put_bytes(content, key) for key, content in ((odd, b"x"), ("b", b"bb"), ("a/1", b"hello"))]
    (tmp_path / "empty").touch()
    await storage.put_file(tmp_path / "empty", "a/2")
    await storage.get_file("a/2", tmp_path / "copy")

    assert (await storage.get_bytes("a/1"), await storage.get_bytes(odd)) == (b"hello", b"x")
    assert (tmp_path / "copy").read_bytes() == b""
    assert await storage.info("a/1") == written[-1]
    sizes = {"a/1": 5, "a/2": 0, "b": 2, odd: 1}
    assert [info async for info in storage.list()] == [ObjectInfo(key=k, num_bytes=size) for k, size in sizes.items()]
    assert [info.key async for info in storage.list("a/")] == ["a/1", "a/2"]
    for _ in range(2):  # deleting twice is no error
        await storage.delete("b")
    assert [await storage.exists(key) for key in ("a/1", "b")] == [True, False]


async def test_a_file_of_several_parts_comes_back_whole(
    storage: Storage, proxy: FaultyProxy, big: Path, tmp_path: Path
) -> None:
    await storage.put_file(big, "big.bin")
    info = await storage.get_file("big.bin", tmp_path / "copy.bin")

    assert sum(seen.is_part for seen in proxy.seen) == 4  # 5 + 5 + 5 + 2 MiB
    assert (tmp_path / "copy.bin").read_bytes() == big.read_bytes()
    assert info.sha256 == hashlib.sha256(big.read_bytes()).hexdigest()


async def test_of_many_conditional_creators_exactly_one_wins(storage: Storage) -> None:
    results = await asyncio.gather(
        *(storage.put_bytes(str(i).encode(), "claim", if_absent=True) for i in range(8)), return_exceptions=True
    )

    lost = [result for result in results if isinstance(result, StorageExistsError)]
    winner = next(i for i, result in enumerate(results) if isinstance(result, ObjectInfo))
    assert len(lost) == 7
    assert await storage.get_bytes("claim") == str(winner).encode()


async def test_a_conditional_create_whose_answer_was_lost_still_knows_that_it_won(
    storage: Storage, proxy: FaultyProxy
) -> None:
    proxy.plan = first(Fault.LOSE_ANSWER, of="PUT")

    await storage.put_bytes(b"mine", "claim", if_absent=True)

    assert await storage.get_bytes("claim") == b"mine"


@pytest.mark.parametrize(
    ("fault", "times", "of"),
    [
        (Fault.SLOW_DOWN, 1, "PUT uploadId"),
        (Fault.DROP, 1, "PUT uploadId"),
        (Fault.LOSE_ANSWER, 1, "PUT uploadId"),
        (Fault.CUT_BODY, 2, "GET"),
    ],
)
async def test_what_passes_is_retried(
    storage: Storage, proxy: FaultyProxy, big: Path, tmp_path: Path, fault: Fault, times: int, of: str
) -> None:
    proxy.plan = first(fault, times, of=of)

    await storage.put_file(big, "big.bin")
    await storage.get_file("big.bin", tmp_path / "copy.bin")

    assert (tmp_path / "copy.bin").read_bytes() == big.read_bytes()


async def test_damage_on_the_way_or_at_rest_is_refused_and_leaves_no_file(
    storage: Storage, proxy: FaultyProxy, big: Path, tmp_path: Path
) -> None:
    await storage.put_file(big, "big.bin")
    await storage.put_bytes(b"small", "small")
    proxy.plan = lambda seen: Fault.FLIP_BYTE if seen.method == "GET" else None
    folder = tmp_path / "to"

    with pytest.raises(StorageCorruptError):
        await storage.get_file("big.bin", folder / "copy.bin")
    # The client library refuses damaged bytes by their CRC, each time it asks; otherwise our own checksum does.
    with pytest.raises((StorageCorruptError, StorageUnreachableError)):
        await storage.get_bytes("small")

    assert list(folder.iterdir()) == []


async def test_an_object_replaced_by_another_program_is_refused(
    storage: Storage, s3_server: MotoServer, bucket: str, tmp_path: Path
) -> None:
    written = await storage.put_bytes(b"right", "a")
    async with s3_client(settings(s3_server.url)) as client:
        await client.put_object(Bucket=bucket, Key="run/a", Body=b"wrong")

    with pytest.raises(StorageCorruptError, match=r"SHA-256 is .*, not"):
        await storage.get_file("a", tmp_path / "a", sha256=written.sha256)


@pytest.mark.parametrize(
    ("fault", "expected", "words"),
    [
        (Fault.EXPIRED, StorageCredentialsError, "expired"),
        (Fault.DENIED, StoragePermissionError, "credentials don't permit this"),
        (Fault.SLOW_DOWN, StorageUnreachableError, "3 tries"),
    ],
)
async def test_refusals_say_what_to_do(
    storage: Storage, proxy: FaultyProxy, tmp_path: Path, fault: Fault, expected: type[RayappError], words: str
) -> None:
    proxy.plan = lambda _: fault

    reads = storage.get_bytes("a"), storage.get_file("a", tmp_path / "a")
    for request in (storage.put_bytes(b"x", "a"), *reads, storage.check()):
        with pytest.raises(expected, match=words):
            await request


async def test_a_full_storage_and_a_missing_object_are_named(
    storage: Storage, proxy: FaultyProxy, tmp_path: Path
) -> None:
    for request in (storage.get_bytes("nothing"), storage.get_file("nothing", tmp_path / "a")):
        with pytest.raises(StorageNotFoundError, match="run/nothing"):
            await request
    proxy.plan = lambda seen: Fault.FULL if seen.method == "PUT" else None
    with pytest.raises(StorageFullError, match="full"):
        await storage.put_bytes(b"x", "a")


async def test_a_missing_bucket_is_named_whatever_is_asked(s3_server: MotoServer, tmp_path: Path) -> None:
    async with open_storage("s3://not-there/x", settings=settings(s3_server.url)) as storage:
        for request in (storage.check(), storage.get_file("a", tmp_path / "a"), storage.put_bytes(b"x", "a")):
            with pytest.raises(StorageBucketError, match="no bucket 'not-there'"):
                await request


async def test_a_server_killed_in_the_middle_leaves_the_file_and_a_new_start_succeeds(big: Path) -> None:
    server = MotoServer()
    server.start()
    try:
        server.make_bucket("bucket")
        async with FaultyProxy(server.url) as proxy:

            def kill_at_third_part(seen: Seen) -> Fault | None:
                if "partNumber=3" in seen.query:
                    server.kill()
                    return Fault.DROP
                return None

            proxy.plan = kill_at_third_part
            async with open_storage("s3://bucket/run", settings=settings(proxy.url)) as storage:
                with pytest.raises(StorageUnreachableError):
                    await storage.put_file(big, "big.bin")
                assert big.stat().st_size == BIG_BYTES

                # The restarted server has neither the bucket nor the parts.
                server.start()
                server.make_bucket("bucket")
                proxy.plan = lambda _: None
                written = await storage.put_file(big, "big.bin")

                assert await storage.info("big.bin") == written
    finally:
        server.kill()


async def test_a_file_that_changes_while_it_is_sent_is_not_stored(
    storage: Storage, proxy: FaultyProxy, big: Path
) -> None:
    def change(seen: Seen) -> Fault | None:
        if "partNumber=2" in seen.query:
            with big.open("r+b") as file:
                file.write(b"changed")
        return None

    proxy.plan = change

    with pytest.raises(StorageCorruptError, match="changed"):
        await storage.put_file(big, "big.bin")

    assert not await storage.exists("big.bin")


async def test_a_folder_goes_on_with_the_files_that_are_missing_and_its_manifest_comes_last(
    storage: Storage, proxy: FaultyProxy, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train.parquet", "test.parquet"):
        (folder / name).write_bytes(name.encode())
    proxy.plan = lambda seen: Fault.DENIED if (seen.method, seen.path[-13:]) == ("PUT", "train.parquet") else None
    with pytest.raises(StoragePermissionError):
        await put_folder(folder, storage)
    assert await read_manifest(storage) is None
    await storage.put_file(folder / "test.parquet", "test.parquet")
    proxy.plan, proxy.seen = lambda _: None, []

    await put_folder(folder, storage)
    await get_folder(storage, tmp_path / "back")

    written = [seen.path.rpartition("/")[2] for seen in proxy.seen if seen.method == "PUT"]
    assert written == ["train.parquet", "manifest.json"]
    assert (tmp_path / "back" / "train.parquet").read_bytes() == b"train.parquet"


def test_part_size_grows_for_files_beyond_ten_thousand_parts() -> None:
    assert part_bytes_for(80_000 * MIB, 8 * MIB) == 8 * MIB
    # 80,001 MiB / 10,000 parts is just above 8 MiB: the next whole MiB is 9.
    assert part_bytes_for(80_001 * MIB, 8 * MIB) == 9 * MIB

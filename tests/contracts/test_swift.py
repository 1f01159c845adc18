"""The storage layer and a run's mirror against OpenStack Swift: signatures, parts, restarts, damage, a full disk.

Swift is installed once, in an environment of its own; where that can't be done the tests are skipped with the reason.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rayapp.config.config import Config
from rayapp.core.errors import (
    StorageCorruptError,
    StorageCredentialsError,
    StorageError,
    StorageExistsError,
    StorageIncompleteError,
    StorageUnreachableError,
)
from rayapp.runs.folder import RunFolder
from rayapp.runs.mirror import lock as locks
from rayapp.runs.mirror.mirror import Patience, mirroring
from rayapp.storage.base import Storage
from rayapp.storage.folders import get_folder, put_folder
from rayapp.storage.opening import open_storage
from rayapp.storage.settings import MIB, S3Settings, Transfer
from support.storage.faulty_proxy import Seen
from support.storage.swift_environment import SwiftNotInstalledError
from support.storage.swift_server import KEY, REGION, SECRET, SwiftServer
from support.storage.threads import ProxyThread, make_bucket, wait_until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]
BUCKET = "bucket"
BIG_BYTES = 23 * MIB
TRANSFER = Transfer(
    part_bytes=5 * MIB, num_parallel=2, max_attempts=3, first_pause_s=0.05, connect_timeout_s=5, read_timeout_s=60
)
QUICK = Patience(look_every_s=0.1, beat_every_s=0.5, lease_s=3.0, settle_s=0.2, finish_s=1.0)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    try:
        server = SwiftServer(tmp_path_factory.mktemp("swift"))
    except SwiftNotInstalledError as error:
        pytest.skip(f"OpenStack Swift can't be used here: {error}")
    server.start()
    make_bucket(server.url, BUCKET, KEY, SECRET, REGION)
    yield server
    server.kill()


@pytest.fixture
def swift(installed: SwiftServer) -> SwiftServer:
    """Running, whatever a test before did to it."""
    installed.kill()
    installed.start()
    return installed


@pytest.fixture
def settings(swift: SwiftServer) -> S3Settings:
    return S3Settings(
        endpoint_url=swift.url, region=REGION, access_key_id=KEY, secret_access_key=SECRET,
        addressing_style="path", transfer=TRANSFER,
    )  # fmt: skip


@pytest.fixture
async def storage(settings: S3Settings, request: pytest.FixtureRequest) -> AsyncIterator[Storage]:
    async with open_storage(f"s3://{BUCKET}/{request.node.name}", settings=settings) as storage:
        yield storage


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big.bin"
    path.write_bytes(random.Random(0).randbytes(BIG_BYTES))
    return path


async def test_files_of_many_parts_and_listings_survive_a_restart(
    storage: Storage, swift: SwiftServer, big: Path, tmp_path: Path
) -> None:
    await storage.put_file(big, "big.bin")
    await storage.put_bytes(b"small", "a/b")
    swift.kill()
    swift.start()

    info = await storage.get_file("big.bin", tmp_path / "copy.bin")
    assert info.num_bytes == BIG_BYTES
    assert (tmp_path / "copy.bin").read_bytes() == big.read_bytes()
    assert [found.key async for found in storage.list()] == ["a/b", "big.bin"]


async def test_a_second_creator_is_refused(storage: Storage) -> None:
    await storage.put_bytes(b"first", "claim", if_absent=True)
    with pytest.raises(StorageExistsError, match="another writer was first"):
        await storage.put_bytes(b"second", "claim", if_absent=True)
    assert await storage.get_bytes("claim") == b"first"


async def test_of_many_runs_that_start_at_once_one_holds_the_folder(storage: Storage) -> None:
    # Swift looks for the object when a request begins: of creators that come at once several are let through.
    starting = [asyncio.create_task(locks.acquire(storage, lease_s=300.0, poll_s=0.2)) for _ in range(6)]
    done, waiting = await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
    more, waiting = await asyncio.wait(waiting, timeout=5.0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert len(done | more) == 1


async def test_an_upload_whose_server_is_killed_leaves_nothing_and_goes_on_after_the_restart(
    settings: S3Settings, swift: SwiftServer, big: Path, tmp_path: Path
) -> None:
    parts: list[Seen] = []

    def kill_in_the_third(seen: Seen) -> None:
        parts.append(seen) if seen.is_part else None
        if len(parts) == 3 and seen is parts[-1]:
            threading.Thread(target=swift.kill).start()

    with ProxyThread(swift.url) as proxy:
        proxy.plan = kill_in_the_third
        through = replace(settings, endpoint_url=proxy.url)
        async with open_storage(f"s3://{BUCKET}/killed", settings=through) as storage:
            with pytest.raises(StorageUnreachableError):
                await storage.put_file(big, "big.bin")
        swift.start()
        parts.clear()
        proxy.plan = lambda seen: parts.append(seen) if seen.is_part else None
        async with open_storage(f"s3://{BUCKET}/killed", settings=through) as storage:
            assert not await storage.exists("big.bin")
            await storage.put_file(big, "big.bin")
            assert len(parts) < 5  # 23 MiB in parts of 5: what had arrived was not sent again
            await storage.get_file("big.bin", tmp_path / "copy.bin")
    assert (tmp_path / "copy.bin").read_bytes() == big.read_bytes()


async def test_a_wrong_key_and_an_unknown_user_are_told_without_retries(settings: S3Settings) -> None:
    for wrong in ({"secret_access_key": "other"}, {"access_key_id": "test:nobody"}):
        async with open_storage(f"s3://{BUCKET}/x", settings=replace(settings, **wrong)) as storage:  # type: ignore[arg-type]
            with pytest.raises(StorageCredentialsError, match="does not accept these credentials"):
                await storage.check()
            with pytest.raises(StorageCredentialsError):
                await storage.put_bytes(b"1", "a")


async def test_a_byte_that_changed_on_the_servers_disk_is_never_read_as_whole(
    storage: Storage, swift: SwiftServer, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "weights").write_bytes(random.Random(1).randbytes(3 * MIB + 17))
    await put_folder(tmp_path / "in", storage)
    damaged = next(path for path in swift.data_files() if path.stat().st_size == 3 * MIB + 17)
    with damaged.open("r+b") as file:
        file.seek(MIB)
        byte = file.read(1)
        file.seek(MIB)
        file.write(bytes([byte[0] ^ 1]))

    with pytest.raises(StorageError) as raised:
        await get_folder(storage, tmp_path / "out")
    assert isinstance(raised.value, StorageCorruptError | StorageUnreachableError)  # Swift may cut the answer itself
    assert not (tmp_path / "out" / "weights").exists()
    damaged.unlink(missing_ok=True)  # Swift puts it in quarantine where it finds the damage itself
    await put_folder(tmp_path / "in", storage, overwrite=True)


async def test_a_full_disk_fails_the_upload_and_room_mends_it(
    storage: Storage, swift: SwiftServer, big: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    big.rename(tmp_path / "in" / "big.bin")
    with swift.full_disk(), pytest.raises(StorageError, match=r"503|full|ServiceUnavailable"):
        await put_folder(tmp_path / "in", storage)
    assert not await storage.exists("manifest.json")
    await put_folder(tmp_path / "in", storage)
    await get_folder(storage, tmp_path / "out")
    assert (tmp_path / "out" / "big.bin").stat().st_size == BIG_BYTES


def test_a_run_whose_server_dies_in_the_middle_and_whose_key_expires_loses_nothing(
    settings: S3Settings, swift: SwiftServer, tmp_path: Path
) -> None:
    """Training goes on through both; what is not there at the end is here, and another start sends it."""
    config = Config.model_validate(
        {"run": {"name": "r", "output_dir": f"s3://{BUCKET}/runs", "staging_dir": tmp_path / "staging"}}
    )
    folder = config.run_folder
    folder.mkdir(parents=True)
    with pytest.raises(StorageIncompleteError, match="rayapp sync"), mirroring(
        config, folder, settings=settings, patience=QUICK
    ) as mirror:  # fmt: skip
        assert mirror is not None
        _step(config, 1)
        wait_until(lambda: mirror.metrics()["storage/pending_files"] == 0.0)
        swift.kill()
        _step(config, 2)
        wait_until(lambda: mirror.metrics()["storage/failed"] >= 1.0)
    assert RunFolder(folder, config).checkpoints.latest().version == 2  # type: ignore[union-attr]

    swift.start()
    wrong = replace(settings, secret_access_key="expired")
    with pytest.raises(StorageCredentialsError), mirroring(config, folder, settings=wrong, patience=QUICK):
        pytest.fail("it started")
    with mirroring(config, folder, settings=settings, patience=QUICK):
        pass
    assert not folder.exists()

    folder.mkdir()
    with mirroring(config, folder, settings=settings, patience=QUICK):
        latest = RunFolder(folder, config).checkpoints.latest()
        assert latest is not None
        assert (latest.path / "learner" / "weights").read_bytes() == _weights(2)
        assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def _step(config: Config, number: int) -> None:
    """What the driver leaves of a step, with a checkpoint."""
    with (config.run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number}) + "\n")
    folder = RunFolder(config.run_folder, config)
    pending = folder.checkpoints.begin(number)
    (pending / "learner").mkdir()
    (pending / "learner" / "weights").write_bytes(_weights(number))
    folder.checkpoints.commit(number, next_group_id=number)


def _weights(number: int) -> bytes:
    return random.Random(number).randbytes(12 * MIB)

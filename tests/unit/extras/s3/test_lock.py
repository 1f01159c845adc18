"""The lock on a run folder in object storage, on a local folder in place of the bucket."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rayapp.core.errors import RunFolderError, StorageCorruptError
from rayapp.extras.s3.lock import acquire
from rayapp.storage.opening import LocalStorage

QUICK = {"lease_s": 0.4, "settle_s": 0.0}
PATIENT = QUICK | {"lease_s": 30.0}


@pytest.fixture
def bucket(tmp_path: Path) -> LocalStorage:
    (tmp_path / "bucket").mkdir()
    return LocalStorage(tmp_path / "bucket")


def holder(**changes: object) -> bytes:
    content = {"owner": "o", "host": "h", "boot": "another machine", "pid": os.getpid(), "beat": 0, "released": False}
    return json.dumps(content | changes).encode()


async def test_the_first_run_gets_number_one_and_the_next_after_it_is_released_number_two(bucket: LocalStorage) -> None:
    first = await acquire(bucket, **QUICK)
    await first.beat(bucket, released=True)
    second = await acquire(bucket, **QUICK)

    assert (first.number, second.number) == (1, 2)


async def test_a_holder_that_beats_is_not_disturbed(bucket: LocalStorage) -> None:
    first = await acquire(bucket, **QUICK)

    async def beat() -> None:
        while True:
            await asyncio.sleep(0.05)
            await first.beat(bucket)

    beating = asyncio.create_task(beat())
    with pytest.raises(RunFolderError, match=r"is in use by the run of process \d+ on \S+, which still renews"):
        await acquire(bucket, **PATIENT)
    beating.cancel()
    assert first.lost == ""


async def test_a_process_of_this_machine_that_is_gone_is_not_waited_for(bucket: LocalStorage) -> None:
    await acquire(bucket, **QUICK)
    mine = json.loads(await bucket.get_bytes("locks/000001.json"))
    await bucket.put_bytes(json.dumps(mine | {"pid": 2**22 + 1}).encode(), "locks/000001.json")

    lock = await asyncio.wait_for(acquire(bucket, lease_s=1e6, settle_s=0.0), 60)

    assert lock.number == 2


async def test_a_holder_that_is_silent_is_taken_over_and_learns_of_it(bucket: LocalStorage) -> None:
    silent = await acquire(bucket, **QUICK)
    await acquire(bucket, **QUICK)

    await silent.beat(bucket)

    assert "was taken over by process" in silent.lost


async def test_of_two_that_were_both_let_through_the_one_whose_name_is_left_goes_on(bucket: LocalStorage) -> None:
    """On a store that checks for the object only when a request begins."""
    first = await acquire(bucket, **QUICK)
    await bucket.put_bytes(holder(), "locks/000001.json")

    await first.beat(bucket)

    assert "started at the same moment" in first.lost


async def test_a_lock_that_says_nothing_counts_by_its_number_alone(bucket: LocalStorage) -> None:
    await bucket.put_bytes(b"nonsense", "locks/000007.json")

    assert (await acquire(bucket, **QUICK)).number == 8


UNREADABLE: dict[str, Callable[[int], bytes]] = {
    "no JSON": lambda beat: b"of a newer version, beat %d" % beat,
    "other fields": lambda beat: holder(beat=beat, format=2),
    "missing fields": lambda beat: json.dumps({"owner": "o", "beat": beat}).encode(),
    "text for truth": lambda beat: holder(beat=beat, released="false"),
    "a list": lambda beat: b"[%d]" % beat,
    "deep": lambda beat: b"[" * 100_000 + b"%d" % beat,
    "no UTF-8": lambda beat: b"\xff%d" % beat,
    "growing": lambda beat: b"x" * beat,
}


class Damaged(LocalStorage):
    """A bucket whose objects never have their checksum."""

    async def get_bytes(self, key: str, *, max_bytes: int = 1) -> bytes:
        raise StorageCorruptError(f"{key}: its SHA-256 is {os.urandom(6).hex()}")


async def test_locks_that_can_not_be_read_are_held_while_they_change(tmp_path: Path) -> None:
    async def is_held(bucket: LocalStorage, write: Callable[[int], bytes]) -> None:
        await bucket.put_bytes(write(0), "locks/000001.json")
        acquiring = asyncio.create_task(acquire(bucket, **PATIENT))
        for number in range(1, 10**6):
            await asyncio.wait([acquiring], timeout=0.1)
            if acquiring.done():
                break
            await bucket.put_bytes(write(number), "locks/000001.json")
        with pytest.raises(RunFolderError, match="is in use by the run of an unknown process, which still renews"):
            await acquiring

    kinds = [is_held(LocalStorage(tmp_path / kind), write) for kind, write in UNREADABLE.items()]
    await asyncio.gather(*kinds, is_held(Damaged(tmp_path / "damaged"), lambda beat: holder(beat=beat)))


async def test_a_holder_stops_for_an_unreadable_lock_above_its_own_and_writes_a_damaged_one_again(
    bucket: LocalStorage,
) -> None:
    lock = await acquire(bucket, **QUICK)
    await bucket.put_bytes(b"damaged", "locks/000001.json")
    await lock.beat(bucket)
    assert lock.lost == ""
    assert json.loads(await bucket.get_bytes("locks/000001.json"))["beat"] == 1

    await bucket.put_bytes(b"of a newer version", "locks/000002.json")
    await lock.beat(bucket)
    assert "was taken over by an unknown process" in lock.lost

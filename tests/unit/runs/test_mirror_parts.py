"""The parts of a run's mirror one by one, on a local folder in place of the bucket: lock, layout, checkpoints, cuts."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from rayapp.config.config import Config
from rayapp.config.sections import CheckpointSection
from rayapp.core.errors import RunFolderError, StorageCorruptError, StorageTakenError
from rayapp.runs.folder import RunFolder
from rayapp.runs.mirror import lock as lock_module
from rayapp.runs.mirror import restore
from rayapp.runs.mirror.layout import Ledger, folder_stamp, last_step, loose_files, trajectory_step
from rayapp.runs.mirror.lock import Holder, acquire, last_generation
from rayapp.runs.mirror.mirror import Uploader
from rayapp.runs.mirror.restore import fetch_again, prepare
from rayapp.storage.opening import LocalStorage

QUICK = {"lease_s": 0.4, "poll_s": 0.02, "settle_s": 0.0}
PATIENT = QUICK | {"lease_s": 30.0}


@pytest.fixture
def bucket(tmp_path: Path) -> LocalStorage:
    (tmp_path / "bucket").mkdir()
    return LocalStorage(tmp_path / "bucket")


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


def uploader(bucket: LocalStorage, staging: Path, **section: int) -> Uploader:
    final = LocalStorage(Path(bucket.uri) / "final")
    ledger = Ledger.load(staging) or Ledger(folder=staging, uri="s3://b/run", generation=1)
    return Uploader(bucket, final, ledger, CheckpointSection(**section))  # type: ignore[arg-type]


def save(staging: Path, version: int, *, score: float = 0.0) -> Path:
    folder = RunFolder(staging, Config.model_validate({"checkpoint": {"keep_last": 9}}))
    pending = folder.checkpoints.begin(version)
    (pending / "learner").mkdir()
    (pending / "learner" / "weights").write_bytes(bytes([version]) * 10)
    folder.checkpoints.commit(version, next_group_id=version, score=score)
    with (staging / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": version}) + "\n")
    return staging / "checkpoints" / f"step={version:06d}"


async def keys(bucket: LocalStorage) -> list[str]:
    return [info.key async for info in bucket.list()]


def holder(**changes: object) -> bytes:
    from dataclasses import asdict

    return json.dumps(asdict(Holder.me()) | {"boot": "another machine", **changes}).encode()


async def test_the_first_run_gets_number_one_and_the_next_after_it_is_released_number_two(bucket: LocalStorage) -> None:
    first = await acquire(bucket, **QUICK)
    await first.release(bucket)
    second = await acquire(bucket, **QUICK)

    assert (first.generation, second.generation) == (1, 2)
    assert await last_generation(bucket) == 2


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
    from dataclasses import asdict

    gone = asdict(Holder.me()) | {"started": 1}  # the id is in use by another process now
    await bucket.put_bytes(json.dumps(gone).encode(), "locks/000001.json")

    lock = await asyncio.wait_for(acquire(bucket, lease_s=1e6, poll_s=1e6, settle_s=0.0), 60)

    assert lock.generation == 2


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

    assert (await acquire(bucket, **QUICK)).generation == 8


async def test_a_lock_that_can_not_be_read_is_held_until_its_lease_has_ended(bucket: LocalStorage) -> None:
    await bucket.put_bytes(b"of a newer version", "locks/000001.json")

    async def beat() -> None:
        for number in range(10**6):
            await asyncio.sleep(0.02)
            await bucket.put_bytes(b"of a newer version, beat %d" % number, "locks/000001.json")

    beating = asyncio.create_task(beat())
    with pytest.raises(RunFolderError, match="is in use by the run of an unknown process, which still renews"):
        await acquire(bucket, **PATIENT)
    beating.cancel()


async def test_a_holder_that_was_paused_writes_nothing_after_it_was_taken_over(bucket: LocalStorage) -> None:
    paused = await acquire(bucket, **QUICK)
    of_paused = bucket.fenced(partial(paused.fence, bucket))
    await of_paused.put_bytes(b"before", "metrics.jsonl")
    following = await acquire(bucket, **QUICK)  # no beat for a lease
    await bucket.fenced(partial(following.fence, bucket)).put_bytes(b"of the new run", "metrics.jsonl")

    with pytest.raises(StorageTakenError, match="was taken over by process"):
        await of_paused.put_bytes(b"stale", "metrics.jsonl")
    with pytest.raises(StorageTakenError, match="was taken over by process"):
        await of_paused.delete("metrics.jsonl")

    assert await bucket.get_bytes("metrics.jsonl") == b"of the new run"


async def test_writes_between_two_beats_cost_no_request_and_the_first_one_after_half_a_lease_beats(
    bucket: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(lock_module, "_now", lambda: clock[0])
    lock = await acquire(bucket, lease_s=60.0, settle_s=0.0)
    before = await bucket.get_bytes("locks/000001.json")
    clock[0] += 29.0
    assert await lock.fence(bucket) == 31.0
    assert await bucket.get_bytes("locks/000001.json") == before
    clock[0] += 2.0
    assert await lock.fence(bucket) == 60.0
    assert await bucket.get_bytes("locks/000001.json") != before


async def test_a_holder_that_comes_back_at_the_moment_of_the_take_over_is_waited_for(
    bucket: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beat came after the watcher's last look, and its check for a taker came before the taker's lock."""
    await bucket.put_bytes(holder(beat=1), "locks/000001.json")
    waits: list[float] = []
    settled = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if seconds == 0.123:
            await bucket.put_bytes(holder(beat=2), "locks/000001.json")
        await settled(0)

    clock = [0.0]
    monkeypatch.setattr(lock_module, "_now", lambda: clock[0])
    monkeypatch.setattr(lock_module.asyncio, "sleep", sleep)
    monkeypatch.setattr(lock_module, "_wait_until_free", _as_last_seen)
    await acquire(bucket, lease_s=60.0, settle_s=0.123)

    assert 60.0 in waits


async def _as_last_seen(bucket: LocalStorage, generation: int, **_: float) -> object:
    return await lock_module._look(bucket, generation)


def test_loose_files_are_in_order_without_work_in_progress(staging: Path) -> None:
    for name in ("metrics.jsonl", "config.yaml", ".hidden", "run.lock", "trajectories/step=000001.parquet",
                 "tensorboard/events", ".mirror-snapshots/x", "checkpoints/step=000001/w", "final/w"):  # fmt: skip
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_text(name)

    found = loose_files(staging)

    assert list(found) == [
        "config.yaml", "tensorboard/events", "trajectories/step=000001.parquet", "metrics.jsonl",
    ]  # fmt: skip
    assert found["config.yaml"][0] == len("config.yaml")
    assert "trajectories/step=000001.parquet" not in loose_files(staging, {"trajectories/step=000001.parquet"})


def test_small_questions_about_a_folder(staging: Path) -> None:
    assert trajectory_step("trajectories/step=000012.parquet") == 12
    assert trajectory_step("trajectories/other.parquet") is None
    assert folder_stamp(staging / "nothing") is None
    assert last_step(staging / "metrics.jsonl") == float("inf")
    (staging / "metrics.jsonl").write_text('{"step": 3}\n{"st')
    assert last_step(staging / "metrics.jsonl") == 3


async def test_what_was_sent_is_not_sent_again_and_what_changed_is(bucket: LocalStorage, staging: Path) -> None:
    (staging / "config.yaml").write_text("a: 1")
    sending = uploader(bucket, staging)
    await sending.files()
    sent = sending.uploaded_bytes
    await sending.files()
    assert sending.uploaded_bytes == sent

    (staging / "config.yaml").write_text("a: 12")
    assert sending.pending() == {"config.yaml": 5}
    await sending.files()
    assert await bucket.get_bytes("config.yaml") == b"a: 12"
    assert sending.pending() == {}


async def test_a_checkpoint_has_a_checksum_of_every_file_there(bucket: LocalStorage, staging: Path) -> None:
    save(staging, 2)
    await uploader(bucket, staging).folders()

    (found,) = await restore.whole_checkpoints(bucket)
    assert found.described.version == 2
    assert len(found.manifest["sha256"]["learner/weights"]) == 64


@pytest.mark.parametrize("damage", ["no manifest", "short file", "missing file", "torn manifest", "other bytes"])
async def test_a_torn_checkpoint_is_passed_over_and_a_damaged_one_never_fetched(
    bucket: LocalStorage, staging: Path, tmp_path: Path, damage: str
) -> None:
    save(staging, 1)
    save(staging, 2)
    await uploader(bucket, staging, keep_last=2).folders()
    folder = Path(bucket.uri) / "checkpoints" / "step=000002"
    match damage:
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "short file":
            (folder / "learner" / "weights").write_bytes(b"w")
        case "missing file":
            (folder / "learner" / "weights").unlink()
        case "torn manifest":
            (folder / "manifest.json").write_text('{"ver')
        case _:
            (folder / "learner" / "weights").write_bytes(b"x" * 10)

    found = await restore.whole_checkpoints(bucket)

    if damage == "other bytes":
        with pytest.raises(StorageCorruptError):
            await restore.fetch(bucket, found[-1], tmp_path / "elsewhere")
        assert not (tmp_path / "elsewhere" / "checkpoints" / "step=000002").exists()
    else:
        assert [checkpoint.described.version for checkpoint in found] == [1]


async def test_pruning_keeps_the_newest_and_the_best_and_removes_torn_ones_before_them(
    bucket: LocalStorage, staging: Path
) -> None:
    for version, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3)):
        save(staging, version, score=score)
    await uploader(bucket, staging, keep_last=9).folders()
    await bucket.delete("checkpoints/step=000003/manifest.json")
    await bucket.put_bytes(b"on its way", "checkpoints/step=000005/learner/weights")

    gone = await restore.prune(bucket, 1, 1)

    assert sorted(gone) == ["checkpoints/step=000001", "checkpoints/step=000003"]
    left = {key.split("/")[1] for key in await keys(bucket) if key.startswith("checkpoints/")}
    assert left == {"step=000002", "step=000004", "step=000005"}  # best, newest, and one that is being uploaded


async def test_trajectories_of_steps_that_are_taken_again_are_deleted_and_sent_again(
    bucket: LocalStorage, staging: Path
) -> None:
    (staging / "trajectories").mkdir()
    (staging / "evaluations").mkdir()
    (staging / "evaluations/step=000003.parquet").write_bytes(b"old")
    for step in (1, 2, 3):
        (staging / f"trajectories/step={step:06d}.parquet").write_bytes(b"old")
    sending = uploader(bucket, staging)
    await sending.files()

    (staging / "trajectories/step=000002.parquet").write_bytes(b"new")
    (staging / "trajectories/step=000003.parquet").unlink()
    (staging / "evaluations/step=000003.parquet").unlink()
    sending.cut_after = 1
    assert len(sending.pending()) == 1
    await sending.files()

    assert await keys(bucket) == ["trajectories/step=000001.parquet", "trajectories/step=000002.parquet"]
    assert await bucket.get_bytes("trajectories/step=000002.parquet") == b"new"
    assert sending.pending() == {}


async def test_a_run_that_begins_anew_forgets_only_what_is_of_a_step(bucket: LocalStorage, staging: Path) -> None:
    (staging / "trajectories").mkdir()
    for name in ("config.yaml", "trajectories/README", "trajectories/step=000000.parquet"):
        (staging / name).write_text(name)
    sending = uploader(bucket, staging)
    await sending.files()
    (staging / "trajectories/step=000000.parquet").unlink()
    sent = sending.uploaded_bytes

    sending.cut_after = -1
    await sending.files()

    assert await keys(bucket) == ["config.yaml", "trajectories/README"]
    assert sending.uploaded_bytes == sent  # the rest was known to be uploaded


async def test_a_damaged_newest_checkpoint_does_not_take_the_place_of_the_one_that_was_gone_on_from(
    bucket: LocalStorage, staging: Path, tmp_path: Path
) -> None:
    for version in (4, 6):
        save(staging, version)
    await uploader(bucket, staging, keep_last=9).folders()
    await bucket.put_bytes(b"x" * 10, "checkpoints/step=000006/learner/weights")
    empty = tmp_path / "empty"
    empty.mkdir()
    await prepare(bucket, empty, 2, must_be_new=False)
    latest = RunFolder(empty, Config()).checkpoints.latest()
    assert latest is not None
    assert latest.version == 4

    going_on = uploader(bucket, empty, keep_last=1)
    going_on.cut_after = 4
    save(empty, 5)
    await going_on.folders(is_final=True)
    assert {key.split("/")[1] for key in await keys(bucket) if "manifest" in key} == {"step=000005"}
    save(empty, 6)  # and the step of the damaged one is sent when it has been taken again
    await going_on.folders(is_final=True)
    (found,) = await restore.whole_checkpoints(bucket)
    assert found.described.version == 6
    assert await bucket.get_bytes("checkpoints/step=000006/learner/weights") == bytes([6]) * 10


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


async def test_a_checkpoint_that_the_disk_damaged_after_its_commit_is_never_sent_and_the_one_before_it_stays(
    bucket: LocalStorage, staging: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sending = uploader(bucket, staging, keep_last=1)
    save(staging, 2)
    await sending.folders(is_final=True)
    flip_a_bit(save(staging, 4) / "learner" / "weights")

    await sending.folders(is_final=True)
    await sending.folders(is_final=True)
    await sending.files()

    (found,) = await restore.whole_checkpoints(bucket)
    assert found.described.version == 2
    assert sending.pending() == {}  # it is refused, not retried forever
    assert (
        caplog.text.count("step=000004 was not uploaded and is refused: the checksum of learner/weights is wrong") == 1
    )


async def test_a_checkpoint_that_the_bucket_damaged_is_passed_over_for_the_one_before_it(
    bucket: LocalStorage, staging: Path, tmp_path: Path
) -> None:
    for version in (2, 4):
        save(staging, version)
    await uploader(bucket, staging, keep_last=9).folders()
    flip_a_bit(Path(bucket.uri) / "checkpoints/step=000004/learner/weights")
    tried: set[int] = set()

    assert await fetch_again(bucket, tmp_path / "empty", 4, tried)

    assert [path.name for path in (tmp_path / "empty" / "checkpoints").glob("step=*")] == ["step=000002"]
    assert tried == {2, 4}
    assert not await fetch_again(bucket, tmp_path / "empty", 4, tried)  # none is left


async def test_a_finished_run_is_seen_as_finished_on_an_empty_machine(
    bucket: LocalStorage, staging: Path, tmp_path: Path
) -> None:
    config = Config.model_validate({"train": {"num_steps": 2}})
    save(staging, 2)
    with RunFolder(staging, config).pending_final() as pending:
        (pending / "model.safetensors").write_bytes(b"weights")
    sending = uploader(bucket, staging)
    await sending.files()
    await sending.folders(is_final=True)
    empty = tmp_path / "empty"
    empty.mkdir()

    (await prepare(bucket, empty, 2, must_be_new=False)).save()

    assert RunFolder(empty, config).is_finished
    assert not (empty / "final" / "model.safetensors").exists()  # nothing continues from it
    assert uploader(bucket, empty).pending() == {}  # and the model there is not replaced by the local one
    assert not RunFolder(empty, Config.model_validate({"train": {"num_steps": 3}})).is_finished


async def test_an_empty_machine_gets_small_files_and_the_newest_checkpoint_only(
    bucket: LocalStorage, staging: Path, tmp_path: Path
) -> None:
    save(staging, 1)
    save(staging, 2)
    (staging / "trajectories").mkdir()
    (staging / "trajectories/step=000001.parquet").write_bytes(b"t")
    await uploader(bucket, staging, keep_last=2).files()
    await uploader(bucket, staging, keep_last=2).folders()
    empty = tmp_path / "empty"
    empty.mkdir()

    ledger = await prepare(bucket, empty, 2, must_be_new=False)

    names = sorted(path.relative_to(empty).as_posix() for path in empty.rglob("*") if path.is_file())
    assert names == [
        ".mirror.json", "checkpoints/step=000002/learner/weights", "checkpoints/step=000002/manifest.json",
        "metrics.jsonl",
    ]  # fmt: skip
    assert ledger.generation == 2
    assert uploader(bucket, empty).pending() == {}  # all of it is known to be there


async def test_a_restore_that_was_killed_begins_again(bucket: LocalStorage, staging: Path, tmp_path: Path) -> None:
    save(staging, 1)
    await uploader(bucket, staging).files()
    await uploader(bucket, staging).folders()
    half = tmp_path / "half"
    (half / "checkpoints" / ".pending-step=000001").mkdir(parents=True)
    (half / ".restoring").touch()
    (half / "metrics.jsonl").write_text("half")

    await prepare(bucket, half, 2, must_be_new=False)

    assert last_step(half / "metrics.jsonl") == 1
    assert RunFolder(half, Config()).checkpoints.latest() is not None
    assert not half.with_name("half.stale-1").exists()


async def test_a_bucket_that_was_emptied_behind_a_run_is_told(bucket: LocalStorage, staging: Path) -> None:
    (staging / "metrics.jsonl").write_text('{"step": 1}\n')
    Ledger(folder=staging, uri=bucket.uri, generation=3).save()

    with pytest.raises(RunFolderError, match=r"holds no run, but .* holds a run that was uploaded to it"):
        await prepare(bucket, staging, 1, must_be_new=False)


def test_a_ledger_of_a_newer_version_is_refused_and_a_torn_one_forgotten(staging: Path) -> None:
    (staging / ".mirror.json").write_text('{"format": 2}')
    with pytest.raises(RunFolderError, match="was written by a newer rayapp"):
        Ledger.load(staging)
    (staging / ".mirror.json").write_text('{"form')
    assert Ledger.load(staging) is None

"""A run on s3://: complete files arrive, none is lost meanwhile, and another machine continues from there. On moto."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rayapp.config.config import Config
from rayapp.core.errors import (
    RunFolderError,
    StorageBucketError,
    StorageCredentialsError,
    StorageIncompleteError,
    StorageNotFoundError,
    StorageUnreachableError,
)
from rayapp.extras.s3.mirror import Patience, RunMirror, mirroring
from rayapp.runs.folder import RunFolder
from rayapp.storage.folders import MANIFEST
from rayapp.storage.opening import open_storage
from rayapp.storage.settings import S3Settings, Transfer
from support.ports import free_port
from support.storage.faulty_proxy import Fault
from support.storage.moto_server import KEY, REGION, SECRET, MotoServer
from support.storage.threads import ProxyThread
from support.timing import wait_until

TRANSFER = Transfer(max_attempts=2, connect_timeout_s=2, read_timeout_s=20)
QUICK = Patience(look_every_s=0.05, beat_every_s=0.1, lease_s=30.0, settle_s=0.05, finish_s=0.5)
IMPATIENT = replace(QUICK, lease_s=1.0)
"""Settings that wait little for a sign of life; a write that takes longer is retried."""


@pytest.fixture(scope="module")
def proxy(s3_server: MotoServer) -> Iterator[ProxyThread]:
    with ProxyThread(s3_server.url) as proxy:
        yield proxy


@pytest.fixture
def settings(proxy: ProxyThread) -> Iterator[S3Settings]:
    proxy.plan = lambda _: None
    yield S3Settings(
        endpoint_url=proxy.url, region=REGION, access_key_id=KEY, secret_access_key=SECRET, transfer=TRANSFER
    )
    proxy.plan = lambda _: None


@pytest.fixture
def config(settings: S3Settings, s3_server: MotoServer, tmp_path: Path) -> Config:
    bucket = f"runs-{abs(hash(str(tmp_path)))}"
    s3_server.make_bucket(bucket)
    return Config.model_validate(
        {
            "run": {"name": "r", "output_dir": f"s3://{bucket}/deep", "staging_dir": tmp_path / "staging"},
            "checkpoint": {"keep_last": 1, "keep_best": 1},
        }
    )


@pytest.fixture
def opened(config: Config, settings: S3Settings) -> Callable[..., RunMirror]:
    """`with opened() as mirror:` on the staging folder, made if it is missing."""

    def enter(patience: Patience = QUICK, **arguments: object) -> object:
        config.run_folder.mkdir(parents=True, exist_ok=True)
        return mirroring(
            config.run_uri, config.run_folder, config.checkpoint, settings=settings, patience=patience, **arguments
        )  # type: ignore[arg-type]

    return enter  # type: ignore[return-value]


def step(folder: Path, number: int, *, reward: float = 0.0) -> None:
    """Write what the driver leaves of a step."""
    (folder / "trajectories").mkdir(exist_ok=True)
    (folder / f"trajectories/step={number:06d}.parquet").write_bytes(b"t" * number)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number, "reward/mean": reward}) + "\n")


def save(config: Config, number: int, mirror: RunMirror | None = None, *, score: float = 0.0) -> None:
    folder = RunFolder(config.run_folder, config, mirror)
    pending = folder.checkpoints.begin(number)
    (pending / "learner").mkdir()
    (pending / "learner" / "weights").write_bytes(bytes([number]) * 1000)
    folder.checkpoints.commit(number, next_group_id=2 * number, score=score)


def there(config: Config, settings: S3Settings) -> dict[str, bytes]:
    """Return every object of the run except the locks."""

    async def read() -> dict[str, bytes]:
        async with open_storage(config.run_uri, settings=settings) as storage:
            found: dict[str, bytes] = {}
            async for info in storage.list():
                if not info.key.startswith("locks/"):
                    with suppress(StorageNotFoundError):  # deleted meanwhile
                        found[info.key] = await storage.get_bytes(info.key)
            return found

    return asyncio.run(read())


def steps_of(metrics: bytes) -> list[int]:
    return [json.loads(line)["step"] for line in metrics.decode().splitlines()]


def test_a_run_arrives_whole_and_its_staging_folder_is_emptied(config: Config, settings: S3Settings, opened) -> None:
    folder = config.run_folder
    with opened():
        (folder / "config.yaml").write_text("train: {}\n")
        step(folder, 1)
        step(folder, 2)
        save(config, 2)
        (folder / "final").mkdir()
        (folder / "final" / "model.safetensors").write_bytes(b"weights")
        (folder / ".half").write_bytes(b"not whole")

    found = there(config, settings)
    assert sorted(found) == [
        "checkpoints/step=000002/learner/weights",
        "checkpoints/step=000002/manifest.json",
        "config.yaml",
        "final/manifest.json",
        "final/model.safetensors",
        "metrics.jsonl",
        "trajectories/step=000001.parquet",
        "trajectories/step=000002.parquet",
    ]
    assert steps_of(found["metrics.jsonl"]) == [1, 2]
    assert found["checkpoints/step=000002/learner/weights"] == bytes([2]) * 1000
    assert not folder.exists()


def test_an_empty_machine_goes_on_from_the_last_whole_checkpoint(config: Config, settings: S3Settings, opened) -> None:
    with pytest.raises(KeyError), opened():
        step(config.run_folder, 1)
        step(config.run_folder, 2)
        save(config, 2)
        step(config.run_folder, 3)
        raise KeyError("the run dies")
    shutil.rmtree(config.run.staging_dir)

    with opened() as mirror:
        folder = RunFolder(config.run_folder, config, mirror)
        checkpoint = folder.checkpoints.latest()
        assert (checkpoint.version, checkpoint.next_group_id) == (2, 4)
        assert (checkpoint.path / "learner" / "weights").read_bytes() == bytes([2]) * 1000
        assert not (config.run_folder / "trajectories").exists()  # nothing continues from them
        folder.truncate_after(2)
        wait_until(lambda: "trajectories/step=000003.parquet" not in there(config, settings))

    found = there(config, settings)
    assert steps_of(found["metrics.jsonl"]) == [1, 2]
    assert {"trajectories/step=000001.parquet", "trajectories/step=000002.parquet"} <= found.keys()


def test_a_finished_run_is_seen_as_finished_on_an_empty_machine_and_its_model_stays(
    config: Config, settings: S3Settings, opened
) -> None:
    done = config.model_copy(update={"train": config.train.model_copy(update={"num_steps": 2})})
    with opened():
        step(config.run_folder, 2)
        save(config, 2)
        with RunFolder(config.run_folder, done).pending_final() as pending:
            (pending / "model.safetensors").write_bytes(b"weights")

    with opened() as mirror:
        assert RunFolder(config.run_folder, done).is_finished
        assert not (config.run_folder / "final" / "model.safetensors").exists()  # nothing continues from it
        wait_until(lambda: mirror.metrics()["storage/pending_files"] == 0.0)
    assert there(config, settings)["final/model.safetensors"] == b"weights"


@pytest.mark.parametrize("damage", ["other bytes", "short file", "missing file", "torn manifest", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over(
    config: Config, settings: S3Settings, opened, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened():
        step(config.run_folder, 1)
        save(config, 1, score=0.9)  # the best one, kept beside the newest
        step(config.run_folder, 2)
        wait_until(lambda: f"checkpoints/step=000001/{MANIFEST}" in there(config, settings))
        save(config, 2, score=0.1)

    async def spoil() -> None:
        weights, manifest = "checkpoints/step=000002/learner/weights", f"checkpoints/step=000002/{MANIFEST}"
        async with open_storage(config.run_uri, settings=settings) as storage:
            match damage:
                case "other bytes":
                    await storage.put_bytes(b"x" * 1000, weights)
                case "short file":
                    await storage.put_bytes(b"w", weights)
                case "missing file":
                    await storage.delete(weights)
                case "torn manifest":
                    await storage.put_bytes(b'{"ver', manifest)
                case _:
                    await storage.delete(manifest)

    asyncio.run(spoil())
    with opened():
        latest = RunFolder(config.run_folder, config).checkpoints.latest()
        assert latest.version == 1
    assert damage != "other bytes" or "step=000002 is damaged and skipped" in caplog.text


def test_a_restore_that_was_killed_begins_again(config: Config, settings: S3Settings, opened) -> None:
    with opened():
        step(config.run_folder, 1)
        save(config, 1)
    half = config.run_folder / "checkpoints" / ".pending-step=000001"
    half.mkdir(parents=True)
    (config.run_folder / "metrics.jsonl").write_text("half")

    with opened():
        assert steps_of((config.run_folder / "metrics.jsonl").read_bytes()) == [1]
        assert RunFolder(config.run_folder, config).checkpoints.latest() is not None
    assert not config.run_folder.with_name(f"{config.run_folder.name}.stale-1").exists()


def test_a_bucket_that_was_emptied_behind_a_run_is_told(config: Config, opened) -> None:
    config.run_folder.mkdir(parents=True)
    (config.run_folder / ".mirror.json").write_text('{"generation": 3}')

    with pytest.raises(RunFolderError, match=r"holds no run, but .* holds a run that was uploaded to it"), opened():
        pytest.fail("the run started")


def test_checkpoints_that_are_neither_recent_nor_best_are_deleted_there(
    config: Config, settings: S3Settings, opened
) -> None:
    def versions() -> set[str]:
        return {key.split("/")[1] for key in there(config, settings) if key.endswith(MANIFEST)}

    with opened() as mirror:
        for number, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3)):
            step(config.run_folder, number)
            save(config, number, mirror, score=score)
            wait_until(lambda n=number: f"step={n:06d}" in versions())
    assert versions() == {"step=000002", "step=000004"}  # keep_last 1 and keep_best 1


def test_a_checkpoint_does_not_count_before_the_metrics_of_its_step(
    config: Config, settings: S3Settings, opened
) -> None:
    manifest = f"checkpoints/step=000001/{MANIFEST}"
    with opened():
        (config.run_folder / "metrics.jsonl").write_text("")
        save(config, 1)
        wait_until(lambda: "checkpoints/step=000001/learner/weights" in there(config, settings))
        assert manifest not in there(config, settings)
        step(config.run_folder, 1)
        wait_until(lambda: manifest in there(config, settings))
        assert steps_of(there(config, settings)["metrics.jsonl"]) == [1]


def test_an_outage_in_the_middle_stops_nothing_and_is_made_up_for(
    config: Config, settings: S3Settings, proxy: ProxyThread, opened, caplog: pytest.LogCaptureFixture
) -> None:
    with opened() as mirror:
        step(config.run_folder, 1)
        wait_until(lambda: mirror.metrics()["storage/pending_files"] == 0.0)
        proxy.plan = lambda _: Fault.DROP
        step(config.run_folder, 2)
        wait_until(lambda: mirror.metrics()["storage/failed"] >= 2.0)
        assert mirror.metrics()["storage/pending_files"] == 2.0
        proxy.plan = lambda _: None
    assert steps_of(there(config, settings)["metrics.jsonl"]) == [1, 2]
    assert caplog.text.count("uploads fail for now") == 1  # reported once, however often it is retried
    assert "work again" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "why"), [(Fault.DROP, "did not answer"), (Fault.EXPIRED, "expired"), (Fault.FULL, "full")]
)
def test_what_is_not_uploaded_at_the_end_stays_here_and_the_message_says_how_to_finish(
    config: Config, settings: S3Settings, proxy: ProxyThread, opened, fault: Fault, why: str,
) -> None:  # fmt: skip
    folder = config.run_folder
    with pytest.raises(StorageIncompleteError) as raised, opened():
        step(folder, 1)
        save(config, 1)
        proxy.plan = lambda _: fault
        step(folder, 2)
    message = str(raised.value)
    assert "start the same command again" in message
    assert "metrics.jsonl" in message
    assert why in message
    assert (folder / "trajectories" / "step=000002.parquet").exists()

    proxy.plan = lambda _: None
    with opened():
        pass
    assert steps_of(there(config, settings)["metrics.jsonl"]) == [1, 2]
    assert f"checkpoints/step=000001/{MANIFEST}" in there(config, settings)
    assert not folder.exists()


def test_a_run_that_gives_no_sign_of_life_is_taken_over_and_stops_when_it_comes_back(
    config: Config, settings: S3Settings, opened
) -> None:
    # Until its first beat it is silent; on a busy machine the second one needs seconds to look for it.
    silent = replace(IMPATIENT, beat_every_s=10.0)
    elsewhere = config.run_folder.with_name("elsewhere")
    elsewhere.mkdir(parents=True)
    with pytest.raises(RunFolderError, match="was taken over by process"), opened(silent) as first:
        step(config.run_folder, 1)
        wait_until(lambda: first.metrics()["storage/pending_files"] == 0.0)  # a write may ask for a beat
        with mirroring(config.run_uri, elsewhere, config.checkpoint, settings=settings, patience=IMPATIENT):
            step(elsewhere, 7)
            wait_until(lambda: first._lock.lost != "", timeout_s=30)
        first.metrics()
    assert steps_of(there(config, settings)["metrics.jsonl"])[-1] == 7
    assert (config.run_folder / "metrics.jsonl").exists()  # the first one's files stay


def test_what_this_machine_had_is_set_aside_when_another_went_on(config: Config, settings: S3Settings, opened) -> None:
    with pytest.raises(KeyError), opened():
        step(config.run_folder, 1)
        raise KeyError("stopped")
    elsewhere = config.run_folder.with_name("elsewhere")
    elsewhere.mkdir(parents=True)
    with mirroring(config.run_uri, elsewhere, config.checkpoint, settings=settings, patience=QUICK):
        step(elsewhere, 2)

    with opened():
        assert steps_of((config.run_folder / "metrics.jsonl").read_bytes()) == [1, 2]
    stale = config.run_folder.with_name(f"{config.run_folder.name}.stale-1")
    assert steps_of((stale / "metrics.jsonl").read_bytes()) == [1]


def test_nothing_starts_when_the_storage_can_not_be_used(
    config: Config, settings: S3Settings, proxy: ProxyThread, tmp_path: Path
) -> None:
    def start(uri: str = config.run_uri, **changes: object) -> None:
        with mirroring(uri, tmp_path, config.checkpoint, settings=replace(settings, **changes), patience=QUICK):
            pytest.fail("the run started")

    with pytest.raises(StorageBucketError, match="there is no bucket 'no-such-bucket'"):
        start("s3://no-such-bucket/x")
    with pytest.raises(StorageUnreachableError, match="did not answer properly in 2 tries"):
        start(endpoint_url=f"http://127.0.0.1:{free_port()}")
    proxy.plan = lambda _: Fault.EXPIRED
    with pytest.raises(StorageCredentialsError, match="expired"):
        start()


def test_resume_never_refuses_a_run_that_is_there_without_touching_it(
    config: Config, settings: S3Settings, opened
) -> None:
    with opened():
        step(config.run_folder, 1)
    before = there(config, settings)
    config.run_folder.mkdir(parents=True)
    with (
        pytest.raises(RunFolderError, match=r"holds a run already, but run\.resume is never"),
        mirroring(
            config.run_uri, config.run_folder, config.checkpoint, must_be_new=True, settings=settings, patience=QUICK
        ),
    ):
        pytest.fail("the run started")
    assert there(config, settings) == before

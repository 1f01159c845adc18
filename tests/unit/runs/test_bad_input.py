"""Faults of a run's location: each is reported before anything starts, and existing files stay.

The messages of the storage layer itself are in test_storage_s3.py, those of the view server in test_view_server.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.config import Config
from rayapp.core.errors import (
    RunFolderError,
    UserError,
)
from rayapp.extras.view import groups
from rayapp.extras.view.run import ViewedRun
from rayapp.runs.folder import FORMAT, RunFolder, check_format
from rayapp.runs.source import open_source
from rayapp.runs.trajectories import write_trajectories
from rayapp.storage.opening import open_storage
from support.runs import hostile_group
from support.storage.faulty_proxy import Fault
from support.storage.threads import ProxyThread
from support.timing import wait_until

BUCKET = "runs"


@pytest.fixture(scope="module")
def proxy(s3_server: Any) -> Iterator[ProxyThread]:
    s3_server.make_bucket(BUCKET)
    with ProxyThread(s3_server.url) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def environment(s3_environment: None, proxy: ProxyThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    proxy.plan = lambda _: None
    yield
    proxy.plan = lambda _: None


def config(tmp_path: Path, output_dir: str = f"s3://{BUCKET}/bad-input", name: str = "r") -> Config:
    return Config.model_validate({"run": {"name": name, "output_dir": output_dir, "staging_dir": tmp_path / "staging"}})


def start(config: Config) -> None:
    with RunFolder.open(config):
        pytest.fail("the run started")


def test_a_permission_that_is_taken_away_in_the_middle_stops_nothing(proxy: ProxyThread, tmp_path: Path) -> None:
    with RunFolder.open(config(tmp_path, name="denied")) as folder:
        proxy.plan = lambda seen: Fault.DENIED if seen.method == "PUT" else None
        (folder.path / "metrics.jsonl").write_text('{"step": 1}\n')
        wait_until(lambda: folder.storage_metrics()["storage/failed"] > 0)
        assert folder.storage_metrics()["storage/pending_files"] > 0
        proxy.plan = lambda _: None


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_run_folder_from_a_newer_version(kind: str, tmp_path: Path) -> None:
    newer = json.dumps({"format": FORMAT + 1, "written_by": "rayapp 9.0"}).encode()
    metrics = b'{"step": 1}\n'
    if kind == "folder":
        settings = config(tmp_path, str(tmp_path / "outputs"), "newer")
        settings.run_folder.mkdir(parents=True)
        (settings.run_folder / "format.json").write_bytes(newer)
        (settings.run_folder / "metrics.jsonl").write_bytes(metrics)
    else:
        settings = config(tmp_path, name="newer")
        with RunFolder.open(settings) as folder:
            (folder.path / "metrics.jsonl").write_bytes(metrics)
        asyncio.run(put(settings.run_uri, "format.json", newer))

    says = (
        r"was written by a newer version \(rayapp 9\.0, format 2\); this version reads format 1\. Nothing was changed"
    )
    with pytest.raises(RunFolderError, match=says):
        start(settings)
    with pytest.raises(UserError, match=says):
        open_source(settings.run_uri)
    assert asyncio.run(get(settings.run_uri, "metrics.jsonl")) == metrics
    assert asyncio.run(get(settings.run_uri, "format.json")) == newer


async def put(uri: str, key: str, data: bytes) -> None:
    async with open_storage(uri) as storage:
        await storage.put_bytes(data, key)


async def get(uri: str, key: str) -> bytes:
    async with open_storage(uri) as storage:
        return await storage.get_bytes(key)


def test_a_storage_that_fails_while_a_run_is_viewed_is_told_and_made_up_for(
    proxy: ProxyThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"s3://{BUCKET}/viewed"
    write_trajectories(tmp_path / "one.parquet", 1, [hostile_group(0)])
    file = (tmp_path / "one.parquet").read_bytes()
    asyncio.run(put(uri, "metrics.jsonl", b'{"step": 1}\n'))
    asyncio.run(put(uri, "trajectories/step=000001.parquet", file))
    run = ViewedRun(open_source(uri))
    assert run.groups({})["total"] == 1
    asyncio.run(put(uri, "metrics.jsonl", b'{"step": 1}\n{"step": 2}\n'))
    asyncio.run(put(uri, "trajectories/step=000002.parquet", file))

    # The file can be listed and not be read: it is not taken for damaged, nor asked for without a pause.
    proxy.plan = lambda seen: Fault.DENIED if seen.path.endswith("step=000002.parquet") else None
    assert run.groups({})["total"] == 1
    refused = run.summary()
    # Nothing can be had: the page keeps what it has.
    proxy.plan = lambda _: Fault.DENIED
    away = run.summary()
    proxy.plan = lambda _: None
    monkeypatch.setattr(groups, "RETRY_S", 1e-9)
    assert run.groups({})["total"] == 1  # both steps hold the group 0 of step 1
    back = run.summary()

    [problem] = refused["problems"]
    assert problem.startswith("step=000002.parquet can't be read: ")
    assert refused["last"] == {"step": 2}
    assert (away["last"], away["name"]) == ({"step": 2}, "viewed")
    assert any("can't be listed" in text for text in away["problems"])
    assert back["problems"] == []


def test_a_format_file_that_is_cut_short(tmp_path: Path) -> None:
    (tmp_path / "format.json").write_text('{"form')

    with pytest.raises(RunFolderError, match=r"can't be read .*: the folder is damaged, or is not a run's folder"):
        check_format(tmp_path)


def test_a_checkpoint_that_the_learners_wrote_elsewhere_does_not_count(tmp_path: Path) -> None:
    from rayapp.core.errors import CheckpointError

    folder = RunFolder(tmp_path, Config())
    folder.checkpoints.begin(1)

    with pytest.raises(CheckpointError, match="they wrote on another machine"):
        folder.checkpoints.commit(1, next_group_id=1)
    assert folder.checkpoints.latest() is None

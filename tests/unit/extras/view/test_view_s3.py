"""A run in object storage, read in place, on moto's HTTP server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayapp.core.errors import UserError
from rayapp.extras.view.run import ViewedRun
from rayapp.runs.source import open_source
from rayapp.runs.trajectories import write_trajectories
from rayapp.storage.opening import open_storage
from support.runs import hostile_group


@pytest.fixture
async def uri(s3_environment: None, s3_server: Any, tmp_path: Path) -> str:
    """The run `my-run`, uploaded by the storage layer."""
    write_trajectories(tmp_path / "step=000001.parquet", 1, [hostile_group(0)])
    s3_server.make_bucket("viewed")
    async with open_storage("s3://viewed/deep/my-run") as storage:
        await storage.put_file(tmp_path / "step=000001.parquet", "trajectories/step=000001.parquet")
        await storage.put_bytes(
            json.dumps({"step": 1, "time": 1, "reward/mean": 0.5}).encode() + b"\n", "metrics.jsonl"
        )
    return "s3://viewed/deep/my-run"


async def test_a_run_in_a_bucket_is_read_like_one_in_a_folder(uri: str) -> None:
    run = ViewedRun(open_source(uri))

    assert run.name == "my-run"
    assert run.panels()[0]["curves"]["reward/mean"] == {"steps": [1.0], "values": [0.5]}
    assert run.groups({})["total"] == 1
    assert run.trajectory(1, 0, 1)["num_tokens"] == 4

    async with open_storage(uri) as storage:
        await storage.put_bytes(b'{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": 1}\n', "metrics.jsonl")
    assert run.panels()[0]["curves"]["reward/mean"]["values"] == [0.5, 1.0]


def test_a_bucket_without_the_run_says_so(s3_environment: None) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        open_source("s3://runs-nowhere/run")

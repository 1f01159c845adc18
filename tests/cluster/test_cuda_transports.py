"""Weights over NCCL and CUDA IPC without a GPU: 8 learners, 4 engines of two ranks, our sender and vLLM's own code.

What stands for CUDA is in tests/data/cuda_transports.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 150.0
WRONG_DEADLINE_S = 40.0
"""Two syncs take three seconds of two quiet cores; the rest is for busy ones."""


def transfer(model: Path, out: Path, deadline_s: float, *cases: str) -> str:
    """Run the cases one after the other. Returns what was printed."""
    script = ROOT / "tests" / "data" / "cuda_transports.py"
    command = [sys.executable, str(script), str(model), str(out), str(deadline_s), *cases]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=390,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def done(found: dict[str, Any], what: str) -> list[str]:
    """The collectives of one kind, in the order in which the streams of a process did them."""
    return [each for each in found["order"] if each.startswith(what)]


@pytest.fixture(scope="module")
def printed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("transports")
    return out, transfer(tiny_model, out, DEADLINE_S, "nccl", "ipc")


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_four_engines_of_two_ranks_get_every_byte_of_eight_learners(printed: tuple[Path, str], transport: str) -> None:
    out = printed[0] / transport
    assert (out / "status").read_text() == "0", printed[1]
    learners, workers = (
        [json.loads((out / f"{role}-{rank}.json").read_text()) for rank in range(8)] for role in ("learner", "worker")
    )
    sent = learners[0]["tensors"]
    assert len(sent) > 10
    assert all(found["tensors"] == sent for found in learners + workers)
    assert all(done(found, "gather") == done(learners[0], "gather") != [] for found in learners)
    assert all(done(found, "broadcast") == done(learners[0], "broadcast") for found in workers)
    # Two syncs of several buckets.
    assert (len(done(learners[0], "broadcast")) > 6) == (transport == "nccl")


@pytest.mark.long
def test_ranks_that_disagree_about_the_order_never_get_through(tiny_model: Path, tmp_path: Path) -> None:
    cases = ("nccl-order", "nccl-buckets", "ipc-order")
    printed = transfer(tiny_model, tmp_path, WRONG_DEADLINE_S, *cases)
    assert [(tmp_path / case / "status").read_text() for case in cases] == ["3", "3", "3"], printed
    assert printed.count("learner-0 waits after") == len(cases)

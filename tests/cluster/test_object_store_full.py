"""A real Ray whose object store and whose disk are full: the call that needed the room says so, and what to raise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio
import numpy as np
import ray
from actors.handles import answer
from rayapp.config.config import Config
from rayapp.core.errors import RayappError
from actors.own_ray import ray_session


@ray.remote(num_cpus=0)
class Exporter:
    def export_weights(self):
        return np.ones(150 << 20, np.uint8)


async def main():
    ref = Exporter.remote().export_weights.remote()
    try:
        await answer(ref, timeout_s=300.0, what="learner-0.export_weights")
    except RayappError as error:
        print(f"{type(error).__name__}: {error}")


with ray_session(Config.model_validate({"cluster": {"object_store_mib": 100, "dashboard": False}})):
    asyncio.run(main())
"""


def test_a_full_object_store_names_the_call_and_the_key_to_raise() -> None:
    # Ray goes on in files when its shared memory is full. This Ray believes that their disk is full as well.
    full_disk = {"RAY_local_fs_capacity_threshold": "0.0001", "RAY_automatic_object_spilling_enabled": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | full_disk | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "learner-0.export_weights: Ray's object store is full. Raise cluster.object_store_mib" in done.stdout, (
        done.stdout + done.stderr
    )
    assert done.stdout.startswith("RayappError")

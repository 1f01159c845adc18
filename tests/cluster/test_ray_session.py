"""SIGTERM while connected to a real Ray: the driver cleans up first, as on Ctrl-C, and nothing of Ray prints stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, sys
from rayapp.config import Config
from rayapp.interrupts import run_until_done
from rayapp.ray_session import ray_session


async def main():
    with ray_session(Config.model_validate({"cluster": {"object_store_mib": 100}})):
        try:
            print("connected", flush=True)
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.1)
            print("cleaned up", flush=True)


try:
    run_until_done(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_connection_after_the_cleanup(number: signal.Signals) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    connected = driver.stdout.readline()
    assert connected == "connected\n", driver.communicate(timeout=600)

    driver.send_signal(number)
    output, errors = driver.communicate(timeout=600)

    assert output == "cleaned up\n", errors
    assert driver.returncode == 130, errors
    assert "SIGTERM received" not in errors

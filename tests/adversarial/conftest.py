"""What the adversarial tests need of this node."""

from __future__ import annotations

import asyncio

import pytest

from rayapp.sandbox.local.doctor import run_doctor


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where no namespaces can be made, as in an ordinary container."""
    report = asyncio.run(run_doctor(levels=("ns",), families=()))
    if report.level == "none":
        pytest.skip(f"no namespaces: {report.refused}")

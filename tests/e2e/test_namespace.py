"""Two runs of one name on one Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors.spawn import kill, spawn
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def attached(standing_ray: Any) -> Iterator[None]:
    ray.init(address=standing_ray.address, namespace="rayapp-twice", logging_level="critical")
    yield
    ray.shutdown()


@pytest.mark.usefixtures("attached")
def test_second_run_of_a_name_is_refused_with_both_ways_out() -> None:
    first = spawn("sandbox-pool", "sandbox-pool", SandboxConfig(), "twice")

    with pytest.raises(
        ConfigError, match="already runs in namespace rayapp-twice of this Ray: another run has the same"
    ):
        spawn("sandbox-pool", "sandbox-pool", SandboxConfig(), "twice")
    kill(first)

"""Two runs of one name on one Ray."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.spawn import kill, spawn
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


def test_second_run_of_a_name_is_refused_with_both_ways_out(start_ray: Callable[..., None]) -> None:
    start_ray(namespace="rayapp-twice", num_cpus=1, object_store_memory=100_000_000)
    first = spawn("sandbox-pool", "sandbox-pool", SandboxConfig(), "twice")

    with pytest.raises(ConfigError, match="namespace rayapp-twice of this Ray already: another run has the same"):
        spawn("sandbox-pool", "sandbox-pool", SandboxConfig(), "twice")
    kill(first)

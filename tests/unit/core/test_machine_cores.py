"""Servers and learners divide the cores among themselves, and with each other where both compute at once."""

from __future__ import annotations

import os

import pytest

from rayapp.config.config import Config
from rayapp.core.machine import share_of_cores


@pytest.mark.parametrize(("max_staleness", "kinds_at_once"), [(0, 1), (1, 2)])
def test_cores_are_divided_among_all_that_compute_at_the_same_time(max_staleness: int, kinds_at_once: int) -> None:
    config = Config.model_validate({"model": {"path": "m"}, "tasks": ["t"], "train": {"max_staleness": max_staleness}})
    cores = len(os.sched_getaffinity(0))

    assert share_of_cores(1, is_synchronous=config.train.max_staleness == 0) == max(1, cores // kinds_at_once)
    assert share_of_cores(2, is_synchronous=config.train.max_staleness == 0) == max(1, cores // kinds_at_once // 2)
    assert share_of_cores(100 * cores, is_synchronous=config.train.max_staleness == 0) == 1

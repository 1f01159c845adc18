"""Servers and learners share the cores with their kind, and with each other if both compute at once. Freed memory goes
back to the system."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import pytest

from rayapp.core import machine
from rayapp.core.machine import num_cores, share_of_cores, trim_heap


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 64 cores without a quota; returns the folder of its cgroups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")
    return tmp_path


@pytest.mark.parametrize(("is_synchronous", "kinds_at_once"), [(True, 1), (False, 2)])
def test_cores_are_divided_among_all_that_compute_at_the_same_time(is_synchronous: bool, kinds_at_once: int) -> None:
    cores = num_cores()

    assert share_of_cores(1, is_synchronous=is_synchronous) == max(1, cores // kinds_at_once)
    assert share_of_cores(2, is_synchronous=is_synchronous) == max(1, cores // kinds_at_once // 2)
    assert share_of_cores(100 * cores, is_synchronous=is_synchronous) == 1


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("", {}, 64),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/kubepods/pod1\n", {"kubepods/cpu.max": "800000 100000", "kubepods/pod1/cpu.max": "max 100000"}, 8),
        ("0::/of/the/host\n", {"cpu.max": "200000 100000"}, 2),
        ("4:cpu,cpuacct:/docker/x\n", {f"cpu,cpuacct/cpu.cfs_{name}_us": "400000" for name in ("quota",)}
         | {"cpu,cpuacct/cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("3:memory:/\n", {"memory/cpu.max": "100000 100000"}, 64),
    ],
)  # fmt: skip
def test_a_container_s_quota_counts_and_not_the_host_s_cores(
    many_cores: Path, own: str, files: dict[str, str], cores: int
) -> None:
    (many_cores / "own").write_text(own)
    for name, text in files.items():
        (many_cores / name).parent.mkdir(parents=True, exist_ok=True)
        (many_cores / name).write_text(text)

    assert num_cores() == cores


@pytest.mark.parametrize(("weights_mib", "threads"), [(0, 4), (100, 4), (270, 8), (1000, 31), (5000, 64)])
def test_a_small_model_gets_no_more_threads_than_it_has_work_for(
    many_cores: Path, tmp_path: Path, weights_mib: int, threads: int
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(weights_mib << 20)

    assert share_of_cores(1, is_synchronous=True, model=str(model)) == threads
    assert share_of_cores(32, is_synchronous=True, model=str(model)) == 2


MIB = 2**20


def test_memory_that_a_thread_freed_is_given_back() -> None:
    # 64 MiB in blocks too small for mmap (128 KiB), all but the last of them freed: the last one keeps the pool from
    # shrinking by itself.
    kept: list[bytearray] = []

    def allocate() -> None:
        blocks = [bytearray(b"x" * 64 * 1024) for _ in range(1024)]
        kept.append(blocks.pop())

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    process = psutil.Process()
    before = process.memory_info().rss

    trim_heap()

    assert process.memory_info().rss <= before - 32 * MIB

"""`train`, `sft` and `evaluate` as a program calls them, up to the driver: whole runs are in tests/e2e."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rayapp
from rayapp.config.config import Config
from rayapp.core.aio import run_until_done
from rayapp.core.errors import InputError, StopTraining
from rayapp.core.names import given
from rayapp.driver import loop
from rayapp.tasks.loading import load_tasks
from support import make

DOUBLE = make.double_task(tests=("1",))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Takes two steps in its own event loop, as the real driver does, and hangs in the third."""
    trained: list[Config] = []

    def run_training(config: Config, on_step: Callable[[int, Mapping[str, float]], Any] | None = None) -> None:
        async def run() -> None:
            for step in range(1, config.train.num_steps + 1):
                told = on_step(step, {"reward/mean": float(step)}) if on_step is not None else None
                if told is not None:
                    await told
                if step == 3:
                    await asyncio.Event().wait()

        trained.append(config)
        assert load_tasks(config.tasks)[0] is DOUBLE
        run_until_done(run())

    monkeypatch.setattr(loop, "run_training", run_training)
    return trained


def test_a_run_of_a_program_knows_its_tasks_and_tells_of_its_steps(driver: list[Config], tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []

    run = rayapp.train(
        {"run": {"output_dir": str(tmp_path), "name": "mine"}},
        {"train.num_steps": 2},
        tasks=[DOUBLE],
        on_step=lambda step, metrics: told.append((step, metrics["reward/mean"])),
    )

    assert told == [(1, 1.0), (2, 2.0)]
    assert run.uri == str(tmp_path / "mine")
    with pytest.raises(InputError, match="object of the Python program"):
        given("python:double")  # registered while the run lasts


async def test_in_a_running_loop_it_has_a_thread_of_its_own_and_what_on_step_raises_comes_out(
    driver: list[Config],
) -> None:
    threads: list[threading.Thread] = []

    async def fails(step: int, metrics: Mapping[str, float]) -> None:
        threads.append(threading.current_thread())
        raise ValueError("no more of this")

    with pytest.raises(ValueError, match="no more of this"):
        rayapp.train(None, {"train.num_steps": 2}, tasks=DOUBLE, on_step=fails)

    assert threads[0] is not threading.current_thread()


class Saver:
    """Saver of a run whose step 4 is done and not saved."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    async def finish(self) -> None: ...


@pytest.fixture
def run_at_four(monkeypatch: pytest.MonkeyPatch) -> Any:
    saver = Saver()

    async def begin(run: Any, version: int) -> None:
        saver.saved.append(version)

    monkeypatch.setattr(loop, "begin_checkpoint", begin)
    folder = SimpleNamespace(checkpoints=SimpleNamespace(latest=lambda: None))
    return SimpleNamespace(saver=saver, folder=folder)


async def test_on_step_may_stop_the_run_and_its_step_is_saved(run_at_four: Any) -> None:
    def stop(step: int, metrics: Mapping[str, float]) -> None:
        raise StopTraining

    assert await loop._is_over(run_at_four, 4, {}, stop)
    assert run_at_four.saver.saved == [4]
    assert not await loop._is_over(run_at_four, 4, {}, lambda step, metrics: None)


async def test_a_step_is_saved_before_what_on_step_raises_ends_the_run(run_at_four: Any) -> None:
    def fails(step: int, metrics: Mapping[str, float]) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await loop._is_over(run_at_four, 4, {}, fails)
    assert run_at_four.saver.saved == [4]

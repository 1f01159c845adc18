"""What a run costs: counted over its processes, and its cap."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayapp.config.sections import BudgetSection
from rayapp.core.errors import BudgetSpentError, RunFolderError
from rayapp.driver import budget
from rayapp.driver.budget import FILE, Costs, counting

PRICES = BudgetSection(gpu_hour=3.6, node_hour=0.36)


def test_gpus_and_nodes_cost_their_seconds(tmp_path: Path) -> None:
    costs = Costs.open(PRICES, 8, tmp_path)
    costs.tick(10.0, 2)
    costs.tick(10.0, 2)

    assert costs.metrics() == pytest.approx({"cost/total": 0.16 + 0.004, "cost/gpu": 0.16, "cost/node": 0.004})


def test_a_resumed_run_goes_on_from_the_sum_of_the_killed_one(tmp_path: Path) -> None:
    first = Costs.open(PRICES, 1, tmp_path, warmup=2.0)
    first.tick(1000.0, 0)
    first.step_metrics({"judged/dollars": 0.25})
    first.save()
    second = Costs.open(PRICES, 1, tmp_path, warmup=2.0)

    assert second.metrics() == pytest.approx(
        {"cost/total": 3.25, "cost/gpu": 1.0, "cost/judges": 0.25, "cost/warmup": 2.0}
    )


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")

    with pytest.raises(RunFolderError, match=r"costs\.json can't be read.*Delete this file to count from 0"):
        Costs.open(PRICES, 1, tmp_path)


def test_without_prices_a_run_has_no_such_metrics(tmp_path: Path) -> None:
    assert Costs.open(BudgetSection(), 8, tmp_path).step_metrics({}) == {}


async def test_the_run_warns_before_the_cap_and_is_cancelled_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each tick takes 0.1 s, however busy the machine is.
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=partial(next, itertools.count(0.0, 0.1))))
    prices = BudgetSection(node_hour=36_000.0, cap=10.0)
    costs, notes, was_cancelled = Costs.open(prices, 0, tmp_path), list[str](), False
    with pytest.raises(BudgetSpentError, match=r"the run has cost 1\d\.\d\d .*reaches budget\.cap = 10"):
        async with counting(costs, lambda: 1, notes.append, tick_s=0.01) as on_lease:
            on_lease()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                was_cancelled = True
                raise

    assert was_cancelled
    assert [note for note in notes if "of 10 (budget.cap)" in note] == notes
    assert len(notes) == 1
    assert Costs.open(prices, 0, tmp_path).total == costs.total >= 10


async def test_a_run_whose_budget_is_spent_does_not_start_again(tmp_path: Path) -> None:
    costs = Costs.open(BudgetSection(cap=1.0), 0, tmp_path, warmup=1.5)
    with pytest.raises(BudgetSpentError, match=r"raise budget\.cap and run the same command"):
        async with counting(costs, lambda: 1, print):
            pytest.fail("it started")


async def test_the_wait_for_gpus_costs_nothing(tmp_path: Path) -> None:
    costs, num_looks = Costs.open(BudgetSection(node_hour=3600.0), 0, tmp_path), 0

    def num_nodes() -> int:
        nonlocal num_looks
        num_looks += 1
        return 1

    async with counting(costs, num_nodes, print, tick_s=0.01) as on_lease:
        await asyncio.sleep(0.2)
        assert (num_looks, costs.total) == (0, 0.0)
        leased_at = time.monotonic()
        on_lease()
        while not costs.total:
            await asyncio.sleep(0.01)
    assert costs.total <= time.monotonic() - leased_at  # a node costs 1 a second


def test_the_last_of_two_saves_at_once_is_the_one_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick's save goes on in its thread while the end of the run saves the last sums."""
    is_writing, may_write, write_text = threading.Event(), threading.Event(), budget.write_text

    def slow(file: Path, text: str) -> None:
        if not is_writing.is_set():
            is_writing.set()
            may_write.wait(60)
        write_text(file, text)

    monkeypatch.setattr(budget, "write_text", slow)
    costs = Costs.open(PRICES, 1, tmp_path)
    costs.tick(1000.0, 0)
    with ThreadPoolExecutor(2) as threads:
        of_the_tick = threads.submit(costs.save)
        assert is_writing.wait(60)
        costs.tick(1000.0, 0)
        at_the_end = threads.submit(costs.save)
        wait([at_the_end], timeout=0.2)  # without a lock it would be done now
        may_write.set()
    of_the_tick.result()

    assert Costs.open(PRICES, 1, tmp_path).total == costs.total == 2.0

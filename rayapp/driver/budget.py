"""Counts the cost of a run (GPUs, nodes, judges), and stops the run at a cap.

`costs.json` in the run folder keeps the sums over resumes; a killed driver loses at most those since the last tick.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rayapp.config.config import Config
from rayapp.config.sections import BudgetSection
from rayapp.core.errors import BudgetSpentError, RunFolderError, one_error
from rayapp.core.files import write_text
from rayapp.driver.cluster import num_alive_nodes, num_held_gpus
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking.trackers import RunTracker

FILE = "costs.json"
TICK_S = 10.0
WARNS_AT = 0.8  # of the cap, once per process
_SECONDS_IN_HOUR = 3600.0


@dataclass(slots=True, kw_only=True)
class Costs:
    """Sums of a run's costs so far, by item: `gpu`, `node`, `judges`, `warmup`."""

    prices: BudgetSection
    num_gpus: int  # that the run holds now
    file: Path
    spent: dict[str, float] = field(default_factory=dict)
    _saving: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, prices: BudgetSection, num_gpus: int, folder: Path, warmup: float = 0.0) -> Costs:
        """Return the costs in the folder's `costs.json`; in a new run, the costs of the warm-up."""
        spent = read_costs(folder)
        if not spent and warmup:
            spent = {"warmup": warmup}
        return cls(prices=prices, num_gpus=num_gpus, file=folder / FILE, spent=spent)

    @property
    def total(self) -> float:
        return sum(self.spent.values())

    def tick(self, seconds: float, num_nodes: int) -> None:
        """Add the cost of the time since the last tick."""
        self._add("gpu", self.num_gpus * seconds / _SECONDS_IN_HOUR * self.prices.gpu_hour)
        self._add("node", num_nodes * seconds / _SECONDS_IN_HOUR * self.prices.node_hour)

    def step_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add the cost of the step's judges; return `cost/*` metrics."""
        self._add("judges", metrics.get("judged/dollars", 0.0))
        return self.metrics()

    def _add(self, item: str, cost: float) -> None:
        if cost:
            self.spent[item] = self.spent.get(item, 0.0) + cost

    def save(self) -> None:
        with self._saving:
            write_text(self.file, json.dumps(self.spent))

    def metrics(self) -> dict[str, float]:
        if not self.prices.has_prices and not self.spent:
            return {}
        return {"cost/total": self.total} | {f"cost/{item}": cost for item, cost in sorted(self.spent.items())}

    def check(self) -> None:
        if self.prices.cap and self.total >= self.prices.cap:
            items = ", ".join(f"{item} {cost:.2f}" for item, cost in sorted(self.spent.items()))
            raise BudgetSpentError(
                f"the run has cost {self.total:.2f} ({items}), which reaches budget.cap = "
                f"{self.prices.cap:g}. To continue, raise budget.cap and run the same command."
            )


def read_costs(folder: Path) -> dict[str, float]:
    file = folder / FILE
    try:
        return {str(name): float(value) for name, value in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{file} can't be read, so the run's cost is unknown: {error}. Delete this file to count from 0."
        ) from error


@asynccontextmanager
async def within_budget(
    config: Config,
    folder: RunFolder,
    tracker: RunTracker,
    *,
    with_servers: bool = True,
    warmup: float = 0.0,
) -> AsyncIterator[Callable[[], None]]:
    """Count the run's costs from the lease of its GPUs to the end of the block, and add them to each step's metrics.
    Yield a function for `open_cluster` to call at the lease. At the cap the block is cancelled as if by Ctrl-C, has
    saved its steps, and BudgetSpentError comes out."""
    if not config.budget.has_prices:
        yield lambda: None
        return
    costs = Costs.open(config.budget, 0, folder.path, warmup)
    tracker.more_metrics = costs.step_metrics
    async with counting(costs, num_alive_nodes, tracker.note) as begin:

        def on_lease() -> None:
            costs.num_gpus = num_held_gpus(config, with_servers=with_servers)
            begin()

        yield on_lease


@asynccontextmanager
async def counting(
    costs: Costs, num_nodes: Callable[[], int], note: Callable[[str], None], *, tick_s: float = TICK_S
) -> AsyncIterator[Callable[[], None]]:
    """Count the costs of the block, and cancel the block when the cap is reached; see `within_budget`."""
    costs.check()
    leased = asyncio.Event()
    with one_error():
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(_tick(costs, num_nodes, leased, note, tick_s), name="count costs")
            try:
                yield leased.set
            finally:
                ticking.cancel()
                costs.save()


async def _tick(
    costs: Costs,
    num_nodes: Callable[[], int],
    leased: asyncio.Event,
    note: Callable[[str], None],
    tick_s: float,
) -> None:
    await leased.wait()
    prices, has_warned, counted_at = costs.prices, False, time.monotonic()
    while True:
        await asyncio.sleep(tick_s)
        now = time.monotonic()
        nodes = await asyncio.to_thread(num_nodes)
        costs.tick(now - counted_at, nodes)
        counted_at = now
        await asyncio.to_thread(costs.save)
        costs.check()
        if prices.cap and not has_warned and costs.total >= WARNS_AT * prices.cap:
            has_warned = True
            note(
                f"the run has cost {costs.total:.2f} of {prices.cap:g} (budget.cap); when the cost "
                "reaches the cap, the run saves and ends"
            )

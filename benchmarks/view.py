"""Waiting times of `rayapp view` with a million trajectories, in a real browser.

    python benchmarks/view.py [--trajectories 1000000] [--folder DIR]

The benchmark writes a synthetic run, which is kept for the next time if --folder is given. It starts the command, and
measures in headless Chromium: the time to the first rows; the times of a filter, a sort, a group and a trajectory; and
the server's memory. The output is JSON. The exit
status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.synthetic_run import write_run

ROOT = Path(__file__).resolve().parents[1]
FIRST_PAGE_TARGET_S, FILTER_TARGET_S = 3.0, 1.0
ROUNDS = 5


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Start `rayapp view`. Yield its address, its process id, and the seconds until it printed the address."""
    command = [sys.executable, "-m", "rayapp", "view", str(folder), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    started = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        try:
            yield line.split()[1].rstrip("/"), program.pid, time.perf_counter() - started
        finally:
            program.terminate()


async def seconds(action: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await action()
    return time.perf_counter() - started


async def measure(folder: Path, chromium: str) -> dict[str, Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        await page.goto("about:blank")
        with served(folder) as (base, pid, start_s):
            found: dict[str, Any] = {"command_to_address_s": start_s}
            found |= await _opening(page, base)
            found |= await _using(page, base)
            found["server_rss_mib"] = rss_mib(pid)
        await browser.close()
    return found


async def _opening(page: Any, base: str) -> dict[str, float]:
    async def groups() -> None:
        await page.goto(f"{base}/#/groups")
        await page.locator("table.groups tbody tr").first.wait_for()

    async def curves() -> None:
        await page.goto(f"{base}/#/curves")
        await page.locator("figure.chart path").first.wait_for()

    first_rows = await seconds(groups)
    paint = await page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime / 1000")
    return {"first_rows_s": first_rows, "first_contentful_paint_s": paint, "curves_s": await seconds(curves)}


async def _using(page: Any, base: str) -> dict[str, Any]:
    """Return the time of the slowest of a few rounds, for each action, over all groups."""
    await page.goto(f"{base}/#/groups")
    await page.reload()
    await page.locator("[data-count]").wait_for()

    async def counted(action: Callable[[], Awaitable[object]]) -> float:
        before = await page.locator("[data-count]").get_attribute("data-count")
        took = time.perf_counter()
        await action()
        await page.locator(f"[data-count]:not([data-count='{before}'])").wait_for()
        return time.perf_counter() - took

    filters: list[float] = []
    for _ in range(ROUNDS):
        filters += [
            await counted(lambda: page.select_option("select[name=reward_status]", "timeout")),
            await counted(lambda: page.select_option("select[name=task]", "gsm8k")),
            await counted(lambda: page.select_option("select[name=task]", "")),
            await counted(lambda: page.select_option("select[name=reward_status]", "")),
        ]
    sorts = [await seconds(lambda: _sort(page)) for _ in range(ROUNDS)]
    group = await seconds(lambda: _open(page, f"{base}/#/group?step=5&group=300", "article.completion"))
    one = await seconds(lambda: _open(page, f"{base}/#/trajectory?step=5&group=300&index=3", "li.turn"))
    return {"filter_worst_s": max(filters), "sort_worst_s": max(sorts), "group_s": group, "trajectory_s": one}


async def _sort(page: Any) -> None:
    link = page.locator("[data-key=sort-reward_mean]")
    before = await page.locator("th[aria-sort]").inner_text()
    await link.click()
    await page.locator("th[aria-sort]").filter(has_not_text=before).wait_for()


async def _open(page: Any, address: str, selector: str) -> None:
    await page.goto(address)
    await page.locator(selector).first.wait_for()


def rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="kept and used again; default a temporary one")
    parser.add_argument("--chromium", default=os.environ.get("RAYAPP_CHROMIUM", "/usr/bin/chromium"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "run"
        if not folder.exists():
            write_run(folder, num_trajectories=given.trajectories)
        size = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
        report: dict[str, Any] = {"trajectories": given.trajectories, "parquet_gib": size / 2**30}
        report |= {"cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}
        report |= asyncio.run(measure(folder, given.chromium))
    print(json.dumps({key: round(value, 3) for key, value in report.items()}, indent=2))
    ok = report["first_rows_s"] <= FIRST_PAGE_TARGET_S and report["filter_worst_s"] <= FILTER_TARGET_S
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

"""Speed of the agent loop without a model: scripted policies, the real loop, real tools, real sandboxes.

    python -m benchmarks.agent_loop                  all parts, about two minutes
    python -m benchmarks.agent_loop overhead -n 400  one of: overhead, concurrent, sandbox, mcp

overhead    CPU milliseconds per turn with an instant tool, without the time of tokenizer and template
concurrent  1,000 trajectories at once in one process, five rounds: resident memory after each
sandbox     trajectories/s with the Python tool on local sandboxes, stateful over the turns, and the same executions in
            the same sandboxes without the loop
mcp         trajectories/s with run_code_once over our own MCP server in this process
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import python_unit_s
from benchmarks.report import print_report
from benchmarks.scripted_policy import TURNS, Instant, ScriptedPolicy, code_of, load_tokenizer
from rayapp.config.sandbox import LocalConfig, SandboxConfig
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import SandboxSpec
from rayapp.extras.service.app import serving
from rayapp.sandbox.pool.build import open_pool
from rayapp.tools.base import ToolContext
from rayapp.tools.coding import PythonTool
from rayapp.tools.loading import open_tools
from rayapp.tools.toolset import ToolSet

ROUNDS = 5
NUM_SANDBOXES = 8
LEASE_TIMEOUT_S = 600.0
GOAL_MS = 0.3
Found = dict[str, Any]


async def measure_overhead(tokenizer: Any, count: int) -> Found:
    policy = ScriptedPolicy(tokenizer, ToolSet([Instant()]), "python")
    await policy.run(20)
    own_ms, tokenizer_ms = [], []
    for _ in range(ROUNDS):
        policy.clock.seconds = 0.0
        started = time.process_time()
        await policy.run(count)
        total_s = time.process_time() - started
        own_ms.append(1000 * (total_s - policy.clock.seconds) / (count * TURNS))
        tokenizer_ms.append(1000 * policy.clock.seconds / (count * TURNS))
    cpu_ms = statistics.median(own_ms)
    return {
        "cpu_ms_per_turn": cpu_ms,
        "goal_ms": GOAL_MS,
        "tokenizer_and_template_cpu_ms_per_turn": statistics.median(tokenizer_ms),
        "turns": count * TURNS,
        "ratios": {"turns_per_unit_of_python": 1000 * python_unit_s() / cpu_ms},
    }


async def measure_concurrent(tokenizer: Any, count: int) -> Found:
    rss, rates = [], []
    async with sandboxes(4) as source:
        policy = ScriptedPolicy(tokenizer, python_tools(source, stateful=False), "python")
        for _ in range(ROUNDS):
            started = time.perf_counter()
            await policy.run(count)
            rates.append(count / (time.perf_counter() - started))
            gc.collect()
            rss.append(rss_mib())
    return {
        "trajectories_at_once": count,
        "trajectories_per_s": statistics.median(rates),
        "rss_mib_after_each_round": rss,
        "ratios": {"memory_after_round_1_over_last": rss[0] / rss[-1]},
    }


async def measure_sandbox(tokenizer: Any, count: int) -> Found:
    """Measure the loop with the Python tool, alternating with the same executions without a loop."""
    async with sandboxes(NUM_SANDBOXES) as source:
        policy = ScriptedPolicy(tokenizer, python_tools(source, stateful=True), "python")
        await policy.run(NUM_SANDBOXES)
        with_loop, without = [], []
        for _ in range(ROUNDS):
            with_loop.append(await timed(policy.run(count)))
            without.append(await timed(execute_only(source, count)))
    return rate_of(count, with_loop) | {
        "executions_alone_per_s": count * (TURNS - 1) / statistics.median(without),
        "ratios": {"calls_of_executions_alone": statistics.median(without) / statistics.median(with_loop)},
    }


async def measure_mcp(tokenizer: Any, count: int) -> Found:
    """Measure the loop over MCP, alternating with the Python tool on the same number of sandboxes. In both, a lease has
    one execution.
    """
    config = sandbox_config(NUM_SANDBOXES)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            sandboxes(NUM_SANDBOXES) as source,
            serving(config, key="key", lease_timeout_s=LEASE_TIMEOUT_S) as address,
        ):
            tools = await open_tools(write_tool_file(Path(folder), f"{address}/mcp"))
            direct = ScriptedPolicy(tokenizer, python_tools(source, stateful=False), "python")
            policy = ScriptedPolicy(tokenizer, tools, "run_code_once")
            await policy.run(NUM_SANDBOXES)
            await direct.run(NUM_SANDBOXES)
            over_mcp, here = [], []
            for _ in range(ROUNDS):
                over_mcp.append(await timed(policy.run(count)))
                here.append(await timed(direct.run(count)))
            await tools.close()
    return rate_of(count, over_mcp) | {
        "trajectories_per_s_of_the_python_tool": count / statistics.median(here),
        "ratios": {"mcp_of_the_python_tool": statistics.median(here) / statistics.median(over_mcp)},
    }


def rate_of(count: int, seconds: list[float]) -> Found:
    rate = count / statistics.median(seconds)
    return {"trajectories": count, "trajectories_per_s": rate, "calls_per_s": rate * (TURNS - 1)}


async def timed(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def execute_only(source: SandboxSource, count: int) -> None:
    """Run the executions of `count` trajectories without the loop. Each trajectory has its own sandbox."""

    async def one() -> None:
        async with source.lease(SandboxSpec(), timeout_s=LEASE_TIMEOUT_S) as sandbox:
            for turn in range(TURNS - 1):
                result = await sandbox.run_code(code_of(turn), timeout_s=30.0, stateful=True)
                assert result.ok, result

    await asyncio.gather(*(one() for _ in range(count)))


def sandbox_config(count: int) -> SandboxConfig:
    return SandboxConfig(providers=(LocalConfig(max_sandboxes=count),))


@contextlib.asynccontextmanager
async def sandboxes(count: int) -> AsyncIterator[SandboxSource]:
    async with open_pool(sandbox_config(count), "agent-loop-benchmark") as (client, _):
        yield client


def python_tools(source: SandboxSource, *, stateful: bool) -> ToolSet:
    config = {"stateful": stateful, "lease_timeout": LEASE_TIMEOUT_S}
    return ToolSet([PythonTool(config, None, ToolContext(sandboxes=source))])


def write_tool_file(folder: Path, url: str) -> Path:
    servers = {"mcpServers": {"own": {"url": url, "api_key": "key"}}}
    (folder / "servers.json").write_text(json.dumps(servers))
    entry = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"type": "mcp", "rate_limit": 10_000, "timeout": 600},
        "mcp": {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["run_code_once"]},
    }
    path = folder / "tools.yaml"
    path.write_text(json.dumps({"tools": [entry]}))
    return path


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


PARTS: dict[str, tuple[Callable[[Any, int], Awaitable[Found]], int]] = {
    "overhead": (measure_overhead, 200),
    "concurrent": (measure_concurrent, 1000),
    "sandbox": (measure_sandbox, 200),
    "mcp": (measure_mcp, 100),
}


async def measure(parts: list[str], count: int) -> dict[str, Found]:
    tokenizer = load_tokenizer()
    found = {}
    for part in parts:
        run, usual = PARTS[part]
        found[part] = await run(tokenizer, count or usual)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("-n", type=int, default=0, help="trajectories; default by part")
    options = parser.parse_args()
    options.parts = options.parts or list(PARTS)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; there are: {', '.join(PARTS)}")
    logging.getLogger("mcp").setLevel(logging.ERROR)
    found = asyncio.run(measure(options.parts, options.n))
    ratios = {f"{part}/{name}": ratio for part, one in found.items() for name, ratio in one.pop("ratios").items()}
    print_report(options, ratios, **found)


if __name__ == "__main__":
    main()

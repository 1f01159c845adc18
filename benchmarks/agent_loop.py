"""How fast the agent loop is without a model: scripted policies, the real loop, real tools, real sandboxes.

    python benchmarks/agent_loop.py                  all parts
    python benchmarks/agent_loop.py overhead -n 400  one of: overhead, sandbox, mcp, concurrent

overhead    CPU seconds per turn of a trajectory with an instant tool, less those of tokenizer, template and tool
sandbox     trajectories/s with the Python tool on local sandboxes, stateful over the turns
mcp         trajectories/s with run_code_once over our own MCP server
concurrent  1,000 trajectories at once in one process, several rounds: resident memory after each
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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.agent.chat import ChatFormat, load_template
from rayapp.agent.episode import AgentLimits, AgentPrompt, Episode
from rayapp.agent.loop import AgentLoop
from rayapp.agent.parsing import HermesParser
from rayapp.engines.scripted import ScriptedEngine
from rayapp.mcp_server.app import serving
from rayapp.sandbox.config import LocalConfig, SandboxConfig
from rayapp.sandbox.pool_here import open_pool
from rayapp.tools.base import ToolBase, ToolContext, ToolOutput, ToolSchema
from rayapp.tools.loading import open_tools
from rayapp.tools.python import PythonTool
from rayapp.tools.toolset import ToolSet
from rayapp.types import SamplingParams

TURNS = 4
MESSAGES = ({"role": "system", "content": "You solve problems step by step."}, {"role": "user", "content": "17 * 23?"})


class Clock:
    """CPU seconds spent inside wrapped calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started

        return call


class TimedTokenizer:
    """The tokenizer with its time taken: it is no part of the loop's own overhead."""

    def __init__(self, tokenizer: Any, clock: Clock) -> None:
        self._tokenizer = tokenizer
        for name in ("encode", "decode", "apply_chat_template"):
            setattr(self, name, clock.timed(getattr(tokenizer, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Instant(ToolBase):
    schema = ToolSchema(
        name="python",
        description="Runs code.",
        parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    )

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        return ToolOutput(text="391")


def call(tool: str, code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': {'code': code}})}\n</tool_call>"


@dataclass
class Bench:
    """A loop over a scripted policy that calls a tool in every turn but the last."""

    tokenizer: Any
    tools: ToolSet
    tool: str
    turns: Sequence[str]

    def __post_init__(self) -> None:
        self.clock = Clock()
        timed = TimedTokenizer(self.tokenizer, self.clock)
        self.chat = ChatFormat(timed, self.tools.schemas, template=load_template("chatml_hermes"))
        limits = AgentLimits(max_response_tokens=4096, max_assistant_turns=TURNS)
        self.loop = AgentLoop(chat=self.chat, parser=HermesParser(), tools=self.tools, limits=limits)
        self.prompt = AgentPrompt(messages=MESSAGES, token_ids=tuple(self.chat.prompt_ids(MESSAGES)))
        # Tokenized beforehand: what the engine does is no part of the loop either.
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.said = [[*self.tokenizer.encode(text, add_special_tokens=False), end] for text in self.turns]

    def engine(self) -> ScriptedEngine:
        return ScriptedEngine(
            self.tokenizer.encode,
            lambda token_ids: "",
            lambda request_id, prompt_ids: self.said[int(request_id.rpartition("=")[2])],
            end_id=0,
        )

    async def run(self, count: int) -> list[Episode]:
        engine, sampling = self.engine(), SamplingParams(max_tokens=1024)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.loop.run(self.prompt, engine=engine, sampling=sampling, request_id=f"t={index}"))
                for index in range(count)
            ]
        episodes = [task.result() for task in tasks]
        wrong = [episode for episode in episodes if len(episode.turns) != TURNS or episode.failure]
        failures = {record.failure for episode in episodes for record in episode.calls if record.failure}
        if wrong or failures:
            raise SystemExit(f"{len(wrong)} of {count} trajectories went wrong: {wrong[:1]} {failures}")
        return episodes


def load_tokenizer() -> Any:
    from transformers import AutoTokenizer

    folder = Path(__file__).parents[1] / "models" / "smollm2-135m"
    if not folder.exists():
        raise SystemExit(f"there is no {folder}; run: rayapp model fetch smollm2-135m")
    return AutoTokenizer.from_pretrained(folder)


def script(tool: str) -> list[str]:
    thought = "First I work out the product by hand, then I check it with the tool. "
    return [*(thought + call(tool, f"print({n} + 17 * 23)") for n in range(TURNS - 1)), "It is #### 391"]


async def measure_overhead(tokenizer: Any, count: int) -> None:
    bench = Bench(tokenizer, ToolSet([Instant()]), "python", script("python"))
    await bench.run(20)
    figures = []
    for _ in range(5):
        bench.clock.seconds = 0.0
        started = time.process_time()
        await bench.run(count)
        total_s = time.process_time() - started
        turns = count * TURNS
        figures.append((1000 * (total_s - bench.clock.seconds) / turns, 1000 * bench.clock.seconds / turns))
    own_ms = statistics.median(own for own, _ in figures)
    tokenizer_ms = statistics.median(other for _, other in figures)
    report("overhead", own_ms_per_turn=own_ms, tokenizer_and_template_ms_per_turn=tokenizer_ms, turns=count * TURNS)


@contextlib.asynccontextmanager
async def python_tools(num_sandboxes: int) -> AsyncIterator[ToolSet]:
    config = SandboxConfig(providers=(LocalConfig(max_sandboxes=num_sandboxes),))
    async with open_pool(config, "agent-loop-benchmark") as (client, _):
        yield ToolSet([PythonTool({"lease_timeout": 600.0}, None, ToolContext(sandboxes=client))])


async def measure_sandbox(tokenizer: Any, count: int) -> None:
    async with python_tools(8) as tools:
        bench = Bench(tokenizer, tools, "python", script("python"))
        await bench.run(8)
        await measure_rate("sandbox", bench, count)


async def measure_mcp(tokenizer: Any, count: int) -> None:
    config = SandboxConfig(providers=(LocalConfig(max_sandboxes=2),))
    with tempfile.TemporaryDirectory() as folder:
        async with serving(config, api_key="key", lease_timeout_s=600.0) as url:
            tools = await open_tools(write_tool_file(Path(folder), url))
            bench = Bench(tokenizer, tools, "run_code_once", script("run_code_once"))
            await bench.run(4)
            await measure_rate("mcp (server in this process)", bench, count)
            await tools.close()


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


async def measure_concurrent(tokenizer: Any, count: int) -> None:
    async with python_tools(4) as tools:
        stateless = ToolSet([stateless_twin(tools)])
        bench = Bench(tokenizer, stateless, "python", script("python"))
        for number in range(5):
            started = time.perf_counter()
            await bench.run(count)
            gc.collect()
            report(
                "concurrent",
                round=number + 1,
                trajectories=count,
                rss_mib=rss_mib(),
                trajectories_per_s=count / (time.perf_counter() - started),
            )


def stateless_twin(tools: ToolSet) -> PythonTool:
    tool: Any = tools.get("python")
    config = {"stateful": False, "lease_timeout": 600.0}
    return PythonTool(config, None, tool.context)


async def measure_rate(part: str, bench: Bench, count: int) -> None:
    started, started_cpu = time.perf_counter(), time.process_time()
    episodes = await bench.run(count)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    durations = [1000 * (record.duration_s - record.waited_s) for episode in episodes for record in episode.calls]
    report(
        part,
        trajectories=len(episodes),
        trajectories_per_s=len(episodes) / seconds,
        tool_calls_per_s=len(durations) / seconds,
        tool_call_median_ms=statistics.median(durations),
        cpu_ms_per_call=1000 * cpu_s / len(durations),
    )


def report(part: str, **figures: float) -> None:
    print(f"{part}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()), flush=True)


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


PARTS: dict[str, tuple[Callable[[Any, int], Any], int]] = {
    "overhead": (measure_overhead, 200),
    "sandbox": (measure_sandbox, 200),
    "mcp": (measure_mcp, 200),
    "concurrent": (measure_concurrent, 1000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("-n", type=int, default=0, help="trajectories; default by part")
    options = parser.parse_args()
    logging.getLogger("mcp").setLevel(logging.ERROR)
    tokenizer = load_tokenizer()
    for part in options.parts or PARTS:
        measure, count = PARTS[part]
        asyncio.run(measure(tokenizer, options.n or count))


if __name__ == "__main__":
    main()

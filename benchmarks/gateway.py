"""Cost of the gateway without a model: policies are scripted, and agents call over HTTP from another process.

    python -m benchmarks.gateway            1,000 sessions at once, five rounds of them, about two minutes

cpu_ms_per_call     processor time of the gateway's process per call, without that of tokenizer and template
rss_mib_...         resident memory after each round: constant if ended sessions keep no memory
recorded_share      share of prompt tokens, after a session's first call, that the engine has already seen unchanged and
                    can serve from its prefix cache
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import aiohttp

from benchmarks.agent_loop import rss_mib
from benchmarks.machine import ROOT, python_unit_s
from benchmarks.report import print_report
from benchmarks.scripted_policy import MESSAGES, Clock, Instant, TimedTokenizer, load_tokenizer, script
from rayapp.core.types import RequestId, SamplingParams
from rayapp.engine.vllm_tool_parser import load_parser
from rayapp.rollout.agent.chat import load_template
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.server import Gateway
from rayapp.rollout.gateway.session import SessionLimits
from rayapp.testing.engine import ScriptedEngine

ROUNDS = 5
CALLS = 8
GOAL_MS = 1.0
Found = dict[str, Any]


async def measure(count: int) -> Found:
    tokenizer, clock = load_tokenizer(), Clock()
    template = load_template("chatml_hermes")
    formats = Formats(
        TimedTokenizer(tokenizer, clock),
        model="benchmark",
        template=template,
        # Pass the tokenizer without the wrapper that measures it, because vLLM's parser reads the vocabulary.
        make_parser=lambda name, _, tools, sample: load_parser(name, tokenizer, tools, sample),
    )
    gateway = Gateway(formats)
    await gateway.start()
    engine = scripted(tokenizer)
    await one_round(gateway, engine, 10)
    cpu_ms, tokenizer_ms, rss, rates, shares = [], [], [], [], list[float]()
    for _ in range(ROUNDS):
        clock.seconds = 0.0
        started_cpu_s, started_s = time.process_time(), time.perf_counter()
        share = await one_round(gateway, engine, count)
        cpu_s = time.process_time() - started_cpu_s
        cpu_ms.append(1000 * (cpu_s - clock.seconds) / (count * CALLS))
        tokenizer_ms.append(1000 * clock.seconds / (count * CALLS))
        rates.append(count * CALLS / (time.perf_counter() - started_s))
        shares.append(share)
        gc.collect()
        rss.append(rss_mib())
    await gateway.close()
    return {
        "cpu_ms_per_call": statistics.median(cpu_ms),
        "goal_ms": GOAL_MS,
        "tokenizer_and_template_cpu_ms_per_call": statistics.median(tokenizer_ms),
        "calls_per_s": statistics.median(rates),
        "sessions_at_once": count,
        "calls_of_a_session": CALLS,
        "rss_mib_after_each_round": rss,
        "recorded_share": min(shares),
        "ratios": {
            "calls_per_unit_of_python": 1000 * python_unit_s() / statistics.median(cpu_ms),
            "memory_after_round_1_over_last": rss[0] / rss[-1],
            "recorded_share": min(shares),
        },
    }


def scripted(tokenizer: Any) -> ScriptedEngine:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    calling, last = (
        [*tokenizer.encode(text, add_special_tokens=False), end] for text in (script("python")[0], script("python")[-1])
    )

    def said(request_id: RequestId, prompt_ids: Sequence[int]) -> list[int]:
        return last if request_id.turn == CALLS else calling

    return ScriptedEngine(tokenizer.encode, lambda token_ids: "", said, end_id=end)


async def one_round(gateway: Gateway, engine: ScriptedEngine, count: int) -> float:
    """Run all sessions from the first call to the last, with agents in another process. Return the recorded share."""
    limits = SessionLimits(max_tokens=1 << 20, max_turns=CALLS)
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(
                gateway.session(
                    engine=engine,
                    sampling=SamplingParams(max_tokens=1024),
                    limits=limits,
                    request_id=RequestId("group", i),
                )
            )
            for i in range(count)
        ]
        doors = [(f"{gateway.url_of(session)}/v1/chat/completions", session.key) for session in sessions]
        agents = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.gateway", "--agents", cwd=ROOT,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await agents.communicate(json.dumps(doors).encode())
        if agents.returncode != 0:
            raise SystemExit(f"the agents failed: {output.decode()[-500:]}")
        wrong = [session for session in sessions if len(session.tree.turns) != CALLS or session.tree.forks]
        if wrong:
            raise SystemExit(f"{len(wrong)} of {count} sessions failed")
    return float(output)


async def act(doors: list[tuple[str, str]]) -> float:
    """Run the agents until they end. Each calls the tool that its prompt names. Return the recorded share of later
    prompts.
    """
    cached, total = 0, 0
    tool = Instant.schema.as_openai()

    async def one(http: aiohttp.ClientSession, url: str, key: str) -> None:
        nonlocal cached, total
        messages: list[dict[str, Any]] = [dict(message) for message in MESSAGES]
        headers = {"Authorization": f"Bearer {key}"}
        for number in range(CALLS):
            async with http.post(url, json={"messages": messages, "tools": [tool]}, headers=headers) as answer:
                reply = await answer.json()
            if number:
                cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                total += reply["usage"]["prompt_tokens"]
            said = reply["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "391"} for call in said.get("tool_calls", ())
            ]
            messages += [said, *results]

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        await asyncio.gather(*(one(http, url, key) for url, key in doors))
    return cached / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=1000, help="sessions at once")
    parser.add_argument("--agents", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agents:
        print(asyncio.run(act(json.loads(sys.stdin.read()))))
        return
    found = asyncio.run(measure(options.n))
    print_report(options, found.pop("ratios"), **found)


if __name__ == "__main__":
    main()

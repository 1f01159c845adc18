"""Cost of the gateway without a model: policies are scripted, and agents call over HTTP from another process.

    python -m benchmarks.gateway            up to 1,000 sessions at once, five rounds of them, about three minutes

cpu_ms_per_call     processor time of the gateway's process per call, without that of tokenizer and template
rss_mib_...         resident memory while sessions are open and full, and after each round, when all have ended
recorded_share      share of prompt tokens, after a session's first call, that the engine has already seen unchanged and
                    can serve from its prefix cache
first_token_ms_...  from the engine's first token of a stream to its arrival in the agent's process; the peer is a bare
                    aiohttp handler in the gateway's process, which writes the same bytes
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
from aiohttp import web

from benchmarks.agent_loop import rss_mib
from benchmarks.machine import ROOT, python_unit_s
from benchmarks.report import print_report
from benchmarks.scripted_policy import MESSAGES, Clock, Instant, TimedTokenizer, load_tokenizer, script
from rayapp.core.protocols import OnTokens
from rayapp.core.types import Completion, RequestId, SamplingParams
from rayapp.rollout.agent.chat import load_template
from rayapp.rollout.agent.vllm_tool_parser import load_parser
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.limits import SessionLimits
from rayapp.rollout.gateway.listening import Listening, bound
from rayapp.rollout.gateway.server import Gateway
from rayapp.testing.engine import ScriptedEngine

CALLS = 8
SMALLER_ROUNDS = (100, 300)
NUM_STREAMS, STREAM_CALLS = 8, 20
TOKEN_S = 0.01
GOAL_MS, FIRST_TOKEN_GOAL_MS = 0.8, 20.0
Found = dict[str, Any]


async def measure(count: int, rounds: int) -> Found:
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
    held = {number: (await one_round(gateway, engine, number))[1] for number in SMALLER_ROUNDS if number < count}
    cpu_ms, tokenizer_ms, rss, rates, shares = [], [], [], [], list[float]()
    for _ in range(rounds):
        clock.seconds = 0.0
        started_cpu_s, started_s = time.process_time(), time.perf_counter()
        share, held[count] = await one_round(gateway, engine, count)
        cpu_s = time.process_time() - started_cpu_s
        cpu_ms.append(1000 * (cpu_s - clock.seconds) / (count * CALLS))
        tokenizer_ms.append(1000 * clock.seconds / (count * CALLS))
        rates.append(count * CALLS / (time.perf_counter() - started_s))
        shares.append(share)
        gc.collect()
        rss.append(rss_mib())
    first_ms, bare_ms = await first_tokens(gateway, tokenizer)
    await gateway.close()
    return {
        "cpu_ms_per_call": statistics.median(cpu_ms),
        "goal_ms": GOAL_MS,
        "tokenizer_and_template_cpu_ms_per_call": statistics.median(tokenizer_ms),
        "calls_per_s": statistics.median(rates),
        "sessions_at_once": count,
        "calls_of_a_session": CALLS,
        "rss_mib_with_open_sessions": held,
        "rss_mib_after_each_round": rss,
        "rss_kib_kept_of_an_ended_session": 1024 * (rss[-1] - rss[0]) / (count * max(1, rounds - 1)),
        "recorded_share": min(shares),
        "first_token_ms_median": statistics.median(first_ms),
        "first_token_ms_p95": statistics.quantiles(first_ms, n=20)[-1],
        "first_token_goal_ms": FIRST_TOKEN_GOAL_MS,
        "first_token_ms_median_of_the_bare_peer": statistics.median(bare_ms),
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


class NotingEngine(ScriptedEngine):
    """A scripted engine that notes when it reports the first token of each call."""

    def __init__(self, tokenizer: Any) -> None:
        said = script("python")[-1]
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        super().__init__(tokenizer.encode, tokenizer.decode, lambda *_: said, end_id=end, token_s=TOKEN_S)
        self.first_at_s: dict[RequestId, float] = {}

    async def generate(
        self,
        request_id: RequestId,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        assert on_tokens is not None, "every call is a stream"

        def noted(ids: Sequence[int]) -> None:
            self.first_at_s.setdefault(request_id, time.monotonic())
            on_tokens(ids)

        return await super().generate(request_id, prompt_ids, sampling, noted)


async def first_tokens(gateway: Gateway, tokenizer: Any) -> tuple[list[float], list[float]]:
    """Return the milliseconds from each first token to its arrival: through the gateway, and from the bare peer."""
    engine, bare_at_s = NotingEngine(tokenizer), dict[str, float]()

    async def bare(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await asyncio.sleep(TOKEN_S)
        bare_at_s[request.match_info["call"]] = time.monotonic()
        await response.prepare(request)
        await response.write(b"data: " + 400 * b"x" + b"\n\n")
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/{call}", bare)
    listening = Listening(app)
    await listening.start(bound("127.0.0.1", 0))
    limits = SessionLimits(max_tokens=1 << 20, max_turns=STREAM_CALLS)
    try:
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
                for i in range(NUM_STREAMS)
            ]
            doors = [(f"{gateway.url_of(session)}/v1/chat/completions", session.key) for session in sessions]
            output = await agents("--streams", json.dumps([*doors, (listening.url, "")]))
    finally:
        await listening.close()
    arrived = json.loads(output)
    through = [
        1000 * (at_s - engine.first_at_s[RequestId("group", stream, turn=number + 1)])
        for stream, calls in enumerate(arrived["gateway"])
        for number, at_s in enumerate(calls)
    ]
    return through, [1000 * (at_s - bare_at_s[call]) for call, at_s in arrived["bare"].items()]


async def stream(doors: list[tuple[str, str]]) -> dict[str, Any]:
    """Run agents that stream, each call once from the gateway and once from the bare peer. Return arrival times."""
    *sessions, (bare_url, _) = doors
    bare = dict[str, float]()

    async def arrival(http: aiohttp.ClientSession, url: str, key: str) -> float:
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 8}
        async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            await answer.content.readany()
            at_s = time.monotonic()
            await answer.read()
        return at_s

    async def one(http: aiohttp.ClientSession, index: int, url: str, key: str) -> list[float]:
        arrivals = []
        for number in range(STREAM_CALLS):
            arrivals.append(await arrival(http, url, key))
            call = f"{index}-{number}"
            bare[call] = await arrival(http, f"{bare_url}/{call}", "")
        return arrivals

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        through = await asyncio.gather(*(one(http, i, *door) for i, door in enumerate(sessions)))
    return {"gateway": through, "bare": bare}


async def one_round(gateway: Gateway, engine: ScriptedEngine, count: int) -> tuple[float, float]:
    """Run all sessions from the first call to the last, with agents in another process. Return the recorded share, and
    the resident memory in MiB while all sessions are still open.
    """
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
        share = float(await agents("--agents", json.dumps(doors)))
        wrong = [session for session in sessions if len(session.tree.turns) != CALLS or session.tree.forks]
        if wrong:
            raise SystemExit(f"{len(wrong)} of {count} sessions failed")
        return share, rss_mib()


async def agents(option: str, doors: str) -> bytes:
    """Run the agents in another process, and return their output."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.gateway", option, cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await running.communicate(doors.encode())
    if running.returncode != 0:
        raise SystemExit(f"the agents failed: {output.decode()[-500:]}")
    return output


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
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all sessions")
    parser.add_argument("--agents", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--streams", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agents or options.streams:
        doors = json.loads(sys.stdin.read())
        print(json.dumps(asyncio.run(stream(doors) if options.streams else act(doors))))
        return
    found = asyncio.run(measure(options.n, options.rounds))
    print_report(options, found.pop("ratios"), **found)


if __name__ == "__main__":
    main()

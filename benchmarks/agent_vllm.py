"""Measures the agent loop on a real vLLM server: how long the server idles while tools run, and how much of later
prompts is cached.

    python -m benchmarks.agent_vllm                        16 trajectories, 10 turns, a tool of 0.5 s in real sandboxes
    python -m benchmarks.agent_vllm -n 64 --tool-s 1.0

The model samples arbitrary text. The parser reads every turn as a call, and a turn that is cut at the length limit
counts as ended, so that each trajectory has all its turns. The prompt of a later turn is the earlier prompt, the
sampled tokens and the tool's result, token for token, as in training. Prompts of different trajectories differ from
their first block on, so every hit in the prefix cache comes from an earlier turn of the same trajectory.

idle                          share of the time, while some trajectory waits for its tool, in which no request runs or
                              waits
hit_rate_of_later_turns       tokens found in the prefix cache, as a share of all tokens that later turns look up
hit_rate_of_what_is_possible  tokens found in the prefix cache, as a share of the tokens that an earlier turn of the
                              trajectory could have cached
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.report import print_report
from rayapp.config.config import Config
from rayapp.config.sandbox import LocalConfig, SandboxConfig
from rayapp.core.types import RequestId, SamplingParams, Trajectory
from rayapp.engine.vllm import VllmEngine
from rayapp.rollout.agent.chat import ChatFormat, load_template
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.recorder import AgentLimits, AgentPrompt
from rayapp.sandbox.pool.build import open_pool
from rayapp.tools.base import RawCall, ToolContext
from rayapp.tools.coding import PythonTool
from rayapp.tools.toolset import ToolSet

MODEL = Path(__file__).parents[1] / "models" / "smollm2-135m"
MAX_PROMPT_TOKENS = 1536
TOKENS_PER_TURN = 64
RESPONSE_TOKENS_PER_TURN = 160
"""Tokens of one turn: the sampled tokens, the tool's result, and the template's tokens around both."""
BLOCK_TOKENS = 32
LOOK_EVERY_S = 0.02
PROBLEM = (
    "A shop sells {n} apples a day at 3 coins, and half as many pears at 4. What does it earn in a week of 6 days? "
)


@dataclass(frozen=True, slots=True)
class AlwaysCalls:
    """A tool call parser that reads every turn as one call of the Python interpreter."""

    code: str

    def parse(self, text: str) -> tuple[RawCall, ...]:
        return (RawCall(name="python", arguments=json.dumps({"code": self.code})),)


@dataclass(slots=True)
class Watch:
    """Samples many times a second, while some trajectory is not done, whether the server is generating."""

    num_generating: int = 0
    num_alive: int = 0
    looks: list[bool] = field(default_factory=list)

    async def look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.num_alive:
                self.looks.append(self.num_generating == 0)

    @property
    def idle(self) -> float:
        return sum(self.looks) / max(1, len(self.looks))


class Watched:
    """The engine, with the interface that the loop calls and with added counters."""

    def __init__(self, engine: VllmEngine, watch: Watch) -> None:
        self._engine = engine
        self._watch = watch
        self.later_tokens = 0
        self.first_tokens = 0

    async def generate(self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams) -> Any:
        if request_id.turn == 0:
            self.first_tokens += len(prompt_ids)
        else:
            self.later_tokens += len(prompt_ids)
        self._watch.num_generating += 1
        try:
            completion = await self._engine.generate(request_id, list(prompt_ids), sampling)
            # Report a turn that is cut at the length limit as ended: otherwise it would end the trajectory.
            return replace(completion, finish_reason="stop")
        finally:
            self._watch.num_generating -= 1


def messages(number: int) -> tuple[dict[str, str], ...]:
    system = f"{number}. You are a math expert. Reason step by step, run code, and end with `#### <answer>`. " + (
        "Examples: " + " ".join(PROBLEM.format(n=n) + f"#### {n * 3 * 6 + n * 12}" for n in range(10, 26))
    )
    return {"role": "system", "content": system}, {"role": "user", "content": PROBLEM.format(n=number)}


def config_of(sandbox: SandboxConfig, turns: int) -> Config:
    completion = turns * RESPONSE_TOKENS_PER_TURN
    return Config.model_validate(
        {
            "model": {"path": str(MODEL)},
            "cluster": {"device": "cpu"},
            "rollout": {"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_completion_tokens": completion},
            "server": {"engine_args": {"block_size": BLOCK_TOKENS}, "kv_cache_gib": 2},
            "sandbox": sandbox.model_dump(),
        }
    )


async def play(loop: AgentLoop, engine: Watched, watch: Watch, number: int) -> Trajectory:
    said = messages(number)
    prompt = AgentPrompt(token_ids=tuple(loop.chat.prompt_ids(said)))
    sampling = SamplingParams(max_tokens=TOKENS_PER_TURN, seed=number, stop=("<|im_end|>",))
    watch.num_alive += 1
    try:
        return await loop.run(prompt, engine=engine, sampling=sampling, request_id=RequestId("group", number, 0))
    finally:
        watch.num_alive -= 1


async def measure(count: int, turns: int, tool_s: float) -> dict[str, Any]:
    from transformers import AutoTokenizer

    sandbox = SandboxConfig(providers=(LocalConfig(max_sandboxes=count),))
    engine = await VllmEngine.start(config_of(sandbox, turns))
    watch = Watch()
    counted = Watched(engine, watch)
    looking = asyncio.create_task(watch.look_for_ever())
    try:
        async with open_pool(sandbox, "agent-vllm-benchmark") as (client, _):
            tools = ToolSet(
                [PythonTool({"stateful": False, "lease_timeout": 600.0}, None, ToolContext(sandboxes=client))]
            )
            chat = ChatFormat(
                AutoTokenizer.from_pretrained(MODEL), tools.schemas, template=load_template("chatml_hermes")
            )
            code = f"import time; time.sleep({tool_s}); print(17 * 23)"
            limits = AgentLimits(max_response_tokens=turns * RESPONSE_TOKENS_PER_TURN, max_assistant_turns=turns)
            loop = AgentLoop(chat=chat, parser=AlwaysCalls(code), tools=tools, limits=limits)
            before, started = engine.load(), time.perf_counter()
            plays = await asyncio.gather(*(play(loop, counted, watch, number) for number in range(count)))
            seconds, after = time.perf_counter() - started, engine.load()
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        engine.close()
    short = [played for played in plays if len(played.turns) != turns]
    if short:
        raise SystemExit(
            f"{len(short)} of {count} trajectories ended early: {short[0].status} {short[0].reward.detail}"
        )
    hits = after["prefix_hits"] - before["prefix_hits"]
    return figures(plays, counted, seconds, hits) | {"idle": watch.idle}


def figures(plays: Sequence[Trajectory], counted: Watched, seconds: float, hits: float) -> dict[str, Any]:
    turns = sum(len(played.turns) for played in plays)
    # The last token of a turn was sampled but never computed; all tokens before it were.
    possible = sum(turn.end - 1 for played in plays for turn in played.turns[:-1])
    waits = sum(call.duration_s for played in plays for call in played.calls)
    return {
        "later_turns": turns - len(plays),
        "seconds": seconds,
        "trajectories_per_s": len(plays) / seconds,
        "sampled_tokens_per_s": sum(int(played.response_mask.sum()) for played in plays) / seconds,
        "tool_wait_s_per_trajectory": waits / len(plays),
        "hit_rate_of_later_turns": hits / counted.later_tokens,
        "hit_rate_of_what_is_possible": hits / possible,
        "mean_prompt_tokens_of_first_turns": counted.first_tokens / len(plays),
        "mean_prompt_tokens_of_later_turns": counted.later_tokens / (turns - len(plays)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=16, help="trajectories, all at once")
    parser.add_argument("--turns", type=int, default=10, help="of each; at least 2")
    parser.add_argument("--tool-s", type=float, default=0.5, help="seconds that each tool call sleeps in its sandbox")
    options = parser.parse_args()
    if not MODEL.exists():
        raise SystemExit(f"there is no {MODEL}; run: rayapp model fetch smollm2-135m")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    found = asyncio.run(measure(options.n, options.turns, options.tool_s))
    ratios = {name: found[name] for name in ("hit_rate_of_later_turns", "hit_rate_of_what_is_possible")}
    print_report(options, ratios | {"busy": 1 - found["idle"]}, **found)


if __name__ == "__main__":
    main()

"""Speed of one GRPO step, of rayapp and of TRL's GRPOTrainer, with the same model, prompts, reward code and cores. The
two alternate in one run, and each is first in every other round.

    python -m benchmarks.grpo_step [--rounds 5] [--json] [key.sub=value ...]
    python -m benchmarks.grpo_step --config CONFIG --trl-python PYTHON [--trl-weights float32] [--verl-python PYTHON]

rayapp's step uses the actors of `rayapp train` (vLLM server, sandbox pool, rollout worker, learner), called in the
order of the driver's loop. TRL runs in its own environment (made on the first call under benchmarks/.envs), with the
settings that are fastest on this machine; its rewards come from rayapp's sandboxes. While one works, the other waits.
Sizes are those of CONFIG, or without it a CPU's. On a GPU (`cluster.device: gpu`) both use it: TRL samples with vLLM,
so its interpreter, `--trl-python`, needs `trl[vllm]`, and each needs memory beside what the other keeps. `--trl-weights
float32` gives TRL's optimizer the float32 weights that rayapp's has. With `--verl-python` verl trains as many steps
before (`benchmarks/verl_peer.py`). The output has medians over the rounds after one warm-up round, and the parts of
rayapp's step, which add up to the whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.trl_peer import TRL_VERSION, TrlPeer, make_environment
from benchmarks.verl_peer import VERL_VERSION, run_verl
from rayapp.config.config import Config
from rayapp.config.loading import load_config
from rayapp.core.protocols import SandboxSource, Task
from rayapp.core.timing import Phases
from rayapp.core.types import GroupSummary, Prompt
from rayapp.driver.cluster import Cluster, open_cluster
from rayapp.rollout.agents import render_prompts
from rayapp.rollout.order import Cohort, GroupRequest, scoring_seed
from rayapp.sandbox.pool.client import PoolClient
from rayapp.sandbox.providers import local_provider
from rayapp.storage.models.tokenizer import load_tokenizer
from rayapp.tasks.loading import load_tasks

CPU_CONFIG = Path("configs/coding_cpu.yaml")
CPU_SIZES = [
    "rollout.group_size=16",
    "rollout.max_completion_tokens=128",
    "train.groups_per_step=2",
    "server.kv_cache_gib=1",
]
PARTS = ("generate", "score", "old_log_probs", "forward_backward", "optimizer", "weight_sync", "idle")


async def _run_group(cluster: Cluster, request: GroupRequest) -> tuple[GroupSummary, Any]:
    with cluster.router.placed(request) as placed:
        return await cluster.rollout_workers[request.group_id % len(cluster.rollout_workers)].run_group(placed)


async def our_step(cluster: Cluster, step: int) -> dict[str, Any]:
    """Run one step as the driver's loop does, without recording it."""
    groups = cluster.config.train.groups_per_step
    phases = Phases()
    with phases("rollout"):
        requests = [
            GroupRequest(
                group_id=(step - 1) * groups + place,
                policy_version=step - 1,
                cohort=Cohort(place=place, size=groups),
            )
            for place in range(groups)
        ]
        results = await asyncio.gather(*(_run_group(cluster, request) for request in requests))
    summaries = tuple(summary for summary, _ in results)
    with phases("train"):
        await cluster.lend_gpus()
        learner = await cluster.learners.train_step(step, summaries, [ref for _, ref in results])
    with phases("weight_sync"):
        await cluster.sync_weights(step)
    timings = phases.metrics(summaries)
    num_tokens = sum(int(summary.num_response_tokens.sum()) for summary in summaries)
    return {
        "step": timings["timing_s/step"],
        "completion_tokens": num_tokens,
        "parts": _parts(timings, learner),
        "learner": learner,
        "reward": statistics.fmean(float(summary.rewards.mean()) for summary in summaries),
    }


def _parts(timings: dict[str, float], learner: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each part of a step. `score` is the scoring time that does not overlap with generation;
    `idle` is the rest.
    """
    parts = {
        "generate": timings["timing_s/generate"],
        "score": timings["timing_s/score"],
        "old_log_probs": learner["timing_s/learner/old_log_probs"],
        "forward_backward": learner["timing_s/learner/forward_backward"],
        "optimizer": learner["timing_s/learner/optimizer"],
        "weight_sync": timings["timing_s/weight_sync"],
    }
    return parts | {"idle": timings["timing_s/step"] - sum(parts.values())}


class OurRewards:
    """Scores TRL's completions with the code that scores rayapp's completions."""

    def __init__(self, config: Config, sandboxes: SandboxSource, tasks: list[Task], prompts: list[Prompt]) -> None:
        self._sandboxes, self._tasks, self._prompts, self._seed = sandboxes, tasks, prompts, config.run.seed
        self._calls = 0

    async def __call__(self, completions: list[dict[str, Any]]) -> list[float]:
        self._calls += 1
        seed = scoring_seed(self._calls, seed=self._seed)
        return await asyncio.gather(*(self._value(c["index"], c["text"], seed) for c in completions))

    async def _value(self, index: int, text: str, seed: int) -> float:
        task, prompt = self._tasks[index], self._prompts[index]
        reward = await task.score(prompt, _cut(text, prompt), self._sandboxes, seed=seed)
        return reward.value


def _cut(text: str, prompt: Prompt) -> str:
    """Remove the stop text from a completion: transformers keeps it, vLLM removes it."""
    for stop in prompt.stop:
        text = text.partition(stop)[0]
    return text


async def run(
    config: Config, rounds: int, trl_python: Path | None, trl_weights: str, verl_python: Path | None
) -> dict[str, Any]:
    import torch
    import transformers

    tasks = list(load_tasks(config.tasks))
    tokenizer = load_tokenizer(config.model, config.agent.chat_template_kwargs)
    prompts = render_prompts(tasks, tokenizer, config.rollout.max_prompt_tokens)
    python = trl_python or make_environment(torch.__version__, transformers.__version__)
    report: dict[str, Any] = {"machine": machine.describe(), "limits": machine.measure_limits(), "trl": TRL_VERSION}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work = _work(config, prompts, folder, trl_weights) | {"num_steps": rounds + 1}
        if verl_python is not None:
            messages = [[dict(message) for message in prompt.messages] for prompt in prompts]
            of_verl = await asyncio.to_thread(run_verl, verl_python, work, messages)
            report |= {"verl": VERL_VERSION, "of_verl": _of_peer(of_verl)}
            _note(f"verl has run {len(of_verl)} steps")
        cluster = await stack.enter_async_context(open_cluster(config))
        await cluster.sync_weights(0)
        _note("our actors are ready")
        sandboxes = PoolClient(
            cluster.pool, local_provider(config.sandbox), holder="trl", ttl_s=config.sandbox.lease_ttl_s
        )
        stack.push_async_callback(sandboxes.close)
        rewards = OurRewards(config, sandboxes, tasks, prompts)
        peer = await TrlPeer.start(python, work, rewards, HERE / ".envs" / "trl.log")
        stack.push_async_callback(peer.close)
        _note("TRL is ready")
        ours, theirs = [], []
        for number in range(rounds + 1):
            for side in ("ours", "TRL") if number % 2 == 0 else ("TRL", "ours"):
                result = await (our_step(cluster, number + 1) if side == "ours" else peer.step())
                (ours if side == "ours" else theirs).append(result)
                _note(_line(number, side, result))
    report |= _summary(ours[1:], theirs[1:], report["limits"], config)
    if "of_verl" in report:
        rates = [report[side]["completion_tokens_per_s"]["median"] for side in ("ours", "of_verl")]
        report["ratios"]["completion_tokens_per_s_of_verl"] = rates[0] / rates[1]
    return report


HERE = Path(__file__).resolve().parent


def _work(config: Config, prompts: list[Prompt], folder: Path, weights: str) -> dict[str, Any]:
    return {
        "model": str(Path(config.model.path).resolve()),
        "prompts": [prompt.text for prompt in prompts],
        "stop": sorted({stop for prompt in prompts for stop in prompt.stop}),
        "groups_per_step": config.train.groups_per_step,
        "group_size": config.rollout.group_size,
        "max_prompt_tokens": config.rollout.max_prompt_tokens,
        "max_completion_tokens": config.rollout.max_completion_tokens,
        "lr": config.learner.optimizer.lr,
        "seed": config.run.seed,
        "threads": machine.describe()["cores"],
        "device": config.cluster.device,
        "weights": weights,
        "gpu_memory_utilization": config.server.gpu_memory_utilization,
        "max_model_tokens": config.max_model_tokens,
        "output_dir": str(folder),
    }


def _line(number: int, side: str, result: dict[str, Any]) -> str:
    label = f"round {number}" if number else "warming up"
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result["parts"].items())
    return f"{label}: {side} {result['completion_tokens']} tokens in {result['step']:.1f} s ({parts})"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _summary(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], limits: dict[str, float], config: Config
) -> dict[str, Any]:
    rates = [[r["completion_tokens"] / r["step"] for r in side] for side in (ours, theirs)]
    return {
        "rounds": len(ours),
        "ratios": {"completion_tokens_per_s_of_trl": statistics.median(rates[0]) / statistics.median(rates[1])},
        "ours": {
            "completion_tokens_per_s": _spread(rates[0]),
            "step_s": _spread([r["step"] for r in ours]),
            "completion_tokens": _spread([r["completion_tokens"] for r in ours]),
            "parts_s": {name: statistics.fmean(r["parts"][name] for r in ours) for name in PARTS},
            "share_of_limit": _shares(ours, limits, config) if config.cluster.device == "cpu" else {},
        },
        "theirs": _of_peer(theirs),
    }


def _of_peer(steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "completion_tokens_per_s": _spread([step["completion_tokens"] / step["step"] for step in steps]),
        "step_s": _spread([step["step"] for step in steps]),
        "completion_tokens": _spread([step["completion_tokens"] for step in steps]),
        "parts_s": {
            name: statistics.fmean(step["parts"].get(name, 0.0) for step in steps) for name in steps[0]["parts"]
        },
    }


def _shares(ours: list[dict[str, Any]], limits: dict[str, float], config: Config) -> dict[str, float]:
    """Return the share of the hardware's limit that each part reaches: of the rate of matrix products for learner and
    engine, of memory bandwidth for the optimizer.
    """
    import transformers

    model = transformers.AutoConfig.from_pretrained(config.model.path)
    matrices, head = _num_weights(model)
    flops = sum(
        6 * matrices * r["learner"]["learner/tokens_computed"]
        + 6 * head * r["learner"]["learner/tokens_trained"] * r["learner"]["learner/share_computed"]
        for r in ours
    )
    seconds = {name: sum(r["parts"][name] for r in ours) for name in PARTS}
    weights = matrices + head
    # In a step, AdamW reads weight, gradient and two moments, and writes all but the gradient: 28 bytes per weight. The
    # norm reads the gradient once more.
    optimizer_bytes = 32 * weights * len(ours)
    return {
        "forward_backward_of_gemm_peak": flops
        / max(seconds["forward_backward"], 1e-9)
        / 1e9
        / limits["gemm_bfloat16_gflops"],
        "optimizer_of_memory_bandwidth": optimizer_bytes
        / max(seconds["optimizer"], 1e-9)
        / 1e9
        / limits["memory_copy_gb_per_s"],
        "generate_of_gemm_peak": sum(2 * weights * r["completion_tokens"] for r in ours)
        / max(seconds["generate"], 1e-9)
        / 1e9
        / limits["gemm_bfloat16_gflops"],
    }


def _num_weights(model: Any) -> tuple[int, int]:
    """Return the number of weights in the layers' matrices, and the number in the output embedding."""
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    attention = model.hidden_size * width * (2 * model.num_attention_heads + 2 * model.num_key_value_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    return model.num_hidden_layers * layer, model.vocab_size * model.hidden_size


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="with the sizes of a step, such as benchmarks.one_gpu writes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print only the JSON report")
    parser.add_argument("--trl-python", type=Path, help="interpreter with TRL (default: one of its own, for CPUs)")
    parser.add_argument("--trl-weights", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--verl-python", type=Path, help=f"interpreter with verl=={VERL_VERSION}, vllm, transferqueue")
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    options = parser.parse_args()
    sizes = CPU_SIZES if options.config is None else []
    common = ["train.num_steps=1000", "run.name=benchmark"]
    config = load_config(options.config or CPU_CONFIG, [*sizes, *common, *options.overrides])
    if config.cluster.device == "gpu" and options.trl_python is None:
        parser.error("on a GPU --trl-python must name an interpreter with trl[vllm]")
    if config.cluster.device == "cpu" and options.verl_python is not None:
        parser.error("verl's engine needs a GPU: leave --verl-python out")
    # Start a separate Ray: a running Ray may be busy with another job, or end with that job.
    os.environ.setdefault("RAY_ADDRESS", "local")
    # Turn off Ray's memory monitor: two trainers nearly fill this machine's memory, but neither grows.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    started = time.perf_counter()
    settings = {"config": str(options.config or CPU_CONFIG), "rounds": options.rounds, "overrides": options.overrides}
    pythons = (options.trl_python, options.trl_weights, options.verl_python)
    report = {"settings": settings} | asyncio.run(run(config, options.rounds, *pythons))
    report["total_s"] = time.perf_counter() - started
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()

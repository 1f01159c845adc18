"""Checks of vLLM alone (start, sleep, wake, log-probs against the learner's) and of a learner's memory."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from rayapp.cli.gpu_check.checks import CheckContext, CheckResult, judged, model_of
from rayapp.config.config import Config
from rayapp.core.errors import DeadlineError
from rayapp.core.types import RequestId, SamplingParams
from rayapp.learner.memory.shape import GIB

MAX_LOG_PROB_DIFFERENCE = 0.05
"""Maximum mean difference over tokens; differences from bfloat16's summation order are smaller."""
MAX_FP8_DIFFERENCE = 0.3
"""Maximum mean difference over tokens with 8-bit weights, keys and values. Each token's correction allows for it."""
PROMPT_TOKENS = 64
KEPT_S = 120.0


def engine_tp1(context: CheckContext) -> CheckResult:
    """Check an engine on one GPU: tokens/s, sleep and wake, and log-probs against the learner's."""
    return _engine(context, tensor_parallel=1)


def engine_eager(context: CheckContext) -> CheckResult:
    """Check an engine on one GPU without torch.compile and CUDA graphs, which the other checks use."""
    return _engine(context, tensor_parallel=1, enforce_eager=True)


def engine_fp8(context: CheckContext) -> CheckResult:
    """Check an engine whose weights and KV cache are rounded to 8 bits."""
    rounding = "fp8_per_block" if context.on_gpu else "fp8_per_channel"
    return _engine(context, tensor_parallel=1, quantization=rounding, kv_cache_dtype="fp8")


def engine_tp2(context: CheckContext) -> CheckResult:
    """Check an engine over two GPUs."""
    return _engine(context, tensor_parallel=2)


def _engine(context: CheckContext, tensor_parallel: int, **server: object) -> CheckResult:
    config = engine_config(context, model_of(context), tensor_parallel, **server)
    found = asyncio.run(_use_engine(config, context))
    tokens, own = found.pop("tokens"), found.pop("own")
    # vLLM has a process group in this process; the learner needs its own, hence its own process.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        learners = process.submit(_learner_log_probs, config, tokens).result()
    found["log_prob_difference"] = float(np.abs(learners - own).mean())
    found["most"] = MAX_FP8_DIFFERENCE if config.server.is_rounded else MAX_LOG_PROB_DIFFERENCE
    return judge_engine(found)


def engine_config(context: CheckContext, model: str, tensor_parallel: int, **server: object) -> Config:
    """Return a config for one engine and one learner: colocated, so that the engine can sleep."""
    return Config.model_validate(
        {
            "model": {"path": model},
            "cluster": {"device": context.device, "placement": "colocated"},
            "algorithm": {"rollout_correction": {"level": "token"}},
            "rollout": {"max_prompt_tokens": PROMPT_TOKENS, "max_completion_tokens": 192 if context.on_gpu else 32},
            "server": {
                "tensor_parallel_size": tensor_parallel, "gpu_memory_utilization": 0.5, "kv_cache_gib": 1,
                "weight_transport": "object_store", **server,
            },
            "learner": {"num_learners": tensor_parallel, "max_tokens_per_microbatch": 8192},
        }
    )  # fmt: skip


async def _use_engine(config: Config, context: CheckContext) -> dict[str, Any]:
    from rayapp.engine.vllm import VllmEngine

    started = time.monotonic()
    engine = await VllmEngine.start(config)
    found: dict[str, Any] = {"start_s": time.monotonic() - started, **await engine.facts()}
    try:
        prompt = list(range(2, 2 + PROMPT_TOKENS // 2))
        count, length = (64 if context.on_gpu else 2), config.rollout.max_completion_tokens
        sampling = SamplingParams(max_tokens=length, temperature=1.0, seed=0)
        started = time.monotonic()
        requests = [engine.generate(RequestId("group", i), prompt, sampling, cohort_size=count) for i in range(count)]
        completions = await asyncio.gather(*requests)
        tokens = sum(len(completion.token_ids) for completion in completions)
        found["tokens_per_s"] = tokens / (time.monotonic() - started)
        sequence = [*prompt, *completions[0].token_ids]
        found |= await _sleep_and_wake(engine)
        found["tokens_after_sleep"] = await _tokens_over_a_sleep(engine, prompt, sampling)
        found |= {"tokens": np.array(sequence, np.int64), "own": await engine.prompt_log_probs(sequence)}
    finally:
        engine.close()
    return found


async def _sleep_and_wake(engine: Any) -> dict[str, float]:
    """Let the engine sleep and wake; return seconds and freed GiB. Empty on a CPU, where vLLM can't sleep."""
    before, started = _free_gib(), time.monotonic()
    if not await engine.sleep():
        return {}
    slept, asleep = time.monotonic(), _free_gib()
    await engine.wake()
    return {"sleep_s": slept - started, "wake_s": time.monotonic() - slept, "freed_gib": asleep - before}


async def _tokens_over_a_sleep(engine: Any, prompt: list[int], sampling: SamplingParams) -> int:
    """Let the engine sleep in the middle of a completion; return the number of tokens that it sampled after it woke.

    Raises:
        DeadlineError: the completion did not go on.
    """
    told: list[int] = []
    has_begun = asyncio.Event()

    def tell(tokens: Sequence[int]) -> None:
        told.extend(tokens)
        has_begun.set()

    running = asyncio.create_task(engine.generate(RequestId("group", 1 << 20), prompt, sampling, tell))
    try:
        async with asyncio.timeout(KEPT_S):
            await has_begun.wait()
            await engine.sleep(keeps_requests=True)
            before = len(told)
            await engine.wake()
            return len((await running).token_ids) - before
    except TimeoutError:
        raise DeadlineError(
            f"vLLM slept and woke during a completion, and the completion did not end within {KEPT_S:g} s"
        ) from None
    finally:
        running.cancel()


def _free_gib() -> float:
    import torch

    return torch.cuda.mem_get_info(0)[0] / GIB if torch.cuda.is_available() else 0.0


def judge_engine(found: dict[str, Any]) -> CheckResult:
    """Judge an engine that started and answered."""
    difference, most = found["log_prob_difference"], found.get("most", MAX_LOG_PROB_DIFFERENCE)
    figure = (
        f"up in {found['start_s']:.0f} s, {found['tokens_per_s']:.0f} tokens/s, log-probs differ by {difference:.2g}"
    )
    if "freed_gib" in found:
        figure += f"; asleep in {found['sleep_s']:.1f} s, awake in {found['wake_s']:.1f} s"
        figure += f", {found['freed_gib']:.1f} GiB given back"
    if not difference <= most:
        cure = "use the same dtype for learner and engine; if they still differ, report the problem with this file"
        return judged(figure, f"more than {most} from the learner's", cure, **found)
    if found.get("freed_gib", 1.0) <= 0:
        return judged(figure, "sleep freed no memory", "use cluster.placement=split, and report the problem", **found)
    return judged(figure, **found)


def _learner_log_probs(config: Config, tokens: np.ndarray) -> np.ndarray:
    """Return log-probs (T-1,) of each token given the earlier ones, by the learner's own code on the first GPU."""
    import torch

    from rayapp.learner.batch import TrainItem, make_micro_batch
    from rayapp.learner.distributed import only_rank
    from rayapp.learner.log_probs import HeadOptions
    from rayapp.learner.memory.simulation import plain_trajectory
    from rayapp.learner.policy import load_policy, to_device

    with only_rank(config) as ranks:
        model = load_policy(config, ranks.mesh, trainable=False)
        trajectory = plain_trajectory(tokens.astype(np.int32), 1)
        item = TrainItem(row=0, group=0, trajectory=trajectory, advantages=np.ones(tokens.size - 1, np.float32))
        batch = to_device(make_micro_batch([item], share_prefixes=False), ranks.device)
        with torch.no_grad():
            scores = model(batch, HeadOptions(temperature=1.0, chunk_rows=1024))
        found: np.ndarray = scores.log_probs[0].float().cpu().numpy()
        return found


def memory_against_plan(context: CheckContext) -> CheckResult:
    """Compare a learner's peak GPU memory over two steps with the plan's. Needs a GPU: torch counts no CPU memory."""
    import torch

    from rayapp.learner.build import build_learner
    from rayapp.learner.distributed import only_rank
    from rayapp.learner.memory.plan import plan_learner
    from rayapp.learner.memory.shape import model_shape
    from rayapp.learner.memory.simulation import full_step

    config = memory_config(context)
    with only_rank(config) as ranks:
        learner = build_learner(config, ranks)
        summaries, shares, groups = full_step(config)
        for step in (1, 2):
            torch.cuda.reset_peak_memory_stats(ranks.device)
            learner.train_step(step, summaries, shares, groups)
        taken = torch.cuda.max_memory_allocated(ranks.device)
        free, total = torch.cuda.mem_get_info(ranks.device)
        outside = total - free - torch.cuda.memory_reserved(ranks.device)
    plan = plan_learner(model_shape(config), config)
    return judge_memory(taken, plan.total - plan.runtime, outside, plan.runtime)


def memory_config(context: CheckContext) -> Config:
    """Return a config with full micro-batches and a model with a realistic vocabulary."""
    from rayapp.cli.gpu_check.checks import LARGE, random_model

    model = context.model or str(random_model(Path(context.folder) / "model", LARGE, vocabulary=65536))
    return Config.model_validate(
        {
            "model": {"path": model},
            "cluster": {"device": context.device},
            "rollout": {"group_size": 8, "max_prompt_tokens": 256, "max_completion_tokens": 768},
            "learner": {"max_tokens_per_microbatch": 8192, "activation_checkpointing": bool(context.model)},
        }
    )


MAX_PLAN_ERROR = 0.15


def judge_memory(taken: int, planned: int, outside: int, assumed_outside: int) -> CheckResult:
    """Compare torch's allocation with the planned tensors, and CUDA's own memory with the plan's assumption (bytes)."""
    figure = (
        f"{taken / GIB:.2f} GiB of tensors, {planned / GIB:.2f} planned; {outside / GIB:.2f} GiB of CUDA, "
        f"{assumed_outside / GIB:.2f} assumed"
    )
    error = abs(taken - planned) / planned
    problem = f"the plan is off by {error:.0%}" if error > MAX_PLAN_ERROR else ""
    if outside > 2 * assumed_outside:
        problem = problem or "CUDA takes more than twice what the plan assumes"
    cure = "leave more memory free than `rayapp plan` says, and report the problem with this file"
    return judged(figure, problem, cure, taken=taken, planned=planned, outside=outside)

"""Runs on one GPU, in the order of their worth, the jobs of docs/results.md ("What waits for a GPU"), and ends in time.

    python -m benchmarks.one_gpu OUT [--minutes 10] [--only step,adapters] [--tiny]

OUT/one_gpu.json has, for each job, exit code, seconds, the medians of its steps after the second, and from its profile
the share of the time in which the GPU computes, with its longest kernels; OUT/one_gpu.tar.gz has consoles, metrics and
profiles. Both are written anew after each job. A job that is still running when its time is over is ended.

The policy has Qwen3-1.7B's shape with random weights, or with `--tiny` two small layers, for a trial on a CPU. Jobs
that only have to end run side by side, with a small policy. OUT/policy/config.yaml also fits `benchmarks.grpo_step`.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import signal
import statistics
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import ROOT, describe

WORDS = 151_936
LARGE = {
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 6144,
    "vocab_size": WORDS,
}
SMALL = LARGE | {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1536, "vocab_size": 8192}
TINY = SMALL | {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 512}
NUM_PROMPTS, PROMPT_TOKENS = 8, 120
TASK = '''"""Pays by a checksum of the text: no code runs, and rewards of a group differ."""

import zlib
from dataclasses import dataclass

import numpy as np

from rayapp.core.types import Prompt, Reward

MESSAGE = {"role": "user", "content": CONTENT}


@dataclass(frozen=True)
class Checksum:
    name: str

    def render(self, tokenizer):
        text = MESSAGE["content"] + " "
        token_ids = np.array(tokenizer.encode(text), np.int32)
        return Prompt(task=self.name, text=text, token_ids=token_ids, messages=(MESSAGE,))

    async def score(self, prompt, completion_text, sandboxes, *, seed):
        return Reward(value=zlib.crc32(completion_text.encode()) % 1000 / 1000, terms={})


TASK = Checksum(name=NAME)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    overrides: tuple[str, ...] = ()
    num_steps: int = 4
    is_alone: bool = True  # with the large policy; the others share the GPU, with a small one
    timeout_s: float = 240.0


TOKENS = "rollout.max_completion_tokens"
FP8 = ("server.quantization=fp8_per_block", "server.kv_cache_dtype=fp8", "algorithm.rollout_correction.level=token")
PARTIAL = ("train.partial_rollouts=true", "train.max_staleness=1", "train.extra_groups=8")
JOBS = {
    "step": Job(num_steps=7, overrides=("train.profile_steps=[5]",)),
    "engine": Job(),  # vLLM's own `LLM.generate`: the tokens of one step
    "adapters": Job(is_alone=False, overrides=("learner.lora.rank=16",)),
    "deterministic": Job(is_alone=False, overrides=("run.deterministic=true",)),
    "deterministic_again": Job(is_alone=False, overrides=("run.deterministic=true",)),
    "fp8": Job(is_alone=False, overrides=FP8),
    "partial": Job(is_alone=False, overrides=PARTIAL),
    "asynchronous": Job(is_alone=False, overrides=("train.max_staleness=1",)),
    "long": Job(overrides=("train.groups_per_step=4", "rollout.group_size=4", f"{TOKENS}=3968"), num_steps=3),
    "many": Job(overrides=("train.groups_per_step=32", "rollout.group_size=8", f"{TOKENS}=2048"), num_steps=2),
    "uncompiled": Job(overrides=("learner.compile=false",)),
    "microbatch_8192": Job(overrides=("learner.max_tokens_per_microbatch=8192",)),
    "chunk_1024": Job(overrides=("learner.log_prob_chunk_tokens=1024",)),
    "bucket_1024": Job(overrides=("server.weight_bucket_mib=1024",)),
}
ON_GPUS = {"fp8"}


def write_policy(folder: Path, shape: Mapping[str, int], *, on_gpu: bool, is_shared: bool, steps: int = 8) -> Path:
    """Write a policy with random weights, its tasks and the config of its step. Return the config's path."""
    from transformers import Qwen3Config

    from rayapp.cli.smoke import save_random, save_words
    from rayapp.config.loading import load_config

    model, source = folder / "model", folder / "shape"
    Qwen3Config(
        **shape,
        head_dim=max(32, shape["hidden_size"] // shape["num_attention_heads"]),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    ).save_pretrained(source)
    save_words(source, shape["vocab_size"])
    tasks = [folder / f"task{number}.py" for number in range(NUM_PROMPTS)]
    for number, task in enumerate(tasks):
        words = " ".join(f"w{(37 * number + place) % 400 + 2}" for place in range(PROMPT_TOKENS))
        task.write_text(TASK.replace("CONTENT", repr(words)).replace("NAME", repr(task.stem)))
    config = {
        "run": {"output_dir": str(folder), "resume": "never"},
        "model": {"path": str(source)},
        "tasks": [str(task) for task in tasks],
        "cluster": {"device": "gpu" if on_gpu else "cpu", "address": "local", "dashboard": False}
        | ({"num_gpus": 1, "placement": "colocated"} if on_gpu else {}),
        "rollout": {"group_size": 16, "max_prompt_tokens": 128, "max_completion_tokens": 512 if on_gpu else 32},
        "train": {"groups_per_step": 8, "num_steps": steps},
        "server": {"max_num_seqs": 256, "kv_cache_gib": 4 if is_shared else 36 if on_gpu else 1},
        "learner": {"max_tokens_per_microbatch": 16_384 if on_gpu else 1024, "optimizer": {"lr": 1e-6}},
        "checkpoint": {"every_steps": 0},
        "sandbox": {"max_leases": 1},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    save_random(load_config(path, []), model)
    path.write_text(yaml.safe_dump(config | {"model": {"path": str(model)}}))
    return path


async def run_job(name: str, job: Job, config: Path, timeout_s: float) -> dict[str, Any]:
    """Run a job in processes of its own, and end them when its time is over. Return its figures."""
    folder = config.parent / name
    console = config.parent / f"{name}.log"
    command = ["rayapp", "train", str(config), f"run.name={name}", f"train.num_steps={job.num_steps}", *job.overrides]
    if name == "engine":
        command = ["benchmarks.one_gpu", "--engine", str(config)]
    started = time.monotonic()
    with console.open("w") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, stdout=out, stderr=out, cwd=ROOT, start_new_session=True
        )
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await process.wait()
        finally:
            if process.returncode is None:
                await _end(process)
    seconds = time.monotonic() - started
    found: dict[str, Any] = {"exit_code": process.returncode, "seconds": round(seconds, 1)}
    if process.returncode:
        found["console"] = console.read_text(errors="replace")[-1500:]
    if name == "engine":
        lines = [line for line in console.read_text(errors="replace").splitlines() if line.startswith("{")]
        return found | {"generate": [json.loads(line) for line in lines]}
    steps = read_steps(folder)
    if steps:
        found |= {"first_step_s": steps[0]["timing_s/step"], "steps": len(steps), "medians": medians(steps)}
    profiles = sorted(folder.glob("profiles/*/*.json.gz"))
    return found | {"profiles": {path.name: busy(json.loads(gzip.decompress(path.read_bytes()))) for path in profiles}}


async def _end(process: asyncio.subprocess.Process) -> None:
    # As Ctrl-C does: the run then ends its Ray and its engine.
    for stop, patience_s in ((signal.SIGINT, 20.0), (signal.SIGKILL, 5.0)):
        os.killpg(process.pid, stop)
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
                return
        except TimeoutError:
            continue


def read_steps(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [step for line in lines if "timing_s/step" in (step := json.loads(line))]


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the medians of each metric over the steps after the second, or over the last."""
    chosen = steps[2:] or steps[-1:]
    names = [name for name in chosen[0] if all(isinstance(step.get(name), int | float) for step in chosen)]
    return {name: statistics.median(step[name] for step in chosen) for name in names}


def differing(first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the metrics, but for seconds and memory, that differ between two runs; `steps` if one ended earlier."""
    left_out = ("timing_s/", "throughput/", "perf/", "memory/", "storage/")
    names = {name for step in (*first, *second) for name in step}
    names = {name for name in names if not name.startswith(left_out) and not name.endswith("_s")}
    pairs = list(zip(first, second, strict=False))
    found = {name for name in names if any(one.get(name) != other.get(name) for one, other in pairs)}
    return sorted(found | ({"steps"} if len(first) != len(second) or not first else set()))


def busy(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return, from a Chrome trace, the milliseconds between a GPU's first and last kernel, the share of them in which
    it computes, and the ten longest kernels with their milliseconds and numbers."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return {"kernels": 0}
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    covered, end = 0.0, spans[0][0]
    for start, stop in spans:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in kernels:
        total[event["name"][:100]] += event["dur"]
        count[event["name"][:100]] += 1
    longest = [f"{dur / 1000:.2f} ms in {count[name]}: {name}" for name, dur in total.most_common(10)]
    whole = end - spans[0][0]
    return {"kernels": len(kernels), "ms": whole / 1000, "busy": covered / whole, "longest": longest}


def generate_alone(path: Path) -> None:
    """Print the seconds in which vLLM's own `LLM` samples the tokens of a step, three times."""
    from vllm import LLM, SamplingParams

    from rayapp.config.loading import load_config
    from rayapp.engine.vllm_arguments import is_on_gpu, set_process_environment, vllm_args
    from rayapp.storage.models.tokenizer import load_tokenizer
    from rayapp.tasks.loading import load_tasks

    config = load_config(path, [])
    set_process_environment(config)
    engine = LLM(**vllm_args(config))
    tokenizer = load_tokenizer(config.model, config.agent.chat_template_kwargs)
    prompts = [task.render(tokenizer).token_ids.tolist() for task in load_tasks(config.tasks)]
    section = config.rollout
    for number in range(3):
        common = {"temperature": 1.0, "max_tokens": section.max_completion_tokens, "logprobs": 0}
        seeds = [number * 1000 + place for place in range(len(prompts) * section.group_size)]
        # vLLM's first model runner, on CPUs, fails with seeds.
        params = [SamplingParams(**common, seed=seed if is_on_gpu(config.cluster) else None) for seed in seeds]
        given = [{"prompt_token_ids": ids} for ids in prompts for _ in range(section.group_size)]
        started = time.perf_counter()
        outputs = engine.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


def write_report(out: Path, report: Mapping[str, Any]) -> None:
    (out / "one_gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    with tarfile.open(out / "one_gpu.tar.gz", "w:gz") as archive:
        for path in sorted(_worth_keeping(out)):
            archive.add(path, path.relative_to(out))


def _worth_keeping(out: Path) -> Iterable[Path]:
    yield from out.glob("*/*.log")
    yield from out.glob("*/*/metrics.jsonl")
    yield from (path for path in out.glob("*/*/profiles/*/*.json.gz") if path.stat().st_size < 8 << 20)


async def run(out: Path, names: Sequence[str], minutes: float, *, is_tiny: bool) -> dict[str, Any]:
    import torch

    on_gpu, end = torch.cuda.is_available() and not is_tiny, time.monotonic() + 60 * minutes
    report: dict[str, Any] = {"machine": describe(), "jobs": {}}
    names = [name for name in names if on_gpu or name not in ON_GPUS]
    large, small = (TINY, TINY) if is_tiny else (LARGE, SMALL)
    alone = write_policy(out / "policy", large, on_gpu=on_gpu, is_shared=False)
    together = write_policy(out / "small", small, on_gpu=on_gpu, is_shared=True)
    waves = [[name] for name in names if JOBS[name].is_alone]
    if others := [name for name in names if not JOBS[name].is_alone]:
        waves.insert(min(2, len(waves)), others)
    for wave in waves:
        left = end - time.monotonic()
        if left < 60:
            report["jobs"] |= {name: {"not_run": "no time was left"} for name in wave}
            continue
        configs = {name: alone if JOBS[name].is_alone else together for name in wave}
        results = await asyncio.gather(
            *(run_job(name, JOBS[name], configs[name], min(left - 25, JOBS[name].timeout_s)) for name in wave)
        )
        report["jobs"] |= dict(zip(wave, results, strict=True))
        if "deterministic_again" in wave:
            twice = [read_steps(together.parent / name) for name in ("deterministic", "deterministic_again")]
            report["differing"] = differing(*twice)
        write_report(out, report)
        print(f"{', '.join(wave)}: {end - time.monotonic():.0f} s left", flush=True)
    write_report(out, report)
    return report


def table(report: Mapping[str, Any]) -> Iterable[str]:
    shown = ("step", "generate", "train", "learner/forward_backward", "weight_sync")
    yield f"{'job':<20}{'exit':>5}{'first':>8}" + "".join(f"{name[-16:]:>17}" for name in shown)
    for name, job in report["jobs"].items():
        seconds = [job.get("first_step_s"), *(job.get("medians", {}).get(f"timing_s/{part}") for part in shown)]
        cells = ["-" if value is None else f"{value:.2f}" for value in seconds]
        yield f"{name:<20}{job.get('exit_code', '-')!s:>5}{cells[0]:>8}" + "".join(f"{cell:>17}" for cell in cells[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("outputs/one_gpu"))
    parser.add_argument("--minutes", type=float, default=10.0, help="no job runs longer")
    parser.add_argument("--only", default=",".join(JOBS), help="names of jobs (default: all)")
    parser.add_argument("--tiny", action="store_true", help="two small layers on a CPU")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        generate_alone(options.engine)
        return 0
    names = options.only.split(",")
    if unknown := sorted(set(names) - set(JOBS)):
        parser.error(f"there is no job {unknown[0]}; there are: {', '.join(JOBS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(run(options.out.resolve(), names, options.minutes, is_tiny=options.tiny))
    print(*table(report), f"written: {options.out / 'one_gpu.json'}", sep="\n")
    return int(any(job.get("exit_code", 1) for job in report["jobs"].values()))


if __name__ == "__main__":
    sys.exit(main())

"""Checks that run `rayapp train` for three steps with a small model: a real run, except for its size."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from rayapp.cli.gpu_check.checks import TASK, CheckContext, CheckResult, first_devices, judged, model_of
from rayapp.runs.tracking.metrics import read_metrics

NUM_STEPS = 3
MAX_LOG_PROB_DIFFERENCE = 0.05


def train_split(context: CheckContext) -> CheckResult:
    """Train with servers and learners on separate GPUs; over NCCL, or through Ray on a CPU."""
    return _train(context, "split", "nccl" if context.on_gpu else "object_store")


def train_split_store(context: CheckContext) -> CheckResult:
    """Train with servers and learners on separate GPUs; weights are sent through Ray's object store, as to a restarted
    server."""
    return _train(context, "split", "object_store")


def train_colocated(context: CheckContext) -> CheckResult:
    """Train with servers and learners that take turns on the same GPUs; weights are sent over CUDA IPC."""
    return _train(context, "colocated", "ipc" if context.on_gpu else "object_store")


def train_adapters(context: CheckContext) -> CheckResult:
    """Train only adapters, on shared GPUs; the adapters are sent to servers through Ray's object store."""
    return _train(context, "colocated", "object_store", {"learner": {"lora": {"rank": 8, "alpha": 16}}})


def train_partial(context: CheckContext) -> CheckResult:
    """Train on shared GPUs with partial rollouts: servers sleep with requests in flight, which continue after the
    sync."""
    kept: dict[str, dict[str, Any]] = {
        "train": {"max_staleness": 1, "partial_rollouts": True},
        "algorithm": {"rollout_correction": {"level": "token"}},
    }
    return _train(context, "colocated", "ipc" if context.on_gpu else "object_store", kept)


def train_async(context: CheckContext) -> CheckResult:
    """Train asynchronously: servers sample ahead while learners train, and new weights reach requests in flight."""
    sampling: dict[str, dict[str, Any]] = {
        "train": {"max_staleness": 1},
        "algorithm": {"rollout_correction": {"level": "token"}},
    }
    return _train(context, "split", "nccl" if context.on_gpu else "object_store", sampling)


def _train(
    context: CheckContext, placement: str, transport: str, changes: Mapping[str, Mapping[str, Any]] | None = None
) -> CheckResult:
    (context.folder / "letters.py").write_text(TASK)
    config = run_config(context, model_of(context), placement, transport)
    for section, values in (changes or {}).items():
        config[section] = {**config.get(section, {}), **values}
    file = context.folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    environment = dict(os.environ)
    if context.on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = first_devices(context.num_gpus)
    environment.pop("RAY_ADDRESS", None)
    code, lines = passed_on([sys.executable, "-m", "rayapp", "train", str(file)], environment)
    if code:
        return judged(
            f"{transport}: exit code {code}", _reason(lines), "look the message up in docs/troubleshoot.md",
            log="".join(lines)[-8000:],
        )  # fmt: skip
    metrics = context.folder / "out" / "check" / "metrics.jsonl"
    return judge_run(transport, read_metrics(metrics))


def passed_on(command: list[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run a command; return its exit code and the lines it printed. Each line is also printed here at once, so that the
    log shows how far a hanging run got."""
    lines: list[str] = []
    with subprocess.Popen(
        command, env={**environment, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, lines


def _reason(lines: list[str]) -> str:
    said = [line.rstrip() for line in lines if line.strip()]
    reasons = [line for line in said if line.startswith(("error:", "failed:"))]
    return (reasons or said or ["it said nothing"])[-1]


def run_config(context: CheckContext, model: str, placement: str, transport: str) -> dict[str, Any]:
    """Return the run's config as its YAML file holds it."""
    num = context.num_gpus if context.on_gpu else 2
    learners = num if placement == "colocated" else num // 2
    servers = learners if placement == "colocated" else num - learners
    if not context.on_gpu:
        servers = learners = 1
    length = 256 if context.on_gpu else 16
    return {
        "run": {"name": "check", "output_dir": str(context.folder / "out")},
        "model": {"path": model},
        "tasks": [str(context.folder / "letters.py")],
        "cluster": {
            "device": context.device, "placement": placement, "address": "local", "dashboard": False,
            "object_store_mib": 1024 if not context.on_gpu else 16384 if context.model else 4096,
        },
        "rollout": {"group_size": 8, "max_prompt_tokens": 64, "max_completion_tokens": length},
        "train": {"num_steps": NUM_STEPS, "groups_per_step": 8 if context.on_gpu else 1},
        "server": {
            "num_servers": servers, "gpu_memory_utilization": 0.4, "kv_cache_gib": 1, "weight_transport": transport,
        },
        "learner": {
            "num_learners": learners, "max_tokens_per_microbatch": 4096, "optimizer": {"lr": 1e-5},
            "activation_checkpointing": bool(context.model),
        },
        "checkpoint": {"every_steps": 0},
        "tracking": {"trackers": ["jsonl"]},
    }  # fmt: skip


def judge_run(transport: str, steps: list[dict[str, Any]]) -> CheckResult:
    """Judge a run that exited with 0 by its metrics."""
    rows = [row for row in steps if "learner/grad_norm" in row]
    if len(rows) < NUM_STEPS:
        figure = f"{transport}: {len(rows)} of {NUM_STEPS} steps have a gradient's norm"
        return judged(
            figure, "the other steps trained on no token, or the norm was not finite", "report it with this file"
        )
    last = rows[-1]
    gb_s = sync_gb_s(rows)
    differences = [float(row.get("rollout_probs_diff/mean", math.nan)) for row in rows]  # NaN is not recorded
    difference = max(differences, key=lambda value: (math.isnan(value), value))
    figure = (
        f"{transport} {gb_s:.3g} GB/s, a step {float(last.get('timing_s/step', math.nan)):.1f} s, sampled and trained "
        f"probabilities differ by {difference:.2g}"
    )
    details: dict[str, Any] = {"gb_s": gb_s, "difference": difference, "last": last}
    if not all(math.isfinite(float(row["learner/grad_norm"])) for row in rows):
        return judged(figure, "a gradient is not finite", "report it with this file", **details)
    if not difference <= MAX_LOG_PROB_DIFFERENCE:
        cure = (
            "servers don't hold the learners' weights: set server.weight_transport to another transport, and report "
            f"{transport}"
        )
        return judged(figure, "servers sample from other weights", cure, **details)
    return judged(figure, **details)


def sync_gb_s(rows: list[dict[str, Any]]) -> float:
    """Return the rate of the fastest weight sync in GB/s. (The first sync is slow, because it also forms the group.)"""
    rates = [
        float(row["weight_sync/bytes"])
        / (float(row["weight_sync/load_s"]) + float(row.get("weight_sync/export_s", 0.0)))
        for row in rows
        if row.get("weight_sync/load_s")
    ]
    return max(rates, default=0.0) / 1e9

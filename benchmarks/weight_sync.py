"""Time of a weight sync, compared with a memory copy of as many bytes: python -m benchmarks.weight_sync MODEL [--rounds
5]

Learner, Ray's object store, server and vLLM are real. The phases are those of a run, in the same order: export (float32
to bfloat16, into buckets), put (into the object store), copy (from the store into the memory that the engine maps), and
engine (freeze, load layer by layer, check). The baseline is `torch.Tensor.copy_` of as many bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import ray
import torch

from actors.learner import Learner
from actors.vllm_server import VllmServer
from benchmarks.report import print_report
from rayapp.config.config import Config
from rayapp.engine.weights.sync import BUCKET_BYTES


def memcpy_s(num_bytes: int) -> float:
    """Return the seconds of the best of five copies into memory that is already mapped."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(5):
        started = time.monotonic()
        target.copy_(source)
        best = min(best, time.monotonic() - started)
    return best


async def sync_once(learner: Learner, server: VllmServer, version: int) -> dict[str, float]:
    """Run one weight sync. Return the seconds of each phase, and the number of bytes."""
    started, export_s, put_s, refs = time.monotonic(), 0.0, 0.0, []
    for bucket in learner.export_weights(0, BUCKET_BYTES):
        exported = time.monotonic()
        refs.append(ray.put(bucket))
        export_s, put_s, started = export_s + exported - started, put_s + time.monotonic() - exported, time.monotonic()
    facts = await server.load_weights(version, refs)
    return {
        "bytes": facts["bytes"],
        "export_s": export_s,
        "put_s": put_s,
        "copy_s": facts["copy_s"],
        "engine_s": facts["engine_s"],
    }


async def measure(config: Config, rounds: int) -> dict[str, Any]:
    """Return medians over the rounds. The first round, which maps memory, is left out."""
    learner, server = Learner(config, 0, 1, "", 0), VllmServer(config, 0)
    await server.start()
    found, wall = [], []
    try:
        for version in range(1, rounds + 2):
            started = time.monotonic()
            found.append(await sync_once(learner, server, version))
            wall.append(time.monotonic() - started)
    finally:
        await server.close()
        learner.close()
    num_bytes = int(found[0]["bytes"])
    sync_s, copy_s = statistics.median(wall[1:]), memcpy_s(num_bytes)
    phases_s = {key: statistics.median(one[key] for one in found[1:]) for key in found[0] if key != "bytes"}
    return {
        "bytes": num_bytes,
        "phases_s": phases_s,
        "sync_s": sync_s,
        "memcpy_s": copy_s,
        "sync_bytes_per_s": num_bytes / sync_s,
        "memcpy_bytes_per_s": num_bytes / copy_s,
        "ratios": {
            "bytes_per_s_of_memcpy": copy_s / sync_s,
            "without_the_engine_of_memcpy": copy_s / (sync_s - phases_s["engine_s"]),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = Config.model_validate(
        {
            "model": {"path": args.model},
            "cluster": {"device": "cpu"},
            "rollout": {"max_prompt_tokens": 64, "max_completion_tokens": 64},
            "learner": {"max_tokens_per_microbatch": 256},
            "server": {"kv_cache_gib": 1},
        }
    )
    ray.init(address="local", object_store_memory=2 << 30, include_dashboard=False, log_to_driver=False)
    try:
        found = asyncio.run(measure(config, args.rounds))
    finally:
        ray.shutdown()
    print_report(args, found.pop("ratios"), **found)


if __name__ == "__main__":
    main()

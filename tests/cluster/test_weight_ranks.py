"""Two and four learners over gloo whose servers fail in every phase of a sync: the learners stay in step, and go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

SYNC_TIMEOUT_S = 120.0
USABLE_AFTER_S = 20.0
"""On a busy machine; the deadline, which nothing may wait for, is far above it."""

RANKS = '''
"""Imports once and forks the ranks: an import of vLLM costs more than everything that they do."""
import json, os, sys, threading, time, zlib
from dataclasses import replace
from pathlib import Path

import torch
from support import gloo, gloo_for_nccl
import actors.learner
from safetensors.torch import load_file
from actors.learner import Learner
from rayapp.config.config import Config
from rayapp.core.errors import WeightSyncError
from rayapp.engine.weights.buckets import unpack
from rayapp.engine.weights.sync import transfer_plan
from support.learners import fork_ranks
from support.ports import free_port

model, out, timeout_s = sys.argv[1], sys.argv[2], float(sys.argv[3])


def config_of(world):
    return Config.model_validate({
        "model": {"path": model}, "cluster": {"device": "cpu"},
        "rollout": {"max_prompt_tokens": 64, "max_completion_tokens": 32},
        "server": {"num_servers": 2},
        "learner": {"num_learners": world, "max_tokens_per_microbatch": 256, "cpu_threads": 1,
                    "cpu_offload": world == 2},
    })


class Servers:
    """Two servers as threads of rank 0, and `ServersClient` to them. The second one fails when it is told to."""

    fault = ""
    held = {}

    def __init__(self, servers, plan, timeout_s):
        self.plan, self.groups = plan, []

    num_loaded = 0

    def announce(self, version, source):
        pass

    def check(self):
        pass

    def init_weight_transfer_engine(self, info):
        if self.fault == "join":
            raise WeightSyncError("vllm-server-1.join_weight_group: its process is gone")
        self.bucket_bytes = info["packed_buffer_size_bytes"]
        joined = [threading.Thread(target=self.join, args=(info, offset)) for offset in self.plan.rank_offsets]
        [thread.start() for thread in joined], [thread.join() for thread in joined]

    def join(self, info, rank):
        self.groups.append(gloo.GlooGroup(
            info["master_address"], info["master_port"], rank=rank, world_size=info["world_size"], timeout_s=timeout_s))

    def start_weight_update(self):
        self.fail("begin")

    def update_weights(self, info):
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(info["shapes"], dtypes)]
        parts = list(gloo.chunks(sizes, self.bucket_bytes))
        assert len(parts) > 2
        takers = [threading.Thread(target=self.take, args=(group, info, sizes, part), daemon=True)
                  for group, part in zip(self.groups, (parts, parts[:1] if self.fault == "receive" else parts))]
        [thread.start() for thread in takers]
        takers[1].join()  # the one that fails; the other waits for the next bucket
        self.fail("receive")
        takers[0].join()

    def take(self, group, info, sizes, parts):
        for part in parts:
            buffer = torch.empty(sum(sizes[p] for p in part), dtype=torch.uint8)
            group.broadcast(buffer, 0)
            for p, data in zip(part, buffer.split([sizes[p] for p in part])):
                self.held[info["names"][p]] = zlib.crc32(data.numpy().tobytes())

    def finish_weight_update(self):
        self.fail("finish")

    def fail(self, phase):
        if self.fault == phase:
            raise WeightSyncError(f"vllm-server-1, {phase}: its process is gone")


def attempt(learner, plan):
    """One sync as the driver calls it. Returns the error that this rank raises."""
    error = ""
    try:
        learner.open_weight_group((), plan, ("127.0.0.1", free_port()), timeout_s)
    except WeightSyncError as caught:
        error = str(caught)
    if not any(learner._learner.ranks.gather(error)):
        try:
            learner.send_weights(1)
        except WeightSyncError as caught:
            error = str(caught)
    return error


def run(world, rank, next_port):
    actors.learner.ServersClient, config = Servers, config_of(world)
    learner = Learner(config, rank, world, "127.0.0.1", next_port())
    plan = replace(transfer_plan(config.server, "nccl"), bucket_bytes=1)  # smaller than any tensor
    in_file = load_file(Path(model, "model.safetensors"))
    own = {n: t for b in learner.export_weights(0, 1 << 20) for n, t in unpack(b.entries, torch.from_numpy(b.data))}
    results = {"is_loaded": rank > 0 or all(torch.equal(own[name], tensor) for name, tensor in in_file.items())}
    for fault in ("join", "begin", "receive", "finish", ""):
        Servers.fault, started = fault, time.monotonic()
        error = attempt(learner, plan)
        # What a server that is started again is given: all ranks gather.
        buckets = list(learner.export_weights(0, 1 << 20))
        results[fault] = {"error": error, "seconds": time.monotonic() - started}
    sent = {n: zlib.crc32(t.contiguous().view(torch.uint8).numpy().tobytes())
            for b in buckets for n, t in unpack(b.entries, torch.from_numpy(b.data))}
    results["is_whole"] = rank > 0 or (sent == Servers.held and len(sent) > 10)
    Path(out, f"{world}-{rank}.json").write_text(json.dumps(results))
    learner.close()
    os._exit(0)  # threads of servers that still wait


for world in (2, 4):
    fork_ranks(world, run)
'''


@pytest.fixture(scope="module")
def results(
    tiny_model: Path, run_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, Any]]]:
    """By number of learners, what each rank saw. Two keep their parameters in host memory (`learner.cpu_offload`)."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(RANKS, tiny_model, out, SYNC_TIMEOUT_S, timeout_s=350)
    return {
        world: [json.loads((out / f"{world}-{rank}.json").read_text()) for rank in range(world)] for world in (2, 4)
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("fault", ["join", "begin", "receive", "finish"])
def test_learners_are_usable_seconds_after_a_server_fails(
    world: int, fault: str, results: dict[int, list[dict[str, Any]]]
) -> None:
    first, *others = [found[fault] for found in results[world]]
    assert "vllm-server-1" in first["error"]
    assert not any(found["error"] for found in others)
    assert all(found["seconds"] < USABLE_AFTER_S for found in (first, *others))


@pytest.mark.parametrize("world", [2, 4])
def test_the_next_sync_brings_every_tensor_in_buckets_smaller_than_any_and_from_host_memory(
    world: int, results: dict[int, list[dict[str, Any]]]
) -> None:
    assert not any(found[""]["error"] for found in results[world])
    assert all(found["is_whole"] for found in results[world])


@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_have_what_the_models_file_has(world: int, results: dict[int, list[dict[str, Any]]]) -> None:
    assert all(found["is_loaded"] for found in results[world])

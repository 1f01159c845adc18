"""Seconds that a checkpoint takes from the learners to object storage and back, and what training waits for:

    python -m benchmarks checkpoints                                      adapters for all linear layers of an 8B
    python -m benchmarks checkpoints -- --lora 0 --layers 2 --ranks 2     all weights of 2 of its 32 layers, in shards

The weights and moments are random numbers in the shapes of Llama 3.1 8B (embeddings are left out); no model computes.
The rest is what a run uses: `begin_save` in a process for each rank, and in the driver's process `CheckpointSaver` and
the run folder's mirror to s3://. The peer is the AWS CLI, which uploads the same folder afterwards. A second start, on
an empty machine, fetches, verifies and loads the checkpoint.

Each rank multiplies matrices on one thread while nothing is asked of it, as it would train. Training waits for `begin`;
what the products lose while files are written and sent is counted as well (`lost_s`). The storage server runs on the
same cores, so this is more than with a remote one. The driver's event loop is asked every 10 ms how late it is.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import ROOT
from benchmarks.report import print_report
from benchmarks.storage import BUCKET, make_cli, measure, start_server
from rayapp.config.config import Config
from rayapp.driver.saving import CheckpointSaver, saving
from rayapp.runs.folder import RunFolder
from support.ports import free_port

GIB = 1 << 30
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32,
}  # fmt: skip
IDLE_S, LOOK_S, BEAT_S = 5.0, 0.05, 0.01


def fake_learner(config: Config, ranks: Any, num_layers: int) -> Any:
    """Return a learner with random weights and moments in an 8B's shapes, sharded over the ranks. Frozen weights have
    no memory.
    """
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from transformers import LlamaConfig, LlamaForCausalLM

    from rayapp.learner.policy import PolicyModel, make_optimizer
    from rayapp.learner.state.checkpoint import _moments
    from rayapp.learner.state.lora import add_adapters
    from rayapp.learner.step import PolicyLearner

    with torch.device("meta"):
        causal_lm = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=num_layers, tie_word_embeddings=True))
        if config.learner.lora.rank:
            add_adapters(causal_lm, config.learner.lora)
    for name, parameter in list(causal_lm.named_parameters()):
        if parameter.requires_grad:
            owner, _, leaf = name.rpartition(".")
            local = torch.randn(parameter.shape[0] // ranks.world_size, *parameter.shape[1:])
            shard = DTensor.from_local(local, ranks.mesh, [Shard(0)])
            causal_lm.get_submodule(owner).register_parameter(leaf, torch.nn.Parameter(shard))
    causal_lm.lm_head.weight = causal_lm.get_input_embeddings().weight
    model = PolicyModel(causal_lm)
    optimizer = make_optimizer(model, config.learner.optimizer)
    for parameter in model.parameters():
        if parameter.requires_grad:
            for moment in _moments(optimizer, parameter).values():
                (moment.to_local() if isinstance(moment, DTensor) else moment).normal_()
    return PolicyLearner(config=config, ranks=ranks, model=model, optimizer=optimizer)


def serve_rank(config: Config, rank: int, port: int, num_layers: int, line: Connection) -> None:
    """Answer the driver's commands in a process of its own; multiply matrices meanwhile."""
    import torch

    from rayapp.learner.distributed import start_ranks
    from rayapp.learner.state.checkpoint import SaveInProgress, begin_save, load_learner

    ranks = start_ranks(config, rank, config.learner.num_learners, "127.0.0.1", port)
    learner = fake_learner(config, ranks, num_layers)
    saves: list[SaveInProgress] = []
    left, num_products = torch.randn(512, 512), 0
    line.send("ready")
    while True:
        if not line.poll(0):
            torch.mm(left, left)
            num_products += 1
            continue
        command, *arguments = line.recv()
        if command == "begin":
            saves.append(begin_save(learner, *arguments))
            line.send(None)
        elif command == "done":
            is_done = saves[-1].is_done()
            if is_done:
                saves[-1].wait()
            line.send(is_done)
        elif command == "load":
            line.send(load_learner(learner, *arguments))
        elif command == "products":
            line.send(num_products)
        else:
            return


class FakeLearners:
    """The ranks' processes, as the driver's saver sees learners."""

    def __init__(self, config: Config, num_layers: int) -> None:
        spawn, port = multiprocessing.get_context("spawn"), free_port()
        self._lines: list[Connection] = []
        self._processes = []
        self._one_at_a_time = asyncio.Lock()
        for rank in range(config.learner.num_learners):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve_rank, args=(config, rank, port, num_layers, theirs), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)
        for line in self._lines:
            line.recv()

    def holds(self, version: int) -> bool:
        return True

    async def begin_checkpoint(self, folder: Path, version: int) -> None:
        await self.ask("begin", str(folder), version)

    async def checkpoint_done(self) -> bool:
        return all(await self.ask("done"))

    async def ask(self, *command: Any) -> list[Any]:
        """Return the answers of all ranks."""
        async with self._one_at_a_time:  # the saver asks whether it is done while the phases ask for products
            for line in self._lines:
                line.send(command)
            return [await asyncio.to_thread(line.recv) for line in self._lines]

    def end(self) -> None:
        for line, process in zip(self._lines, self._processes, strict=True):
            line.send(("end",))
            process.join()


class Phases:
    """Seconds, the rate of the ranks' products, and the event loop's delays, for each named phase."""

    def __init__(self, learners: FakeLearners) -> None:
        self._learners = learners
        self.found: dict[str, dict[str, float]] = {}

    @asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[None]:
        late_ms: list[float] = []
        before, started = sum(await self._learners.ask("products")), time.monotonic()
        watching = asyncio.create_task(_watch(late_ms))
        try:
            yield
        finally:
            watching.cancel()
        seconds = time.monotonic() - started
        products = sum(await self._learners.ask("products")) - before
        late = {"late_p99_ms": float(np.percentile(late_ms, 99)), "late_max_ms": max(late_ms)} if late_ms else {}
        self.found[name] = {"seconds": seconds, "products_per_s": products / seconds, **late}


async def _watch(late_ms: list[float]) -> None:
    while True:
        started = time.monotonic()
        await asyncio.sleep(BEAT_S)
        late_ms.append(1000 * (time.monotonic() - started - BEAT_S))


async def save(folder: RunFolder, learners: FakeLearners) -> dict[str, Any]:
    """Save one checkpoint as a run does, until object storage has all of it."""
    phases = Phases(learners)
    saver = CheckpointSaver(learners, folder)
    async with saving(saver):
        async with phases.phase("idle"):
            await asyncio.sleep(IDLE_S)
        async with phases.phase("begin"):
            await saver.begin(1, next_group_id=0)
        async with phases.phase("write"):
            await saver.finish()
        async with phases.phase("upload"):
            while folder.storage_metrics()["storage/pending_bytes"]:  # noqa: ASYNC110 - sent by a thread of the mirror
                await asyncio.sleep(LOOK_S)
    return phases.found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Save, upload and restore one checkpoint. Raises AssertionError: the restored state is of another version."""
    cli = make_cli()
    with tempfile.TemporaryDirectory(dir=ROOT / "benchmarks" / ".envs") as place:
        home = Path(place)
        _, keys, stop = start_server(args.server, home)
        os.environ |= keys
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the CLI would compile its modules at every start
        config = Config.model_validate({
            "run": {"name": "r", "output_dir": f"s3://{BUCKET}/runs", "staging_dir": home / "staging"},
            "checkpoint": {"keep_last": 1},
            "learner": {"num_learners": args.ranks, "cpu_threads": 1, "lora": {"rank": args.lora}},
        })  # fmt: skip
        learners = FakeLearners(config, args.layers)
        try:
            with RunFolder.open(config) as folder:
                phases = asyncio.run(save(folder, learners))
                here = folder.checkpoints.path
                files = [path.stat().st_size for path in here.rglob("*") if path.is_file()]
                measure([str(cli), "s3", "ls"], dict(os.environ), home / "log")  # compiles the CLI's modules
                command = [str(cli), "s3", "cp", "--quiet", "--recursive", str(here), f"s3://{BUCKET}/cli"]
                peer = measure(command, dict(os.environ), home / "log")
            started = time.monotonic()
            with RunFolder.open(config) as folder:  # the staging folder is gone, as on another machine
                restored = folder.checkpoints.latest()
                fetched_s = time.monotonic() - started
                assert restored is not None
                versions = asyncio.run(learners.ask("load", str(restored.path / "learner")))
                loaded_s = time.monotonic() - started - fetched_s
            assert versions == [1] * args.ranks, versions
        finally:
            stop()
            learners.end()  # the last: it raises if a rank has failed
    idle = phases["idle"]["products_per_s"]
    lost = {
        name: one["seconds"] * (1 - min(1.0, one["products_per_s"] / idle))
        for name, one in phases.items()
        if name != "idle"
    }
    return {
        "gib": sum(files) / GIB, "files": len(files), "phases": phases, "lost_s": lost, "cli_upload_s": peer.seconds,
        "fetch_s": fetched_s, "load_s": loaded_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="how many of the model's 32 layers there are")
    parser.add_argument("--lora", type=int, default=16, help="rank of the adapters; 0: all weights are trained")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--server", choices=("swift", "moto"), default="swift")
    args = parser.parse_args()
    found = run(args)
    seconds = {name: one["seconds"] for name, one in found["phases"].items()}
    print(f"{found['gib']:.2f} GiB: {seconds}, lost {found['lost_s']}", file=sys.stderr, flush=True)
    print_report(args, {"upload_over_cli": found["cli_upload_s"] / seconds["upload"]}, **found)


if __name__ == "__main__":
    main()

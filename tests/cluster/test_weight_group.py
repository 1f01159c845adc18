"""The real vLLM and a real learner in one gloo group, through vLLM's own weight-transfer handshake."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from actors.learner import Learner
from actors.vllm_server import VllmServer
from rayapp.config.config import Config
from rayapp.core.errors import WeightSyncError
from rayapp.core.types import RequestId, SamplingParams
from rayapp.engine.vllm import VllmEngine
from rayapp.engine.weights.sync import transfer_plan
from rayapp.learner.state.sender import LearnerSource, WeightSender
from support import make
from support.learners import MAX_LOG_PROB_DIFFERENCE, plain_log_probs
from support.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

TIMEOUT_S = 120.0
BUCKET_BYTES = 100_000
"""Larger than the largest tensor, smaller than the model."""
CPU = torch.device("cpu")
TAKES_ONE_BUCKET = """
import os, signal, sys, torch
from datetime import timedelta
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
size, address, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
timeout = timedelta(seconds=120)
store = TCPStore(address, port, 2, is_master=False, timeout=timeout, wait_for_workers=False)
store.set("here/1", "")
group = ProcessGroupGloo(PrefixStore("rayapp-weights", store), 1, 2, timeout)
group.broadcast(torch.empty(size, dtype=torch.uint8), 0).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Stands for a server: address and port come last."""


def config(model: Path) -> Config:
    # Several buckets for the tiny model, too.
    return make.config(model, server={"weight_bucket_mib": 1})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model: Path) -> AsyncIterator[VllmServer]:
    from vllm.config.weight_transfer import WeightTransferConfig

    start_engine = partial(
        VllmEngine.start,
        worker_extension_cls="support.gloo_for_nccl.GlooExtension",
        weight_transfer_config=WeightTransferConfig(backend="nccl"),
    )
    started = VllmServer(config(tiny_model), 0, must_sync=True, start_engine=start_engine)
    await started.start()
    yield started
    await started.close()


class Client:
    """What `ServersClient` is in a run, for a server in this process: called from the sender's threads."""

    def __init__(self, server: VllmServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self.version = 0
        self.checksums: dict[str, int] | None = None
        self.source: LearnerSource | None = None
        self.num_loaded = 0

    def _wait(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(TIMEOUT_S)

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._wait(self._server.join_weight_group(info))

    def start_weight_update(self) -> None:
        self._wait(self._server.begin_update())

    def update_weights(self, info: Any) -> None:
        self._wait(self._server.receive_weights(info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self.source is not None
        checksums = self.source.sums.read() if self.checksums is None else self.checksums
        self.num_loaded = self._wait(self._server.finish_update(self.version, checksums))


@pytest.fixture(scope="module")
def learner(moved_model: Path) -> Any:
    import support.gloo_for_nccl  # noqa: F401 - it imports vLLM, which not each process that collects tests should

    made = Learner(config(moved_model), 0, 1, "", 0)
    yield made
    made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def joined(server: VllmServer, learner: Learner, moved_model: Path) -> tuple[WeightSender, Client]:
    settings = config(moved_model)
    client = Client(server, asyncio.get_running_loop())
    client.source = LearnerSource(learner._learner.model, settings.learner.lora, CPU, torch.bfloat16)
    sender = await asyncio.to_thread(
        WeightSender,
        transfer_plan(settings.server, "nccl"),
        client.source,
        rank=0,
        client=client,
        address=("127.0.0.1", free_port()),
        timeout_s=TIMEOUT_S,
    )
    return sender, client


async def test_one_group_takes_the_weights_again_and_again_and_the_server_computes_with_them(
    server: VllmServer, joined: tuple[WeightSender, Client], moved_model: Path, tiny_model: Path
) -> None:
    sender, client = joined
    tokens = [72, 75, 84, 40, 41, 42, 43]
    for version in (1, 2):
        client.version = version
        await asyncio.to_thread(sender.send)
        assert await server.go_on() == version
        assert client.num_loaded == client.source.sums.num_tensors
        (found,) = await server.prompt_log_probs([tokens])
        assert np.abs(found - plain_log_probs(moved_model, tokens)).max() < MAX_LOG_PROB_DIFFERENCE
    assert np.abs(found - plain_log_probs(tiny_model, tokens)).max() > MAX_LOG_PROB_DIFFERENCE


async def test_weights_that_are_not_what_was_sent_are_found_and_the_server_serves_nothing(
    server: VllmServer, joined: tuple[WeightSender, Client]
) -> None:
    sender, client = joined
    client.version = 3
    assert client.source is not None
    client.checksums = {name: value ^ 1 for name, value in client.source.sums.read().items()}

    with pytest.raises(WeightSyncError, match=r"received by this server are not .* other checksums"):
        await asyncio.to_thread(sender.send)

    assert await server.go_on() == -1
    assert "mixture" in server._not_servable
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await server.generate(RequestId("group", 0, 0), [72], SamplingParams(max_tokens=1))


class Deserter:
    """Servers of which none comes, or one comes, takes a bucket and dies."""

    def __init__(self, peer: list[str] | None = None) -> None:
        self._peer = peer

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        if self._peer is None:
            raise WeightSyncError("vllm-server-0.join_weight_group did not answer within server.sync_timeout_s = 2 s")
        self.process = subprocess.Popen([*self._peer, info["master_address"], str(info["master_port"])])

    def start_weight_update(self) -> None:
        return

    def update_weights(self, info: Any) -> None:
        self.process.wait(TIMEOUT_S)
        raise WeightSyncError("vllm-server-0.receive_weights: its process is gone")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        raise AssertionError("nobody is left to finish")


def sender_to(client: Deserter, learner: Learner, *, timeout_s: float) -> WeightSender:
    source = LearnerSource(learner._learner.model, learner._config.learner.lora, CPU, torch.bfloat16)
    plan = replace(transfer_plan(learner._config.server, "nccl"), bucket_bytes=BUCKET_BYTES)
    address = ("127.0.0.1", free_port())
    return WeightSender(plan, source, rank=0, client=client, address=address, timeout_s=timeout_s)


async def test_a_server_that_never_joins_the_group_is_named_after_the_deadline(learner: Learner) -> None:
    message = r"not form a nccl group within 2 s .*vllm-server-0\.join_weight_group did not"
    with pytest.raises(WeightSyncError, match=message):
        await asyncio.to_thread(sender_to, Deserter(), learner, timeout_s=2.0)


async def test_a_server_that_dies_with_half_of_the_weights_ends_the_sync_before_its_deadline(learner: Learner) -> None:
    from support.gloo import chunks  # imports vLLM: not in each process that collects the tests

    meta = LearnerSource(learner._learner.model, learner._config.learner.lora, CPU, torch.bfloat16).metadata()
    sizes = [math.prod(m.shape) * m.dtype.itemsize for m in meta]
    first = sum(sizes[position] for position in next(chunks(sizes, BUCKET_BYTES)))
    assert first < sum(sizes)
    client = Deserter([sys.executable, "-c", TAKES_ONE_BUCKET, str(first)])
    sender = await asyncio.to_thread(sender_to, client, learner, timeout_s=TIMEOUT_S)

    # Without a deadline's help: TIMEOUT_S is as long as this test may take.
    with pytest.raises(WeightSyncError, match=r"did not reach every server|its process is gone"):
        await asyncio.wait_for(asyncio.to_thread(sender.send), TIMEOUT_S)
    assert client.process.wait() == -signal.SIGKILL


class Counted:
    """Stands for the servers, their communicator and CUDA's streams, and counts the calls of each."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.update([name])


@pytest.mark.parametrize(("transport", "message"), [("ipc", "update_weights"), ("nccl", "broadcast")])
async def test_vllms_engines_for_gpus_send_and_wait_once_a_bucket_however_many_tensors_it_has(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, transport: Any, message: str
) -> None:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory, nccl_engine, packed_tensor

    counted, empty = Counted(), torch.empty
    for place, name, stub in (
        (torch, "empty", lambda *shape, **options: empty(*shape, **options | {"device": "cpu"})),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.cuda, "current_stream", lambda: counted),
        (torch.cuda, "get_device_properties", lambda index: counted),
        (torch.cuda, "ipc_collect", lambda: None),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        (packed_tensor, "_get_streams", lambda device, count: (counted,) * count),
        (packed_tensor, "reduce_tensor", lambda tensor: counted.calls.update(["shared buffer"]) or (None, ())),
        (nccl_engine, "open_trainer_endpoint", lambda info: counted),
    ):
        monkeypatch.setattr(place, name, stub)
    own = nccl_engine.NCCLTrainerWeightTransferEngine  # another test has put gloo's in its place
    monkeypatch.setitem(WeightTransferTrainerFactory._registry, "nccl", lambda: own)

    def sent_in(bucket_bytes: int) -> Counter[str]:
        source = LearnerSource(learner._learner.model, learner._config.learner.lora, CPU, torch.bfloat16)
        plan = replace(transfer_plan(learner._config.server, transport), bucket_bytes=bucket_bytes)
        where: Any = {"client": counted, "address": ("127.0.0.1", 1), "timeout_s": TIMEOUT_S}
        sender = WeightSender(plan, source, rank=0, **where)
        counted.calls.clear()
        sender.send()
        assert source.sums.num_tensors > 10
        return counted.calls.copy()

    whole = sent_in(1 << 30)
    assert whole == {"start_weight_update": 1, "update_weights": 1, "finish_weight_update": 1} | whole
    parts = await asyncio.to_thread(sent_in, BUCKET_BYTES)
    assert whole[message] == 1
    assert 3 < parts[message] < 10  # buckets of the tiny model, which has more tensors
    added = parts[message] - 1
    assert parts - whole == Counter({message: added, "synchronize": added})


async def test_a_request_brings_its_seed_where_the_runner_has_no_one_generator_for_all() -> None:
    from rayapp.engine.vllm_output import vllm_sampling_params

    sampling = SamplingParams(max_tokens=1, seed=11)
    assert [vllm_sampling_params(sampling, with_seed=with_seed).seed for with_seed in (True, False)] == [11, None]

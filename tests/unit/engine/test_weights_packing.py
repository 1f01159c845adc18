"""vLLM's own packers for NCCL and CUDA IPC, on CPU tensors: the tensors that they request, and the CUDA stream.

Only CUDA's calls are stubs. The file is loaded alone, as importing vLLM takes longer than all tests of this folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rayapp.learner.state.sender import gathered_in_order

BUCKET_BYTES = 64
EMBEDDING = 100


class Streams:
    """Stub of CUDA's streams that records the current stream and waits."""

    def __init__(self) -> None:
        self.current = "default"
        self.log: list[str] = []

    def stream(self, name: object) -> Any:
        @contextlib.contextmanager
        def within() -> Iterator[None]:
            before, self.current = self.current, str(name)
            yield
            self.current = before

        return within()


@dataclass(frozen=True)
class Stream:
    name: str
    streams: Streams

    def __str__(self) -> str:
        return self.name

    def synchronize(self) -> None:
        self.streams.log.append(f"wait for {self}")

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append(f"{self} comes after {other}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("default", streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(streams.current, streams))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: streams.log.append(f"used by {stream}"))
    return streams


@pytest.fixture
def packers(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations is not None
    path = f"{found.submodule_search_locations[0]}/distributed/weight_transfer/packed_tensor.py"
    spec = importlib.util.spec_from_file_location("packed_tensor_alone", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    sides = tuple(Stream(f"side {number}", streams) for number in range(2))
    monkeypatch.setattr(module, "_get_streams", lambda device, number: sides[:number])
    monkeypatch.setattr(module, "reduce_tensor", lambda tensor: (None, ("handle", tensor)))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    on_cpu = {"empty": lambda *shape, device, dtype: torch.empty(*shape, dtype=dtype)}
    monkeypatch.setattr(module, "torch", SimpleNamespace(**vars(torch) | on_cpu))
    return module


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """The embedding, which is larger than a bucket, and six small tensors."""
    yield "embedding", torch.full((EMBEDDING,), 7, dtype=torch.uint8)
    for number in range(6):
        yield f"w{number}", torch.full((20,), number, dtype=torch.uint8)


@pytest.mark.parametrize(("is_alone", "awaited"), [(False, "wait for default"), (True, "{} comes after default")])
def test_on_a_gpu_every_tensor_is_gathered_in_the_default_stream_before_it_is_sent(
    packers: ModuleType, streams: Streams, is_alone: bool, awaited: str
) -> None:
    def gathers() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights():
            streams.log.append(f"gather {name} in {streams.current}")
            yield name, tensor

    group = SimpleNamespace(broadcast=lambda tensor, src: streams.log.append(f"broadcast in {streams.current}"))
    source = gathered_in_order(gathers(), torch.device("cuda", 0), is_alone=is_alone)
    packers.packed_nccl_broadcast_producer(source, group, 0, lambda item: item[1], EMBEDDING)

    log = [line for line in streams.log if not line.startswith("wait for side")]
    assert log[:3] == ["gather embedding in default", awaited.format("side 0"), "used by side 0"]
    assert {line for line in log if "gather" in line} == {f"gather {name} in default" for name, _ in weights()}
    assert [line for line in log if "broadcast" in line] == ["broadcast in side 0", "broadcast in side 1"]
    # Every gather is waited for: rank 0 never postpones a gather that other ranks have finished.
    gathered = [at for at, line in enumerate(log) if "gather" in line]
    assert all(log[at + 1] in {awaited.format(f"side {side}") for side in range(2)} for at in gathered)


def test_over_cuda_ipc_a_bucket_is_one_message_and_one_wait(packers: ModuleType, streams: Streams) -> None:
    messages = [
        (chunk.names, streams.log.count("wait for default"))
        for chunk in packers.packed_ipc_producer(weights(), "gpu", lambda item: item[1], EMBEDDING)
    ]

    assert messages == [(["embedding"], 1), ([f"w{number}" for number in range(5)], 2), (["w5"], 3)]

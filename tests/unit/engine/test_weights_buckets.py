"""Buckets hold every tensor bit for bit, and a sync that did not reach every server is an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayapp.core.errors import WeightSyncError
from rayapp.engine.weights.buckets import ALIGNMENT, WeightBucket, pack, unpack
from rayapp.engine.weights.sync import BUCKET_BYTES, StoreCarrier, WeightSync

DTYPES = (torch.bfloat16, torch.float32, torch.uint8)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


async def all_up() -> None:
    """Every server is up."""


def tensors_of(shapes: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"layer.{i}", (torch.randn(shape, generator=generator) * 9).to(DTYPES[dtype]))
        for i, (shape, dtype) in enumerate(shapes)
    ]


def restored(buckets: Sequence[WeightBucket]) -> list[tuple[str, torch.Tensor]]:
    return [pair for bucket in buckets for pair in unpack(bucket.entries, torch.from_numpy(bucket.data))]


@given(shapes=st.lists(st.tuples(SHAPES, st.integers(0, 2)), max_size=12), bucket_bytes=st.integers(1, 400))
def test_every_tensor_comes_back_bit_for_bit_in_its_order(
    shapes: list[tuple[tuple[int, ...], int]], bucket_bytes: int
) -> None:
    sent = tensors_of(shapes)

    received = restored(list(pack(sent, bucket_bytes)))

    assert [name for name, _ in received] == [name for name, _ in sent]
    for (_, one), (_, other) in zip(sent, received, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@given(shapes=st.lists(st.tuples(SHAPES, st.integers(0, 2)), max_size=12), bucket_bytes=st.integers(1, 400))
def test_no_bucket_is_larger_than_asked_unless_one_tensor_is(
    shapes: list[tuple[tuple[int, ...], int]], bucket_bytes: int
) -> None:
    for bucket in pack(tensors_of(shapes), bucket_bytes):
        assert bucket.data.nbytes <= bucket_bytes or len(bucket.entries) == 1
        assert all(offset % ALIGNMENT == 0 for _, _, _, offset, _ in bucket.entries)


def test_buckets_of_a_hundred_bytes_hold_what_fits() -> None:
    # 40 bytes take one line of 64; 64 + 64 > 100, so each bucket holds one; 200 bytes take 4 lines.
    sent = [("a", torch.zeros(10)), ("b", torch.zeros(10)), ("c", torch.zeros(50))]

    assert [bucket.data.nbytes for bucket in pack(sent, 100)] == [64, 64, 256]
    assert [bucket.data.nbytes for bucket in pack(sent, 128)] == [128, 256]


def test_packing_asks_for_a_tensor_only_when_the_bucket_before_is_taken() -> None:
    # A learner gathers each tensor when it is requested: there must never be a second full copy of the model.
    asked = []

    def tensors() -> Any:
        for name in "abcd":
            asked.append(name)
            yield name, torch.zeros(16)

    next(pack(tensors(), 64))

    assert asked == ["a", "b"]


def test_a_tensor_may_be_overwritten_once_the_next_one_is_asked_for() -> None:
    # If tensors were kept until their bucket is full, their memory would be needed twice.
    scratch = torch.zeros(16)

    def tensors() -> Any:
        for value in (1.0, 2.0, 3.0):
            yield str(value), scratch.fill_(value)

    received = restored(list(pack(tensors(), 1 << 12)))

    assert [(name, tensor.unique().tolist()) for name, tensor in received] == [
        ("1.0", [1.0]),
        ("2.0", [2.0]),
        ("3.0", [3.0]),
    ]


def test_a_view_that_is_not_contiguous_is_sent_as_it_looks() -> None:
    matrix = torch.arange(6.0).reshape(2, 3).T

    ((_, received),) = restored(list(pack([("m", matrix)], 1 << 10)))

    assert torch.equal(received, matrix)


def test_what_is_unpacked_is_a_view_of_the_buffer() -> None:
    (bucket,) = pack([("m", torch.ones(4))], 1 << 10)
    ((_, tensor),) = restored([bucket])

    bucket.data[:4] = np.frombuffer(np.float32(7).tobytes(), np.uint8)

    assert tensor.tolist() == [7.0, 1.0, 1.0, 1.0]


@dataclass
class Learners:
    """Exports two buckets."""

    refs: tuple[str, ...] = ("first", "second")
    sizes: list[int] = field(default_factory=list)

    async def export_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[str]:
        self.sizes.append(bucket_bytes)
        for ref in self.refs:
            yield ref


@dataclass
class Server:
    """Records the calls."""

    name: str
    loaded: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    error: Exception | None = None
    hangs: bool = False

    async def load_weights(self, version: int, buckets: Sequence[Any]) -> dict[str, Any]:
        if self.error:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        self.loaded.append((version, tuple(buckets)))
        return {"bytes": 128.0}


async def test_every_server_gets_the_same_references_and_the_export_happens_once() -> None:
    learners, servers = Learners(), [Server("vllm-server-0"), Server("vllm-server-1")]

    metrics, failed = await WeightSync(StoreCarrier(10.0)).sync(3, learners=learners, servers=servers, settled=all_up)

    assert failed == {}
    assert learners.sizes == [BUCKET_BYTES]
    assert [server.loaded for server in servers] == [[(3, ("first", "second"))]] * 2
    assert metrics["weight_sync/bytes"] == 128.0
    assert {"weight_sync/export_s", "weight_sync/load_s"} <= set(metrics)


async def test_a_server_that_hangs_is_found_by_the_deadline_and_the_others_have_the_weights() -> None:
    servers = [Server("vllm-server-0"), Server("vllm-server-1", hangs=True)]

    _, failed = await WeightSync(StoreCarrier(2.0)).sync(3, learners=Learners(), servers=servers, settled=all_up)

    assert servers[0].loaded == [(3, ("first", "second"))]
    assert list(failed) == ["vllm-server-1"]
    assert "vllm-server-1 did not load version 3 within 2 s" in str(failed["vllm-server-1"])


async def test_a_server_that_was_started_again_gets_the_weights_of_the_last_sync() -> None:
    broken = Server("vllm-server-0", error=WeightSyncError("version 3 was not loaded"))
    transport = WeightSync(StoreCarrier(10.0))

    _, failed = await transport.sync(3, learners=Learners(), servers=[broken], settled=all_up)
    replaced = Server("vllm-server-0")
    await transport.catch_up(replaced)

    assert str(failed["vllm-server-0"]) == "version 3 was not loaded"
    assert replaced.loaded == [(3, ("first", "second"))]


async def test_a_server_never_gets_an_older_version_after_a_newer_one() -> None:
    late, learners, transport = Server("vllm-server-1"), Learners(), WeightSync(StoreCarrier(10.0))
    await transport.sync(3, learners=learners, servers=[], settled=all_up)

    # Both use the server at the same time: a sync to version 4, and a catch-up with version 3.
    await asyncio.gather(transport.sync(4, learners=learners, servers=[late], settled=all_up), transport.catch_up(late))

    assert [version for version, _ in late.loaded] == [4, 4]

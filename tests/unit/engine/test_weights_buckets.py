"""Buckets hold every tensor bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayapp.engine.weights.buckets import ALIGNMENT, WeightBucket, pack, unpack

DTYPES = (torch.bfloat16, torch.float32, torch.uint8)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


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

"""Tensors that are sent to a GPU's servers are gathered in the default stream, while vLLM iterates in its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import pytest
import torch

from rayapp.learner.state.sender import gathered_in_order


class Streams:
    """Stub of CUDA's streams that records the current stream and waits."""

    def __init__(self) -> None:
        self.current = "default"
        self.log: list[str] = []

    @contextlib.contextmanager
    def within(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, str(stream)
        yield
        self.current = before


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
    monkeypatch.setattr(torch.cuda, "stream", streams.within)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("default", streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(streams.current, streams))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: streams.log.append(f"used by {stream}"))
    return streams


@pytest.mark.parametrize(("is_alone", "awaited"), [(False, "wait for default"), (True, "{} comes after default")])
def test_on_a_gpu_every_tensor_is_gathered_in_the_default_stream_before_it_is_sent(
    streams: Streams, is_alone: bool, awaited: str
) -> None:
    def gathers() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            streams.log.append(f"gather {name} in {streams.current}")
            yield name, torch.zeros(1)

    source = gathered_in_order(gathers(), torch.device("cuda", 0), is_alone=is_alone)
    for side in ("side 0", "side 1", "side 0"):  # vLLM takes another stream for each bucket
        with streams.within(side):
            for name, _ in islice(source, 1):
                streams.log.append(f"broadcast {name} in {streams.current}")

    # Every gather is waited for: rank 0 never postpones a gather that other ranks have finished.
    assert streams.log == [
        "gather a in default", awaited.format("side 0"), "used by side 0", "broadcast a in side 0",
        "gather b in default", awaited.format("side 1"), "used by side 1", "broadcast b in side 1",
        awaited.format("side 0"),
    ]  # fmt: skip

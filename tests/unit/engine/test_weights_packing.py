"""Tensors that are sent to a GPU's servers are gathered in the default stream, while vLLM iterates in its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "stream", streams.within)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("default", streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(streams.current, streams))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: streams.log.append(f"used by {stream}"))
    return streams


def test_on_a_gpu_every_tensor_is_gathered_in_the_default_stream_before_it_is_sent(streams: Streams) -> None:
    def gathers() -> Iterator[tuple[str, Any]]:
        for name in "ab":
            streams.log.append(f"gather {name} in {streams.current}")
            yield name, torch.zeros(1)

    with streams.within("side"):
        for name, _ in gathered_in_order(gathers(), torch.device("cuda", 0)):
            streams.log.append(f"broadcast {name} in {streams.current}")

    # Every gather is waited for: rank 0 never postpones a gather that other ranks have finished.
    assert streams.log == [
        "gather a in default", "wait for default", "used by side", "broadcast a in side",
        "gather b in default", "wait for default", "used by side", "broadcast b in side", "wait for default",
    ]  # fmt: skip

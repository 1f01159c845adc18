"""Measures where a learner's time goes: named stretches that add up to the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up seconds by name; what no name claims is `other`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time inside under `name`. Stretches must not nest."""
        start = time.perf_counter()
        try:
            yield
            if self._device.type == "cuda":
                # Wait for the kernels, which run on after the call: else their time counts under the next name.
                torch.cuda.synchronize(self._device)
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`timing_s/learner/*` in seconds; all but `total` add up to `total`."""
        total = time.perf_counter() - self._start
        names = ("prepare", "old_log_probs", "ref", "forward_backward", "optimizer", "metrics")
        seconds = {name: self._seconds.get(name, 0.0) for name in names}
        seconds["other"] = total - sum(seconds.values())
        return {f"timing_s/learner/{name}": value for name, value in {**seconds, "total": total}.items()}

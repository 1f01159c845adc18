"""What every test may rely on: no network, no leftover settings, and GPU or provider tests only where they can run."""

from __future__ import annotations

import os

import pytest

# Before anything imports transformers or Ray: tests must not wait for a hub they can't reach, nor report usage.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("live") and os.environ.get("RAYAPP_LIVE") != "1":
            item.add_marker(pytest.mark.skip(reason="calls a provider; set RAYAPP_LIVE=1 and its key"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()

"""Prints the table "will it fit?" of docs/scale.md: `python -m scripts.fit_table`. A test finds a stale table.

Each card runs configs/coding_24gb.yaml with another model, in three ways. A model fits with the first of `TRIES` with
which the plan fits and a server holds a group's sequences.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayapp.config.loading import load_config
from rayapp.learner.memory.plan import plan_gpu, without_autos
from rayapp.learner.memory.shape import GIB, Gpu, ModelShape, model_shape
from scripts.config_plans import ARCHITECTURES, ROOT

CONFIG = ROOT / "configs" / "coding_24gb.yaml"
CARDS = {"12 GB": 11, "16 GB": 15, "24 GB": 23, "48 GB": 44, "80 GB": 79}
"""Card -> GiB that programs can use."""
_LARGE = {"num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "0.5B": ("qwen2.5-0.5b", {}),
    "1.5B": ("qwen2.5-1.5b", {}),
    "3B": ("qwen2.5-3b", {}),
    "7B": ("qwen2.5-7b", {}),
    "14B": ("qwen2.5-7b", _LARGE | {"num_hidden_layers": 48, "intermediate_size": 13824}),
    "32B": ("qwen2.5-7b", _LARGE | {"num_hidden_layers": 64, "intermediate_size": 27648}),
}
"""Qwen2.5-Coder's sizes: architecture, and what differs from it."""
WAYS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "all weights": (
        ("model.quantization=none", "learner.lora.rank=0"),
        {"num_packed": 0, "num_adapter_parameters": 0, "adapter_rank_sum": 0},
    ),
    "adapters": (("model.quantization=none",), {"num_packed": 0}),
    "adapters on 4 bits": ((), {}),
}
"""Way to train: overrides of the config, and what they change in a model's shape."""
SERVER = "server.quantization=none"
TRIES = (
    (SERVER, "learner.offload_when_idle=false"),
    (SERVER, "learner.offload_when_idle=true"),
    ("learner.offload_when_idle=false",),
    ("learner.offload_when_idle=true",),
)
NOTES = ("", " (1)", " (2)", " (1, 2)")
HEADER = f"| card | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}"


def table() -> str:
    """Return the table in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        shapes = {name: _shape(Path(folder), *MODELS[name]) for name in reversed(MODELS)}
    found = {
        way: list(_largest({name: replace(shape, **changes) for name, shape in shapes.items()}, overrides))
        for way, (overrides, changes) in WAYS.items()
    }
    rows = (f"| {card} | {' | '.join(found[way][i] for way in WAYS)} |" for i, card in enumerate(CARDS))
    return "\n".join([HEADER, *rows])


def _largest(shapes: dict[str, ModelShape], overrides: tuple[str, ...]) -> Iterator[str]:
    """Yield the largest model that each card trains in this way, with the notes of its settings."""
    for gib in CARDS.values():
        fitting = (
            name + note
            for name, shape in shapes.items()
            for note, tried in zip(NOTES, TRIES, strict=True)
            if _fits(shape, [*overrides, *tried], gib)
        )
        yield next(fitting, "none")


def _shape(folder: Path, architecture: str, changes: dict[str, int]) -> ModelShape:
    read: dict[str, Any] = json.loads((ARCHITECTURES / f"{architecture}.json").read_text())
    (folder / "config.json").write_text(json.dumps(read | changes))
    return model_shape(load_config(CONFIG, [f"model.path={folder}"]))


def _fits(shape: ModelShape, overrides: list[str], gib: int) -> bool:
    gpu = Gpu(name="card", room=gib * GIB, tflops=1, memory_gb_s=1, link_gb_s=1)
    config = without_autos(shape, load_config(CONFIG, overrides), gpu)
    plan = plan_gpu(shape, config, gpu)
    return plan.fits and plan.server.num_sequences >= config.rollout.group_size


if __name__ == "__main__":
    print(table())

"""The adapter of an earlier run in `MODEL/adapter`, which that run merged into the model (`model.quantization`).

Rounding the merged weights would lose it: it is smaller than a step between two of NF4's values. So learners and
servers take it out before they round, and learners train it on. In this way a run goes on from its warm-up in 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PEFT_PREFIX = "base_model.model."
EXPORTED = "rayapp.json"  # file in a run's `final/` that names its run and step: its adapter is in the weights


def has_merged_adapter(path: str) -> bool:
    folder = Path(path)
    return (folder / EXPORTED).is_file() and (folder / "adapter").is_dir()


def merged_adapter(path: str) -> dict[str, Tensor]:
    """Return the float32 tensors, by peft's names, of an adapter that is merged into the model; empty without one."""
    if not has_merged_adapter(path):
        return {}
    from safetensors.torch import load_file

    return {name: t.float() for name, t in load_file(Path(path) / "adapter" / "adapter_model.safetensors").items()}


def beneath(adapter: Mapping[str, Tensor], name: str, weight: Any, rows: Any = ...) -> Any:
    """Return rows of a weight without the adapter that is merged into it. `weight` has only these rows."""
    module = f"{PEFT_PREFIX}{name.removesuffix('.weight')}"
    up = adapter.get(f"{module}.lora_B.weight")
    if up is None:
        return weight
    down = adapter[f"{module}.lora_A.weight"]
    return weight.float() - up[rows].to(weight.device) @ down.to(weight.device)  # (rows, rank) @ (rank, in)

"""Compiles norms, rotary positions and gated MLPs (`learner.compile`).

These are chains of small operators that read and write every token's activations several times; the compiler makes one
kernel of each chain. Attention, the head and experts have hand-written code that compiling would only break up. Whole
layers are not compiled: micro-batches differ in every dimension but the width.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from rayapp.core.errors import LearnerError

log = logging.getLogger(__name__)
ROPE = "apply_rotary_pos_emb"
"""Name of the function in transformers' model modules."""
GATED = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
"""Names of a gated MLP's linear layers, for the known layouts."""


def fuse(causal_lm: Any, device: torch.device) -> None:
    """Make the model compile its small operators when they first run. Call it before sharding.

    Raises:
        LearnerError: the compiler is missing, or the model has nothing to compile.
    """
    _check_compiler(device)
    decoder = causal_lm.get_decoder()
    norms = [module for module in decoder.modules() if _is_norm(module)]
    mlps = [module for module in decoder.modules() if _is_gated(module)]
    for module in (*norms, *mlps):
        # One compilation serves all modules of a class, because their parameters are arguments.
        module.forward = MethodType(_compiled(type(module).forward), module)
    rotary = [sys.modules[name] for name in {type(module).__module__ for module in decoder.modules()}]
    rotary = [code for code in rotary if code.__name__.startswith("transformers.") and hasattr(code, ROPE)]
    for code in rotary:
        setattr(code, ROPE, _compiled(getattr(code, ROPE)))
    if not norms and not mlps and not rotary:
        raise LearnerError(f"learner.compile is true, but {type(causal_lm).__name__} has no operators to compile")
    log.info("compiling %d norms, %d MLPs, positions of %d models", len(norms), len(mlps), len(rotary))


def _compiled(function: Any) -> Any:
    return _compile(getattr(function, "_torchdynamo_orig_callable", function))


@cache
def _compile(function: Any) -> Any:
    """Compile for any number of tokens."""
    return torch.compile(function, dynamic=True)


def _is_norm(module: nn.Module) -> bool:
    """Return whether this is a norm to compile; torch's own norms are single kernels already."""
    is_torch = type(module).__module__.startswith("torch.")
    return "Norm" in type(module).__name__ and not is_torch and not list(module.children())


def _is_gated(module: nn.Module) -> bool:
    """Return whether this is a gated MLP of plain linear layers, without adapters."""
    children = dict(module.named_children())
    return any(all(type(children.get(name)) is nn.Linear for name in names) for names in GATED)


def _check_compiler(device: torch.device) -> None:
    missing = list(_missing(device))
    if missing:
        raise LearnerError(
            f"learner.compile is true, but this learner has no {' and no '.join(missing)}, which torch.compile needs "
            f"for device {device.type}. Install it (Debian: apt-get install g++), or set learner.compile=false."
        )


def _missing(device: torch.device) -> Iterator[str]:
    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        yield "C++ compiler"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            yield "Triton"

"""What a rank does on its device beside the model: copies from the host, and compiled operators.

`fuse` compiles norms, rotary positions and gated MLPs; whole layers are not compiled, because micro-batches differ in
every dimension but the width.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rayapp.core.errors import LearnerError

log = logging.getLogger(__name__)


def moved(values: Any, device: torch.device) -> Tensor:
    """Return an array or a tensor of the host on the device. A copy to a GPU does not wait for the work that is queued
    there."""
    tensor = torch.as_tensor(values)
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@cache
def compiled(function: Any) -> Any:
    from torch._dynamo import config

    # Torch 2.13 would make a norm's epsilon an input: a tensor on the CPU, for which GPUs too would need C++.
    config.specialize_float = True
    return torch.compile(function, dynamic=True)


ROPE = "apply_rotary_pos_emb"  # in transformers' model modules
GATED = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))  # linear layers, for each known layout


def fuse(causal_lm: Any, *, is_asked: bool) -> None:
    """Make the model compile its small operators when they first run. Call it before sharding. LearnerError:
    `is_asked`, but there is nothing to compile."""
    decoder = causal_lm.get_decoder()
    norms = [module for module in decoder.modules() if _is_norm(module)]
    mlps = [module for module in decoder.modules() if _is_gated(module)]
    # One compilation serves all modules of a class with equal widths, because their parameters are arguments.
    for module in norms:
        module.forward = MethodType(_of_views(_compiled(type(module).forward)), module)
    for module in mlps:
        module.forward = MethodType(_compiled(type(module).forward), module)
    rotary = [sys.modules[name] for name in {type(module).__module__ for module in decoder.modules()}]
    rotary = [code for code in rotary if code.__name__.startswith("transformers.") and hasattr(code, ROPE)]
    for code in rotary:
        setattr(code, ROPE, _compiled(getattr(code, ROPE)))
    if is_asked and not (norms or mlps or rotary):
        raise LearnerError(
            f"learner.compile is true, but {type(causal_lm).__name__} has no operators to compile. Set "
            "learner.compile=false."
        )
    log.info("compiling %d norms, %d MLPs, positions of %d models", len(norms), len(mlps), len(rotary))


def _compiled(function: Any) -> Any:
    return compiled(getattr(function, "_torchdynamo_orig_callable", function))


def _of_views(function: Any) -> Any:
    """Return a method whose first argument is always a view. FSDP gives a layer its input as a view: torch.compile
    would compile the norm at a layer's start and the norm in its middle separately."""

    def method(self: nn.Module, hidden: Tensor, *args: Any, **options: Any) -> Any:
        return function(self, hidden.view_as(hidden), *args, **options)

    return method


def _is_norm(module: nn.Module) -> bool:
    """Return whether to compile a module; torch's own norms are single kernels already."""
    is_torch = type(module).__module__.startswith("torch.")
    return "Norm" in type(module).__name__ and not is_torch and not list(module.children())


def _is_gated(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return any(all(type(children.get(name)) is nn.Linear for name in names) for names in GATED)


def keep_compiled() -> None:
    """Make torch keep compiled code in the user's cache folder: its own, in /tmp, is gone with a container."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(name, default_cache_dir()) != default_cache_dir():  # torch sets its default when it is imported
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rayapp" / "torchinductor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.info("compiled code is kept in torch's own folder: %s", error)
        return
    os.environ[name] = str(folder)


def check_compiler(device_type: str) -> None:
    """Check that torch.compile has what it needs on this machine; else LearnerError."""
    missing = list(_missing(device_type))
    if missing:
        raise LearnerError(
            f"learner.compile is on, but this machine has no {' and no '.join(missing)}, which torch.compile needs "
            f"for device {device_type}. Install it (Debian: apt-get install gcc g++ python3-dev), or set "
            "learner.compile=false."
        )


def _missing(device_type: str) -> Iterator[str]:
    # Looked up as Triton (C) and torch (C++) do.
    if device_type == "cpu":
        if not shutil.which(os.environ.get("CXX", "g++")):
            yield "C++ compiler (CXX, or g++)"
        return
    from torch.utils._triton import has_triton

    if not (shutil.which(os.environ["CC"]) if "CC" in os.environ else shutil.which("gcc") or shutil.which("clang")):
        yield "C compiler (CC, or gcc or clang)"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.is_file():
        yield f"{headers}"
    if not has_triton():
        yield "Triton"

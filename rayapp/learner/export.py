"""The policy's weights outwards: bfloat16 buckets for the servers, and a Hugging Face folder at the end of a run.

Gathering sharded weights is collective: every rank calls these, and only rank 0 gets anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayapp.config import Config
from rayapp.learner.policy import PolicyModel, named_weights
from rayapp.weights.buckets import WeightBucket, pack

EXPORT_DTYPE = torch.bfloat16


def export_buckets(model: PolicyModel, bucket_bytes: int, *, rank: int) -> Iterator[WeightBucket]:
    """All weights under their Hugging Face names, in buckets of at most `bucket_bytes` (or of one larger tensor)."""
    tensors = ((name, _whole(parameter)) for name, parameter in named_weights(model))
    if rank == 0:
        yield from pack(tensors, bucket_bytes)
        return
    for _ in tensors:
        pass


def export_hf(config: Config, model: PolicyModel, folder: str, *, rank: int) -> None:
    """Write a folder that transformers and vLLM load: safetensors, config, generation config, tokenizer."""
    weights = {name: _whole(parameter) for name, parameter in named_weights(model)}
    if rank != 0:
        return
    from transformers import AutoTokenizer

    causal_lm: Any = model.causal_lm
    attention = causal_lm.config._attn_implementation  # noqa: SLF001 - transformers offers no public name for it
    try:
        # Ours is known to this process only: what reads the folder chooses its own.
        causal_lm.config._attn_implementation = "sdpa"  # noqa: SLF001
        causal_lm.save_pretrained(folder, state_dict=weights)
        # It wrote down the dtype of the learner's own parameters; the weights in the folder are narrower.
        causal_lm.config.dtype = EXPORT_DTYPE
        causal_lm.config.save_pretrained(folder)
    finally:
        causal_lm.config._attn_implementation = attention  # noqa: SLF001
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    tokenizer.save_pretrained(Path(folder))


def _whole(parameter: torch.nn.Parameter) -> Tensor:
    """The full tensor in bfloat16 on the host. Cast before gathering: half the bytes travel."""
    narrow: Any = parameter.detach().to(EXPORT_DTYPE)
    full: Tensor = narrow.full_tensor() if hasattr(narrow, "full_tensor") else narrow
    return full.cpu()

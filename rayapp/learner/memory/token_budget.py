"""`learner.max_tokens_per_microbatch: auto`: how many tokens one forward may have, measured instead of guessed.

`build_learner` calls it once, after the model is loaded and before the first step. Two short forwards and backwards of
different lengths give the bytes of a token; what is free gives their number. Never changes weights or RNG, and leaves
no gradients.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rayapp.config.config import Config
from rayapp.core.errors import LearnerError
from rayapp.core.machine import available_memory
from rayapp.learner.batch import empty_micro_batch
from rayapp.learner.distributed import Ranks, local_part
from rayapp.learner.log_probs import HeadOptions
from rayapp.learner.memory.meter import MemoryMeter, memory_meter
from rayapp.learner.memory.plan import ADAM, frozen_shapes, gathered_bytes, head_bytes, head_bytes_per_token
from rayapp.learner.memory.shape import model_shape
from rayapp.learner.policy import PolicyModel, reduce_gradients, to_device

log = logging.getLogger(__name__)
MIB = 2**20
ROOM_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Share of the free memory that a micro-batch may take. The rest: on CPU servers, sandboxes and the page cache want
memory too, and malloc holds back freed pieces; on GPU the allocator does."""
PROBE_TOKENS = {"cpu": 128, "cuda": 1024}
"""Tokens of the shorter of two probes. On CPU 128 tokens of a 135M-parameter model take a third of a second."""
LARGEST = 65536
"""Upper limit: matrix products reach their full speed with far fewer tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that a micro-batch of N tokens takes: at moment k of its computation, fixed[k] + N x per_token[k]."""

    fixed: NDArray[np.float64]
    """(K,)"""
    per_token: NDArray[np.float64]
    """(K,)"""

    def of(self, num_tokens: int) -> int:
        """Bytes for so many tokens at the worst moment. Which moment that is depends on their number."""
        return int((self.fixed + num_tokens * self.per_token).max())

    def fits(self, room_bytes: int) -> int:
        """Most tokens that fit into this room; below 1 when none do."""
        return int(((room_bytes - self.fixed) / self.per_token).min())


def find_token_budget(config: Config, ranks: Ranks, model: PolicyModel, room_bytes: int | None = None) -> int:
    """The token budget: a power of two, so that a few megabytes don't change the run. The same on every rank.

    Args:
        room_bytes: memory that may be taken; None measures what is free.
    Raises:
        LearnerError: the longest trajectory alone needs more.
    """
    longest, need = -(-config.max_learner_tokens // ranks.num_parts), measure_need(config, ranks, model)
    room = free_bytes(ranks, model) if room_bytes is None else room_bytes
    fits = min(ranks.gather(need.fits(room)))
    if fits < longest:
        raise LearnerError(
            f"learner.max_tokens_per_microbatch is auto, but a micro-batch of the longest trajectory, {longest} tokens "
            f"(rollout.max_prompt_tokens + rollout.max_completion_tokens), takes {need.of(longest) / MIB:.0f} MiB with "
            f"its gradients and logits, and {room / MIB:.0f} MiB are free: {max(0, fits)} tokens fit. Set "
            "learner.activation_checkpointing=true, lower learner.log_prob_chunk_tokens or the lengths, or raise "
            "learner.num_learners."
        )
    budget = max(longest, 1 << (min(fits, LARGEST).bit_length() - 1))
    log.info("micro-batches of at most %d tokens: %.0f of %.0f MiB", budget, need.of(budget) / MIB, room / MIB)
    return budget


def measure_need(config: Config, ranks: Ranks, model: PolicyModel) -> MemoryNeed:
    """Run the layers on some tokens and on twice as many, and compare moment by moment.

    The two runs have the same operators, and at each of them what is allocated grows by so much a token; so both
    tell what any number of tokens takes, also where the worst moment is another one. The head is added from its
    formula, as if its peak and the layers' came together: that errs on the safe side. Collective.

    Raises:
        LearnerError: the runs can't be compared.
    """
    few = min(PROBE_TOKENS[ranks.device.type], config.max_model_tokens // 2)
    # Uncompiled: the meter counts operators, and compiled ones take less.
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, memory_meter(ranks.device, [local_part(parameter) for parameter in model.parameters()]) as meter:
        _marks_of_layers(config, ranks, model, meter, few)  # libraries make their workspaces
        first, second = (_marks_of_layers(config, ranks, model, meter, size) for size in (few, 2 * few))
    if first.size != second.size:
        raise LearnerError(
            f"learner.max_tokens_per_microbatch is auto, but this model runs {first.size} operators for {few} tokens "
            f"and {second.size} for {2 * few}: what more tokens take does not follow from that. Set a number."
        )
    shape, per_token = model_shape(config), (second - first) / few
    # Frozen models score just before the update, and the weights that they gathered are still there.
    on_cpu = ranks.device.type == "cpu"
    frozen = sum(
        gathered_bytes(own, config, own.num_layers if on_cpu else 2) for own in frozen_shapes(shape, config).values()
    )
    return MemoryNeed(
        fixed=first - few * per_token + head_bytes(shape, config) + frozen,
        per_token=per_token.clip(0) + head_bytes_per_token(shape, config),
    )


def _marks_of_layers(
    config: Config, ranks: Ranks, model: PolicyModel, meter: MemoryMeter, num_tokens: int
) -> NDArray[np.float64]:
    """Bytes at each moment of a last micro-batch without the head, when one before has left its gradients."""
    reduce_gradients(model, ranks.device, is_last=False)
    _run_layers(config, ranks, model, 1)
    reduce_gradients(model, ranks.device, is_last=True)
    meter.restart()
    _run_layers(config, ranks, model, num_tokens)
    marks = np.array(meter.marks, np.float64)
    model.zero_grad()
    return marks


def _run_layers(config: Config, ranks: Ranks, model: PolicyModel, num_tokens: int) -> None:
    """Forward and backward of so many tokens of which none is predicted: all but the head, with gradients of 0."""
    options = HeadOptions(temperature=1.0, chunk_rows=config.learner.log_prob_chunk_tokens)
    # One sequence: for several, attention on CPU would run more operators.
    batch = empty_micro_batch(num_tokens * ranks.num_parts, num_heads=0)
    model(to_device(batch, ranks.device, ranks.sequence), options).log_probs.sum().backward()


def free_bytes(ranks: Ranks, model: PolicyModel) -> int:
    """This rank's part of the free memory, less AdamW's moments, which the first step makes. Gradients are measured."""
    trained = sum(local_part(p).numel() for p in model.parameters() if p.requires_grad)
    if ranks.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ranks.device)
        free += torch.cuda.memory_reserved(ranks.device) - torch.cuda.memory_allocated(ranks.device)
    else:
        free = available_memory() // ranks.world_size
    return int(ROOM_SHARE[ranks.device.type] * (free - ADAM * trained))

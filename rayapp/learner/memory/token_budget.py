"""Measures the number of tokens that one forward may have, for `learner.max_tokens_per_microbatch: auto`.

Two short forwards and backwards of different lengths, before the first step, give the bytes per token, operator by
operator: on GPU from torch's allocator, on CPU by following every operator's tensors.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayapp.config.config import Config, frozen_models
from rayapp.config.learner import CPU_SOFTMAX_ROWS, LearnerSection
from rayapp.core.errors import LearnerError
from rayapp.core.machine import available_memory
from rayapp.learner.batch import empty_micro_batch
from rayapp.learner.distributed import Ranks, local_part
from rayapp.learner.log_probs import HeadOptions
from rayapp.learner.memory.plan import (
    ADAM,
    frozen_shapes,
    gathered_bytes,
    head_bytes,
    head_bytes_per_token,
    kept_in_tower,
    longest_part,
    plan_learner,
    tower_bytes,
)
from rayapp.learner.memory.shape import GIB, model_shape
from rayapp.learner.policy import PolicyModel, reduce_gradients, to_device


def memory_meter(device: torch.device, existing: Iterable[Tensor]) -> MemoryMeter:
    """Return a context manager that measures memory in its block. On CPU all tensors but `existing` count as new."""
    return GpuMeter(device) if device.type == "cuda" else CpuMeter(existing)


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the bytes allocated since its start and not freed; each operator adds one entry to `marks`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks: list[int] = []

    def restart(self) -> None:
        """Drop all marks, and begin with a mark of this moment."""
        self.marks = [self.mark(())]

    def mark(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes allocated after an operator on these tensors."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a tensor subclass: torch calls this again for its inner tensors
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        self.marks.append(self.mark([leaf for leaf in leaves if isinstance(leaf, Tensor)]))
        return result


class GpuMeter(MemoryMeter):  # type: ignore[no-untyped-call]
    """Reads the peak since the previous operator from the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._before = device, torch.cuda.memory_allocated(device)

    def mark(self, tensors: Iterable[Tensor]) -> int:
        # Don't use max_memory_allocated: it flattens and sorts all 160 figures each time, which took 10 of a probe's 14
        # s on an H100.
        figures = torch.cuda.memory_stats_as_nested_dict(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(figures["allocated_bytes"]["all"]["peak"]) - self._before


class CpuMeter(MemoryMeter):  # type: ignore[no-untyped-call]
    """Follows the storages of tensors until they are freed."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self._existing = {tensor.untyped_storage()._cdata for tensor in existing}  # noqa: SLF001
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._now = 0

    def restart(self) -> None:
        # FSDP frees memory by resizing storages, which runs no operator, so read the sizes of all storages again.
        for reference, _ in list(self._alive.values()):
            if (storage := reference()) is not None:
                self._see(storage)
        super().restart()

    def mark(self, tensors: Iterable[Tensor]) -> int:
        for tensor in tensors:
            self._see(tensor.untyped_storage())
        return self._now

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001
        if key in self._existing:
            return
        if key in self._alive:
            reference, before = self._alive[key]
            self._now -= before
        else:
            reference = weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = (reference, size)
        self._now += size

    def _forget(self, key: int) -> None:
        self._now -= self._alive.pop(key)[1]


log = logging.getLogger(__name__)
MIB = 2**20
# Share of the free memory; on CPU others need some too, and allocators keep freed memory.
ROOM_SHARE = {"cpu": 0.5, "cuda": 0.9}
PROBE_TOKENS = {"cpu": 128, "cuda": 1024}  # of the shorter of two probes
LARGEST = 65536  # products reach their full speed with far fewer tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of a micro-batch of N tokens: fixed[k] + N x per_token[k] at moment k."""

    fixed: NDArray[np.float64]  # (K,)
    per_token: NDArray[np.float64]  # (K,)

    def of(self, num_tokens: int) -> int:
        """Return the bytes at the worst moment, which depends on the number."""
        return int((self.fixed + num_tokens * self.per_token).max())

    def fits(self, room_bytes: int) -> int:
        """Return the tokens that fit; below 1 if none does."""
        return int(((room_bytes - self.fixed) / self.per_token).min())


def find_token_budget(config: Config, ranks: Ranks, model: PolicyModel, room_bytes: int | None = None) -> int:
    """Return the token budget of all ranks: a power of two, so that a few megabytes more or less don't change the run.
    LearnerError: the longest trajectory does not fit."""
    longest = longest_part(config.learner, config.max_model_tokens)
    need = measure_need(config, ranks, model)
    room = free_bytes(ranks, model) if room_bytes is None else room_bytes
    if model.tower is not None:
        room -= tower_bytes(model_shape(config), config).get("features of pictures", 0)
    fits = min(ranks.gather(need.fits(room)))
    if fits < longest:
        raise LearnerError(
            f"the longest trajectory, {longest} tokens (rollout.max_prompt_tokens + rollout.max_completion_tokens), "
            f"does not fit into memory. A micro-batch of it takes {need.of(longest) / MIB:.0f} MiB with its gradients "
            f"and logits, and {room / MIB:.0f} MiB are free, enough for {max(0, fits)} tokens. Set "
            "learner.activation_checkpointing=true, lower learner.log_prob_chunk_tokens or the two lengths, or raise "
            "learner.num_learners."
        )
    budget = max(longest, 1 << (min(fits, LARGEST).bit_length() - 1))
    log.info("micro-batches of at most %d tokens: %.0f of %.0f MiB", budget, need.of(budget) / MIB, room / MIB)
    return budget


def measure_need(config: Config, ranks: Ranks, model: PolicyModel) -> MemoryNeed:
    """Run the layers on some tokens and on twice as many, and compare the memory moment by moment. Collective.

    At each operator the bytes grow linearly with the tokens, so the two runs predict any number. The head's bytes come
    by formula, as if head and layers had their peaks together.
    """
    few = min(PROBE_TOKENS[ranks.device.type], config.max_model_tokens // 2)
    # Run uncompiled, because the meter counts operators. Compiled operators need less memory.
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, memory_meter(ranks.device, [local_part(parameter) for parameter in model.parameters()]) as meter:
        _marks_of_layers(config.learner, ranks, model, meter, few)  # warm up: libraries allocate their workspaces
        first, second = (_marks_of_layers(config.learner, ranks, model, meter, size) for size in (few, 2 * few))
    if first.size != second.size:
        raise LearnerError(
            "learner.max_tokens_per_microbatch can't be auto: this model's memory need can't be predicted, because it "
            f"runs {first.size} operators for {few} tokens and {second.size} for {2 * few}. Set "
            "learner.max_tokens_per_microbatch to a number."
        )
    shape, per_token = model_shape(config), (second - first) / few
    # Frozen models score just before the update, and the weights that they gathered still take memory.
    on_cpu = ranks.device.type == "cpu"
    frozen = sum(
        gathered_bytes(own, config.learner, own.num_layers if on_cpu else 2)
        for own in frozen_shapes(shape, frozen_models(config)).values()
    )
    head = head_bytes(
        shape,
        config.learner,
        needs_logits=config.distillation.needs_logits,
        softmax_rows=CPU_SOFTMAX_ROWS if on_cpu else None,
    )
    unseen = head_bytes_per_token(shape, config.learner) + kept_in_tower(shape, config.learner)
    fixed = first - few * per_token + head + frozen
    return MemoryNeed(fixed=fixed, per_token=per_token.clip(0) + unseen)


def _marks_of_layers(
    learner: LearnerSection, ranks: Ranks, model: PolicyModel, meter: MemoryMeter, num_tokens: int
) -> NDArray[np.float64]:
    """Return the bytes at each moment of a step's second micro-batch, without the head."""
    reduce_gradients(model, is_last=False)
    _run_layers(learner, ranks, model, 1)
    reduce_gradients(model, is_last=True)
    meter.restart()
    _run_layers(learner, ranks, model, num_tokens)
    marks = np.array(meter.marks, np.float64)
    model.zero_grad()
    return marks


def _run_layers(learner: LearnerSection, ranks: Ranks, model: PolicyModel, num_tokens: int) -> None:
    # No token is predicted, so gradients are 0.
    options = HeadOptions(temperature=1.0, chunk_rows=learner.log_prob_chunk_tokens)
    # Use one sequence: attention on CPU would run more operators for several sequences.
    batch = empty_micro_batch(num_tokens * ranks.num_parts, num_heads=0)
    model(to_device(batch, ranks.device, ranks.sequence), options).log_probs.sum().backward()


def free_bytes(ranks: Ranks, model: PolicyModel) -> int:
    """Return this rank's part of the free memory, minus AdamW's moments, which the first step allocates."""
    trained = sum(local_part(p).numel() for p in model.parameters() if p.requires_grad)
    if ranks.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ranks.device)
        free += torch.cuda.memory_reserved(ranks.device) - torch.cuda.memory_allocated(ranks.device)
    else:
        free = available_memory() // ranks.world_size
    return int(ROOM_SHARE[ranks.device.type] * (free - ADAM * trained))


PLAN_TOLERANCE = 1.1  # of measured to planned bytes, above which a warning is logged


@contextmanager
def beside_plan(config: Config, device: torch.device, metrics: dict[str, float]) -> Iterator[None]:
    """After the first step on a GPU, log its peak of memory beside the planned one, and add both to `metrics`."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.reset_peak_memory_stats(device)
    yield
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    plan = plan_learner(model_shape(config), config)
    measured, planned = torch.cuda.max_memory_allocated(device), plan.total - plan.runtime
    metrics |= compare_with_plan(measured, planned, left=total - outside - measured, tokens=config.learner.token_budget)


def compare_with_plan(measured: int, planned: int, *, left: int, tokens: int) -> dict[str, float]:
    """Log measured and planned bytes of the first step; warn if it took more. Return both, in GiB, as metrics. `left`:
    bytes of the GPU that nothing took."""
    gib = {"measured": measured / GIB, "planned": planned / GIB, "left": left / GIB}
    figures = "the first step took {measured:.2f} GiB of GPU memory, {planned:.2f} were planned, {left:.2f} were left"
    log.info(figures.format(**gib))
    if measured > PLAN_TOLERANCE * planned:
        log.warning(
            "%s. Later steps with longer micro-batches may run out of memory: set learner.max_tokens_per_microbatch, "
            "now %d, to %d, and report both figures.", figures.format(**gib), tokens, max(16, tokens // 2)
        )  # fmt: skip
    return {f"memory/first_step_{name}_gib": value for name, value in gib.items()}

"""`learner.max_tokens_per_microbatch: auto`: how many tokens one forward may have, measured instead of guessed.

`build_learner` calls it once, after the model is loaded and before the first step. Two short forwards and backwards of
different lengths give the bytes of a token; what is free gives their number. On GPU the allocator counts, on CPU the
tensors that autograd keeps (malloc's own numbers depend on what came before). Never changes weights, gradients or RNG.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayapp.config import Config
from rayapp.errors import LearnerError
from rayapp.learner.batch import MicroBatch, TrainItem, split
from rayapp.learner.distributed import Ranks
from rayapp.learner.log_probs import HeadOptions
from rayapp.learner.policy import DTYPES, PolicyModel, to_device
from rayapp.memory_plan import ADAM, MASTER, adapter_bytes_per_token, layer_bytes_per_token
from rayapp.plan_command import model_shape
from rayapp.types import Reward, RolloutStatus, Trajectory

log = logging.getLogger(__name__)
ROOM_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Of what is free, what a micro-batch may take. On CPU servers, sandboxes and the page cache want memory too."""
LARGEST = 65536
"""Matrix products are as fast as they get long before."""


def find_token_budget(config: Config, ranks: Ranks, model: PolicyModel, room_bytes: int | None = None) -> int:
    """A power of two, so that a few megabytes more or less free don't change the run. The same on every rank.

    Args:
        room_bytes: that may be taken; None measures it.
    Raises:
        LearnerError: the longest trajectory alone needs more.
    """
    longest = config.max_model_tokens
    first, second = probe_sizes(config, ranks)
    few, many = (probe(config, ranks, model, size) for size in (first, second))
    per_token = max(1.0, (many - few) / (second - first))
    fixed = max(0.0, few - per_token * first)
    room = (free_bytes(ranks, model) if room_bytes is None else room_bytes) - fixed
    fits = min(ranks.gather(int(room / per_token)))
    if fits < longest:
        raise LearnerError(
            f"learner.max_tokens_per_microbatch is auto, but {fits} tokens of {per_token / 2**10:.0f} KiB fit into "
            f"the {room / 2**30:.2f} GiB that are free; the longest trajectory has {longest} "
            "(rollout.max_prompt_tokens + rollout.max_completion_tokens). Set learner.activation_checkpointing=true, "
            "lower learner.log_prob_chunk_tokens or the lengths, or raise learner.num_learners."
        )
    budget = max(longest, 1 << (min(fits, LARGEST).bit_length() - 1))
    log.info(
        "micro-batches of at most %d tokens: %.0f KiB each, %.2f GiB free", budget, per_token / 2**10, room / 2**30
    )
    return budget


def probe_sizes(config: Config, ranks: Ranks) -> tuple[int, int]:
    """Tokens of the two probes, whole sequences of the longest kind."""
    longest = config.max_model_tokens
    element = DTYPES[config.learner.compute_dtype].itemsize
    # On GPU the head's memory is in the measurement, and past this many rows it grows no more.
    rows = config.learner.log_prob_chunk_tokens * 4 // element if ranks.device.type == "cuda" else 1
    number = -(-rows // longest)
    return number * longest, 2 * number * longest


def probe(config: Config, ranks: Ranks, model: PolicyModel, num_tokens: int) -> int:
    """Bytes that a micro-batch of so many tokens takes for its forward and backward. Collective."""
    batch = _batch(config, model, num_tokens)
    options = HeadOptions(temperature=1.0, chunk_rows=config.learner.log_prob_chunk_tokens)
    if ranks.device.type == "cuda":
        return _peak_on_gpu(model, batch, options, ranks.device)
    kept = _kept_on_cpu(model, batch, options, ranks.device)
    return kept + _recomputed_on_cpu(config, num_tokens) + _head_on_cpu(config, model)


def _batch(config: Config, model: PolicyModel, num_tokens: int) -> MicroBatch:
    """Sequences of the longest kind, every token but the first one trained on."""
    longest, vocabulary = config.max_model_tokens, _vocabulary(model)
    draws = np.random.default_rng(0)
    items = []
    for row in range(num_tokens // longest):
        mask = np.arange(longest + 1) >= 1
        trajectory = Trajectory(
            token_ids=draws.integers(0, vocabulary, longest + 1).astype(np.int32),
            response_mask=mask,
            rollout_log_probs=np.zeros(longest + 1, np.float32),
            completion_text="",
            reward=Reward(value=0.0),
            status=RolloutStatus.COMPLETED,
            min_policy_version=0,
            max_policy_version=0,
        )
        items.append(TrainItem(row=row, group=row, trajectory=trajectory, advantages=np.ones(longest, np.float32)))
    (batch,) = split(items, max_tokens=num_tokens, share_prefixes=False)
    return batch


def _run(model: PolicyModel, batch: MicroBatch, options: HeadOptions, device: torch.device) -> None:
    scores = model(to_device(batch, device), options)
    scores.log_probs.sum().backward()
    model.zero_grad()


def _peak_on_gpu(model: PolicyModel, batch: MicroBatch, options: HeadOptions, device: torch.device) -> int:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _run(model, batch, options, device)
    return torch.cuda.max_memory_allocated(device) - before


def _kept_on_cpu(model: PolicyModel, batch: MicroBatch, options: HeadOptions, device: torch.device) -> int:
    """Without the head's logits and without weights, both of which don't grow with the tokens."""
    vocabulary = _vocabulary(model)
    weights = {shape for p in model.parameters() for shape in (tuple(p.shape), tuple(p.shape)[::-1])}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in weights and not (tensor.ndim and tensor.shape[-1] == vocabulary):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _run(model, batch, options, device)
    return sum(kept.values())


def _recomputed_on_cpu(config: Config, num_tokens: int) -> int:
    """Of the one layer that is being computed again: those tensors never pass the hooks of whoever called backward."""
    if not config.learner.activation_checkpointing:
        return 0
    shape, element = model_shape(config), DTYPES[config.learner.compute_dtype].itemsize
    return num_tokens * (layer_bytes_per_token(shape, element) + adapter_bytes_per_token(shape, element))


def _head_on_cpu(config: Config, model: PolicyModel) -> int:
    """See `memory_plan.head_bytes`: kept logits, and a chunk's or the head's gradient beside them."""
    vocabulary, hidden = _vocabulary(model), int(_settings(model).hidden_size)
    element, rows = DTYPES[config.learner.compute_dtype].itemsize, config.learner.log_prob_chunk_tokens
    return 4 * rows * vocabulary + max((element + 8) * rows * vocabulary, (element + 4) * vocabulary * hidden)


def _vocabulary(model: PolicyModel) -> int:
    return int(_settings(model).vocab_size)


def _settings(model: PolicyModel) -> Any:
    """transformers' config of the model."""
    causal_lm: Any = model.causal_lm
    return causal_lm.config


def free_bytes(ranks: Ranks, model: PolicyModel) -> int:
    """This rank's part of what is free, less the gradients and moments that the first step will make."""
    trained = sum(_local(p).numel() for p in model.parameters() if p.requires_grad)
    if ranks.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ranks.device)
        free += torch.cuda.memory_reserved(ranks.device) - torch.cuda.memory_allocated(ranks.device)
    else:
        free = available_bytes() // ranks.world_size
    return int(ROOM_SHARE[ranks.device.type] * (free - (MASTER + ADAM) * trained))


def available_bytes() -> int:
    """Of this machine, or of the cgroup that this process may use."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    machine = int(lines["MemAvailable"].split()[0]) * 1024
    return min([machine, *_cgroup_bytes()])


def _cgroup_bytes() -> list[int]:
    """What the cgroup (v2, v1) leaves; nothing where it sets no limit."""
    root, old = Path("/sys/fs/cgroup"), "memory/memory"
    for limit, usage in (("memory.max", "memory.current"), (f"{old}.limit_in_bytes", f"{old}.usage_in_bytes")):
        if (root / limit).exists() and (text := (root / limit).read_text().strip()) != "max":
            return [max(0, int(text) - int((root / usage).read_text()))]
    return []


def _local(parameter: torch.nn.Parameter) -> torch.Tensor:
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()

"""Expert parallelism: each of several ranks holds a part of the experts, and tokens travel to their experts' ranks.

    (N, H) --exchange--> rows of own experts --experts--> their outputs --exchange--> (N, k, H) --weights--> (N, H)

Routers, attention and everything else stay on the token's own rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rayapp.config.learner import LearnerSection
from rayapp.core.errors import InputError
from rayapp.learner.families.router_replay import num_experts_of


def check_expert_parallel(causal_lm: Any, learner: LearnerSection) -> None:
    """Raise InputError if the ranks can't share the experts evenly, or transformers computes them in another way."""
    size, text = learner.expert_parallel_size, causal_lm.config.get_text_config()
    if size == 1:
        return
    where, number = f"learner.expert_parallel_size is {size}, but {text.model_type!r} has", num_experts_of(text)
    if not number or not experts_of(causal_lm):
        raise InputError(
            f"{where} no experts that transformers computes as one module (use_experts_implementation). Set "
            "learner.expert_parallel_size: 1."
        )
    if number % size:
        learners = learner.num_learners
        sizes = [str(size) for size in range(1, number + 1) if number % size == 0 and learners % size == 0]
        raise InputError(
            f"{where} {number} experts, which {size} ranks can't share evenly. Set learner.expert_parallel_size to one "
            f"of {', '.join(sizes)}."
        )


def experts_of(causal_lm: Any) -> list[Any]:
    """Return the modules that hold all experts of a layer, if transformers can compute them with `grouped_mm`."""
    found = [module for module in causal_lm.get_decoder().modules() if hasattr(module, "is_concatenated")]
    if any(p.shape[0] != module.num_experts for module in found for p in module.parameters()):
        return []
    return found


def split_experts(causal_lm: Any, mesh: DeviceMesh) -> None:
    """Give each rank of the one-dimensional mesh its part of all experts, before sharding; forwards exchange tokens."""
    for experts in experts_of(causal_lm):
        own = experts.num_experts // mesh.size()
        for name, parameter in list(experts.named_parameters()):
            rows = parameter.detach().narrow(0, mesh.get_local_rank() * own, own)
            split = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(split, parameter.requires_grad))
        experts.forward = partial(_experts_over_ranks, experts, mesh.get_group())


def is_split(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))


class _OwnExperts:
    """The experts of this rank, with the attributes that transformers reads."""

    def __init__(self, experts: Any, size: int) -> None:
        self._experts, self._size = experts, size
        self.num_experts = experts.num_experts // size

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        if not isinstance(value, DTensor):
            return value
        own = value.to_local()
        if own.requires_grad:
            # The gradient has the tokens of all ranks of the group, and FSDP takes its mean over the groups. Other
            # parameters get the mean over all ranks.
            own.register_hook(lambda gradient: gradient / self._size)  # type: ignore[no-untyped-call]
        return own


def _experts_over_ranks(
    experts: Any, group: dist.ProcessGroup, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute tokens (N, H) with experts (N, k) and their weights (N, k) -> (N, H)."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    own, k = _OwnExperts(experts, group.size()), top_k_index.shape[1]
    # Rows are pairs of a token and one of its experts, in order of experts, so that a rank's rows lie together.
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    counts = torch.bincount(chosen, minlength=experts.num_experts)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = torch.stack([counts, arriving]).view(2, -1, own.num_experts).sum(2).tolist()
    rows = _Exchange.apply(hidden_states[order // k], sent, received, group)  # type: ignore[no-untyped-call]
    numbers = torch.arange(own.num_experts, device=rows.device).repeat(group.size()).repeat_interleave(arriving)
    if not len(numbers):
        # Compute one row of zeros, which no token gets: FSDP's reduction waits for a gradient of every rank.
        rows, numbers = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), numbers.new_zeros(1)
    found = grouped_mm_experts_forward(own, rows, numbers[:, None], rows.new_ones(len(rows), 1))
    back = _Exchange.apply(found[: sum(received)], received, sent, group)  # type: ignore[no-untyped-call]
    weighted: Tensor = back[order.argsort()] * top_k_weights.reshape(-1, 1)
    return weighted.view(-1, k, weighted.shape[1]).sum(1).to(hidden_states.dtype)


class _Exchange(torch.autograd.Function):
    """Exchange of rows within a group; the backward returns the rows' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.exchanged = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group = ctx.exchanged
        return _exchange(grad, received, sent, group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    # Sends `sent[r]` rows to rank r, in order; `received[r]` rows arrive from rank r.
    found = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found

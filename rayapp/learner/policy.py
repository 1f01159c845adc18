"""The policy on one rank: a transformers model, sharded with FSDP2, that maps a micro-batch to log-probs.

`load_policy` makes it; the learner calls it. The same path serves one rank and many, CPU and GPU, the trained policy
and the frozen reference. It knows nothing of rewards, losses or optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from rayapp.config.config import Config
from rayapp.config.distillation import DistillationSection
from rayapp.core.errors import InputError
from rayapp.core.imports import large_imports
from rayapp.learner.attention import ATTENTION_NAME, AttentionPlan, plan_attention, register_attention
from rayapp.learner.batch import MicroBatch
from rayapp.learner.compute.fused import fuse
from rayapp.learner.compute.sequence import (
    SEQUENCE_ATTENTION,
    OwnTokens,
    SequenceGroup,
    SequencePlan,
    check_sequence_parallel,
    gather_rows,
    own_tokens,
    register_sequence_attention,
)
from rayapp.learner.families.head import head_rule
from rayapp.learner.families.router_replay import EXPERTS, RouterReplay
from rayapp.learner.family import check_family, fit_to_packing, read_architecture, training_mode
from rayapp.learner.log_probs import HeadOptions, Targets, TeacherHead, first_pairs_of, token_log_probs
from rayapp.learner.state.lora import add_adapters
from rayapp.learner.state.pretrained import generation_config, load_pretrained, start_adapters

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """A micro-batch's numbers on the learner's device."""

    token_ids: Tensor
    """(1, N)"""
    position_ids: Tensor
    """(1, N)"""
    attention: AttentionPlan | SequencePlan
    head_positions: Tensor
    """(M,)"""
    targets: Targets
    row_pairs: Tensor
    """(B, T)"""
    row_heads: Tensor
    """(B, T)"""
    mask: Tensor
    """(B, T) float32"""
    routed_experts: Tensor | None = None
    """(N, layers, k), as in `MicroBatch`."""
    part: OwnTokens | None = None
    """With sequence parallelism: N, M and the targets are those of this rank's part, and this is which."""


def to_device(batch: MicroBatch, device: torch.device, group: SequenceGroup | None = None) -> DeviceBatch:
    """Copy to the device what a forward needs of a micro-batch.

    Args:
        group: the ranks that compute it together with this one; None where each computes its own.
    """

    def moved(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device)

    part = None if group is None else own_tokens(batch, group)
    packing = batch.packing if part is None else part.packing
    tokens, heads, pairs = (slice(None),) * 3 if part is None else (part.tokens, part.heads, part.pairs)
    plan: Any = plan_attention(packing, device)
    head_positions = batch.head_positions if part is None else part.head_positions(batch)
    rows, experts = batch.pair_rows[pairs] - (heads.start or 0), batch.routed_experts
    if experts is not None:
        experts = np.pad(experts, ((0, packing.num_tokens - len(experts)), (0, 0), (0, 0)), constant_values=-1)
    return DeviceBatch(
        token_ids=moved(packing.token_ids[tokens])[None],
        position_ids=moved(packing.position_ids[tokens])[None],
        attention=plan if group is None else SequencePlan(whole=plan, group=group),
        head_positions=moved(head_positions),
        targets=Targets(
            rows=moved(rows),
            token_ids=moved(batch.pair_targets[pairs]),
            first_pairs=first_pairs_of(rows, head_positions.size),
        ),
        row_pairs=moved(batch.row_pairs),
        row_heads=moved(batch.row_heads),
        mask=moved(batch.mask),
        routed_experts=None if experts is None else moved(experts[tokens]),
        part=part,
    )


class TokenScores(NamedTuple):
    """Scores of B trajectories, (B, T) float32, 0 past a row's own tokens. A tuple, as FSDP hooks tensors in tuples."""

    log_probs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor
    teacher_kl: Tensor
    """To the teacher where each token was sampled; 0 without one."""


class PolicyModel(nn.Module):
    """The transformers model with our head: hidden states only where a response token is predicted, no logits out."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._head = head_rule(causal_lm)
        self.num_tokens: int | None = None
        """The first so many tokens of its head count, in place of all: what is past them is another model's padding."""
        self.replay: RouterReplay | None = None
        """What makes its routers choose the engine's experts; None: they choose their own."""

    def forward(self, batch: DeviceBatch, options: HeadOptions, teacher: TeacherHead | None = None) -> TokenScores:
        """Score every response token of the micro-batch; with a teacher's head of it, the KL to that too."""
        log_probs, *by_head = token_log_probs(
            self._hidden(batch), self._output_weight(), batch.targets, self._head.applied_to(options), teacher
        )
        if (part := batch.part) is not None:
            log_probs = gather_rows(log_probs, part.num_pairs, part.group)
            own = slice(part.num_heads[part.group.rank])
            by_head = [gather_rows(values[own], part.num_heads, part.group) for values in by_head]
        return TokenScores(
            _rows(log_probs, batch.row_pairs, batch.mask),
            *(_rows(values, batch.row_heads, batch.mask) for values in by_head),
        )

    def read(self, batch: DeviceBatch, options: HeadOptions, section: DistillationSection) -> TeacherHead:
        """What this model's distributions follow from where the micro-batch has response tokens. Its head stays
        gathered until `reshard`."""
        return TeacherHead(
            hidden=self._hidden(batch),
            weight=self._output_weight().detach(),
            options=self._head.applied_to(options),
            section=section,
        )

    def _hidden(self, batch: DeviceBatch) -> Tensor:
        """(M, H)"""
        model: Any = self.causal_lm
        experts = {} if self.replay is None else {EXPERTS: batch.routed_experts}
        outputs = model.get_decoder()(
            input_ids=batch.token_ids, position_ids=batch.position_ids, use_cache=False, plan=batch.attention, **experts
        )
        hidden: Tensor = outputs.last_hidden_state[0].index_select(0, batch.head_positions)
        return hidden

    def _output_weight(self) -> Tensor:
        """(V, H)"""
        weight: Tensor = self.causal_lm.get_output_embeddings().weight  # type: ignore[operator]
        return weight if self.num_tokens is None else weight[: self.num_tokens]

    @property
    def vocabulary(self) -> int:
        """Tokens that its head has a logit for."""
        return self._output_weight().shape[0]


def _rows(values: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """Gather to (B, T); the gradient of a shared token is the sum over the rows it is in."""
    if index.shape[0] == 0:
        # An empty micro-batch has no row, but a zero gradient must reach every parameter, or FSDP waits for ever.
        return (values * 0.0).sum().expand(1, 1).clone()  # a view would lose FSDP's hook
    return values.index_select(0, index.reshape(-1)).view(index.shape) * mask


def load_policy(config: Config, mesh: DeviceMesh, *, trainable: bool, is_checked: bool = True) -> PolicyModel:
    """The model at `config.model.path`, sharded over the mesh.

    It is built without memory and sharded, and then each rank reads its own part.

    Args:
        is_checked: whether its family is, on rank 0: the check computes a small model, and once is enough.
    Raises:
        InputError: the model can't be loaded, or is of a family that the learner does not compute.
    """
    causal_lm = build_causal_lm(config, is_checked=is_checked and mesh.get_rank() == 0)
    section = config.learner
    if section.compile:
        fuse(causal_lm, torch.device(mesh.device_type))
    model = policy_of(causal_lm, config, trainable=trainable)
    shard(model, mesh, compute_dtype=DTYPES[section.compute_dtype], cpu_offload=section.cpu_offload)
    _give_memory(model, torch.device(mesh.device_type), on_host=section.cpu_offload)
    load_pretrained(causal_lm, config.model.path)
    start_adapters(causal_lm, config.run.seed)
    return model


def policy_of(causal_lm: Any, config: Config, *, trainable: bool) -> PolicyModel:
    """A transformers model as the learner runs it, not sharded yet: adapters added, and what is not trained frozen."""
    if config.learner.activation_checkpointing and trainable:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = PolicyModel(causal_lm)
    model.eval().requires_grad_(trainable)
    if trainable:
        training_mode(causal_lm)
    if trainable and config.learner.router_replay:
        model.replay = RouterReplay(causal_lm)
    if trainable and config.learner.lora.rank > 0:
        with torch.device("meta"):
            add_adapters(causal_lm, config.learner.lora)
    return model


def build_causal_lm(config: Config, *, is_checked: bool = True) -> Any:
    """The transformers model in float32 with packed attention, on torch's meta device: without weights or memory.

    Args:
        is_checked: whether to compare a small model of this family with plain attention first.
    Raises:
        InputError: it can't be made, or the learner would compute another model.
    """
    with large_imports():
        from transformers import AutoModelForCausalLM

    register_attention()
    register_sequence_attention()
    architecture = read_architecture(config)
    if is_checked:
        check_family(architecture, config)
    try:
        with torch.device("meta"):
            causal_lm = AutoModelForCausalLM.from_config(
                architecture,
                dtype=torch.float32,
                attn_implementation=ATTENTION_NAME if config.learner.sequence_parallel == 1 else SEQUENCE_ATTENTION,
                trust_remote_code=config.model.trust_remote_code,
            )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model.path {config.model.path!r} can't be loaded: {error}") from error
    fit_to_packing(causal_lm, config.max_model_tokens)
    check_sequence_parallel(causal_lm, config)
    if is_checked and getattr(causal_lm.config.get_text_config(), "router_aux_loss_coef", None):
        log.info("the model's config has router_aux_loss_coef: routers are trained by the policy's loss alone")
    if (sampling := generation_config(config.model.path)) is not None:
        causal_lm.generation_config = sampling
    return causal_lm


def _give_memory(model: PolicyModel, device: torch.device, *, on_host: bool) -> None:
    """Memory for a sharded model on the meta device; what its buffers hold is computed, parameters stay unset.

    Args:
        on_host: its parameters are in host memory; buffers are where it computes.
    """
    model.to_empty(device="cpu" if on_host else device)
    causal_lm: Any = model.causal_lm
    causal_lm.tie_weights()  # each name got memory of its own
    for parameter in causal_lm.parameters():
        parameter._is_hf_initialized = True  # noqa: SLF001 - how transformers knows what is not to be set
    causal_lm.initialize_weights()
    for module in causal_lm.modules():
        module._buffers.update({name: b.to(device) for name, b in module._buffers.items() if b is not None})  # noqa: SLF001


def shard(
    model: PolicyModel, mesh: DeviceMesh, *, compute_dtype: torch.dtype, cpu_offload: bool = False
) -> PolicyModel:
    """FSDP2: float32 shards, all-gathered in compute_dtype, gradients reduced in float32.

    Args:
        cpu_offload: shards, gradients and with them the optimizer's state live in host memory.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32
    )
    is_cpu = mesh.device_type == "cpu"
    # Pinned memory is for copies to a GPU; a CPU run has none to pin for.
    offload = CPUOffloadPolicy(pin_memory=not is_cpu) if cpu_offload else OffloadPolicy()
    decoder: Any = model.causal_lm.get_decoder()  # type: ignore[operator]
    for layer in decoder.layers:
        # On CPU host memory is plenty, and gathering again in backward costs time.
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=not is_cpu)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    register_fsdp_forward_method(model, "read")
    return model


def reduce_gradients(model: PolicyModel, device: torch.device, *, is_last: bool) -> None:
    """Tell FSDP, before a backward, whether to reduce gradients over the ranks after it.

    On CPU the gradients of all micro-batches are summed locally and reduced once, after the last of the optimizer step;
    on GPU they are reduced each time, as the memory for the sum is too dear.
    """
    if device.type == "cpu":
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        model.set_reshard_after_backward(is_last)  # type: ignore[operator]


def named_weights(model: PolicyModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter under its module's name, tied ones once. Without LoRA these are the Hugging Face names."""
    yield from model.causal_lm.named_parameters()

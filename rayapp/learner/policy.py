"""Holds the policy on one rank: a transformers model, sharded with FSDP2, that maps a micro-batch to log-probs.

The learning rate is a pure function of the optimizer step, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
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
from rayapp.config.learner import LearnerSection, OptimizerSection
from rayapp.config.other_models import DistillationSection
from rayapp.config.sections import ModelSection
from rayapp.core.errors import InputError
from rayapp.learner.attention import ATTENTION_NAME, AttentionLayout, plan_attention, register_attention
from rayapp.learner.batch import MicroBatch
from rayapp.learner.device import check_compiler, fuse, keep_compiled, moved
from rayapp.learner.distributed import EXPERT_RANKS, whole
from rayapp.learner.families.experts import check_expert_parallel, is_split, split_experts
from rayapp.learner.families.pictures import (
    DevicePictures,
    Tower,
    build_model,
    freeze_tower,
    on_device,
    replicated,
    tower_parameters,
)
from rayapp.learner.families.router_replay import EXPERTS, RouterReplay
from rayapp.learner.family import check_family, fit_to_packing, head_rule, read_architecture, training_mode
from rayapp.learner.log_probs import (
    HeadOptions,
    Targets,
    TeacherHead,
    first_pairs_of,
    masks_on,
    token_log_probs,
)
from rayapp.learner.sequence import (
    SEQUENCE_ATTENTION,
    OwnTokens,
    SequenceGroup,
    SequenceLayout,
    check_sequence_parallel,
    gather_rows,
    own_tokens,
    register_sequence_attention,
)
from rayapp.learner.state.lora import add_adapters
from rayapp.learner.state.packed import pack_linears
from rayapp.learner.state.pretrained import generation_config, load_pretrained, start_adapters
from rayapp.storage.models.adapters import has_merged_adapter

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    token_ids: Tensor  # (1, N)
    position_ids: Tensor  # (1, N), or (3, 1, N) with pictures whose rotary positions have three dimensions
    attention: AttentionLayout | SequenceLayout
    head_positions: Tensor  # (M,)
    targets: Targets
    row_pairs: Tensor  # (B, T)
    row_heads: Tensor  # (B, T)
    mask: Tensor  # (B, T) float32
    routed_experts: Tensor | None = None  # (N, layers, k)
    # Part of this rank with sequence parallelism, which N, M and the targets then cover.
    part: OwnTokens | None = None
    pictures: DevicePictures | None = None


def to_device(batch: MicroBatch, device: torch.device, group: SequenceGroup | None = None) -> DeviceBatch:
    """Copy the tensors that a forward needs to the device. `group` are ranks that compute the micro-batch together."""

    on = partial(moved, device=device)
    part = None if group is None else own_tokens(batch, group)
    packing = batch.packing if part is None else part.packing
    tokens, heads, pairs = (slice(None),) * 3 if part is None else (part.tokens, part.heads, part.pairs)
    plan: Any = plan_attention(packing, device)
    head_positions = batch.head_positions if part is None else part.head_positions(batch)
    rows, experts = batch.pair_rows[pairs] - (heads.start or 0), batch.routed_experts
    if experts is not None:
        experts = np.pad(experts, ((0, packing.num_tokens - len(experts)), (0, 0), (0, 0)), constant_values=-1)
    pictures = None if batch.pictures is None else batch.pictures.part(tokens, packing.num_tokens)
    position_ids = packing.position_ids[None, tokens]
    if pictures is not None and pictures.positions is not None:
        position_ids = pictures.positions[:, None]
    return DeviceBatch(
        token_ids=on(packing.token_ids[tokens])[None],
        position_ids=on(position_ids),
        attention=plan if group is None else SequenceLayout(whole=plan, group=group),
        head_positions=on(head_positions),
        targets=Targets(
            rows=on(rows),
            token_ids=on(batch.pair_targets[pairs]),
            first_pairs=first_pairs_of(rows, head_positions.size),
            allowed=None if batch.allowed is None else masks_on(device, batch.allowed.of(heads)),
        ),
        row_pairs=on(batch.row_pairs),
        row_heads=on(batch.row_heads),
        mask=on(batch.mask),
        routed_experts=None if experts is None else on(experts[tokens]),
        part=part,
        pictures=None if pictures is None else on_device(pictures, device),
    )


class TokenScores(NamedTuple):
    """Scores of B trajectories, (B, T) float32, 0 past a row's own tokens. FSDP looks for tensors in tuples."""

    log_probs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor
    teacher_kl: Tensor  # KL to the teacher at each sampled token's position


class PolicyModel(nn.Module):
    """Transformers model whose head scores only the positions that predict a response token, and returns no logits."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._head = head_rule(causal_lm)
        self.num_tokens: int | None = None  # of the head, if another model has a smaller vocabulary
        self.replay: RouterReplay | None = None  # makes the routers choose the experts that the engine chose
        self.tower = Tower(causal_lm) if tower_parameters(causal_lm) else None  # reads pictures
        self.reduces_once = self.keeps_gathered = False  # see `reduce_gradients`

    def forward(self, batch: DeviceBatch, options: HeadOptions, teacher: TeacherHead | None = None) -> TokenScores:
        """Score every response token, with the KL to the teacher if one is given."""
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
        """Return this model as the teacher of a micro-batch. Its output embedding stays gathered until `reshard`."""
        return TeacherHead(
            hidden=self._hidden(batch),
            weight=self._output_weight().detach(),
            options=self._head.applied_to(options),
            section=section,
        )

    def _hidden(self, batch: DeviceBatch) -> Tensor:
        """Return hidden states (M, H) of the positions that predict a response token."""
        model: Any = self.causal_lm
        inputs: dict[str, Any] = {} if self.replay is None else {EXPERTS: batch.routed_experts}
        if self.tower is None:
            inputs["input_ids"] = batch.token_ids
        else:
            inputs |= self.tower.decoder_inputs(batch.token_ids, batch.pictures)
        outputs = model.get_decoder()(position_ids=batch.position_ids, use_cache=False, plan=batch.attention, **inputs)
        hidden: Tensor = outputs.last_hidden_state[0].index_select(0, batch.head_positions)
        return hidden

    def _output_weight(self) -> Tensor:
        weight: Tensor = self.causal_lm.get_output_embeddings().weight  # type: ignore[operator]
        return weight if self.num_tokens is None else weight[: self.num_tokens]

    @property
    def vocabulary(self) -> int:
        return self._output_weight().shape[0]


def _rows(values: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """Gather values into rows (B, T). The gradient of a token that rows share is the sum over them."""
    if index.shape[0] == 0:
        # An empty micro-batch has no row, but a zero gradient must reach every parameter: otherwise FSDP waits forever.
        return (values * 0.0).sum().expand(1, 1).clone()  # a view would lose FSDP's hook
    return values.index_select(0, index.reshape(-1)).view(index.shape) * mask


def load_policy(config: Config, mesh: DeviceMesh, *, trainable: bool, is_checked: bool = True) -> PolicyModel:
    """Load the model at `config.model.path`: built and sharded without memory, then each rank reads its part of the
    weights. `is_checked`: check the model's family, on rank 0 only."""
    compiles = config.compiles(on_gpu=mesh.device_type == "cuda")
    if compiles:
        check_compiler(mesh.device_type)
        keep_compiled()
    causal_lm = build_causal_lm(
        config.model, config.learner, config.max_model_tokens, is_checked=is_checked and mesh.get_rank() == 0
    )
    section = config.learner
    if compiles:
        fuse(causal_lm, is_asked=section.compile is True)
    model = policy_of(causal_lm, config.model, config.learner, trainable=trainable)
    if section.expert_parallel_size > 1:
        split_experts(causal_lm, mesh[EXPERT_RANKS])
    # On CPU memory is plentiful, and gathering again costs time.
    keeps = mesh.device_type == "cpu" or (trainable and section.keeps_gathered(len(causal_lm.get_decoder().layers)))
    dtype = DTYPES[section.compute_dtype]
    shard(model, mesh, compute_dtype=dtype, cpu_offload=section.cpu_offload, keeps_gathered=keeps)
    _give_memory(model, torch.device(mesh.device_type), on_host=section.cpu_offload)
    files = load_pretrained(causal_lm, config.model)
    start_adapters(causal_lm, config.run.seed, section.lora, files.adapter)
    return model


def policy_of(causal_lm: Any, section: ModelSection, learner: LearnerSection, *, trainable: bool) -> PolicyModel:
    """Add adapters, freeze and pack other parameters, before sharding. Frozen ones get the compute dtype; trained ones
    stay float32."""
    if trainable:
        recompute(causal_lm, learner.num_recomputed(len(causal_lm.get_decoder().layers)))
    model = PolicyModel(causal_lm)
    model.eval().requires_grad_(trainable)
    if section.freeze_vision:
        freeze_tower(causal_lm)
    if trainable:
        training_mode(causal_lm)
    if trainable and learner.router_replay:
        model.replay = RouterReplay(causal_lm)
    if learner.lora.rank > 0 and (trainable or (section.quantization == "nf4" and has_merged_adapter(section.path))):
        with torch.device("meta"):
            add_adapters(causal_lm, learner.lora)
        if not trainable:
            model.requires_grad_(False)
    if section.quantization == "nf4":
        pack_linears(causal_lm)
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(DTYPES[learner.compute_dtype])
    return model


def recompute(causal_lm: Any, num_layers: int) -> None:
    """Recompute the first `num_layers` layers' activations in the backward. InputError: the model can only recompute
    all."""
    if not num_layers:
        return
    causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = causal_lm.get_decoder().layers
    for layer in layers[num_layers:]:
        if not hasattr(layer, "gradient_checkpointing"):
            raise InputError(
                f"{type(causal_lm).__name__} can't recompute only {num_layers} of its {len(layers)} layers: set "
                "learner.activation_checkpointing to true or false"
            )
        layer.gradient_checkpointing = False


def build_causal_lm(model: ModelSection, learner: LearnerSection, max_tokens: int, *, is_checked: bool = True) -> Any:
    """Build the transformers model in float32 with packed attention, on torch's meta device."""
    register_attention()
    register_sequence_attention()
    architecture = read_architecture(model)
    if is_checked:
        check_family(architecture, model, learner, max_tokens)
    attention = ATTENTION_NAME if learner.sequence_parallel == 1 else SEQUENCE_ATTENTION
    try:
        with torch.device("meta"):
            causal_lm = build_model(architecture, attention, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model.path {model.path!r} can't be loaded: {error}") from error
    fit_to_packing(causal_lm, max_tokens)
    check_sequence_parallel(causal_lm, learner)
    check_expert_parallel(causal_lm, learner)
    if is_checked and getattr(causal_lm.config.get_text_config(), "router_aux_loss_coef", None):
        log.info("the model's config has router_aux_loss_coef: routers are trained by the policy's loss alone")
    if (sampling := generation_config(model.path)) is not None:
        causal_lm.generation_config = sampling
    return causal_lm


def _give_memory(model: PolicyModel, device: torch.device, *, on_host: bool) -> None:
    # The model is on the meta device. Buffers are computed, parameters stay unset.
    model.to_empty(device="cpu" if on_host else device)
    causal_lm: Any = model.causal_lm
    for parameter in replicated(causal_lm):
        parameter.data = torch.empty_like(parameter, device=device)
    causal_lm.tie_weights()  # tie weights again, because each name got its own memory
    for parameter in causal_lm.parameters():
        parameter._is_hf_initialized = True  # noqa: SLF001 - tells transformers not to initialize it
    causal_lm.initialize_weights()
    for module in causal_lm.modules():
        module._buffers.update({name: b.to(device) for name, b in module._buffers.items() if b is not None})  # noqa: SLF001


def shard(
    model: PolicyModel,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    cpu_offload: bool = False,
    keeps_gathered: bool = False,
) -> PolicyModel:
    """Shard the model with FSDP2: float32 shards, gathered in compute_dtype, gradients reduced in float32.
    `cpu_offload` keeps shards, gradients and the optimizer's state in host memory. `keeps_gathered` gathers each layer
    once a step; otherwise a lone rank, too, copies its shards before each forward and each backward."""
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32
    )
    is_cpu = mesh.device_type == "cpu"
    # Pin memory only for GPUs, because it speeds up copies to GPUs.
    offload = CPUOffloadPolicy(pin_memory=not is_cpu) if cpu_offload else OffloadPolicy()
    decoder: Any = model.causal_lm.get_decoder()  # type: ignore[operator]
    sharded = partial(fully_shard, offload_policy=offload, reshard_after_forward=not keeps_gathered)
    everyone = mesh._flatten() if EXPERT_RANKS in (mesh.mesh_dim_names or ()) else mesh  # noqa: SLF001
    for layer in decoder.layers:
        for experts in filter(is_split, layer.modules()):
            # Leave the experts' weights in the router's dtype, as if they were arguments inside of the layer.
            sharded(experts, mesh=mesh["shard"], mp_policy=replace(precision, cast_forward_inputs=False))
        sharded(layer, mesh=everyone, mp_policy=precision)
    ignored = replicated(model.causal_lm)
    sharded(model, mesh=everyone, mp_policy=precision, reshard_after_forward=False, ignored_params=ignored)
    register_fsdp_forward_method(model, "read")
    model.reduces_once = is_cpu or (mesh.size() == 1 and not cpu_offload)
    model.keeps_gathered = keeps_gathered
    return model


def reduce_gradients(model: PolicyModel, *, is_last: bool) -> None:
    """Tell FSDP, before a micro-batch, whether to reduce gradients after it: on a CPU, and on one GPU, whose shards are
    whole, once, after the last; else after each, to save the memory of the unsharded sum. Gathered weights that are
    kept are freed after the last."""
    if model.reduces_once:
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    if model.keeps_gathered:
        model.set_reshard_after_backward(is_last)  # type: ignore[operator]


def named_weights(model: PolicyModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter with its name in the module (Hugging Face's, without LoRA); tied ones once."""
    yield from model.causal_lm.named_parameters()


def make_optimizer(model: PolicyModel, section: OptimizerSection) -> torch.optim.AdamW:
    """Return fused AdamW with weight decay only on matrices."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, fused=True)


def learning_rate(step: int, num_steps: int, section: OptimizerSection) -> float:
    """Return the learning rate of optimizer step `step`, from 1 to `num_steps`; the schedule ends one step later.

    Example: lr 1, warmup 2 of 4 steps, linear to 0 -> 0.5, 1.0, 1.0, 0.5.
    """
    if step <= section.warmup_steps:
        return section.lr * step / section.warmup_steps
    progress = (step - 1 - section.warmup_steps) / max(1, num_steps - section.warmup_steps)
    return section.lr * _decay(min(1.0, progress), section)


def _decay(progress: float, section: OptimizerSection) -> float:
    if section.schedule == "constant":
        return 1.0
    share = 1.0 - progress if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.min_lr_ratio + (1.0 - section.min_lr_ratio) * share


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale gradients to a global norm of at most `max_norm`; return the norm before. If it is not finite, none is
    scaled."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}  # torch adds up the norms of one mesh only
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [whole(torch.nn.utils.get_total_norm([p.grad for p in own])) for own in by_mesh.values()]  # type: ignore[misc]
    norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)
    if torch.isfinite(norm) and norm > max_norm:
        for own in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
    return float(norm)

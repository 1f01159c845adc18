"""The policy on one rank: a transformers model, sharded with FSDP2, that maps a micro-batch to log-probs.

`load_policy` makes it; the learner calls it. The same path serves one rank and many, CPU and GPU, the trained policy
and the frozen reference. It knows nothing of rewards, losses or optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.core.imports import large_imports
from rayapp.learner.attention import ATTENTION_NAME, AttentionPlan, plan_attention, register_attention
from rayapp.learner.batch import MicroBatch
from rayapp.learner.family import check_family, read_architecture
from rayapp.learner.log_probs import HeadOptions, Targets, first_pairs_of, token_log_probs
from rayapp.learner.state.lora import add_adapters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """A micro-batch's numbers on the learner's device."""

    token_ids: Tensor
    """(1, N)"""
    position_ids: Tensor
    """(1, N)"""
    attention: AttentionPlan
    head_positions: Tensor
    """(M,)"""
    targets: Targets
    row_pairs: Tensor
    """(B, T)"""
    row_heads: Tensor
    """(B, T)"""
    mask: Tensor
    """(B, T) float32"""


def to_device(batch: MicroBatch, device: torch.device) -> DeviceBatch:
    """Copy to the device what a forward needs of a micro-batch."""

    def moved(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device)

    return DeviceBatch(
        token_ids=moved(batch.packing.token_ids)[None],
        position_ids=moved(batch.packing.position_ids)[None],
        attention=plan_attention(batch.packing, device),
        head_positions=moved(batch.head_positions),
        targets=Targets(
            rows=moved(batch.pair_rows),
            token_ids=moved(batch.pair_targets),
            first_pairs=first_pairs_of(batch.pair_rows, batch.head_positions.size),
        ),
        row_pairs=moved(batch.row_pairs),
        row_heads=moved(batch.row_heads),
        mask=moved(batch.mask),
    )


class TokenScores(NamedTuple):
    """Scores of B trajectories, (B, T) float32, 0 past a row's own tokens. A tuple, as FSDP hooks tensors in tuples."""

    log_probs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor


class PolicyModel(nn.Module):
    """The transformers model with our head: hidden states only where a response token is predicted, no logits out."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, batch: DeviceBatch, options: HeadOptions) -> TokenScores:
        """Score every response token of the micro-batch."""
        model: Any = self.causal_lm
        outputs = model.get_decoder()(
            input_ids=batch.token_ids, position_ids=batch.position_ids, use_cache=False, plan=batch.attention
        )
        hidden = outputs.last_hidden_state[0].index_select(0, batch.head_positions)  # (M, H)
        weight = model.get_output_embeddings().weight
        log_probs, entropy, squares = token_log_probs(hidden, weight, batch.targets, options)
        return TokenScores(
            _rows(log_probs, batch.row_pairs, batch.mask),
            _rows(entropy, batch.row_heads, batch.mask),
            _rows(squares, batch.row_heads, batch.mask),
        )


def _rows(values: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """Gather to (B, T); the gradient of a shared token is the sum over the rows it is in."""
    if index.shape[0] == 0:
        # An empty micro-batch has no row, but a zero gradient must reach every parameter, or FSDP waits for ever.
        return (values * 0.0).sum().expand(1, 1).clone()  # a view would lose FSDP's hook
    return values.index_select(0, index.reshape(-1)).view(index.shape) * mask


def load_policy(config: Config, mesh: DeviceMesh, *, trainable: bool) -> PolicyModel:
    """The model at `config.model.path`, sharded over the mesh. Collective.

    Only the first rank reads it and holds it whole, in host memory, until every rank has its shards.

    Raises:
        InputError: the model can't be loaded, or has a head that the learner does not compute.
    """
    has_weights = mesh.get_local_rank() == 0
    causal_lm = load_causal_lm(config) if has_weights else causal_lm_without_weights(config)
    model = policy_of(causal_lm, config, trainable=trainable)
    whole = dict(model.named_parameters()) if has_weights else {}
    sharded = shard(
        model, mesh, compute_dtype=DTYPES[config.learner.compute_dtype], cpu_offload=config.learner.cpu_offload
    )
    if mesh.size() > 1:
        _scatter(whole, sharded, mesh)
    return sharded


def policy_of(causal_lm: Any, config: Config, *, trainable: bool) -> PolicyModel:
    """A transformers model as the learner runs it, not sharded yet: adapters added, and what is not trained frozen."""
    if config.learner.activation_checkpointing and trainable:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = PolicyModel(causal_lm)
    model.train(trainable).requires_grad_(trainable)
    if trainable and config.learner.lora.rank > 0:
        add_adapters(causal_lm, config.learner.lora)
    return model


def _scatter(whole: dict[str, nn.Parameter], model: PolicyModel, mesh: DeviceMesh) -> None:
    """Give every rank its shards of the first rank's parameters, and all of its buffers. Collective.

    Args:
        whole: the parameters before they were sharded; empty on the other ranks.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Where there are no weights only the shape is read.
            source = whole.pop(name).detach() if whole else torch.empty(parameter.shape, dtype=parameter.dtype)
            assert isinstance(parameter, DTensor)
            mine = distribute_tensor(source, mesh, parameter.placements, src_data_rank=0)
            parameter.to_local().copy_(mine.to_local())
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0, group=mesh.get_group())


def causal_lm_without_weights(config: Config) -> Any:
    """What `load_causal_lm` gives, with whatever is in memory for weights: pages that nobody writes take no room."""
    from transformers import AutoModelForCausalLM

    register_attention()
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(
            read_architecture(config),
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=config.model.trust_remote_code,
        )
    causal_lm.to_empty(device="cpu")
    causal_lm.tie_weights()
    return causal_lm


def load_causal_lm(config: Config) -> Any:
    """The transformers model in float32 on CPU, with packed attention.

    Raises:
        InputError: it can't be loaded, or the learner would compute another model.
    """
    with large_imports():
        from transformers import AutoModelForCausalLM

    register_attention()
    path = config.model.path
    architecture = read_architecture(config)
    check_family(architecture, config)
    try:
        causal_lm = AutoModelForCausalLM.from_pretrained(
            path,
            config=architecture,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=config.model.trust_remote_code,
            local_files_only=Path(path).is_dir(),
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model.path {path!r} can't be loaded: {error}") from error
    check_head(causal_lm)
    return causal_lm


def check_head(causal_lm: Any) -> None:
    """Raises InputError for heads that do more than multiply by the output embedding."""
    if getattr(causal_lm.get_output_embeddings(), "bias", None) is not None:
        raise InputError(f"{type(causal_lm).__name__} has a bias in its output embedding, which the learner lacks")
    text = causal_lm.config.get_text_config()
    for name, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1.0), ("logit_scale", 1.0)):
        value = getattr(text, name, neutral)
        if value not in (None, neutral):
            raise InputError(f"{type(causal_lm).__name__} sets {name} = {value}, which the learner does not compute")


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

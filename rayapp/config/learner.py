"""Section `learner`: memory, precision, adapters, optimizer. Data only."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rayapp.config.base import AutoDtype, FrozenModel


class OptimizerSection(FrozenModel):
    """AdamW, and its learning rate over the steps."""

    lr: float = Field(1e-6, gt=0.0)
    """Learning rate at the peak of the schedule."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates: of the running mean of the gradient, and of its square."""
    weight_decay: float = Field(0.0, ge=0.0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Gradient clipping: a gradient with a larger norm is scaled down to this norm."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up: constant, or falling to lr * min_lr_ratio at the last step along a cosine or
    linearly."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the learning rate rises linearly from 0 to lr."""
    min_lr_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """Learning rate at the end of the schedule as a share of lr; has no effect on a constant schedule."""


CPU_SOFTMAX_ROWS = 64  # rows together: 64 x 49152 float32 fit into the last-level cache
GPU_SOFTMAX_ROWS = 1024  # enough to fill a GPU; float32 copies of a larger chunk would only take memory
MAX_ADAPTER_RANK = 512  # that vLLM serves


class LoraSection(FrozenModel):
    """Low-rank adapters, trained instead of all weights."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = Field(32, ge=1)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = Field(("all-linear",), min_length=1)
    """Names of the linear layers that get adapters, e.g. q_proj. all-linear: all linear layers of the decoder."""
    send: Literal["adapter", "merged"] = "adapter"
    """Weights that servers get after each step. adapter: only the low-rank matrices. merged: full weights with the
    adapters merged in, for models that vLLM can't serve with LoRA, or for faster generation at the cost of more bytes
    to send."""

    @property
    def sends_adapter(self) -> bool:
        return self.rank > 0 and self.send == "adapter"

    @model_validator(mode="after")
    def _vllm_has_the_rank(self) -> Self:
        if self.sends_adapter and self.rank > MAX_ADAPTER_RANK:
            raise ValueError(
                f"learner.lora.rank is {self.rank}, but vLLM serves adapters of rank {MAX_ADAPTER_RANK} at most. "
                "Lower learner.lora.rank, or set learner.lora.send: merged."
            )
        return self


class LearnerSection(FrozenModel):
    """Processes that train, and their memory and precision (docs/learner.md)."""

    num_learners: int = Field(1, ge=1)
    """Number of learner processes (FSDP2 world size): one for each GPU that trains."""
    replicas: int = Field(1, ge=1)
    """Number of model replicas (HSDP): the learners form this many groups, and each group shards a full model. 1: one
    model, sharded over all learners. On several nodes use the number of nodes, so that only gradients cross nodes."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of learners that compute a micro-batch together, each a part of its tokens (Ulysses). A trajectory may
    then be this many times as long as learner.max_tokens_per_microbatch. The number of attention heads must be
    divisible by it."""
    expert_parallel_size: int = Field(1, ge=1)
    """Number of neighbouring learners that share the experts of each layer, for mixtures of experts: tokens are sent to
    the learners of their experts, and a learner gathers only its own experts. num_learners and the number of experts
    must be divisible by it (docs/learner.md)."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=16)] | Literal["auto"] = 8192
    """Maximum number of tokens of one forward pass of a learner. The value changes only the memory of activations, and
    the last digits of results. auto: at the start, measure the number that fits, and use a power of two."""
    compute_dtype: AutoDtype = "auto"
    """Number format of forward, backward and frozen parameters (a reference, a teacher, the model under adapters).
    Trained parameters and optimizer state are float32. auto: as server.dtype if that is set; else bfloat16 on GPUs and
    on CPUs with bfloat16 instructions, and float32 on other CPUs, where bfloat16 takes about 20 times as long."""
    share_prefixes: bool = True
    """Compute tokens that trajectories of a group share, such as the prompt, only once. The result is exact."""
    activation_checkpointing: bool | Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Recompute activations of layers in the backward pass: less memory, and for all layers a third more time. A
    number: only of this many layers, from the first on. auto: on GPUs of as few as fit by the plan, on CPU of none."""
    compile: bool | Literal["auto"] = "auto"
    """Compile norms, rotary positions, gated MLPs and the softmax over the vocabulary: less memory traffic, the same
    numbers up to rounding. auto: on GPUs, unless run.deterministic is set. Needs Triton, a C compiler and Python's
    headers on the learners' nodes; on CPU a C++ compiler."""
    router_replay: bool = False
    """Router replay (R3), for mixtures of experts: train each token, and compute its old log-prob, with the experts
    that the server chose. A reference chooses its own (docs/learner.md)."""
    log_prob_chunk_tokens: int = Field(1024, ge=16)
    """Number of tokens whose logits are in memory at once. The logits take log_prob_chunk_tokens x vocabulary size x 4
    bytes."""
    cpu_threads: int = Field(0, ge=0)
    """Threads of each learner on CPU. 0: the cores (or the container's quota) divided by the number of learners, half
    if servers compute at the same time (train.max_staleness above 0); at most 4, or one per 32 MiB of weights if that
    is more."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP2). Slower; for models that don't fit on the
    GPU."""
    offload_when_idle: bool = False
    """Move parameters and optimizer state to pinned host memory while servers on the same GPUs generate. This leaves
    room for a larger KV cache. Needs cluster.placement: colocated; every step costs a copy in each direction."""
    lora: LoraSection = LoraSection()
    optimizer: OptimizerSection = OptimizerSection()

    @property
    def token_budget(self) -> int:
        """`max_tokens_per_microbatch` as a number. A learner replaces auto before this is read."""
        assert isinstance(self.max_tokens_per_microbatch, int), "learner.max_tokens_per_microbatch is still auto"
        return self.max_tokens_per_microbatch

    def num_recomputed(self, num_layers: int) -> int:
        """Return how many layers compute their activations again; auto, which a learner replaces, counts as none."""
        asked = self.activation_checkpointing
        if asked == "auto":
            return 0
        return num_layers if asked is True else min(int(asked), num_layers)

    def keeps_gathered(self, num_layers: int) -> bool:
        """Return whether a lone GPU keeps all weights in the compute dtype during a step: where they are small beside
        masters and moments, and memory has room for the activations of all layers."""
        is_alone = self.num_learners == 1 and not self.cpu_offload
        return is_alone and not self.lora.rank and not self.num_recomputed(num_layers)

    @model_validator(mode="after")
    def _learners_form_whole_groups(self) -> Self:
        for key in ("replicas", "sequence_parallel", "expert_parallel_size"):
            if self.num_learners % (size := getattr(self, key)):
                raise ValueError(
                    f"learner.num_learners is {self.num_learners}, which is not a multiple of learner.{key} = {size}. "
                    f"Use a multiple of {size} learners."
                )
        return self

    @model_validator(mode="after")
    def _experts_can_be_split(self) -> Self:
        if self.expert_parallel_size == 1:
            return self
        refused = f"learner.expert_parallel_size is {self.expert_parallel_size}, which"
        if self.replicas > 1:
            raise ValueError(
                f"{refused} has not been built together with learner.replicas = {self.replicas}. Set one of the two to "
                "1."
            )
        if self.max_tokens_per_microbatch == "auto":
            raise ValueError(
                f"{refused} makes a learner's memory depend on the other learners' tokens, so it can't be measured. "
                "Set learner.max_tokens_per_microbatch to a number."
            )
        return self

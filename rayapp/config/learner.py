"""The section `learner`: memory, precision, adapters, optimizer. See `config.py`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rayapp.config.base import Dtype, FrozenModel


class OptimizerSection(FrozenModel):
    lr: float = Field(1e-6, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    max_grad_norm: float = Field(1.0, gt=0.0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    min_lr_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """The schedule ends at lr * min_lr_ratio."""


class LoraSection(FrozenModel):
    """Low-rank adapters instead of all weights."""

    rank: int = Field(0, ge=0)
    """0 trains all weights."""
    alpha: int = Field(32, ge=1)
    """The adapter's product is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = Field(("all-linear",), min_length=1)
    """Names of linear layers, e.g. q_proj; all-linear takes all of the decoder."""
    send: Literal["adapter", "merged"] = "adapter"
    """Weights that servers get after each step. adapter: the low-rank matrices alone. merged: whole weights with them
    merged in, for models that vLLM serves without LoRA, and where the bytes don't matter: it generates faster."""

    @property
    def sends_adapter(self) -> bool:
        """Servers hold the model's own weights and an adapter."""
        return self.rank > 0 and self.send == "adapter"

    @model_validator(mode="after")
    def _vllm_has_the_rank(self) -> Self:
        if self.sends_adapter and self.rank > 512:
            raise ValueError(
                f"learner.lora.rank is {self.rank}, but vLLM serves adapters of at most 512. Lower it, or set "
                "learner.lora.send: merged."
            )
        return self


class LearnerSection(FrozenModel):
    num_learners: int = Field(1, ge=1)
    """FSDP2 world size."""
    replicas: int = Field(1, ge=1)
    """Times that the model is there: each of so many groups of learners shards a whole one (HSDP). 1 shards it over all
    learners. Several nodes: their number, so that only gradients travel between nodes."""
    sequence_parallel: int = Field(1, ge=1)
    """Learners that compute a micro-batch together, each a part of its tokens (Ulysses): a trajectory may then be this
    many times as long as learner.max_tokens_per_microbatch. Must divide the model's attention heads."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=16)] | Literal["auto"] = 8192
    """Tokens that a learner computes in one forward: the memory of activations grows with it, nothing else does. auto
    measures at the start how many fit, and takes a power of two; where it differs, runs differ in their last digits."""
    compute_dtype: Dtype = "bfloat16"
    """Dtype of the forward and backward. Parameters and optimizer state are float32."""
    share_prefixes: bool = True
    """Compute tokens that several trajectories of a group share, such as the prompt, once. Exact."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward: less memory, a third more time."""
    compile: bool = False
    """Compile norms, rotary positions and gated MLPs (torch.compile): less memory traffic, the same numbers but for
    rounding. The first steps take longer; needs a C++ compiler where the learners run, and Triton on GPUs."""
    router_replay: bool = False
    """Mixtures of experts: train each token with the experts that the server chose for it (R3), and so do old
    log-probs; weights of the mixture stay the learner's own, and so does a reference's choice (docs/learner.md)."""
    log_prob_chunk_tokens: int = Field(1024, ge=16)
    """Tokens whose logits exist at once: vocabulary x this x 4 bytes."""
    cpu_threads: int = Field(0, ge=0)
    """Threads of a learner on CPU; 0 divides the cores among the learners, or half of them where servers compute beside
    them (train.max_staleness above 0)."""
    step_timeout_s: float = Field(1800.0, gt=0)
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP2), for models that don't fit: slower."""
    offload_when_idle: bool = False
    """Move parameters and optimizer state to pinned host memory while servers on the same GPUs generate: room for a
    larger KV cache. Only with cluster.placement: colocated; costs a copy there and back every step."""
    lora: LoraSection = LoraSection()
    optimizer: OptimizerSection = OptimizerSection()

    @property
    def token_budget(self) -> int:
        """`max_tokens_per_microbatch` as a number; a learner replaces auto before anybody asks."""
        assert isinstance(self.max_tokens_per_microbatch, int), "auto was not replaced by a number"
        return self.max_tokens_per_microbatch

    @model_validator(mode="after")
    def _learners_form_whole_groups(self) -> Self:
        for key, size in (("replicas", self.replicas), ("sequence_parallel", self.sequence_parallel)):
            if self.num_learners % size:
                raise ValueError(
                    f"learner.num_learners is {self.num_learners}, which learner.{key} = {size} does not divide. Use a "
                    f"multiple of {size} learners."
                )
        return self

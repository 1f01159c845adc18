"""The section `distillation`: a teacher that scores what the policy sampled. See `config.py`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rayapp.config.base import FrozenModel


class DistillationSection(FrozenModel):
    """On-policy distillation (docs/distillation.md)."""

    teacher: str = ""
    """A model with the policy's tokenizer: a Hugging Face folder, one on s3://, or a hub id. The learners hold it as
    they hold the reference: frozen and sharded. Empty: no distillation."""
    kl: Literal["reverse", "forward"] = "reverse"
    """reverse: KL(policy || teacher), which the policy lowers by keeping to what the teacher finds likely. forward:
    KL(teacher || policy), by covering all that the teacher would say."""
    kl_over: Literal["sampled", "top_k", "vocabulary"] = "sampled"
    """sampled: an advantage for every sampled token, from the two log-probs of it alone. vocabulary: the whole KL at
    every position, as a loss: less noise, and the head is computed twice. top_k: the same, but for tokens that are not
    among the most probable (the policy's for reverse, the teacher's for forward), which count as one."""
    top_k: int = Field(64, ge=1)
    """Tokens that kl_over: top_k tells apart."""
    weight: float = Field(1.0, gt=0.0)
    """Of the teacher: its advantages or its loss, times this."""
    reward_weight: float = Field(1.0, ge=0.0)
    """Of the rewards: their advantages, times this. At 0 the teacher alone trains, and rewards are only measured."""
    max_log_ratio: float | None = Field(10.0, gt=0.0)
    """For kl_over: sampled. The teacher's log-prob less the policy's counts as at most so much, either way: a token
    that the teacher would never say does not outweigh all others. null: as it is."""

    @property
    def needs_logits(self) -> bool:
        """Whether the loss wants the teacher's whole distribution, and not its log-probs of sampled tokens alone."""
        return bool(self.teacher) and self.kl_over != "sampled"

    @model_validator(mode="after")
    def _somebody_teaches(self) -> Self:
        fields = type(self).model_fields
        idle = [name for name, field in fields.items() if getattr(self, name) != field.default]
        if idle and not self.teacher:
            raise ValueError(
                f"distillation.{idle[0]} is {getattr(self, idle[0])!r}, but distillation.teacher names no model: "
                "nothing would be distilled. Name one, or leave the section out."
            )
        return self

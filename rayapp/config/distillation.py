"""The section `distillation`: a teacher that scores what the policy sampled. See `config.py`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rayapp.config.base import FrozenModel
from rayapp.config.endpoints import Endpoint, plain_url


class DistillationSection(FrozenModel):
    """On-policy distillation (docs/distillation.md)."""

    teacher: str = ""
    """A model with the policy's tokenizer: a Hugging Face folder, one on s3://, or a hub id. The learners hold it as
    they hold the reference: frozen and sharded. policy: the policy as it is at each step, which takes no memory and
    needs `privileged`. Empty: no distillation."""
    base_url: str = ""
    """A vLLM server that holds the teacher in place of the learners, e.g. http://host:8000/v1 of `vllm serve MODEL
    --tensor-parallel-size 8`; `teacher` is its name there. You start it, and may start it again: the run waits for some
    minutes. run://NAME: one of model_servers, which the run starts itself. With kl_over: sampled."""
    api_key_env: str = ""
    """Environment variable of the learners that holds the server's key. Empty: none."""
    timeout_s: float = Field(300.0, gt=0.0)
    """Deadline of one trajectory's request to the server."""
    privileged: Literal["none", "verdict"] = "none"
    """verdict: before the prompt the teacher reads how the answer was judged: status, reward, and the exception or the
    first failed test. With kl_over: sampled, as its positions are not the policy's."""
    max_privileged_tokens: int = Field(256, ge=64)
    """Of what the teacher alone reads; a longer verdict is cut."""
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

    @property
    def is_policy(self) -> bool:
        """Whether the policy is its own teacher."""
        return self.teacher == "policy"

    @property
    def num_privileged_tokens(self) -> int:
        """Tokens that the teacher may read more than the policy."""
        return self.max_privileged_tokens if self.privileged != "none" else 0

    @property
    def endpoint(self) -> Endpoint:
        """The teacher's server. It is waited for while somebody starts it again, for some minutes."""
        return Endpoint(
            who="the teacher",
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            timeout_s=self.timeout_s,
            max_retries=20,
            max_concurrent=256,
        )

    @field_validator("base_url", mode="after")
    @classmethod
    def _plain_url(cls, value: str) -> str:
        return plain_url(value) if value else value

    @model_validator(mode="after")
    def _somebody_teaches(self) -> Self:
        fields = type(self).model_fields
        idle = [name for name, field in fields.items() if getattr(self, name) != field.default]
        if idle and not self.teacher:
            raise ValueError(
                f"distillation.{idle[0]} is {getattr(self, idle[0])!r}, but distillation.teacher names no model: "
                "nothing would be distilled. Name one, or leave the section out."
            )
        if self.is_policy and self.privileged == "none":
            raise ValueError(
                "distillation.teacher is policy and distillation.privileged is none: a policy that reads no more than "
                "itself is no teacher. Set distillation.privileged: verdict, or name another model."
            )
        if self.base_url and (self.is_policy or self.kl_over != "sampled"):
            raise ValueError(
                f"distillation.base_url is set, distillation.teacher is {self.teacher} and distillation.kl_over is "
                f"{self.kl_over}: a server gives the log-probs of sampled tokens, of a model that it names. Use "
                "distillation.kl_over: sampled with the teacher's name there, or leave base_url out."
            )
        if self.privileged != "none" and self.kl_over != "sampled":
            raise ValueError(
                f"distillation.privileged is {self.privileged} and distillation.kl_over is {self.kl_over}: what the "
                "teacher alone reads moves its positions away from the policy's. Use distillation.kl_over: sampled."
            )
        return self

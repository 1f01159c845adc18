"""Sections for models beside the policy, none of them trained: teacher, judges, and their servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, field_validator, model_validator

from rayapp.config.base import FrozenModel
from rayapp.core.http import Endpoint, server_named

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
MODEL_SERVER_SHARE = 0.9  # share of each GPU's memory that a model server takes, unless its `options` have another one
JUDGE_RETRIES = 3  # of a judge's request: after status 408, 429 or 5xx, without an answer, and without a connection


class ModelServerSection(FrozenModel):
    """A vLLM server of the run on its own GPUs. The run starts it before its clients and restarts it if it dies."""

    name: str = Field(pattern=NAME)
    """Unique name. Clients set base_url: run://NAME, and use NAME as the model's name."""
    path: str = Field(min_length=1)
    """Hugging Face model: a local folder, an s3:// folder, or a hub id."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs of one node that the model is split over."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further options of `vllm serve`, e.g. {max-model-len: 8192,
    gpu-memory-utilization: 0.5}, or {runner: pooling} for a reward model."""

    @field_validator("options", mode="after")
    @classmethod
    def _not_ours(cls, options: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
        for name in options:
            if name.strip("-").replace("_", "-") in _OURS:
                raise ValueError(
                    f"options: {name!r} can't be set here, because the run sets it. Leave it out. For the model's GPUs "
                    "use tensor_parallel_size"
                )
        return options


_OURS = (
    *("host", "port", "uds", "api-key", "middleware", "model", "served-model-name"),
    "tensor-parallel-size",
)


def plain_url(value: str) -> str:
    """Return the URL without a trailing slash. ValueError: another scheme, credentials or a query."""
    if server_named(value):
        return value
    url = urlsplit(value)
    shown = url._replace(netloc=url.netloc.rpartition("@")[2], query="").geturl()
    hidden = [name for name in ("username", "password", "query") if getattr(url, name)]
    if hidden:
        raise ValueError(
            f"URL {shown!r} was given with a {' and a '.join(hidden)} (not shown here), which is not allowed: a key "
            "belongs in the environment variable that api_key_env names"
        )
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"URL {shown!r} must be of the form http(s)://HOST[:PORT][/PATH] or run://NAME")
    return value.rstrip("/")


class ClientSection(FrozenModel):
    """A section with the address of a model behind HTTP, which may be a model server of the run."""

    if TYPE_CHECKING:
        base_url: str
    _key: str = PrivateAttr("")

    @property
    def key(self) -> str:
        """Key of a model server of the run; empty for any other server. No written or printed config holds it."""
        return self._key

    def at(self, urls: Mapping[str, str], key: str, **changes: str) -> Self:
        """Return the section with run://NAME replaced by that server's URL, with `key` and `changes`."""
        if not (url := urls.get(server_named(self.base_url))):
            return self
        section = self.model_copy(update={"base_url": url, **changes})
        section._key = key  # noqa: SLF001 - a private attribute of pydantic, of the same class
        return section


class DistillationSection(FrozenModel):
    """On-policy distillation (docs/distillation.md)."""

    teacher: str = ""
    """Teacher model, with the policy's tokenizer: a Hugging Face folder, an s3:// folder, or a hub id. The learners
    hold it frozen and sharded. Empty: no distillation."""
    kl: Literal["reverse", "forward"] = "reverse"
    """Direction of the KL. reverse: KL(policy || teacher), which keeps the policy to text that the teacher finds
    likely. forward: KL(teacher || policy), which makes it cover every text of the teacher."""
    kl_over: Literal["sampled", "vocabulary"] = "sampled"
    """Tokens that the KL sums over. sampled: an advantage for each sampled token from its two log-probs. vocabulary:
    the full KL at every position as a loss: less noisy, but the head is computed twice."""
    weight: float = Field(1.0, gt=0.0)
    """Factor of the teacher's advantages or loss."""
    reward_weight: float = Field(1.0, ge=0.0)
    """Factor of the rewards' advantages. At 0 only the teacher trains the policy, and rewards are only measured."""
    max_log_ratio: float | None = Field(10.0, gt=0.0)
    """Limit of the absolute difference between the teacher's log-prob and the policy's, for kl_over: sampled. Without a
    limit, a token that the teacher would never sample could outweigh all others. null: no limit."""

    @property
    def needs_logits(self) -> bool:
        """True if the loss needs the teacher's full distribution, not only log-probs of sampled tokens."""
        return bool(self.teacher) and self.kl_over != "sampled"

    @model_validator(mode="after")
    def _somebody_teaches(self) -> Self:
        fields = type(self).model_fields
        idle = [name for name, field in fields.items() if getattr(self, name) != field.default]
        if idle and not self.teacher:
            raise ValueError(
                f"distillation.{idle[0]} is {getattr(self, idle[0])!r}, but distillation.teacher names no model. Set "
                "distillation.teacher, or remove the section."
            )
        return self


CriterionName = Annotated[str, Field(pattern=NAME)]
CriterionText = Annotated[str, Field(min_length=1)]


class JudgeSection(ClientSection):
    """A model that scores answers, behind OpenAI's chat API or, for a reward model, vLLM's /classify."""

    name: str = Field(pattern=NAME)
    """Unique name, used in reward.judges, metrics and reward terms."""
    kind: Literal["rubric", "pairwise", "reward_model"] = "rubric"
    """rubric: the judge scores each criterion. pairwise: it compares each response with four others of the group; the
    score is the share of comparisons won. reward_model: the score of a sequence classification model with one
    class."""
    base_url: str
    """Base URL for OpenAI clients, e.g. https://api.openai.com/v1 or http://127.0.0.1:8000/v1. run://NAME: one of
    model_servers."""
    model: str = Field(min_length=1)
    """The model's name at base_url; with run://NAME, the same NAME."""
    api_key_env: str = ""
    """Environment variable of the rollout workers that holds the key; a config never holds keys. Empty: no key."""
    rubric: dict[CriterionName, CriterionText] = Field(default_factory=dict)
    """Criteria of rubric and pairwise judges: name -> text that describes the best response. The score of a rubric
    judge is the mean over its criteria."""
    reference: bool = False
    """Show the judge the data row's ground_truth. Not for tasks, which have none."""
    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """Way in which the request asks for a JSON answer; the answer is always checked. Use json_object, or none (words in
    the prompt only), for servers that refuse json_schema."""
    temperature: float | None = Field(0.0, ge=0.0)
    """Sampling temperature of the judge. null: not sent, for models that refuse it."""
    max_tokens: int = Field(1024, ge=16)
    """Maximum number of tokens of the judge's answer, including its reasons."""
    timeout_s: float = Field(60.0, gt=0.0)
    """Deadline of one request. For a pairwise judge, responses must also be complete this long before
    rollout.group_deadline_s."""
    requests_per_minute: float = Field(0.0, ge=0.0)
    """Maximum number of requests per minute of the whole run, divided among the rollout workers. 0: no limit, except
    that the server may answer with status 429."""
    max_concurrent: int = Field(32, ge=1)
    """Maximum number of requests in flight at once, over the whole run."""
    input_price: float = Field(0.0, ge=0.0)
    """Price in dollars per million tokens that the judge reads."""
    output_price: float = Field(0.0, ge=0.0)
    """Price in dollars per million tokens that the judge writes."""

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(
            who=f"judge {self.name}",
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            key=self.key,
            timeout_s=self.timeout_s,
            max_retries=JUDGE_RETRIES,
            max_concurrent=self.max_concurrent,
            requests_per_minute=self.requests_per_minute,
        )

    _plain_url = field_validator("base_url", mode="after")(plain_url)

    @model_validator(mode="after")
    def _rubric_where_asked(self) -> Self:
        if self.kind != "reward_model" and not self.rubric:
            raise ValueError(f"kind {self.kind} needs a rubric, e.g. {{correct: It is right.}}")
        if self.kind == "reward_model" and (self.rubric or self.reference):
            raise ValueError("kind reward_model uses neither `rubric` nor `reference`: leave both out")
        if "agrees" in self.rubric:
            raise ValueError(
                "rubric: a criterion can't have the name 'agrees', which is the name of a metric. Rename it."
            )
        return self

"""Judges of a run: models behind HTTP that give rewards (docs/judges.md). Which source takes which: `reward.judges`.

A part of the schema in `config.py`, which says what holds for all sections. Data only.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rayapp.config.base import FrozenModel
from rayapp.config.endpoints import Endpoint, plain_url
from rayapp.config.model_servers import NAME


class Criterion(FrozenModel):
    """One thing that a judge looks at."""

    name: str = Field(pattern=NAME)
    text: str = Field(min_length=1)
    """What a response must do for the highest score."""
    weight: float = Field(1.0, gt=0.0, allow_inf_nan=False)
    """Beside the other criteria's."""


class JudgeSection(FrozenModel):
    """A model that judges, behind OpenAI's chat API or, for a reward model, vLLM's /classify."""

    name: str = Field(pattern=NAME)
    """In reward.judges, metrics and terms. No two are alike."""
    kind: Literal["rubric", "pairwise", "reward_model"] = "rubric"
    """rubric: a score for each criterion. pairwise: the responses of a group are compared two by two, and the share
    that one wins is its score. reward_model: what a model of sequence classification says."""
    base_url: str
    """As clients of OpenAI's take it, e.g. https://api.openai.com/v1 or http://127.0.0.1:8000/v1; run://NAME: one of
    model_servers."""
    model: str = Field(min_length=1)
    api_key_env: str = ""
    """Environment variable of the rollout workers that holds the key: keys never stand in a config. Empty: none."""
    rubric: tuple[Criterion, ...] = ()
    """What rubric and pairwise judges look at: a name, a text of what the best response does, and a weight (1) each."""
    max_score: int = Field(10, ge=1, le=100)
    """rubric: the highest score of a criterion; 0 is the lowest. The reward is the weighted mean as a share of it."""
    reference: bool = False
    """Show the judge the data row's ground_truth. Not for tasks, which have none."""
    num_opponents: int = Field(4, ge=2, multiple_of=2)
    """pairwise: so many others each response is compared with, in both orders; at most all of its group."""
    class_index: int | None = Field(None, ge=0)
    """reward_model: whose number is the reward, where the model has several classes."""
    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the server is told the form of the answer, which is checked here in any case. For servers that refuse
    json_schema; none: in words alone."""
    temperature: float | None = Field(0.0, ge=0.0)
    """None: not sent, for models that refuse it."""
    max_tokens: int = Field(1024, ge=16)
    """Of the judge's answer, its reasons included."""
    timeout_s: float = Field(60.0, gt=0.0)
    """Deadline of one request. Of a pairwise judge also how long before rollout.group_deadline_s the responses must be
    there."""
    max_retries: int = Field(3, ge=0)
    """Times that a request is sent again after 408, 429, 5xx, no answer, or no connection."""
    requests_per_minute: float = Field(0.0, ge=0.0)
    """Of the whole run; each rollout worker keeps to its part. 0: no limit but the server's 429."""
    max_concurrent: int = Field(32, ge=1)
    """Requests under way at once, of the whole run."""
    cache: bool = True
    """Keep answers in judgements/ of the run folder: the same question to the same model is not asked again."""
    input_price: float = Field(0.0, ge=0.0)
    """Dollars per million tokens that the judge reads."""
    output_price: float = Field(0.0, ge=0.0)
    """Dollars per million tokens that it writes."""

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(
            who=f"judge {self.name}",
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            timeout_s=self.timeout_s,
            max_retries=self.max_retries,
            max_concurrent=self.max_concurrent,
            requests_per_minute=self.requests_per_minute,
        )

    _plain_url = field_validator("base_url", mode="after")(plain_url)

    @model_validator(mode="after")
    def _rubric_where_asked(self) -> Self:
        if self.kind != "reward_model" and not self.rubric:
            raise ValueError(f"kind {self.kind} needs a rubric, e.g. [{{name: correct, text: It is right.}}]")
        if self.kind == "reward_model" and (self.rubric or self.reference):
            raise ValueError("a reward_model reads no rubric and no reference: leave them out")
        if len({"agrees", *(each.name for each in self.rubric)}) <= len(self.rubric):
            raise ValueError("two criteria of the rubric have the same name, or one is called agrees, as a metric is")
        return self

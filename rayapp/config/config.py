"""The configuration of a run: keys that agree with each other, its sources, and its other models.

`loading.py` makes a `Config` from files and `key.sub=value` overrides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import model_validator

from rayapp.config.agent import AgentSection
from rayapp.config.agreement import check_agreement
from rayapp.config.keys import Keys
from rayapp.config.other_models import MODEL_SERVER_SHARE, ModelServerSection
from rayapp.core.http import server_named
from rayapp.core.machine import EMULATED_BFLOAT16_SLOWDOWN, has_bfloat16, processor_name


class Config(Keys):
    """A whole run: keys that agree with each other."""

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        check_agreement(self)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source of a run's groups, with its settings as a full config."""

    name: str  # empty for the only source of a run without `sources`
    ratio: float
    config: Config  # with only this source's tasks or data, and its settings


def sources_of(config: Config) -> tuple[Source, ...]:
    """Return all sources of a run, at least one: `tasks` is a single source without a name."""
    ratios = [each.ratio for each in config.sources] or [1.0]
    return tuple(
        Source(name=name, ratio=ratio, config=own)
        for ratio, (name, own) in zip(ratios, config.by_source(), strict=True)
    )


def with_values(config: Config, **sections: dict[str, Any]) -> Config:
    """Return the config with other values in some sections, not validated."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def with_number_formats(config: Config, *, on_gpu: bool) -> Config:
    """Replace `auto` in learner.compute_dtype and server.dtype by one format: that of the other if it is set; else
    float32 on a CPU without bfloat16 instructions, and bfloat16 everywhere else."""
    asked = (config.learner.compute_dtype, config.server.dtype)
    if "auto" not in asked:
        return config
    usual = "bfloat16" if on_gpu or has_bfloat16() else "float32"
    chosen = next((each for each in asked if each != "auto"), usual)
    return with_values(config, learner={"compute_dtype": chosen}, server={"dtype": chosen})


def explain_number_formats(config: Config) -> str:
    """Say in a line in which formats a run on this machine's processor computes, and why."""
    chosen = with_number_formats(config, on_gpu=False)
    learner, server = chosen.learner.compute_dtype, chosen.server.dtype
    formats = learner if learner == server else f"{learner} in learners and {server} in servers"
    told = f"computing in {formats} on {processor_name()}"
    if has_bfloat16() or "bfloat16" not in (learner, server):
        return told
    return (
        f"{told}, which has no bfloat16 instructions: a step takes about {EMULATED_BFLOAT16_SLOWDOWN} times as long "
        "as with learner.compute_dtype=float32 server.dtype=float32"
    )


def frozen_models(config: Config) -> dict[str, Config]:
    """Return the frozen models that learners hold beside the policy: name -> config with which to load the model."""
    models = {"reference": config} if config.algorithm.has_reference else {}
    section = config.distillation
    if section.teacher:
        own = {"path": section.teacher, "max_position_embeddings": None, "quantization": "none"}
        models["teacher"] = with_values(config, model=own, learner={"expert_parallel_size": 1})
    return models


def alone(config: Config, server: ModelServerSection) -> Config:
    """Return the config with a model server's model as the policy, for the policy's checks and plan."""
    share = float(server.options.get("gpu-memory-utilization", MODEL_SERVER_SHARE))
    own: dict[str, Any] = {"tensor_parallel_size": server.tensor_parallel_size, "gpu_memory_utilization": share}
    own |= {"quantization": "none", "kv_cache_dtype": "auto", "kv_cache_gib": "auto"}  # of the policy's servers
    model = {"path": server.path, "max_position_embeddings": None, "quantization": "none"}
    return with_values(config, model=model, server=own, learner={"expert_parallel_size": 1})


def with_addresses(config: Config, urls: Mapping[str, str], key: str) -> Config:
    """Return the config with run://NAME replaced by the address of that model server, with the servers' key."""

    def of_agent(agent: AgentSection) -> AgentSection:
        endpoint = agent.external.endpoint.at(urls, key, model=server_named(agent.external.endpoint.base_url))
        return agent.model_copy(update={"external": agent.external.model_copy(update={"endpoint": endpoint})})

    judges = tuple(judge.at(urls, key) for judge in config.judges)
    sources = tuple(source.model_copy(update={"agent": of_agent(source.agent)}) for source in config.sources)
    return config.model_copy(update={"judges": judges, "agent": of_agent(config.agent), "sources": sources})

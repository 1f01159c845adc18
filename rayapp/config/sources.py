"""Sources of a run: where its groups come from, how many from each, and what of the run's settings is its own.

A part of the schema in `config.py`, which says what holds for all sections. Data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, model_validator

from rayapp.config.agent import AgentSection, DataSection, RewardSection
from rayapp.config.base import FrozenModel

SECTIONS = ("data", "agent", "reward")
"""Sections that a source may have values of its own for. What it leaves out is the run's."""


class SourceRollout(FrozenModel):
    """Limits of a source, below the run's: those are what servers, learners and watchdogs are laid out for."""

    max_prompt_tokens: int | None = Field(None, ge=1)
    """A longer prompt is refused. None: rollout.max_prompt_tokens."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """None: rollout.max_completion_tokens."""
    group_deadline_s: float | None = Field(None, gt=0)
    """A group not finished by then is a failed rollout. None: rollout.group_deadline_s."""

    @model_validator(mode="before")
    @classmethod
    def _one_temperature(cls, values: Any) -> Any:
        if isinstance(values, dict) and "temperature" in values:
            raise ValueError(
                "temperature can't be a source's own: learners compute log-probs at one temperature for all, and the "
                "importance ratio needs the engine's to be of the same. Set rollout.temperature for the whole run."
            )
        return values


class SourceEval(FrozenModel):
    """How a source is evaluated. When it is, the run's section eval says."""

    tasks: tuple[str, ...] = ()
    """Tasks that its evaluation takes in place of its own."""
    samples_per_task: int | None = Field(None, ge=1)
    """Completions per task or data row. None: eval.samples_per_task."""
    temperature: float | None = Field(None, ge=0.0)
    """0 is greedy. None: eval.temperature."""


class SourceSection(FrozenModel):
    """One of the run's sources: tasks, or rows of data."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """In metrics, trajectories and filters. No two are alike."""
    ratio: float = Field(1.0, gt=0.0, allow_inf_nan=False)
    """Its share of the groups, beside the other sources' ratios: 2 gives twice as many as 1."""
    tasks: tuple[str, ...] = ()
    """As the run's `tasks`. A source has either these or data files."""
    data: DataSection = DataSection()
    """Its files and how they are read; what is left out is as in the run's section `data`."""
    agent: AgentSection = AgentSection()
    """How it is played; what is left out is as in the run's section `agent`."""
    reward: RewardSection = RewardSection()
    """What an answer is worth; what is left out is as in the run's section `reward`."""
    rollout: SourceRollout = SourceRollout()
    eval: SourceEval = SourceEval()

    @property
    def has_files(self) -> bool:
        """True for rows of data, False for tasks."""
        return bool(self.data.train_files or self.data.eval_files)


def filled_in(sources: Any, run: Mapping[str, Any]) -> Any:
    """The list `sources` of a configuration, not yet checked, with the run's values where a source gives none."""
    if not isinstance(sources, list | tuple):
        return sources
    return [_one_filled_in(source, run) for source in sources]


def _one_filled_in(source: Any, run: Mapping[str, Any]) -> Any:
    if not isinstance(source, dict):
        return source
    own = {name: _mapping(source.get(name, {})) for name in SECTIONS}
    shared = {name: _mapping(run.get(name, {})) for name in SECTIONS}
    merged = {
        name: {**shared[name], **own[name]}
        for name in SECTIONS
        if isinstance(own[name], dict) and isinstance(shared[name], dict)
    }
    return source | merged


def _mapping(section: Any) -> Any:
    return section.model_dump(exclude_unset=True) if isinstance(section, BaseModel) else section

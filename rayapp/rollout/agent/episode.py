"""What the agent loop takes and gives: one prompt with its tools' arguments, one episode with a record of every turn.

Plain data, read by the group's scoring, the metrics and the traces; nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rayapp.core.types import (
    BoolArray,
    CallRecord,
    ExpertArray,
    FloatArray,
    Fork,
    Int32Array,
    RolloutStatus,
    SandboxSpec,
    TurnRecord,
)  # fmt: skip
from rayapp.rollout.agent.cutting import CutSide


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """How long a trajectory may go on."""

    max_response_tokens: int
    """Tokens after the prompt, over all turns, tool results included."""
    max_assistant_turns: int = 5
    """Times the policy speaks. Calls in its last turn are run only where one of them hands in the answer: nobody would
    read the results of others."""
    max_calls_per_turn: int = 8
    """Calls of one turn that are run; the others get an error as their result."""
    max_tool_output_chars: int = 1024
    """A longer tool result is cut."""
    cut_side: CutSide = "middle"
    """Which part of it stays: left (the beginning), right (the end), or middle (both ends)."""


class EpisodeEnd(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    """The policy ended a turn without calling a tool, or handed in its answer with one."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    FAILED = "failed"
    """For reasons that are not the policy's; see `Episode.failure`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished episode.

    Example: prompt [5, 9], turn [7, 2], tool result [4, 4], turn [8, 2] -> token_ids [5, 9, 7, 2, 4, 4, 8, 2],
    response_mask [F, F, T, T, F, F, T, T].
    """

    token_ids: Int32Array
    """(T,) prompt, turns and tool results as the policy read and wrote them."""
    response_mask: BoolArray
    """(T,) True exactly where the policy sampled the token."""
    rollout_log_probs: FloatArray
    """(T,) the engine's where `response_mask`, 0 elsewhere."""
    num_prompt_tokens: int
    turns: tuple[TurnRecord, ...]
    end: EpisodeEnd
    status: RolloutStatus
    failure: str = ""
    """Why it failed: one line for a person; empty otherwise."""
    tool_rewards: Mapping[str, float] = field(default_factory=dict)
    """By tool: its verdict on the whole episode, from tools that have one."""

    answer: str | None = None
    """What a tool (`submit`) named as the answer."""
    forks: tuple[Fork, ...] = ()
    """As in `Trajectory`."""
    agent_output: str = ""
    """What an external agent's program wrote, cut."""
    routed_experts: ExpertArray | None = None
    """As in `Trajectory`."""

    @property
    def final_text(self) -> str:
        """The answer: what a tool named as that, else what the policy said last."""
        if self.answer is not None:
            return self.answer
        return self.turns[-1].text if self.turns else ""

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        return tuple(call for turn in self.turns for call in turn.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPrompt:
    """Where an episode starts."""

    token_ids: tuple[int, ...]
    """`ChatFormat.prompt_ids(messages)`, rendered once for all trajectories of a group."""
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By tool: the data row's `extra_info.tools_kwargs`, e.g. {"calc_gsm8k_reward": {"create_kwargs": {…}}}."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What lies in the workspace at the start."""
    packages: tuple[str, ...] = ()
    """What is preloaded there."""
    spec: SandboxSpec | None = None
    """What sandbox it is."""
    setup: tuple[str, ...] = ()
    """A command that is run in it first."""
    first_turn: int = 0
    """Number of the first turn in what the engine is asked: 1 where another has taken the trajectory's seat."""

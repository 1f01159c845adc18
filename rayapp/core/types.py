"""Data types that the parts of a run exchange: frozen and slotted dataclasses of numpy arrays, with no methods except
for derived values.

Numpy arrays are zero-copy in Ray's object store. Shapes: T tokens, G trajectories of a group. A *trajectory* is one
full sequence: prompt, completions and (in multi-turn tasks) tool results, in the order the policy saw them. Token in,
token out: `token_ids` are the tokens that the engine read and sampled, never re-tokenized text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayapp.core.sandbox_types import CallReport, CallResult, ExecOutcome, ExecResult, SandboxSpec, StopCause

__all__ = ["CallReport", "CallResult", "ExecOutcome", "ExecResult", "SandboxSpec", "StopCause"]

Int32Array = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
ExpertArray = NDArray[np.unsignedinteger[Any]]
"""Indices of experts (MoE), in the narrowest integer type that holds them."""
FinishReason = Literal["stop", "length"]
"""Reason why a completion ended: a stop token or stop text, or the limit of tokens. If the engine aborts a completion,
an `EngineError` is raised."""


class RequestId(NamedTuple):
    """Id of one request to an engine. Ids sort by purpose, then the oldest group first.

    `str()` gives the text for vLLM and for logs: `group=7/trajectory=2/turn=0`. No module parses this text.
    """

    purpose: Literal["group", "eval"]
    """Use of the completion; only `group` is trained on. Evaluation and training use separate queues and prefix caches
    in each server."""
    group: int
    trajectory: int = -1
    """Index of the trajectory in its group; -1 if the request belongs to no trajectory, as for `serve`."""
    side: int = -1
    """Number of an external agent's call that is not recorded in its trajectory; -1 for recorded calls."""
    turn: int = -1
    """Turn of the trajectory; -1 if the trajectory has only one turn."""

    @property
    def is_first_turn(self) -> bool:
        """True for the first request of a trajectory. The first requests of a cohort start together."""
        return self.turn <= 0

    def __str__(self) -> str:
        return "/".join([f"{self.purpose}={self.group}", *self._places()])

    def _places(self) -> list[str]:
        named = {"trajectory": self.trajectory, "side": self.side, "turn": self.turn}
        return [f"{name}={value}" for name, value in named.items() if value >= 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture in a sequence of tokens. The encoded bytes are kept apart, by hash (`Group.pictures`)."""

    sha256: str
    """SHA-256 of the encoded bytes (PNG, JPEG, …), in hexadecimal."""
    start: int
    """Index of the first token that stands for the picture in its sequence of token ids."""
    end: int
    """Index after the last token that stands for the picture: the model's own processor makes these tokens."""


Media = tuple[Picture, ...]
"""Pictures of a sequence of tokens, in the order of their places; empty for text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one completion: distribution, length, randomness, and what is recorded."""

    max_tokens: int
    """Maximum number of tokens to sample."""
    temperature: float = 1.0
    """0 is greedy. Training computes log-probs at the same temperature."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token. top_p below 1 or top_k above 0 biases the importance ratio, so training refuses them."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; the matched string is not part of `Completion.text`."""
    seed: int | None = None
    """Seed of the sampling. For requests that an engine admits as one cohort, the same seeds, weights and prompts give
    the same tokens."""
    num_routed: int = 0
    """Number of leading prompt tokens whose experts are known already and not returned; only for
    `learner.router_replay`."""
    structured_outputs: Mapping[str, Any] = field(default_factory=dict)
    """Form that the completion must have, as one field of vLLM's StructuredOutputsParams, e.g. {"json": schema}; empty:
    any."""
    wants_allowed: bool = False
    """True to return which tokens of the vocabulary `structured_outputs` allowed at each position. Training needs
    them."""
    is_streamed: bool = False
    """Report tokens while the completion is sampled."""
    media: Media = ()
    """Pictures among the prompt's tokens."""
    pictures: Mapping[str, Any] = field(default_factory=dict)
    """SHA-256 -> encoded bytes of these pictures, or a reference to them in the object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """A run of tokens that one version of the policy sampled."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTokens:
    """Tokens of the vocabulary that the form of a structured output allowed at each of T positions."""

    masks: Int32Array
    """(K, W) distinct masks of the vocabulary: token id t is allowed if bit t % 32 of word t // 32 is set."""
    mask_of: Int32Array
    """(T,) index of each position's mask; -1: every token was allowed."""

    def of(self, tokens: Any) -> AllowedTokens:
        """Return the masks of the positions that a numpy index selects."""
        return AllowedTokens(masks=self.masks, mask_of=self.mask_of[tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that the engine sampled for one prompt."""

    token_ids: Int32Array
    """(T,) sampled tokens, including the stop token or the tokens of the stop string. Training uses all of them."""
    log_probs: FloatArray
    """(T,) log-probability of each token under the distribution from which it was sampled."""
    text: str
    """Decoded text, without the stop string."""
    finish_reason: FinishReason
    policy_version: int
    """Policy version that sampled the first token: the oldest one."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Policy versions that sampled the completion, in order, if new weights arrived during it; empty: only
    `policy_version`."""
    routed_experts: ExpertArray | None = None
    """(N, layers, k) with `learner.router_replay`: the experts of N tokens. These are the prompt's tokens after the
    first `SamplingParams.num_routed`, and all sampled tokens but the last, which no forward pass has read."""
    allowed: AllowedTokens | None = None
    """Tokens of the vocabulary that the form allowed at each sampled position, if `SamplingParams.wants_allowed`."""
    time_queued_s: float = 0.0
    time_generate_s: float = 0.0


class RolloutStatus(StrEnum):
    """End of a trajectory. ERROR_* means that a part of the run failed; trajectories with any other status may be
    trained on.
    """

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """The trajectory reached the limit of sampled tokens."""
    MAX_TURNS = "max_turns"
    """The last turn that is allowed ended with tool calls, so there is no final answer."""
    ERROR_ENGINE = "error_engine"
    ERROR_SANDBOX = "error_sandbox"
    ERROR_TASK = "error_task"
    ERROR_TOOL = "error_tool"
    ERROR_REWARD = "error_reward"
    """The user's reward function or a judge failed."""

    @property
    def is_error(self) -> bool:
        return self.value.startswith("error_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The verdict on one completion.

    Example: `Reward(value=0.6, terms={"pass_rate": 0.6, "solved": 0.0}, status="scored")`; or, if the sandbox died
    twice, `Reward.invalid("sandbox_gone", "…")`: the trajectory is then left out of the group's baseline and the loss.
    """

    value: float
    """The reward that training uses. If `valid` is False, the value is 0.0 and means nothing."""
    terms: dict[str, float] = field(default_factory=dict)
    """Named parts of the verdict, which are recorded. Every task that tests score has `pass_rate` and `solved` (0 or
    1)."""
    status: str = "scored"
    """Short reason of the verdict, which metrics count: scored, banned, syntax_error, error, timeout, no_code, …."""
    valid: bool = True
    """False if infrastructure failed: the verdict then says nothing about the policy."""
    failure_kind: str = ""
    """Reason why the verdict is not valid, e.g. sandbox_gone; empty if it is valid."""
    detail: str = ""
    """Explanation in one line: the exception that the code raised, or the first failed test with its expected value. It
    is recorded and shown in `rayapp view`, but the policy never reads it."""
    time_score_s: float = 0.0

    @classmethod
    def invalid(cls, failure_kind: str, detail: str) -> Reward:
        return cls(value=0.0, status="invalid", valid=False, failure_kind=failure_kind, detail=detail)


UNSCORED = Reward.invalid("unscored", "no verdict has been given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One rendered prompt, ready for the engine."""

    task: str
    """Name of the task that scores the completion."""
    text: str
    """Text that the policy reads, including the chat template and the prefill."""
    token_ids: Int32Array
    """(T,) the tokens of `text`."""
    prefill: str = ""
    """Beginning of the answer, which ends `text`. The answer's code is read from prefill + completion."""
    stop: tuple[str, ...] = ()
    source: str = ""
    """Name of the run's source that the prompt comes from; empty in a run without `sources`."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Messages before the chat template was applied; empty if unknown. Judges read them."""
    ground_truth: Any = None
    """Ground truth of a data row, for judges. None for tasks, and for a ground truth that is too long to
    keep."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """`extra_info` of a data row, for judges. Empty for tasks, and for data that are too long to keep."""
    media: Media = ()
    """Pictures among `token_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecRecord:
    """One execution in a sandbox for a tool call. The tool measures the times, so they include the network's."""

    sandbox_id: str
    provider: str
    """Provider of the sandbox; `mcp` if the sandbox belongs to an MCP server."""
    outcome: str
    """ok, code_failed or code_stopped."""
    started_at_s: float
    """Unix time."""
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One tool call: its text, result and times."""

    name: str
    """Tool name as the policy wrote it; empty if the call could not be parsed."""
    arguments: str
    """JSON text as the policy wrote it."""
    output: str
    """Result that the policy read."""
    failure: str = ""
    """Kind of failure: malformed, unknown_tool, bad_arguments, too_many_calls, timeout, crash, or a kind of the tool's
    own. Empty if the call succeeded."""
    reward: float | None = None
    started_at_s: float = 0.0
    """Unix time."""
    duration_s: float = 0.0
    waited_s: float = 0.0
    """Part of `duration_s` for which the tool waited for its rate limit or a free sandbox."""
    execs: tuple[ExecRecord, ...] = ()
    """Sandbox executions of this call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn of the policy with its tool calls. Its tokens are `Trajectory.token_ids[start:end]`."""

    start: int
    """Index of the first sampled token in `Trajectory.token_ids`."""
    end: int
    text: str
    finish_reason: FinishReason
    policy_version: int
    started_at_s: float
    """Unix time."""
    queued_s: float
    generate_s: float
    calls: tuple[CallRecord, ...] = ()
    version_spans: tuple[VersionSpan, ...] = ()
    """Policy versions that sampled the turn, in order, if new weights arrived during it; else empty."""

    @classmethod
    def of(cls, completion: Completion, *, end: int, text: str, started_at_s: float) -> TurnRecord:
        """Make the record of a completion whose tokens end before index `end` of `Trajectory.token_ids`."""
        return cls(
            start=end - completion.token_ids.size,
            end=end,
            text=text,
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
            started_at_s=started_at_s,
            queued_s=completion.time_queued_s,
            generate_s=completion.time_generate_s,
            version_spans=completion.version_spans,
        )

    @property
    def max_policy_version(self) -> int:
        """Policy version that sampled the last token."""
        return self.version_spans[-1].policy_version if self.version_spans else self.policy_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A place in a trajectory where a token doesn't continue from the token before it."""

    start: int
    """Index of the token in `Trajectory.token_ids`."""
    after: int
    """Index of the token from which the token at `start` continues; -1 if that token begins a new conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """All tokens that the policy read and sampled in one play of a prompt.

    Example: prompt [5, 9], completion [7, 2] -> token_ids [5, 9, 7, 2], response_mask [F, F, T, T],
    rollout_log_probs [0, 0, -0.1, -2.3].
    """

    token_ids: Int32Array
    """(T,) all tokens that the policy read and sampled."""
    response_mask: BoolArray
    """(T,) True for each token that the policy sampled."""
    rollout_log_probs: FloatArray
    """(T,) the engine's log-probs where `response_mask` is True, 0 elsewhere."""
    completion_text: str
    """The answer that the agent submitted; without one, the text of the last turn."""
    reward: Reward = UNSCORED
    """The verdict; for a trajectory that failed, an invalid verdict with the reason."""
    status: RolloutStatus
    min_policy_version: int
    max_policy_version: int
    num_turns: int = 1
    time_generate_s: float = 0.0
    turns: tuple[TurnRecord, ...] = ()
    """Turns with their tool calls. Empty for a trajectory that failed before the policy's first turn."""
    forks: tuple[Fork, ...] = ()
    """Forks sorted by `start`; empty for a single conversation. An agent that edits its history, retries or has
    sub-agents makes a tree of tokens. `token_ids` has each of them once, in the order of the turns, and
    `core.trajectories` computes the context of each."""
    agent_output: str = ""
    """Output of an external agent's program, cut to a limit, and notes on its calls; empty for other agents."""
    agent_counts: Mapping[str, float] = field(default_factory=dict)
    """Counts of an external agent's calls, e.g. {"forked": 1, "forked/retry": 1}. Reported as terms `agent/*`."""
    routed_experts: ExpertArray | None = None
    """(T, layers, k) with `learner.router_replay`: the experts that the engine chose when it first computed each token.
    A token after which no token was sampled has 0, because no forward pass has read it."""
    allowed: AllowedTokens | None = None
    """Tokens that the policy could sample at each position, if calls asked for a form (`agent.external.structured:
    guide`). `rollout_log_probs` are then log-probs of the distribution over these tokens."""
    media: Media = ()
    """Pictures among `token_ids`: those of the prompt, then those of tool results."""
    tool_rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward of each tool or environment for the whole trajectory. The verdict includes these rewards; only the verdict
    is recorded."""

    @classmethod
    def of_tokens(
        cls,
        token_ids: Int32Array,
        response_mask: BoolArray,
        *,
        reward: Reward,
        log_probs: FloatArray | None = None,
        completion_text: str = "",
    ) -> Trajectory:
        """Make a completed trajectory from tokens alone, e.g. of a demonstration, or for a measurement.

        Args:
            log_probs: (T,) the engine's log-probs; None if they are unknown: they are then stored as 0.
        """
        return cls(
            token_ids=token_ids,
            response_mask=response_mask,
            rollout_log_probs=np.zeros(token_ids.size, np.float32) if log_probs is None else log_probs,
            completion_text=completion_text,
            reward=reward,
            status=RolloutStatus.COMPLETED,
            min_policy_version=0,
            max_policy_version=0,
        )

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        return tuple(call for turn in self.turns for call in turn.calls)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size)

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_mask.sum())

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens before the first sampled one."""
        return int(self.response_mask.argmax()) if self.response_mask.any() else self.num_tokens

    @property
    def is_trainable(self) -> bool:
        """True if the trajectory may be trained on: its rollout did not fail, and its verdict is valid."""
        return self.reward.valid and not self.status.is_error and self.num_response_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """G trajectories of one prompt: the unit of admission, of advantage, and of staleness."""

    group_id: int
    """Number of the group in the run's order of prompts: 0, 1, 2, …. A resumed run gives each group the same number
    again."""
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """SHA-256 -> encoded bytes of each picture that the prompt or a trajectory reads, once for the whole group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """Numbers of a group that the driver needs. The group itself stays in Ray's object store."""

    group_id: int
    task: str
    rewards: FloatArray
    """(G,) the reward of each trajectory; 0 where `valid` is False."""
    valid: BoolArray
    """(G,) True for each trajectory that may be trained on."""
    num_tokens: Int32Array
    """(G,) tokens of prompt and completion together."""
    num_response_tokens: Int32Array
    """(G,) sampled tokens."""
    num_prompt_tokens: int
    """Length of the prompt with which all trajectories begin; 0 if each trajectory has a prompt of its own."""
    statuses: tuple[str, ...]
    """(G,) RolloutStatus values."""
    reward_statuses: tuple[str, ...]
    """(G,) `Reward.status` values."""
    failure_kinds: tuple[str, ...]
    """(G,) `Reward.failure_kind` values; empty where valid."""
    reward_terms: dict[str, FloatArray]
    """Term -> (G,) values, NaN for trajectories without the term."""
    min_policy_version: int
    time_generate_s: float
    """Seconds from admission to the last completion."""
    time_total_s: float
    source: str = ""
    """Name of the run's source that the prompt comes from; empty in a run without `sources`."""
    mean_prompt_tokens: float = 0.0
    """Mean prompt length of the trajectories with sampled tokens; without such a trajectory, the prompt's length."""
    tokens_by_version: tuple[Mapping[int, int], ...] = ()
    """(G,) for each trajectory: policy version -> number of tokens that the version sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicVerdict:
    """Result of the public tests, which an agent may run on its work at any time. It is not part of the reward."""

    pass_rate: float
    text: str
    """Report for the agent to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStart:
    """Everything that an agent sees at the start of a task. Hidden tests and expected values are not part of it."""

    messages: tuple[Mapping[str, str], ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """Files in the agent's workspace: relative path -> text."""
    packages: tuple[str, ...] = ()
    """Python packages preloaded in the workspace's sandbox."""
    tools: tuple[str, ...] = ()
    """Tools of the task, in addition to those of the run's tool file: names of shipped tools, or classes
    (docs/tools.md)."""
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tool -> `{"create_kwargs": {...}}`, as in `extra_info.tools_kwargs` of a data row."""
    spec: SandboxSpec | None = None
    """Sandbox that the workspace needs; None for the default. `packages` and the needs of tools are added to it."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Image or template that the workspace or the verdict needs -> the reason, as a text for users."""
    setup: tuple[str, ...] = ()
    """Command to run in the workspace after its files are written. The agent starts even if the command fails."""

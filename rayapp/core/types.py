"""Data types that the parts of a run exchange: frozen and slotted dataclasses of numpy arrays (zero-copy in Ray).

Shapes: T tokens, G trajectories of a group. A *trajectory* is one full sequence: prompt, completions and tool results,
in the order the policy saw them. Token in, token out: `token_ids` are never re-tokenized text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
# Indices of experts (MoE), in the narrowest integer type that holds them.
ExpertArray = NDArray[np.unsignedinteger[Any]]
# Stop token or stop text, or the limit of tokens; an abort is an EngineError.
FinishReason = Literal["stop", "length"]


class RequestId(NamedTuple):
    """Id of one request to an engine. Ids sort by purpose, then the oldest group first. As text, for vLLM and logs:
    `group=7/trajectory=2/turn=0`, which no module parses."""

    purpose: Literal["group", "eval"]  # only `group` is trained on; the two have separate queues and prefix caches
    group: int
    trajectory: int = -1  # in its group; -1 without a trajectory
    side: int = -1  # an external agent's call that is not recorded in its trajectory; -1 for recorded calls
    turn: int = -1  # -1 if the trajectory has only one turn

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

    sha256: str  # of the encoded bytes (PNG, JPEG, …), in hexadecimal
    start: int  # index of the first token that stands for the picture: the model's own processor makes these tokens
    end: int  # index after the last


Media = tuple[Picture, ...]
"""Pictures of a sequence of tokens, in the order of their places; empty for text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one completion: distribution, length, randomness, and what is recorded."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy; training computes log-probs at the same temperature
    top_p: float = 1.0
    top_k: int = 0  # 0: all; with top_p below 1 it biases the importance ratio, so training refuses them
    stop: tuple[str, ...] = ()  # end the completion; not part of `Completion.text`
    seed: int | None = None  # in one cohort, the same seeds, weights and prompts give the same tokens
    num_routed: int = 0  # leading prompt tokens whose experts are known already (`learner.router_replay`)
    # Form of the completion, as a field of vLLM's StructuredOutputsParams, e.g. {"json": schema}; empty: any.
    structured_outputs: Mapping[str, Any] = field(default_factory=dict)
    # Return the tokens that `structured_outputs` allowed at each position, which training needs.
    wants_allowed: bool = False
    is_streamed: bool = False  # report tokens while the completion is sampled
    media: Media = ()  # pictures among the prompt's tokens
    # SHA-256 -> encoded bytes of these pictures, or a reference to them in the object store.
    pictures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """A run of tokens that one version of the policy sampled."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTokens:
    """Tokens of the vocabulary that the form of a structured output allowed at each of T positions."""

    masks: Int32Array  # (K, W) distinct masks: token id t is allowed if bit t % 32 of word t // 32 is set
    mask_of: Int32Array  # (T,) index of each position's mask; -1: every token was allowed

    def of(self, tokens: Any) -> AllowedTokens:
        return AllowedTokens(masks=self.masks, mask_of=self.mask_of[tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that the engine sampled for one prompt."""

    token_ids: Int32Array  # (T,), with the stop token or the tokens of the stop string; training uses all
    log_probs: FloatArray  # (T,), under the distribution from which each was sampled
    text: str  # without the stop string
    finish_reason: FinishReason
    policy_version: int  # that sampled the first token: the oldest
    # Versions in order, if new weights arrived meanwhile; empty: only `policy_version`.
    version_spans: tuple[VersionSpan, ...] = ()
    # Experts (N, layers, k), with `learner.router_replay`, of the prompt's tokens after the first `num_routed`, and of
    # all sampled tokens but the last, which no forward pass has read.
    routed_experts: ExpertArray | None = None
    allowed: AllowedTokens | None = None  # at each sampled position, if `SamplingParams.wants_allowed`
    time_queued_s: float = 0.0
    time_generate_s: float = 0.0


class RolloutStatus(StrEnum):
    """End of a trajectory. ERROR_* means that a part of the run failed; others may be trained on."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"  # reached the limit of sampled tokens
    MAX_TURNS = "max_turns"  # the last allowed turn ended with tool calls, so there is no final answer
    ERROR_ENGINE = "error_engine"
    ERROR_SANDBOX = "error_sandbox"
    ERROR_TASK = "error_task"
    ERROR_TOOL = "error_tool"
    ERROR_REWARD = "error_reward"  # the user's reward function or a judge failed

    @property
    def is_error(self) -> bool:
        return self.value.startswith("error_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The verdict on one completion.

    Example: `Reward(value=0.6, terms={"pass_rate": 0.6, "solved": 0.0}, status="scored")`; or, if the sandbox died
    twice, `Reward.invalid("sandbox_gone", "…")`: the trajectory is then left out of the group's baseline and the loss.
    """

    value: float  # for training; if not `valid`, 0.0 without a meaning
    # Recorded parts of the verdict; tasks that tests score have `pass_rate` and `solved` (0 or 1).
    terms: dict[str, float] = field(default_factory=dict)
    status: str = "scored"  # counted by metrics: scored, banned, syntax_error, error, timeout, no_code, …
    valid: bool = True  # False if infrastructure failed: the verdict says nothing about the policy
    failure_kind: str = ""  # why the verdict is not valid, e.g. sandbox_gone
    # One line, never read by the policy: the code's exception, or the first failed test with its expected value.
    detail: str = ""
    time_score_s: float = 0.0

    @classmethod
    def invalid(cls, failure_kind: str, detail: str) -> Reward:
        return cls(value=0.0, status="invalid", valid=False, failure_kind=failure_kind, detail=detail)


UNSCORED = Reward.invalid("unscored", "no verdict has been given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One rendered prompt, ready for the engine."""

    task: str  # that scores the completion
    text: str  # that the policy reads, with chat template and prefill
    token_ids: Int32Array  # (T,), of `text`
    prefill: str = ""  # beginning of the answer, which ends `text`; its code is read from prefill + completion
    stop: tuple[str, ...] = ()
    source: str = ""  # of the run; empty without `sources`
    messages: tuple[Mapping[str, Any], ...] = ()  # before the chat template; empty if unknown. Judges read them.
    ground_truth: Any = None  # of a data row, for judges; None for tasks, and if too long to keep
    # Data row's `extra_info`, for judges; empty for tasks, and if too long to keep.
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    media: Media = ()  # pictures among `token_ids`


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecRecord:
    """One execution in a sandbox for a tool call. The tool measures the times, so they include the network's."""

    sandbox_id: str
    provider: str  # `mcp` for a sandbox of an MCP server
    outcome: str  # ok, code_failed or code_stopped
    started_at_s: float  # Unix time
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One tool call: its text, result and times."""

    name: str  # as the policy wrote it; empty if the call could not be parsed
    arguments: str  # JSON text as the policy wrote it
    output: str  # that the policy read
    pictures: tuple[str, ...] = ()  # SHA-256 of the pictures that it read after the output
    # Kind of failure: malformed, unknown_tool, bad_arguments, too_many_calls, timeout, crash, or a tool's own.
    failure: str = ""
    reward: float | None = None
    started_at_s: float = 0.0  # Unix time
    duration_s: float = 0.0
    waited_s: float = 0.0  # part of `duration_s`, for the tool's rate limit or a free sandbox
    execs: tuple[ExecRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn of the policy with its tool calls. Its tokens are `Trajectory.token_ids[start:end]`."""

    start: int
    end: int
    text: str
    finish_reason: FinishReason
    policy_version: int
    started_at_s: float  # Unix time
    queued_s: float
    generate_s: float
    calls: tuple[CallRecord, ...] = ()
    version_spans: tuple[VersionSpan, ...] = ()  # in order, if new weights arrived during the turn

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

    start: int  # index of the token in `Trajectory.token_ids`
    after: int  # index of the token from which it continues; -1 for a new conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """All tokens that the policy read and sampled in one play of a prompt.

    Example: prompt [5, 9], completion [7, 2] -> token_ids [5, 9, 7, 2], response_mask [F, F, T, T], rollout_log_probs
    [0, 0, -0.1, -2.3].
    """

    token_ids: Int32Array  # (T,) read and sampled
    response_mask: BoolArray  # (T,) True for each sampled token
    rollout_log_probs: FloatArray  # (T,) the engine's, where `response_mask` is True, else 0
    completion_text: str  # submitted answer; without one, the text of the last turn
    reward: Reward = UNSCORED  # invalid, with the reason, for a trajectory that failed
    status: RolloutStatus
    min_policy_version: int
    max_policy_version: int
    num_turns: int = 1
    time_generate_s: float = 0.0
    turns: tuple[TurnRecord, ...] = ()  # empty if it failed before the policy's first turn
    # Sorted by `start`; empty for a single conversation. An agent that edits its history, retries or has sub-agents
    # makes a tree of tokens, each once, in the order of the turns (`core.trajectories`).
    forks: tuple[Fork, ...] = ()
    agent_output: str = ""  # of an external agent's program, cut to a limit, and notes on its calls
    # Counts of an external agent's calls, e.g. {"forked": 1, "forked/retry": 1}, as terms `agent/*`.
    agent_counts: Mapping[str, float] = field(default_factory=dict)
    # Experts (T, layers, k), with `learner.router_replay`, as a token was first computed; 0 after the last sampled
    # ones.
    routed_experts: ExpertArray | None = None
    # Tokens that the policy could sample, if calls asked for a form (`agent.external.structured: guide`); log-probs are
    # then of the distribution over these.
    allowed: AllowedTokens | None = None
    media: Media = ()  # pictures among `token_ids`: those of the prompt, then those of tool results
    # Rewards of each tool or environment for the whole trajectory, which are part of the verdict.
    tool_rewards: Mapping[str, float] = field(default_factory=dict)

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
        """Make a completed trajectory from tokens, e.g. a demonstration's. Unknown `log_probs` (T,) are stored as 0."""
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
        """True if the rollout did not fail, and its verdict is valid."""
        return self.reward.valid and not self.status.is_error and self.num_response_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """G trajectories of one prompt: the unit of admission, of advantage, and of staleness."""

    group_id: int  # in the run's order of prompts; a resumed run gives the same again
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    # encoded bytes of each picture that the prompt or a trajectory reads, by SHA-256, once for the whole group
    pictures: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """Numbers of a group that the driver needs. The group itself stays in Ray's object store."""

    group_id: int
    task: str
    rewards: FloatArray  # (G,); 0 where `valid` is False
    valid: BoolArray  # (G,) may be trained on
    num_tokens: Int32Array  # (G,) prompt and completion together
    num_response_tokens: Int32Array  # (G,)
    num_prompt_tokens: int  # of the prompt with which all begin; 0 if each has its own
    statuses: tuple[str, ...]  # (G,) RolloutStatus
    reward_statuses: tuple[str, ...]  # (G,) `Reward.status`
    failure_kinds: tuple[str, ...]  # (G,) `Reward.failure_kind`; empty where valid
    reward_terms: dict[str, FloatArray]  # (G,) by term; NaN for trajectories without it
    min_policy_version: int
    time_generate_s: float  # from admission to the last completion
    time_total_s: float
    source: str = ""  # of the run; empty without `sources`
    mean_prompt_tokens: float = 0.0  # of the trajectories with sampled tokens; without one, the prompt's length
    tokens_by_version: tuple[Mapping[int, int], ...] = ()  # (G,) policy version -> tokens that it sampled


class ExecOutcome(StrEnum):
    """Result of code in a sandbox. A failure of the sandbox itself raises a SandboxError."""

    OK = "ok"
    CODE_FAILED = "code_failed"  # raised, exited with a non-zero status, or crashed
    CODE_STOPPED = "code_stopped"  # `ExecResult.stopped_for` has the cause


class StopCause(StrEnum):
    TIMEOUT = "timeout"
    OUTPUT = "output"  # more than max_output_bytes
    MEMORY = "memory"
    CPU = "cpu"
    PROCESSES = "processes"
    KILLED = "killed"  # the lease was released, or the sandbox was killed


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of running code or a command in a sandbox."""

    outcome: ExecOutcome
    exit_code: int  # -N if signal N ended the process
    stdout: str  # at most max_output_bytes, else `truncated` is set; undecodable bytes are replaced
    stderr: str
    duration_s: float
    truncated: bool = False
    stopped_for: StopCause | None = None  # only with CODE_STOPPED
    error: str = ""  # last line of the traceback, e.g. `ValueError: …`
    isolation: str = ""  # ns+proc, ns, ll or unisolated; for a remote sandbox, the provider's name

    @property
    def ok(self) -> bool:
        return self.outcome is ExecOutcome.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """Result of one call of the candidate's function."""

    ok: bool
    # Rebuilt plain data (None, bool, int, float, str, list, tuple, dict, set, bytes), never of a subclass.
    value: object = None
    error: str = ""  # an exception, an unsupported return type, or a value that is too large


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """Result of defining code and calling one function of it on several inputs (`Sandbox.call_function`)."""

    exec: ExecResult  # not `ok` if the code raised outside the calls, or was stopped
    calls: tuple[CallResult, ...]  # one per input, in order; without a result `ok=False`


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicVerdict:
    """Result of the public tests, which an agent may run on its work at any time. It is not part of the reward."""

    pass_rate: float
    text: str  # for the agent


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Kind of sandbox that a task needs. Tasks with equal specs share sandboxes."""

    template: str = ""  # the provider's template, snapshot or image; empty: its default
    packages: tuple[str, ...] = ()  # preloaded by the local provider, e.g. ("numpy",)
    env: tuple[tuple[str, str], ...] = ()  # the code's whole environment; never put a secret here
    memory_mib: int = 512
    disk_mib: int = 16
    max_processes: int = 16
    loopback: bool = False  # programs may connect to one port of the loopback interface, on which rayapp listens
    workdir: str = ""  # in an image; empty: the image's own
    # Code may write files and start programs, in a root folder in which /app and /tests can be made.
    own_files: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStart:
    """Everything that an agent sees at the start of a task, without hidden tests and expected values."""

    messages: tuple[Mapping[str, str], ...]
    files: Mapping[str, str] = field(default_factory=dict)  # in the agent's workspace: relative path -> text
    packages: tuple[str, ...] = ()  # preloaded in the workspace's sandbox
    tools: tuple[str, ...] = ()  # besides those of the tool file: shipped names, or classes (docs/tools.md)
    # Tool -> `{"create_kwargs": {...}}`, as in a row's `extra_info.tools_kwargs`.
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    spec: SandboxSpec | None = None  # of the workspace; `packages` and the needs of tools are added
    # Image or template of workspace or verdict -> the reason, for users.
    images: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()  # command in the workspace after its files are written; it may fail

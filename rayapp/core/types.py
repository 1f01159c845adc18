"""The data that moves between the parts: frozen, slotted, numpy inside, no behaviour beyond derived values.

Numpy arrays keep these objects zero-copy in Ray's object store. Shapes: T tokens, G trajectories of a group.
A *trajectory* is one whole sequence: prompt, completions and (in multi-turn tasks) tool results, in the order the
policy saw them. Token in, token out: `token_ids` is what the engine read and sampled, never a re-tokenization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
ExpertArray = NDArray[np.unsignedinteger[Any]]
"""Numbers of experts, in the narrowest type that holds them."""
FinishReason = Literal["stop", "length"]
"""A completion that the engine itself gave up is no completion: `EngineError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is sampled. Only what changes the distribution, its length, its randomness, or its record."""

    max_tokens: int
    """Most tokens to sample."""
    temperature: float = 1.0
    """0 is greedy. Training samples at the temperature its log-probs are computed at."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token. Below 1 / above 0 these bias the importance ratio, so training refuses them."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion; the text that matched is not part of `Completion.text`."""
    seed: int | None = None
    """The same seeds, weights and prompts give the same tokens, for requests that an engine admits as one cohort."""
    num_routed: int = 0
    """With `learner.router_replay`: tokens of the prompt whose experts are known, and need not be returned again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """A run of tokens that one version of the policy sampled."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that the engine sampled for one prompt."""

    token_ids: Int32Array
    """(T,) sampled tokens, with the stop token or the tokens of the stop text: all of them are trained on."""
    log_probs: FloatArray
    """(T,) log-probability of each token under the distribution it was sampled from."""
    text: str
    """Decoded, without the stop text."""
    finish_reason: FinishReason
    policy_version: int
    """Weights that sampled its first token: the oldest."""
    version_spans: tuple[VersionSpan, ...] = ()
    """The versions that sampled it, in order, where new weights came in its middle; empty: `policy_version` alone."""
    routed_experts: ExpertArray | None = None
    """(N, layers, k) with `learner.router_replay`: the experts of the prompt's tokens behind the first
    `SamplingParams.num_routed`, and of the sampled ones but the last, which no forward has read."""
    time_queued_s: float = 0.0
    time_generate_s: float = 0.0


class RolloutStatus(StrEnum):
    """How a trajectory ended. Everything but ERROR_* is the policy's own doing and may be trained on."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Ran into max_completion_tokens."""
    MAX_TURNS = "max_turns"
    """Called tools in its last turn too: it ended by itself, only not with an answer."""
    ERROR_ENGINE = "error_engine"
    ERROR_SANDBOX = "error_sandbox"
    ERROR_TASK = "error_task"
    ERROR_TOOL = "error_tool"
    ERROR_REWARD = "error_reward"
    """What scores it, a function of the user's or a judge, has failed."""

    @property
    def is_error(self) -> bool:
        return self.value.startswith("error_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A verdict on one completion.

    Example: `Reward(value=0.6, terms={"pass_rate": 0.6, "solved": 0.0}, status="scored")`, or, when the sandbox died
    twice, `Reward.invalid("sandbox_gone", "…")`: no value, left out of the group's baseline and of the loss.
    """

    value: float
    """The scalar that training uses; 0.0 when not valid, and then nobody may read it."""
    terms: dict[str, float] = field(default_factory=dict)
    """Named parts, each recorded. `pass_rate` and `solved` (0 or 1) are there for every task scored by tests."""
    status: str = "scored"
    """What the verdict rests on: scored, banned, syntax_error, error, timeout, no_code…; counted in the metrics."""
    valid: bool = True
    """False when infrastructure failed: that says nothing about the policy."""
    failure_kind: str = ""
    """Why it is not valid, e.g. sandbox_gone; empty otherwise."""
    detail: str = ""
    """One line for a person: the exception the code raised, or the first failed test with what it expected. Recorded
    and shown in `rayapp view`; nothing shows it to a policy."""
    time_score_s: float = 0.0

    @classmethod
    def invalid(cls, failure_kind: str, detail: str) -> Reward:
        return cls(value=0.0, status="invalid", valid=False, failure_kind=failure_kind, detail=detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One rendered prompt, ready for the engine."""

    task: str
    """Name of the task, which scores what comes back."""
    text: str
    """What the policy reads, template and prefill included."""
    token_ids: Int32Array
    """(T,)"""
    prefill: str = ""
    """The part of the answer already written at the end of `text`; code is read from prefill + completion."""
    stop: tuple[str, ...] = ()
    source: str = ""
    """Name of the run's source it comes from; empty in a run without `sources`."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """What is asked, before a template wrote it; empty where that is not known. For judges, not for the policy."""
    ground_truth: Any = None
    """Of a data row, for judges and for scoring again; None for tasks, and where it is too long to keep."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecRecord:
    """One execution in a sandbox for a tool call, as the tool saw it: with the way there and back."""

    sandbox_id: str
    provider: str
    """Provider of the sandbox; `mcp` where a server keeps it."""
    outcome: str
    """ok, code_failed or code_stopped."""
    started_at_s: float
    """Unix time."""
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One tool call, run or refused."""

    name: str
    """Tool name as the policy wrote it; empty when it could not be read."""
    arguments: str
    """JSON text as the policy wrote it."""
    output: str
    """What the policy read as the result."""
    failure: str = ""
    """malformed, unknown_tool, bad_arguments, too_many_calls, timeout, crash, or the tool's own kind; empty: it ran."""
    reward: float | None = None
    started_at_s: float = 0.0
    """Unix time."""
    duration_s: float = 0.0
    waited_s: float = 0.0
    """Part of duration_s before the tool could start (rate limit, free sandbox)."""
    execs: tuple[ExecRecord, ...] = ()
    """Executions in sandboxes that it led to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn of the policy and the calls in it. Tokens are those of the trajectory from `start` to `end`."""

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
    """The versions that sampled it, as in `Completion`."""

    @classmethod
    def of(cls, completion: Completion, *, end: int, text: str, started_at_s: float) -> TurnRecord:
        """The turn whose sampled tokens end before index `end`."""
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
        """Weights that sampled its last token."""
        return self.version_spans[-1].policy_version if self.version_spans else self.policy_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A place in a trajectory where a token does not go on from the token before it."""

    start: int
    """Index of the token in `Trajectory.token_ids`."""
    after: int
    """Index of the token that it goes on from; -1: it begins a conversation of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode.

    Example: prompt [5, 9], completion [7, 2] -> token_ids [5, 9, 7, 2], response_mask [F, F, T, T],
    rollout_log_probs [0, 0, -0.1, -2.3].
    """

    token_ids: Int32Array
    """(T,) everything the policy read and wrote."""
    response_mask: BoolArray
    """(T,) True exactly where the policy sampled the token."""
    rollout_log_probs: FloatArray
    """(T,) the engine's log-probability where `response_mask`, 0 elsewhere."""
    completion_text: str
    reward: Reward
    status: RolloutStatus
    min_policy_version: int
    max_policy_version: int
    num_turns: int = 1
    time_generate_s: float = 0.0
    turns: tuple[TurnRecord, ...] = ()
    """Each turn with its tool calls. Empty for a trajectory that failed before the policy spoke."""
    forks: tuple[Fork, ...] = ()
    """By `start`. Empty for one conversation. An agent that edits its history, tries again or has helpers makes a tree
    of it: every token is in `token_ids` once, in the order of the turns, and `core.forks` says what each was read
    after."""
    agent_output: str = ""
    """What an external agent's program wrote, cut; empty for other agents."""
    routed_experts: ExpertArray | None = None
    """(T, layers, k) with `learner.router_replay`: the experts of each token, as the engine chose them where it first
    computed that token; 0 for tokens that nothing was sampled after, which no forward has read."""

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
        """A completed one whose tokens are all that is known: a demonstration, or one made to measure or to compare.

        Args:
            log_probs: the engine's; None: unknown, which is 0.
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
    def num_tokens(self) -> int:
        return int(self.token_ids.size)

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_mask.sum())

    @property
    def is_trainable(self) -> bool:
        """An invalid verdict or a failed rollout carries no signal about the policy."""
        return self.reward.valid and not self.status.is_error and self.num_response_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """G trajectories of one prompt: the unit of admission, of advantage, and of staleness."""

    group_id: int
    """Position in the run's prompt order: 0, 1, 2, … It never repeats, and a resumed run reuses it."""
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """A group as the driver sees it: scalars only. The group itself stays in the object store."""

    group_id: int
    task: str
    rewards: FloatArray
    """(G,) 0 where not valid."""
    valid: BoolArray
    """(G,) trainable trajectories."""
    num_tokens: Int32Array
    """(G,) prompt and completion."""
    num_response_tokens: Int32Array
    """(G,)"""
    num_prompt_tokens: int
    statuses: tuple[str, ...]
    """(G,) RolloutStatus values."""
    reward_statuses: tuple[str, ...]
    """(G,) `Reward.status` values."""
    failure_kinds: tuple[str, ...]
    """(G,) empty where valid."""
    reward_terms: dict[str, FloatArray]
    """Each (G,), NaN where a trajectory has no such term."""
    min_policy_version: int
    max_policy_version: int
    time_generate_s: float
    """Seconds from admission to the last completion."""
    time_score_s: float
    """Sum over trajectories."""
    time_total_s: float
    source: str = ""
    """As in `Prompt`."""


class ExecOutcome(StrEnum):
    """How code that ran in a sandbox ended. None of these is the sandbox's failure (that is a SandboxError)."""

    OK = "ok"
    CODE_FAILED = "code_failed"
    """It raised, returned non-zero, or crashed by itself."""
    CODE_STOPPED = "code_stopped"
    """We ended it: see `ExecResult.stopped_for`."""


class StopCause(StrEnum):
    """Why we ended code that was running."""

    TIMEOUT = "timeout"
    OUTPUT = "output"
    """It wrote more than max_output_bytes."""
    MEMORY = "memory"
    CPU = "cpu"
    PROCESSES = "processes"
    KILLED = "killed"
    """The lease was released or the sandbox killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of running code or a command in a sandbox."""

    outcome: ExecOutcome
    exit_code: int
    """Process exit status; negative is the signal that ended it."""
    stdout: str
    """At most max_output_bytes, cut at the end with `truncated` set; undecodable bytes are replaced."""
    stderr: str
    duration_s: float
    truncated: bool = False
    stopped_for: StopCause | None = None
    """Set exactly when outcome is CODE_STOPPED."""
    error: str = ""
    """`ValueError: …` when Python code raised: last line of its traceback."""
    isolation: str = ""
    """What kept the code in: ns+proc, ns, ll, unisolated, or the provider's name."""

    @property
    def ok(self) -> bool:
        return self.outcome is ExecOutcome.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """One call of the candidate's function. `value` is plain data that we rebuilt, never the candidate's object."""

    ok: bool
    value: object = None
    """None, bool, int, float, str, list, tuple, dict, set or bytes of exactly these types."""
    error: str = ""
    """Why there is no value: the exception, an unsupported return type, too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """Result of defining code and calling one function of it on several inputs (`Sandbox.call_function`)."""

    exec: ExecResult
    """The execution as a whole. Not `ok` when the definition raised or the whole run was stopped."""
    calls: tuple[CallResult, ...]
    """One per input, in order, whatever the code did: calls that gave no result are `ok=False`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicVerdict:
    """What the tests that an agent may run say about its work so far. Worth nothing by itself."""

    pass_rate: float
    text: str
    """For the agent to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What kind of sandbox a task needs. Equal specs share a pool."""

    template: str = ""
    """Provider's template, snapshot or image; empty is the provider's default."""
    packages: tuple[str, ...] = ()
    """Extra packages preloaded by the local provider, e.g. ("numpy",)."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment of the sandboxed code: nothing else is in it. Never a secret."""
    memory_mib: int = 512
    disk_mib: int = 16
    max_processes: int = 16
    loopback: bool = False
    """Programs in it may connect to one port of their own loopback, where whoever holds the sandbox listens."""
    own_root: bool = False
    """Its root folder is no other's: /app, /tests, /solution and /logs can be made there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStart:
    """Where an agent begins a task: all that it sees, and nothing that a verdict rests on."""

    messages: tuple[Mapping[str, str], ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """In its workspace, by relative path."""
    packages: tuple[str, ...] = ()
    """Preloaded there."""
    tools: tuple[str, ...] = ()
    """Tools that the task brings, besides those of the run's tool file: shipped names or classes (docs/tools.md)."""
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By tool: `{"create_kwargs": {...}}`, as in `extra_info.tools_kwargs` of a data row."""
    spec: SandboxSpec | None = None
    """What sandbox its workspace is; packages and what the tools ask for are added."""
    images: Mapping[str, str] = field(default_factory=dict)
    """By image or template that the workspace or the verdict needs: why, for a person."""
    setup: tuple[str, ...] = ()
    """A command that is run in it once the files are there. It may fail: the agent then works without what it does."""

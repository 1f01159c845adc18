"""Protocols between the parts of rayapp. Each has at least two implementations, counting fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from rayapp.core.types import (
    AgentStart,
    CallReport,
    Completion,
    ExecResult,
    Prompt,
    RequestId,
    Reward,
    SamplingParams,
    SandboxSpec,
)


class Sandbox(Protocol):
    """One isolated place where code runs. Every method has its own deadline, independent of the provider's SDK.

    Any method raises:
        SandboxGoneError: the sandbox is dead; never use it again.
        SandboxDeadlineError: no answer in time; the sandbox's state is unknown, so kill it.
        SandboxProtocolError: the provider's answer can't be understood.
    Failures of the code itself (raise, exit, loop, flood) are never raised but returned.
    """

    @property
    def id(self) -> str: ...

    @property
    def provider(self) -> str:
        """Name of the provider, e.g. `local`."""
        ...

    async def run_code(
        self, code: str, *, timeout_s: float, stdin: str = "", stateful: bool = False, max_output_bytes: int = 65536
    ) -> ExecResult:
        """Run Python source. `stateful` keeps names from one call to the next until the sandbox is released."""
        ...

    async def call_function(
        self, code: str, function: str, inputs: Sequence[Sequence[object]], *, timeout_s: float
    ) -> CallReport:
        """Define `code`, then call `function(*args)` for each args of `inputs`, in one fresh interpreter.

        Expected values are never passed in: the caller compares `CallResult.value` outside the sandbox.

        Args:
            inputs: plain data only (None, bool, int, float, str, list, tuple, dict, set, bytes).
            timeout_s: time limit of the definition and all calls together.
        """
        ...

    async def run_command(
        self, argv: Sequence[str], *, timeout_s: float, stdin: str = "", max_output_bytes: int = 65536
    ) -> ExecResult: ...

    async def write_file(self, path: str, data: bytes, *, timeout_s: float = 10.0) -> None: ...

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, timeout_s: float = 10.0) -> bytes:
        """Return the contents of a file, cut at max_bytes inside the sandbox.

        Raises:
            FileNotFoundError: there is no such file in the sandbox.
        """
        ...

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        """Return True if the sandbox answers now. Distinguishes failed code from a sandbox that is gone."""
        ...

    async def extend(self, ttl_s: float, *, timeout_s: float = 5.0) -> None:
        """Have the provider end the sandbox ttl_s from now, unless it is extended again."""
        ...

    async def kill(self, *, timeout_s: float = 10.0) -> None:
        """End the sandbox and everything in it. Idempotent; killing a dead sandbox is no error."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def name(self) -> str: ...

    async def create(self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float) -> Sandbox:
        """Create a sandbox and return it when it is ready. The provider itself ends it after ttl_s.

        Raises:
            SandboxUnavailableError: or one of its subclasses; retrying later may help.
            SandboxConfigError: retrying can't help.
            SandboxDeadlineError: not ready within timeout_s; this object kills a sandbox that is ready later.
        """
        ...

    def list(self, labels: Mapping[str, str], *, timeout_s: float = 30.0) -> AsyncIterator[str]:
        """Yield the ids of living sandboxes that carry all these labels."""
        ...

    async def kill(self, sandbox_id: str, *, timeout_s: float = 10.0) -> None:
        """End a sandbox known only by its id; called by the reaper. Idempotent."""
        ...

    async def close(self) -> None:
        """Kill the sandboxes that this object created; release connections and helper processes. Idempotent."""
        ...


class SandboxLease(Protocol):
    """A sandbox leased from the pool. Leaving the `async with` block returns it."""

    async def __aenter__(self) -> Sandbox: ...

    async def __aexit__(self, *exc: object) -> None: ...


class SandboxSource(Protocol):
    """The source of a task's sandboxes: the pool actor through its client, or a provider directly (`rayapp score`)."""

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> SandboxLease: ...


OnTokens = Callable[[Sequence[int]], None]
"""Function that is called with the ids sampled since its last call."""


class RolloutEngine(Protocol):
    """Samples completions: token ids in, token ids and log-probs out."""

    async def generate(
        self,
        request_id: RequestId,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one completion.

        Args:
            on_tokens: called with new tokens while the completion is sampled; it may miss the last ones.
        Raises:
            EngineError: the request can't be served; EngineDeadError if no request can.
        """
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rollouts use."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: Literal[False], add_generation_prompt: bool
    ) -> str:
        """Return the messages as text in the model's template.

        Raises:
            ValueError: the model has no chat template.
        """
        ...


class Task(Protocol):
    """A task: renders a prompt and scores completions. Picklable data; heavy objects are made in `score`."""

    @property
    def name(self) -> str: ...

    def render(self, tokenizer: Tokenizer) -> Prompt:
        """Return the prompt that the policy reads."""
        ...

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        """Score a completion. `seed` draws the hidden tests and is equal for all trajectories of a group.

        If it raises, its trajectory has no reward, as with `Reward.invalid`.
        """
        ...


@runtime_checkable
class AgentTask(Task, Protocol):
    """A task that an agent can play over several turns with tools. Its `score` gets only the final answer."""

    def agent_start(self) -> AgentStart:
        """Return the messages, files and tools that the agent starts with."""
        ...


class Tracker(Protocol):
    """Receives one record of scalars per step, in order, only from the driver."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...

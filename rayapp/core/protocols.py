"""Protocols between the parts of rayapp. Each has at least two implementations, fakes included."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

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

    Any method raises SandboxGoneError (dead; never use it again), SandboxDeadlineError (its state is unknown, so kill
    it) or SandboxProtocolError. Failures of the code in it (an exception, an exit, an endless loop, too much output)
    are returned, never raised.
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
        """Run Python source. With `stateful`, later stateful calls see the code's variables."""
        ...

    async def call_function(
        self, code: str, function: str, inputs: Sequence[Sequence[object]], *, timeout_s: float
    ) -> CallReport:
        """Run `code`, then call its `function` with each tuple of `inputs` (plain data), in one fresh interpreter.
        Expected values stay outside: the caller compares each `CallResult.value`. `timeout_s` is for all together."""
        ...

    async def run_command(
        self, argv: Sequence[str], *, timeout_s: float, stdin: str = "", max_output_bytes: int = 65536
    ) -> ExecResult: ...

    async def write_file(self, path: str, data: bytes, *, timeout_s: float = 10.0) -> None: ...

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, timeout_s: float = 10.0) -> bytes:
        """Return at most `max_bytes` bytes of a file; the rest stays inside. FileNotFoundError: it is missing."""
        ...

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        """True if the sandbox answers now. Callers use it to tell failed code from a sandbox that is gone."""
        ...

    async def extend(self, ttl_s: float, *, timeout_s: float = 5.0) -> None:
        """Make the provider end the sandbox `ttl_s` seconds from now, unless a later call extends its life again."""
        ...

    async def kill(self, *, timeout_s: float = 10.0) -> None:
        """End the sandbox and everything in it. Idempotent; killing a dead sandbox is no error."""
        ...


class SandboxProvider(Protocol):
    """Factory of sandboxes of one kind, e.g. local ones or those of a cloud service."""

    @property
    def name(self) -> str: ...

    async def create(self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float) -> Sandbox:
        """Create a sandbox and return it when it is ready. The provider itself ends the sandbox after `ttl_s` seconds.

        SandboxUnavailableError: retrying later may help. SandboxConfigError: it can't. SandboxDeadlineError: not ready
        within `timeout_s`; if it becomes ready later, this object kills it.
        """
        ...

    def list(self, labels: Mapping[str, str], *, timeout_s: float = 30.0) -> AsyncIterator[str]:
        """Yield the ids of living sandboxes that carry all these labels."""
        ...

    async def kill(self, sandbox_id: str, *, timeout_s: float = 10.0) -> None:
        """End a sandbox known only by its id; called by sweeps. Idempotent."""
        ...

    async def close(self) -> None:
        """Release connections and helper processes, and with these a local provider's sandboxes. Idempotent."""
        ...


SandboxLease = AbstractAsyncContextManager[Sandbox]
"""A sandbox leased from the pool. Leaving the `async with` block returns it."""


class SandboxSource(Protocol):
    """Source of sandboxes for tasks: the client of the pool actor, or a provider itself (in `rayapp score`)."""

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> SandboxLease: ...


OnTokens = Callable[[Sequence[int]], None]  # receives the token ids sampled since its last call


class RolloutEngine(Protocol):
    """Engine that samples completions. Prompts are token ids; completions are token ids with log-probs."""

    async def generate(
        self,
        request_id: RequestId,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one completion. `on_tokens` gets new tokens meanwhile, perhaps not the last. EngineError: this request
        can't be served. EngineDeadError: none can."""
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rollouts use."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: Literal[False], add_generation_prompt: bool
    ) -> str:
        """Return the messages as text in the model's template. ValueError: the model has no chat template."""
        ...


class Task(Protocol):
    """A task: renders a prompt and scores completions. A task must be picklable, so make heavy objects in `score`."""

    @property
    def name(self) -> str: ...

    def render(self, tokenizer: Tokenizer) -> Prompt:
        """Return the prompt that the policy reads."""
        ...

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        """Score a completion. `seed` chooses the hidden tests and is equal for all trajectories of a group. If this
        raises, the trajectory has no reward, as with `Reward.invalid`."""
        ...


@runtime_checkable
class AgentTask(Task, Protocol):
    """A task that an agent can play over several turns with tools. Its `score` gets only the final answer."""

    def agent_start(self) -> AgentStart:
        """Return the messages, files and tools that the agent starts with."""
        ...


@runtime_checkable
class EnvironmentRow(Task, Protocol):
    """A row of a third-party environment, which plays and scores its rows itself (`rayapp.extras.environments`)."""

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The row's prompt."""
        ...

    def refuse(self) -> NoReturn:
        """Raise InputError: only the environment can play and score this row."""
        ...


class Tracker(Protocol):
    """Receiver of metrics, e.g. MLflow. The driver calls it with one record of scalars per step, in order."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...

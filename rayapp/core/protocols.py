"""The protocols between the parts. A protocol is here only where two implementations exist (a fake counts)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from rayapp.core.types import (
    AgentStart,
    CallReport,
    Completion,
    ExecResult,
    Prompt,
    Reward,
    SamplingParams,
    SandboxSpec,
)


class Sandbox(Protocol):
    """One isolated place where code runs. Every method has our own deadline, whatever the provider's SDK promises.

    Raises, from any method:
        SandboxGoneError: it is dead; never use it again.
        SandboxDeadlineError: no answer in time; its state is unknown, so kill it.
        SandboxProtocolError: the provider answered nonsense.
    What the code does (raise, exit, loop, flood) is never raised but returned.
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

        The expected values never come here: the caller compares `CallResult.value` outside the sandbox.

        Args:
            inputs: plain data only (None, bool, int, float, str, list, tuple, dict, set, bytes).
            timeout_s: time for all of it: the definition and all calls.
        """
        ...

    async def run_command(
        self, argv: Sequence[str], *, timeout_s: float, stdin: str = "", max_output_bytes: int = 65536
    ) -> ExecResult: ...

    async def write_file(self, path: str, data: bytes, *, timeout_s: float = 10.0) -> None: ...

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, timeout_s: float = 10.0) -> bytes:
        """Contents of a file, cut at max_bytes inside the sandbox.

        Raises:
            FileNotFoundError: there is no such file in the sandbox.
        """
        ...

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        """True if it answers now. Tells *the code failed* from *the sandbox is gone*."""
        ...

    async def extend(self, ttl_s: float, *, timeout_s: float = 5.0) -> None:
        """The provider ends the sandbox ttl_s from now, unless extended again."""
        ...

    async def kill(self, *, timeout_s: float = 10.0) -> None:
        """End it and everything in it. Idempotent; killing a dead sandbox is no error."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def name(self) -> str: ...

    async def create(self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float) -> Sandbox:
        """A ready sandbox that the provider itself ends after ttl_s.

        Raises:
            SandboxUnavailableError: or one of its subclasses; trying again later may help.
            SandboxConfigError: trying again can't help.
            SandboxDeadlineError: not ready within timeout_s; a late arrival is killed by the provider object.
        """
        ...

    def list(self, labels: Mapping[str, str], *, timeout_s: float = 30.0) -> AsyncIterator[str]:
        """Ids of living sandboxes that carry all these labels."""
        ...

    async def kill(self, sandbox_id: str, *, timeout_s: float = 10.0) -> None:
        """End a sandbox known only by id (the reaper's call). Idempotent."""
        ...

    async def close(self) -> None:
        """Release connections and helper processes; sandboxes this object created are killed. Idempotent."""
        ...


class SandboxLease(Protocol):
    """A sandbox on loan from the pool; leave the `async with` block to give it back."""

    async def __aenter__(self) -> Sandbox: ...

    async def __aexit__(self, *exc: object) -> None: ...


class SandboxSource(Protocol):
    """The source of a task's sandboxes: the pool actor through its client, or a provider directly (`rayapp score`)."""

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> SandboxLease: ...


class RolloutEngine(Protocol):
    """Samples completions: token ids in, token ids and log-probs out."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: the request can't be served; EngineDeadError when no request can.
        """
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rollouts use."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: Literal[False], add_generation_prompt: bool
    ) -> str:
        """The messages as the model's template writes them.

        Raises:
            ValueError: the model has no chat template.
        """
        ...


class Task(Protocol):
    """Where prompts come from and what completions are worth. Picklable data; heavy things are made in `score`."""

    @property
    def name(self) -> str: ...

    def render(self, tokenizer: Tokenizer) -> Prompt:
        """The prompt the policy reads."""
        ...

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        """Score a completion. `seed` draws the hidden tests: equal for all trajectories of a group.

        Never raises for what the completion does or for a failed sandbox (that is `Reward.invalid`).
        """
        ...


@runtime_checkable
class AgentTask(Task, Protocol):
    """A task that an agent can play, over several turns and with tools. Its `score` gets the answer alone."""

    def agent_start(self) -> AgentStart:
        """What the agent is told, and what it finds."""
        ...


class Tracker(Protocol):
    """Receives one record of scalars per step, in order, from the driver only."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...

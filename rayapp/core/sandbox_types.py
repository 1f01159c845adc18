"""Kinds of sandboxes, and results of code that ran in one. Import these types from `core/types.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Kind of sandbox that a task needs. Tasks with equal specs share sandboxes."""

    template: str = ""
    """Provider's template, snapshot or image; empty: the provider's default."""
    packages: tuple[str, ...] = ()
    """Extra packages preloaded by the local provider, e.g. ("numpy",)."""
    env: tuple[tuple[str, str], ...] = ()
    """The whole environment of the sandboxed code. Never put a secret here."""
    memory_mib: int = 512
    disk_mib: int = 16
    max_processes: int = 16
    loopback: bool = False
    """True if programs in the sandbox may connect to one port of its loopback interface, on which rayapp listens."""
    workdir: str = ""
    """Working folder in an image; empty: the image's own."""
    own_files: bool = False
    """True if code may write files and start programs, in a root folder of its own in which /app and /tests can be
    made."""


class ExecOutcome(StrEnum):
    """The way in which code in a sandbox ended. A failure of the sandbox itself raises a SandboxError."""

    OK = "ok"
    CODE_FAILED = "code_failed"
    """The code raised, exited with a non-zero status, or crashed."""
    CODE_STOPPED = "code_stopped"
    """The sandbox stopped the code; `ExecResult.stopped_for` has the cause."""


class StopCause(StrEnum):
    """Cause for which the sandbox stopped running code."""

    TIMEOUT = "timeout"
    OUTPUT = "output"
    """The code wrote more than max_output_bytes."""
    MEMORY = "memory"
    CPU = "cpu"
    PROCESSES = "processes"
    KILLED = "killed"
    """The lease was released, or the sandbox was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of running code or a command in a sandbox."""

    outcome: ExecOutcome
    exit_code: int
    """Exit status of the process; -N if signal N ended the process."""
    stdout: str
    """Standard output, at most max_output_bytes: longer output is cut at the end, and `truncated` is set. Undecodable
    bytes are replaced."""
    stderr: str
    duration_s: float
    truncated: bool = False
    stopped_for: StopCause | None = None
    """Set if and only if outcome is CODE_STOPPED."""
    error: str = ""
    """Last line of the traceback if Python code raised an exception, e.g. `ValueError: …`."""
    isolation: str = ""
    """Isolation level of the sandbox: ns+proc, ns, ll or unisolated; for a remote sandbox, the provider's name."""

    @property
    def ok(self) -> bool:
        return self.outcome is ExecOutcome.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """Result of one call of the candidate's function. `value` is plain data rebuilt from the result, never the
    candidate's object.
    """

    ok: bool
    value: object = None
    """Plain data: None, bool, int, float, str, list, tuple, dict, set or bytes, never of a subclass."""
    error: str = ""
    """Reason why there is no value: an exception, an unsupported return type, or a value that is too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """Result of defining code and calling one function of it on several inputs (`Sandbox.call_function`)."""

    exec: ExecResult
    """The execution as a whole. It is not `ok` if the code raised an exception outside the calls, or was stopped."""
    calls: tuple[CallResult, ...]
    """One result per input, in order; a call without a result has `ok=False`."""

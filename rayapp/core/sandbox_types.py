"""Kinds of sandboxes, and results of code that ran in one. Import these types from `core/types.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    # code may write files and start programs, in a root folder in which /app and /tests can be made
    own_files: bool = False


class ExecOutcome(StrEnum):
    """How code in a sandbox ended. A failure of the sandbox itself raises a SandboxError."""

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
    # rebuilt plain data (None, bool, int, float, str, list, tuple, dict, set, bytes), never of a subclass
    value: object = None
    error: str = ""  # an exception, an unsupported return type, or a value that is too large


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """Result of defining code and calling one function of it on several inputs (`Sandbox.call_function`)."""

    exec: ExecResult  # not `ok` if the code raised outside the calls, or was stopped
    calls: tuple[CallResult, ...]  # one per input, in order; without a result `ok=False`

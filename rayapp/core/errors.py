"""Every error this application raises on purpose.

    RayappError
    ├── UserError                       the user can fix it: exit code 2
    │   ├── ConfigError                 a key, a value, or two values that contradict each other
    │   ├── InputError                  a model, dataset, task or file that can't be used
    │   └── RunFolderError              the run folder is in use, damaged, or belongs to another config
    ├── SandboxError                    the *sandbox* failed; says nothing about the code that ran in it
    │   ├── SandboxUnavailableError     no sandbox could be created or leased in time
    │   │   ├── SandboxQuotaError       the provider's quota is reached
    │   │   └── SandboxRateLimitError   the provider asks to wait (`retry_after_s`)
    │   ├── SandboxGoneError            the sandbox died or was deleted while it was in use
    │   ├── SandboxDeadlineError        the provider did not answer within rayapp's own deadline
    │   ├── SandboxProtocolError        the provider's answer can't be understood
    │   ├── SandboxConfigError          key, template or endpoint is wrong: retrying can't help
    │   │   ├── ImageError              an image is missing, damaged, too large, or for another platform
    │   │   └── IsolationUnavailableError   this node can't isolate model-written code
    ├── EngineError                     a vLLM server can't generate
    │   ├── EngineDeadError             the server's process is gone
    │   └── StaleVersionError           the server holds another policy version than the caller requires
    ├── WeightSyncError                 a server did not receive all new weights
    ├── ToolUnavailableError            a tool's service can't be reached: the trajectory is left out
    ├── KindError                       an error that metrics count by its kind
    │   └── RewardFailedError           a user's reward function or a judge failed
    ├── LearnerError                    the learners can't train on what they were given
    ├── ProcessDiedError                a Ray actor is gone (`EngineDeadError` when it is a server)
    │   ├── ProcessUnavailableError     Ray is starting the actor again
    │   └── LearnersLostError           a learner is gone, so the step of all learners is lost
    ├── StalledError                    nothing finished for too long, though every process answers
    ├── RestartsUsedUpError             a process died more often than `recovery.max_restarts` allows
    ├── GroupFailedError                one group of trajectories can't be made: the step continues without the group
    ├── ObjectsLostError                groups or weights were in the memory of a node that is gone
    ├── DeadlineError                   a Ray actor did not answer in time; the message names it
    ├── CheckpointError                 a checkpoint can't be written or read whole
    │   └── CheckpointDamagedError      the contents are no valid weights: use another checkpoint
    ├── StorageError                    object storage or a disk can't do what was asked
    │   ├── StorageUnreachableError     no answer after every retry, or the server fails
    │   ├── StorageNotFoundError        there is no such object or file
    │   ├── StorageExistsError          a conditional create lost: another writer was first
    │   ├── StorageCorruptError         the bytes read are not the bytes written
    │   ├── StorageFullError            the disk or the quota is full
    │   ├── StorageIncompleteError      a run ended before all its files were uploaded
    │   └── StorageConfigError          retrying can't help (also a UserError)
    │       ├── StorageBucketError      the bucket doesn't exist
    │       ├── StoragePermissionError  these credentials may not do this
    │       └── StorageCredentialsError the credentials are missing, wrong, or expired
    ├── BudgetSpentError                the run has cost as much as `budget.cap` allows
    └── TrainingAbortedError            too many rollouts failed

Code that fails or is stopped *inside* a sandbox is not an error but data: see `ExecResult.outcome`.
Ray pickles errors that cross processes: a subclass takes only a message, or defines `__reduce__`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def one_line(text: object, max_chars: int = 300) -> str:
    """Return a text or an error's message on one line, cut to `max_chars`, so that a message can quote it."""
    return " ".join(str(text).split())[:max_chars]


def readable_error(error: BaseException) -> str:
    """Return an error's message in one line. The error may be of a user's class whose `__str__` fails."""
    try:
        return one_line(error)
    except Exception:  # boundary: the user's __str__ may raise anything
        return "(its message can't be read)"


EXIT_FAILED, EXIT_USER_ERROR, EXIT_BUDGET_SPENT = 1, 2, 3  # exit codes of commands


class RayappError(Exception):
    """Base of the errors that rayapp itself raises."""


class UserError(RayappError):
    """An error that the user can correct. The CLI prints the message without a traceback and exits with 2."""


class KindError(RayappError):
    """An error that metrics count by its kind, a short word."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[KindError], tuple[str, str]]:
        return type(self), (str(self), self.kind)


class RewardFailedError(KindError):
    """A user's function raised, took too long, or returned an unusable value: no verdict on the policy. Kinds:
    reward_error, reward_timeout, reward_nonsense."""


class ConfigError(UserError, ValueError):
    """A configuration key or value is wrong, or two values contradict each other."""


class InputError(UserError, ValueError):
    """A model, dataset, task or file can't be used."""


class RunFolderError(UserError):
    """The run folder is in use, damaged, or was made by another configuration."""


class SandboxError(RayappError):
    """The sandbox failed. Never raised for anything that the code in it did."""


class SandboxUnavailableError(SandboxError):
    """No sandbox could be created or leased before the deadline."""


class SandboxQuotaError(SandboxUnavailableError):
    """The provider refuses more sandboxes. The pool continues with those that it has."""


class SandboxRateLimitError(SandboxUnavailableError):
    """The provider's rate limit is reached: the caller must wait."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # None if the provider named no time

    def __reduce__(self) -> tuple[type[SandboxRateLimitError], tuple[str, float | None]]:
        return type(self), (str(self), self.retry_after_s)


class SandboxGoneError(SandboxError):
    """The sandbox died or was deleted: never use it again."""


class SandboxDeadlineError(SandboxError, TimeoutError):
    """The provider did not answer within rayapp's deadline: the sandbox, in an unknown state, is discarded."""


class SandboxProtocolError(SandboxError):
    """The provider's answer can't be understood."""


class SandboxConfigError(SandboxError, UserError):
    """Wrong key, template, endpoint or permission: retrying can't help, so the run stops with this message."""


class ImageError(SandboxConfigError):
    """An image is missing, damaged, too large, or for another platform."""


class IsolationUnavailableError(SandboxConfigError):
    """This node offers no isolation that is strong enough for model-written code."""


class EngineError(RayappError):
    """A server can't generate."""


class EngineDeadError(EngineError):
    """The engine's process is gone."""


class StaleVersionError(EngineError):
    """A server holds another policy version than the caller requires."""


class GroupFailedError(RayappError):
    """One group of trajectories failed as a whole although every process works; other groups may succeed."""


class WeightSyncError(RayappError):
    """A vLLM server did not receive all new weights, so it must not serve requests."""


class ToolUnavailableError(RayappError):
    """The service behind a tool can't be reached. The failure is not the policy's, so the trajectory is left out."""


class LearnerError(RayappError):
    """The learners can't train on what they were given."""


class ProcessDiedError(RayappError):
    """The process behind a Ray actor is gone."""


class ProcessUnavailableError(ProcessDiedError):
    """The process behind a Ray actor is gone, and Ray is starting it again."""


class LearnersLostError(ProcessDiedError):
    """A learner is gone or hangs. All learners are restarted, because each holds only a shard of the training state."""


class ObjectsLostError(RayappError):
    """Objects that a call needs were in the object store of a node that is gone."""


class StalledError(RayappError):
    """Nothing finished for too long, though every process answers. The message says which process waits for what."""


class RestartsUsedUpError(RayappError):
    """A process died more often than `recovery.max_restarts` allows."""


class DeadlineError(RayappError, TimeoutError):
    """A Ray actor did not answer within its deadline."""


class CheckpointError(RayappError):
    """A checkpoint can't be written or read whole."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint can be read, but its contents are invalid (e.g. not finite). An earlier checkpoint may be valid."""


class StorageError(RayappError):
    """Object storage or a disk can't do what was asked. No local file is then deleted."""


class StorageUnreachableError(StorageError):
    """No answer after every retry, or the server keeps failing."""


class StorageNotFoundError(StorageError):
    """There is no such object, file, or whole folder."""


class StorageExistsError(StorageError):
    """A conditional create failed: the object already exists, perhaps from another writer."""


class StorageCorruptError(StorageError):
    """The bytes read are not the bytes written: checksum or length differ."""


class StorageFullError(StorageError):
    """The disk or the storage quota is full."""


class StorageIncompleteError(StorageError):
    """A run has ended and some of its files are only on this machine. The message names them and the way out."""


class StorageConfigError(StorageError, UserError):
    """A location, endpoint, bucket or credential is wrong: retrying can't help."""


class StorageBucketError(StorageConfigError):
    """The bucket doesn't exist."""


class StoragePermissionError(StorageConfigError):
    """The credentials are valid but don't permit this."""


class StorageCredentialsError(StorageConfigError):
    """No credentials were found, or they are wrong or expired."""


class StopTraining(Exception):  # noqa: N818 - no error: as StopIteration
    """Exception that a user's `on_step` raises to end the run: the step is saved and the model exported."""


class TrainingAbortedError(RayappError):
    """The run stops because too many rollouts failed. The message names the failures and how often each occurred."""


class BudgetSpentError(RayappError):
    """The run has cost as much as `budget.cap` allows. Its steps are saved, and the CLI exits with 3."""


@contextmanager
def one_error() -> Iterator[None]:
    """Replace an exception group from the block with its first error."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise first_error(group) from group


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def first_error(error: BaseException) -> BaseException:
    """Return the first error inside nested groups; the other errors are similar or follow from it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


WRONG_TOKEN = (
    "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the cluster's token. On a workstation the token is in "
    "~/.ray/auth_token; with KubeRay it is the entry auth_token of the Secret that has the RayCluster's name."
)


class UnusableWorkError(Exception):
    """An agent's workspace can't be submitted as its answer. The agent reads the message and can correct it."""

"""Converts a service's HTTP status to a SandboxError: one table for all services. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.core.errors import (
    SandboxConfigError,
    SandboxDeadlineError,
    SandboxError,
    SandboxProtocolError,
    SandboxQuotaError,
    SandboxRateLimitError,
    SandboxUnavailableError,
)

_HOPELESS = (400, 401, 402, 403, 404, 405, 422)
_NONSENSE = (ValueError, TypeError, KeyError, AttributeError)
"""Exceptions of an SDK that meets an unexpected answer. None of them is an SDK's own error type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """Words with which one service reports a full quota, and the hint for permanent refusals."""

    quota_words: tuple[str, ...]
    quota_statuses: tuple[int, ...]
    to_check: str


E2B = Wording(
    quota_words=("concurrent", "maximum number", "quota"),
    quota_statuses=(403, 429),
    to_check="the template, the key and the endpoint",
)
DAYTONA = Wording(
    quota_words=("quota", "limit exceeded", "limit reached", "maximum", "exceeds", "insufficient"),
    quota_statuses=(400, 402, 403),
    to_check="the snapshot, the key and the endpoint",
)


def error_of(
    error: Exception,
    text: str,
    wording: Wording,
    *,
    status: int | None,
    is_late: bool,
    wait_s: float | None = None,
) -> SandboxError:
    """Return the SandboxError for an SDK's exception.

    Args:
        text: text of the message.
        status: HTTP status of the answer; None if there was no answer or the status is unknown.
        is_late: True if there was no answer in time.
        wait_s: pause in seconds that the service asks for.
    """
    if is_late:
        return SandboxDeadlineError(text)
    if status is None:
        return SandboxProtocolError(text) if isinstance(error, _NONSENSE) else SandboxUnavailableError(text)
    return error_of_status(status, text, wording, wait_s=wait_s)


def error_of_status(status: int, text: str, wording: Wording, *, wait_s: float | None = None) -> SandboxError:
    """Return the SandboxError for an HTTP status of the control plane; see `error_of`."""
    if status in wording.quota_statuses and any(word in text.lower() for word in wording.quota_words):
        return SandboxQuotaError(text)
    if status == 429:
        return SandboxRateLimitError(text, wait_s)
    if status in _HOPELESS:
        return SandboxConfigError(f"{text}. Check {wording.to_check}: trying again can't help")
    return SandboxUnavailableError(text) if status == 409 or status >= 500 else SandboxProtocolError(text)

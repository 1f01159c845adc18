"""What E2B's SDK raises, as errors of ours. Called by the E2B service and its channel; pure.

The SDK has several roots: SandboxException, AuthenticationException and ServiceBusyException beside it, and raw errors
of its transports. A TimeoutException may be a slow answer or a dead sandbox: only asking tells, so that is left open.
"""

from __future__ import annotations

import e2b

from rayapp.core.errors import (
    SandboxConfigError,
    SandboxDeadlineError,
    SandboxError,
    SandboxGoneError,
    SandboxProtocolError,
    SandboxQuotaError,
    SandboxRateLimitError,
    SandboxUnavailableError,
)

_NONSENSE = (ValueError, TypeError, KeyError, AttributeError)
"""What the SDK raises when an answer is not what it expects. Its own errors are none of these."""
_QUOTA_WORDS = ("concurrent", "maximum number", "quota")


def control_error(error: Exception, what: str) -> SandboxError:
    """Of a call to the control plane.

    Args:
        what: the call, for the message, e.g. `create`.
    """
    text = f"e2b {what}: {type(error).__name__}: {error}"[:600]
    if isinstance(error, e2b.AuthenticationException):
        return SandboxConfigError(f"{text}. Check the key in the variable that sandbox.providers[].api_key_env names")
    if isinstance(error, e2b.RateLimitException):
        return _too_many(text)
    if isinstance(error, e2b.SandboxNotFoundException):
        return SandboxGoneError(text)
    if isinstance(error, e2b.TimeoutException | TimeoutError):
        return SandboxDeadlineError(text)
    if isinstance(error, _NONSENSE):
        return SandboxProtocolError(text)
    status = getattr(error, "status_code", None)
    return of_status(status, text) if status is not None else SandboxUnavailableError(text)


def of_status(status: int, text: str, retry_after_s: float | None = None) -> SandboxError:
    """Of an HTTP status of the control plane."""
    if status == 429:
        return _too_many(text, retry_after_s)
    if status == 403 and any(word in text.lower() for word in _QUOTA_WORDS):
        return SandboxQuotaError(text)
    if status in (400, 401, 403, 404, 405):
        return SandboxConfigError(f"{text}. Check the template, the key and the endpoint: trying again can't help")
    if status >= 500:
        return SandboxUnavailableError(text)
    return SandboxProtocolError(text)


def _too_many(text: str, retry_after_s: float | None = None) -> SandboxError:
    if any(word in text.lower() for word in _QUOTA_WORDS):
        return SandboxQuotaError(text)
    return SandboxRateLimitError(text, retry_after_s)


def is_surely_gone(error: Exception) -> bool:
    """True when the error itself says that the sandbox does not exist any more."""
    kinds = (e2b.SandboxNotRunningException, e2b.SandboxNotFoundException)
    return isinstance(error, kinds) or "sandbox was not found" in str(error).lower()

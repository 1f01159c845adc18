"""What Daytona's SDK raises, as errors of ours. Pure.

Most calls raise DaytonaError and its subclasses; some let the generated clients' ApiException through, which has a
status and no common root with them. So the status decides, and the type only where there is none.
"""

from __future__ import annotations

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
from rayapp.sandbox.providers.retry_after import retry_after_s

_NONSENSE = (ValueError, TypeError, KeyError, AttributeError)
"""What the SDK raises when an answer is not what it expects. Its own errors are none of these."""
_QUOTA_WORDS = ("quota", "limit exceeded", "limit reached", "maximum", "exceeds", "insufficient")
_CREATE = "create"


def status_of(error: Exception) -> int | None:
    """HTTP status of an error of the SDK or of its generated clients."""
    status = getattr(error, "status_code", None) or getattr(error, "status", None)
    return status if type(status) is int else None


def daytona_error(error: Exception, what: str) -> SandboxError:
    """One of ours.

    Args:
        what: the call, for the message, e.g. `create`.
    """
    text = f"daytona {what}: {type(error).__name__}: {error}"[:600]
    status = status_of(error)
    if status is None:
        if isinstance(error, _NONSENSE):
            return SandboxProtocolError(text)
        is_slow = "Timeout" in type(error).__name__ or isinstance(error, TimeoutError)
        return SandboxDeadlineError(text) if is_slow else SandboxUnavailableError(text)
    if status == 429:
        return SandboxRateLimitError(text, _retry_after_s(error))
    if status in (400, 402, 403) and any(word in text.lower() for word in _QUOTA_WORDS):
        return SandboxQuotaError(text)
    if status in (404, 410) and what != _CREATE:
        return SandboxGoneError(text)
    if status in (400, 401, 402, 403, 404, 422):
        return SandboxConfigError(f"{text}. Check the snapshot, the key and the endpoint: trying again can't help")
    if status in (408, 504):
        return SandboxDeadlineError(text)
    return SandboxUnavailableError(text) if status == 409 or status >= 500 else SandboxProtocolError(text)


def _retry_after_s(error: Exception) -> float | None:
    headers = getattr(error, "headers", None) or {}
    waits = [str(value) for name, value in dict(headers).items() if str(name).lower().startswith("retry-after")]
    return max((seconds for wait in waits if (seconds := retry_after_s(wait)) is not None), default=None)

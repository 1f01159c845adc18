"""Reads a Retry-After header. Called by the providers that see one; pure."""

from __future__ import annotations

MAX_WAIT_S = 600.0
"""A service that asks for more is asked again after this: a nonsense header must not stop a run for days."""


def retry_after_s(text: str | None) -> float | None:
    """Seconds to wait; None where it says nothing usable.

    The header's other form, a date, is not used: it would be read against this machine's clock, which may be off.
    """
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    # Comparisons with NaN are false, so NaN ends here as well.
    return min(seconds, MAX_WAIT_S) if seconds >= 0 else None

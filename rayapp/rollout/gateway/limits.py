"""Limits of a session's use of the policy, and what is known about how a client sends a call."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

MOST_CHOICES = 16
_MAX_CHARS_A_TOKEN = 32
"""Maximum characters per token, on average over a prompt. A prompt that needs more can't fit into the session's tokens,
so it is refused before it is rendered."""
_BODY_BYTES, _BODY_VALUES = 1 << 20, 50_000
"""Maximum bytes and JSON values of a body without the texts of its messages. They are for tools, and for the fields
around each message."""
MODEL = "policy"
"""Model name of the policy, which agents get in RAYAPP_MODEL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of a session's use of the policy."""

    max_tokens: int
    """Maximum tokens of all conversations of the session together, read and sampled. A token that several calls share
    counts once."""
    max_turns: int
    """Maximum turns of the policy. A call with n choices takes n turns."""

    @property
    def max_chars(self) -> int:
        """Maximum characters of a prompt's messages."""
        return _MAX_CHARS_A_TOKEN * self.max_tokens

    @property
    def max_body_bytes(self) -> int:
        return _BODY_BYTES + 2 * self.max_chars

    @property
    def max_body_values(self) -> int:
        """Maximum JSON values in a body. They are limited because parsing holds the interpreter's lock. Few tokens
        contain two values.
        """
        return _BODY_VALUES + 3 * self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One attempt of a client to send a call."""

    key: bytes = b""
    """Key that is equal for attempts to send the same call; empty if the client doesn't mark attempts."""
    is_repeated: bool = False
    """True if, by its headers, this attempt is a retry, or the client may retry it."""
    timeout_s: float | None = None
    """Seconds after which the client retries; None if its headers don't tell."""
    sent_at_s: float = field(default_factory=time.monotonic)

    @property
    def has_timed_out(self) -> bool:
        return self.timeout_s is not None and time.monotonic() - self.sent_at_s > 0.9 * self.timeout_s

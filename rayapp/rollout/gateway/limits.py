"""Limits of a session's use of the policy, and what is known about how a client sends a call."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

MOST_CHOICES = 16
# Most characters per token over a prompt; one that needs more can't fit into the session, and is refused unrendered.
_MAX_CHARS_A_TOKEN = 32
# Limits of a body without its messages' texts: tools, and the fields around each message.
_BODY_BYTES, _BODY_VALUES = 1 << 20, 50_000
# Bytes of pictures in a body, in base64, and in a session, encoded.
PICTURES_BODY_BYTES, MOST_SESSION_BYTES = 16 << 20, 128 << 20
MODEL = "policy"  # which agents get in RAYAPP_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    max_tokens: int  # of all conversations together, read and sampled; a token that calls share counts once
    max_turns: int  # of the policy; a call with n choices takes n

    @property
    def max_chars(self) -> int:
        return _MAX_CHARS_A_TOKEN * self.max_tokens

    @property
    def max_body_bytes(self) -> int:
        return _BODY_BYTES + 2 * self.max_chars

    @property
    def max_body_values(self) -> int:
        """Maximum JSON values in a body: parsing holds the interpreter's lock. Few tokens contain two values."""
        return _BODY_VALUES + 3 * self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One attempt of a client to send a call."""

    key: bytes = b""  # equal for attempts to send the same call; empty if the client doesn't mark attempts
    is_repeated: bool = False  # by its headers a retry, or one may follow
    timeout_s: float | None = None  # after which the client retries; None if its headers don't tell
    sent_at_s: float = field(default_factory=time.monotonic)

    @property
    def has_timed_out(self) -> bool:
        return self.timeout_s is not None and time.monotonic() - self.sent_at_s > 0.9 * self.timeout_s

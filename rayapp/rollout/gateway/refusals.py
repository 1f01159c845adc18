"""What the gateway says no to: one kind of error, which each API writes in its own form."""

from __future__ import annotations

from typing import Literal

Kind = Literal["invalid", "key", "unknown", "over", "too_large", "turns", "tokens", "busy", "engine"]
STATUS: dict[Kind, int] = {
    "invalid": 400,
    "key": 401,
    "unknown": 404,
    # Clients try 408, 409, 429 and all from 500 again; what is over stays over.
    "over": 410,
    "too_large": 413,
    "turns": 400,
    "tokens": 400,
    "busy": 429,
    "engine": 503,
}


class RefusedError(Exception):
    """A call that is not served. Its message is for the agent's author."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind

    @property
    def status(self) -> int:
        """Of HTTP."""
        return STATUS[self.kind]

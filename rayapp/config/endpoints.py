"""A model behind HTTP, as its section names it: what a judge and a teacher on a server have in common."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from rayapp.config.model_servers import server_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a model is asked, and how hard."""

    who: str
    """For messages: `judge quality`."""
    base_url: str
    api_key_env: str
    timeout_s: float
    """Deadline of one request."""
    max_retries: int
    max_concurrent: int
    """Requests under way at once, of the whole run."""
    requests_per_minute: float = 0.0
    """Of the whole run. 0: no limit but the server's 429."""


def plain_url(value: str) -> str:
    """The URL without a slash at its end. Raises ValueError: it is none, or says more than where something is."""
    if server_named(value):
        return value
    url = urlsplit(value)
    if url.scheme not in ("http", "https") or not url.hostname or url.username or url.password or url.query:
        shown = url._replace(netloc=url.netloc.rpartition("@")[2], query="").geturl()
        raise ValueError(
            f"{shown!r} must be http(s)://HOST[:PORT][/PATH] or run://NAME, without a user, a password or a query: a "
            "key goes into the variable that api_key_env names"
        )
    return value.rstrip("/")

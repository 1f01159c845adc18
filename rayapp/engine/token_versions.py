"""Which weights sampled which tokens of a completion, where new ones arrive in the middle of it.

An engine freezes what runs, takes the new weights, and goes on from the same tokens. `TokenVersions` keeps, for every
request in flight, how many tokens each version has sampled. Used by `VllmEngine`; pure counting.
"""

from __future__ import annotations

from collections.abc import Callable

from rayapp.core.types import VersionSpan


class TokenVersions:
    """See the module. Requests are known by any id that is unique among those in flight."""

    def __init__(self) -> None:
        self._spans: dict[str, list[VersionSpan]] = {}
        self._ended_by: dict[str, int] = {}
        """Version that sampled the last token of a request whose output has not been fetched yet."""

    def begin(self, request_id: str) -> None:
        """From now on every update counts this request's tokens."""
        self._spans[request_id] = []

    @property
    def num_open(self) -> int:
        return len(self._spans)

    def close_version(self, version: int, num_tokens: Callable[[str], int | None]) -> None:
        """All is frozen: what has been sampled so far, and not been counted, is `version`'s.

        Args:
            num_tokens: of a request, sampled since its start; None if it has ended.
        """
        for request_id, spans in self._spans.items():
            count = num_tokens(request_id)
            if count is None:
                self._ended_by.setdefault(request_id, version)
            else:
                self._add(spans, version, count)

    def end(self, request_id: str, version: int, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Everything that was sampled for a request, oldest version first; `version` sampled what is left."""
        spans = self._spans.pop(request_id)
        self._add(spans, self._ended_by.pop(request_id, version), num_tokens)
        return tuple(spans)

    def forget(self, request_id: str) -> None:
        """A request that failed or was cancelled. Idempotent."""
        self._spans.pop(request_id, None)
        self._ended_by.pop(request_id, None)

    @staticmethod
    def _add(spans: list[VersionSpan], version: int, num_tokens: int) -> None:
        new = num_tokens - sum(span.num_tokens for span in spans)
        assert new >= 0, f"{num_tokens} tokens after {spans}"
        if new:
            spans.append(VersionSpan(policy_version=version, num_tokens=new))

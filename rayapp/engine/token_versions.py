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
        """For requests that ended and whose output was not fetched yet: the version that sampled their last token."""

    def begin(self, request_id: str) -> None:
        """Begin to follow a request: every update from now on counts its tokens."""
        self._spans[request_id] = []

    @property
    def num_open(self) -> int:
        return len(self._spans)

    def close_version(self, version: int, num_tokens: Callable[[str], int | None]) -> None:
        """Give `version` all tokens that were sampled and not counted yet. Called while the engine is frozen.

        Args:
            num_tokens: request id -> tokens sampled since its start; None if it has ended.
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
        """Stop following a request that failed or was cancelled. Idempotent."""
        self._spans.pop(request_id, None)
        self._ended_by.pop(request_id, None)

    @staticmethod
    def _add(spans: list[VersionSpan], version: int, num_tokens: int) -> None:
        new = num_tokens - sum(span.num_tokens for span in spans)
        assert new >= 0, f"{num_tokens} tokens after {spans}"
        if new:
            spans.append(VersionSpan(policy_version=version, num_tokens=new))

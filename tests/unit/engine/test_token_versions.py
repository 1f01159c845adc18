"""Every sampled token belongs to exactly one version, whenever new weights arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayapp.core.types import VersionSpan
from rayapp.engine.vllm_output import TokenVersions


def test_tokens_before_and_after_an_update_are_told_apart() -> None:
    versions = TokenVersions()
    for request in ("a", "b", "ended"):
        versions.begin(request)
    versions.close_version(3, {"a": 5, "b": 0}.get)
    assert versions.end("a", 4, 7) == (
        VersionSpan(policy_version=3, num_tokens=5),
        VersionSpan(policy_version=4, num_tokens=2),
    )
    # It was queued when the weights came: all its tokens are the new version's.
    assert versions.end("b", 4, 2) == (VersionSpan(policy_version=4, num_tokens=2),)
    # It had ended when they came: all are the old version's.
    assert versions.end("ended", 4, 6) == (VersionSpan(policy_version=3, num_tokens=6),)
    assert versions.num_open == 0


def test_one_that_was_cancelled_is_forgotten() -> None:
    versions = TokenVersions()
    versions.begin("a")
    versions.close_version(1, lambda request: None)
    versions.forget("a")
    versions.forget("a")
    versions.begin("a")
    assert versions.end("a", 2, 1) == (VersionSpan(policy_version=2, num_tokens=1),)


@given(tokens_by_version=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_the_spans_say_what_each_version_sampled(tokens_by_version: list[int]) -> None:
    versions, total = TokenVersions(), 0
    versions.begin("a")
    for version, num_tokens in enumerate(tokens_by_version[:-1]):
        total += num_tokens
        versions.close_version(version, lambda request, total=total: total)
    last = len(tokens_by_version) - 1
    spans = versions.end("a", last, total + tokens_by_version[-1])
    assert {s.policy_version: s.num_tokens for s in spans} == {v: n for v, n in enumerate(tokens_by_version) if n}

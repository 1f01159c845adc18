"""Dealing groups out to learner ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.learner_group import assign_by_tokens


@given(num_tokens=st.lists(st.integers(1, 10_000), max_size=40), num_ranks=st.integers(1, 9))
def test_every_group_goes_to_exactly_one_rank(num_tokens: list[int], num_ranks: int) -> None:
    assignment = assign_by_tokens(num_tokens, num_ranks)
    assert len(assignment) == num_ranks
    assert sorted(position for positions in assignment for position in positions) == list(range(len(num_tokens)))


@given(num_tokens=st.lists(st.integers(1, 10_000), min_size=1, max_size=40), num_ranks=st.integers(1, 9))
def test_no_rank_is_ahead_of_another_by_more_than_one_group(num_tokens: list[int], num_ranks: int) -> None:
    loads = [sum(num_tokens[p] for p in positions) for positions in assign_by_tokens(num_tokens, num_ranks)]
    assert max(loads) - min(loads) <= max(num_tokens)

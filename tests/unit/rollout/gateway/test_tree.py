"""The tree of a trajectory's tokens: each token once, its context, and branches as plain sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayapp.core.trajectories import before, branches, path_to
from rayapp.core.types import AllowedTokens, Completion, Fork, VersionSpan
from rayapp.rollout.recorder import Recorder, cut_completion
from support import make


def completion(ids: Sequence[int]) -> Completion:
    return make.completion(*ids, log_probs=-np.arange(1, len(ids) + 1, dtype=np.float32))


def add(tree: Recorder, after: int, read: Sequence[int], sampled: Sequence[int]) -> int:
    return tree.add_turn(after, read, completion(sampled), text="", started_at_s=0.0)[1]


def test_a_helper_with_its_own_prompt_begins_a_conversation_and_the_first_goes_on() -> None:
    tree = Recorder()
    main = add(tree, -1, [1, 2], [3])
    add(tree, -1, [7], [8])

    last = add(tree, main, [4], [5])

    assert tree.context(last) == [1, 2, 3, 4, 5]
    assert tree.trajectory().response_mask.tolist() == [False, False, True, False, True, False, True]
    assert tree.trajectory().rollout_log_probs.tolist() == [0, 0, -1, 0, -1, 0, -1]
    assert tree.forks == [Fork(start=3, after=-1), Fork(start=5, after=2)]
    assert [branch.tolist() for branch in branches(tree.size, tree.forks)] == [[3, 4], [0, 1, 2, 5, 6]]


def test_what_an_agent_sends_again_from_the_start_is_there_once_up_to_where_it_differs() -> None:
    tree = Recorder()
    add(tree, add(tree, -1, [1, 2], [3]), [4, 9], [5])

    assert tree.num_new(-1, [1, 2, 3, 4, 8]) == 1
    last = add(tree, -1, [1, 2, 3, 4, 8], [6])

    assert tree.context(last) == [1, 2, 3, 4, 8, 6]
    assert tree.trajectory().token_ids.tolist() == [1, 2, 3, 4, 9, 5, 8, 6]
    assert before(6, tree.forks).tolist() == [0, 1, 2, 3]


def test_a_cut_sample_is_one_of_fewer_tokens() -> None:
    spans = (VersionSpan(policy_version=1, num_tokens=2), VersionSpan(policy_version=2, num_tokens=2))
    whole = replace(completion([1, 2, 3, 4]), version_spans=spans)

    kept = cut_completion(whole, 1)

    assert (kept.token_ids.tolist(), kept.finish_reason) == ([1], "length")
    assert kept.version_spans == (VersionSpan(policy_version=1, num_tokens=1),)
    # No span without tokens: its version sampled nothing that stays.
    assert cut_completion(whole, 2).version_spans == spans[:1]
    assert cut_completion(whole, 4) is whole


def test_the_experts_of_a_token_are_those_of_the_turn_that_computed_it_first() -> None:
    def turn(after: int, read: list[int], sampled: list[int], known: int, number: int) -> int:
        rows = len(tree.context(after)) + len(read) - known + len(sampled) - 1
        said = replace(completion(sampled), routed_experts=np.full((rows, 1, 2), number, np.uint8))
        return tree.add_turn(after, read, said, text="", started_at_s=0.0)[1]

    tree = Recorder()
    first = turn(-1, [1, 2], [3, 4], known=0, number=1)
    assert tree.num_routed(first) == 3  # nothing has read 4 yet
    again = turn(1, [], [5, 6], known=tree.num_routed(1), number=2)
    goes_on = turn(first, [7], [8], known=tree.num_routed(first), number=3)
    # Started at the same time as the turn before it, and recorded after it.
    turn(first, [7], [9, 9], known=3, number=4)

    assert tree.num_routed(again) == 3
    assert tree.num_routed(goes_on) == 5
    assert tree.trajectory().token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    experts = tree.trajectory().routed_experts
    assert experts.shape == (10, 1, 2)
    assert experts[:, 0, 0].tolist() == [1, 1, 1, 3, 2, 0, 3, 0, 4, 0]


def test_a_cut_sample_has_the_experts_of_its_tokens() -> None:
    whole = replace(completion([1, 2, 3, 4]), routed_experts=np.arange(5, dtype=np.uint8).reshape(5, 1, 1))
    kept = cut_completion(whole, 2).routed_experts
    assert kept.ravel().tolist() == [0, 1, 2]


def test_masks_stand_at_the_tokens_of_their_turn_and_each_is_kept_once() -> None:
    def said(token_ids: list[int], *masks: int) -> Completion:
        rows = np.array([[word, 7] for word in masks], np.int32)
        allowed = AllowedTokens(masks=rows, mask_of=np.arange(len(masks), dtype=np.int32))
        return replace(completion(token_ids), allowed=allowed)

    tree = Recorder()
    first = tree.add_turn(-1, [1, 2], said([3, 4], 5, 6), text="", started_at_s=0.0)[1]
    free = tree.add_turn(first, [5], completion([6]), text="", started_at_s=0.0)[1]
    tree.add_turn(free, [7], cut_completion(said([8, 9, 9], 6, 5, 8), 2), text="", started_at_s=0.0)

    allowed = tree.trajectory().allowed
    assert allowed.masks.shape == (2, 2)  # 5 and 6; the mask of the token that was cut off is gone
    words = [None if number < 0 else allowed.masks[number, 0] for number in allowed.mask_of.tolist()]
    assert words == [None, None, 5, 6, None, None, None, 6, 5]


Steps = list[tuple[int, list[int], list[int]]]
IDS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.integers(0, 99), IDS, IDS), min_size=1, max_size=20))
def test_any_tree_keeps_every_context_and_every_sample_once(steps: Steps) -> None:
    """Prompts over four letters share prefixes by chance, and each step continues from any earlier turn or token."""
    tree, contexts, ends = Recorder(), [list[int]()], [-1]
    for chosen, read, sampled in steps:
        parent = chosen % len(contexts)
        last = add(tree, ends[parent], read, sampled)
        contexts.append(contexts[parent] + read + sampled)
        ends.append(last)

    ids = tree.trajectory().token_ids
    for context, last, turn in zip(contexts[1:], ends[1:], tree.turns, strict=True):
        assert tree.context(last) == context
        assert ids[before(turn.start, tree.forks)].tolist() == context[: len(context) - (turn.end - turn.start)]
    assert tree.trajectory().response_mask.sum() == sum(len(sampled) for _, _, sampled in steps)
    assert sorted({i for branch in branches(tree.size, tree.forks) for i in branch.tolist()}) == list(range(tree.size))
    assert path_to(-1, tree.forks).size == 0

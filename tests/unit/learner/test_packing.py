"""The radix tree shares every prefix that it claims to share, and lets each token see exactly its own sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.core.errors import LearnerError
from rayapp.core.types import Fork
from rayapp.learner.attention import _PathRows, packed_attention, plan_attention, varlen_plan
from rayapp.learner.batch import TrainItem, make_micro_batch, split, trained_branches
from rayapp.learner.families import flex
from rayapp.learner.families.flex import flex_tree_attention, tree_mask
from rayapp.learner.families.mixers import MAX_PADDING, lay_out, paths_of
from rayapp.learner.packing import Packing, pack, segment_paths
from support import make
from support.learners import counted_operators

token = st.integers(0, 2)
sequence = st.lists(token, min_size=1, max_size=9)
tree = st.tuples(st.lists(token, min_size=1, max_size=5), st.lists(sequence, min_size=1, max_size=7))


def sequences_of(trees: list[tuple[list[int], list[list[int]]]]) -> list[list[np.ndarray]]:
    return [[np.array(prompt + rest, np.int32) for rest in rests] for prompt, rests in trees]


def visible(packing: Packing) -> np.ndarray:
    """Return (N, N): which tokens each token sees, from the segments."""
    sees = np.zeros((packing.num_tokens, packing.num_tokens), bool)
    for s in packing.segments:
        sees[s.start : s.end, s.start : s.end] = np.tri(s.end - s.start, dtype=bool)
        sees[s.end : s.subtree_end, s.start : s.end] = True
    return sees


def item(row: int, group: int, prompt: list[int], response: list[int]) -> TrainItem:
    trajectory = make.trajectory(prompt + response, len(prompt))
    return TrainItem(row=row, group=group, trajectory=trajectory, advantages=np.ones(len(response), np.float32))


@settings(max_examples=300, deadline=None)
@given(trees=st.lists(tree, min_size=1, max_size=3), share=st.booleans())
def test_every_sequence_is_there_and_sees_exactly_itself(
    trees: list[tuple[list[int], list[list[int]]]], share: bool
) -> None:
    sequences = sequences_of(trees)
    packing = pack(sequences, share_prefixes=share)
    expected = np.zeros((packing.num_tokens, packing.num_tokens), bool)
    flat = [tokens for group in sequences for tokens in group]
    assert len(packing.paths) == len(flat)
    for tokens, path in zip(flat, packing.paths, strict=True):
        np.testing.assert_array_equal(packing.token_ids[path], tokens)
        np.testing.assert_array_equal(packing.position_ids[path], np.arange(tokens.size))
        for i, position in enumerate(path):
            expected[position, path[: i + 1]] = True
    np.testing.assert_array_equal(visible(packing), expected)
    assert share or packing.num_tokens == sum(tokens.size for tokens in flat)


def test_a_shared_prompt_and_a_repeated_completion_are_computed_once() -> None:
    prompt = [1] * 10
    sequences = [[np.array(prompt + rest, np.int32) for rest in ([2] * 6, [3] * 6, [2] * 6)]]
    # 10 prompt tokens, two different completions of 6: 22, where plain packing has 3 x 16 = 48
    assert pack(sequences, share_prefixes=True).num_tokens == 22
    assert pack(sequences, share_prefixes=False).num_tokens == 48


@pytest.mark.parametrize(
    ("num_sequences", "num_shared", "is_shared"),
    [(2, 3, False), (2, 4, True), (3, 1, False), (3, 2, True), (5, 1, True)],
)
def test_a_prefix_is_computed_once_if_that_saves_four_tokens(
    num_sequences: int, num_shared: int, *, is_shared: bool
) -> None:
    sequences = [np.array([9] * num_shared + [number] * 2, np.int32) for number in range(num_sequences)]

    num_tokens = pack([sequences], share_prefixes=True).num_tokens

    assert num_tokens == num_sequences * (2 if is_shared else 2 + num_shared) + is_shared * num_shared


@pytest.mark.parametrize(("is_sampled", "later"), [(True, [([0, 1, 2, 3, 5, 6], [5])]), (False, [])])
def test_a_token_that_branches_share_is_trained_in_the_first_and_a_branch_without_another_is_left_out(
    later: list[tuple[list[int], list[int]]], *, is_sampled: bool
) -> None:
    mask = np.array([False, False, True, True, True, False, is_sampled])
    forked = make.trajectory(range(7), 2, response_mask=mask, forks=(Fork(start=5, after=3),))

    found = [(path.tolist(), responses.tolist()) for path, responses in trained_branches(forked)]
    assert found == [([0, 1, 2, 3, 4], [2, 3, 4]), *later]


def test_prompts_with_and_without_recorded_experts_are_not_counted_as_shared() -> None:
    items = [item(row, 0, [7] * 20, [row] * 3) for row in range(2)]
    experts = np.zeros((23, 2, 1), np.uint8)
    mixed = [items[0], replace(items[1], trajectory=replace(items[1].trajectory, routed_experts=experts))]

    assert len(split(items, max_tokens=30, share_prefixes=True)) == 1
    for order in (mixed, mixed[::-1]):
        assert len(split(order, max_tokens=30, share_prefixes=True)) == 2


def test_groups_never_share_even_equal_prompts() -> None:
    same = np.array([1, 2, 3, 4, 5, 6], np.int32)
    assert pack([[same], [same]], share_prefixes=True).num_tokens == 12


def plain_attention(
    packing: Packing,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """With all scores at once, at a scale of 0.3."""
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.from_numpy(visible(packing))
    if window is not None:
        positions = torch.from_numpy(packing.position_ids)
        seen &= positions[:, None] - positions[None] < window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : packing.num_tokens]
    return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(
    trees=st.lists(tree, min_size=1, max_size=2),
    share=st.booleans(),
    seed=st.integers(0, 99),
    window=st.none() | st.integers(1, 9),
    softcap=st.none() | st.just(1.5),
    has_sinks=st.booleans(),
    max_rows=st.sampled_from([3, 256]),
)
def test_attention_and_its_gradient_are_those_of_the_mask(
    trees: list[tuple[list[int], list[list[int]]]],
    share: bool,
    seed: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    max_rows: int,
) -> None:
    packing = pack(sequences_of(trees), share_prefixes=share)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, packing.num_tokens, 8) for heads in (4, 2, 2)]
    query, key, value = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    sinks = torch.randn(4, generator=generator).requires_grad_() if has_sinks else None
    inputs = [query, key, value] if sinks is None else [query, key, value, sinks]
    plan = plan_attention(packing, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "MAX_ROWS", max_rows)
        found, _ = packed_attention(
            torch.nn.Identity(), query, key, value, None,
            plan=plan, scaling=0.3, sliding_window=window, softcap=softcap, s_aux=sinks,
        )  # fmt: skip
    expected = plain_attention(packing, query, key, value, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    slopes = torch.randn(found.shape, generator=generator)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, slopes), torch.autograd.grad(expected, inputs, slopes), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@settings(max_examples=100, deadline=None)
@given(trees=st.lists(tree, min_size=1, max_size=3), share=st.booleans())
def test_on_a_gpu_keys_are_copied_only_where_segments_share_tokens_and_their_gradient_sorts_none(
    trees: list[tuple[list[int], list[list[int]]]], share: bool
) -> None:
    packing = pack(sequences_of(trees), share_prefixes=share)
    plan = varlen_plan(packing, torch.device("cpu"))
    paths = segment_paths(packing.segments)
    assert plan.cu_keys.diff().tolist() == [path.size for path in paths]
    if plan.paths is None:
        assert np.concatenate(paths).tolist() == list(range(packing.num_tokens))
        return
    rows = torch.randn(packing.num_tokens, 2, 4, dtype=torch.bfloat16).requires_grad_()
    expected = rows[torch.from_numpy(np.concatenate(paths))]
    slopes = torch.randn(expected.shape).bfloat16()
    with counted_operators() as counts:
        found = _PathRows.apply(rows, plan.paths)  # type: ignore[no-untyped-call]
        [gradient] = torch.autograd.grad(found, rows, slopes)
    assert torch.equal(found, expected)
    exact = torch.zeros(rows.shape).index_add_(0, torch.from_numpy(np.concatenate(paths)), slopes.float())
    torch.testing.assert_close(gradient.float(), exact, atol=1e-5, rtol=2**-8)  # rounded to bfloat16 once
    assert set(counts) & {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::sort"} == set()
    assert counts["aten::index_select"] == 3  # the forward; each token's own key; keys of shared tokens


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (4, 1.5)])
def test_what_a_gpu_computes_for_sinks_and_caps_is_the_same(window: int | None, softcap: float | None) -> None:
    packing = pack(sequences_of([([1, 2, 0, 1, 1], [[1, 2, 2, 0, 1], [1, 2, 0], [2] * 9])]), share_prefixes=True)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, packing.num_tokens, 8, generator=generator) for heads in (4, 2, 2))
    options: dict[str, Any] = {"softcap": softcap, "sinks": torch.randn(4, generator=generator)}
    tree = tree_mask(packing, torch.device("cpu"))
    rule = flex.MaskRule(scale=0.3, window=window, softcap=softcap)
    found = flex_tree_attention(query, key, value, options["sinks"], tree, rule)
    expected = plain_attention(packing, query, key, value, window=window, **options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(trees=st.lists(tree, min_size=1, max_size=3), share=st.booleans())
def test_rows_of_sequences_hold_every_token_behind_all_that_comes_before_it(
    trees: list[tuple[list[int], list[list[int]]]], share: bool
) -> None:
    packing = pack(sequences_of(trees), share_prefixes=share)
    rows, place = lay_out(paths_of(packing.segments))
    assert np.concatenate([index.ravel() for index in rows])[place].tolist() == list(range(packing.num_tokens))
    paths = {tuple(path[:n]) for path in packing.paths for n in range(1, path.size + 1)}
    starts = np.cumsum([0, *(index.size for index in rows)])
    for where in place:
        bunch = int(np.searchsorted(starts, where, side="right")) - 1
        row, column = divmod(int(where - starts[bunch]), rows[bunch].shape[1])
        assert tuple(rows[bunch][row, : column + 1]) in paths
    assert sum(index.size for index in rows) <= MAX_PADDING * sum(path.size for path in paths_of(packing.segments))


def test_the_bfloat16_gradient_of_a_shared_prompt_is_the_float32_one_to_three_digits() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 9, 40)
    packing = pack(
        [[np.concatenate([prompt, rng.integers(0, 9, 20)]).astype(np.int32) for _ in range(8)]], share_prefixes=True
    )
    plan = plan_attention(packing, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, heads, packing.num_tokens, 16, generator=generator).bfloat16() for heads in (4, 2, 2)]
    slopes = torch.randn(1, packing.num_tokens, 4, 16, generator=generator).bfloat16()
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in exact]
        output, _ = packed_attention(torch.nn.Identity(), *inputs, None, plan=plan, scaling=0.25)
        gradients.append(torch.autograd.grad(output, inputs, slopes.to(dtype)))
    for wide, narrow in zip(*gradients, strict=True):
        # bfloat16 keeps 8 bits: 2^-8 of the largest entry, and the sums over a few blocks of rounded numbers
        assert float((narrow.float() - wide).abs().max()) < 0.01 * float(wide.abs().max())


completions = st.lists(st.tuples(st.integers(0, 2), st.lists(token, min_size=1, max_size=8)), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(completions=completions, max_tokens=st.integers(12, 60), share=st.booleans())
def test_a_split_keeps_the_budget_and_loses_no_token(
    completions: list[tuple[int, list[int]]], max_tokens: int, share: bool
) -> None:
    items = [item(row, group, [7, 8, 9, 5], rest) for row, (group, rest) in enumerate(completions)]
    batches = split(items, max_tokens=max_tokens, share_prefixes=share)
    assert sorted(i.row for batch in batches for i in batch.items) == list(range(len(items)))
    for batch in batches:
        # A branch that saves less than MIN_SAVED_TOKENS is computed twice, which the estimate does not count.
        slack = 3 * len(batch.items) if share else 0
        assert batch.packing.num_tokens <= max_tokens + slack
    assert sum(batch.num_trained_tokens for batch in batches) == sum(len(rest) for _, rest in completions)


@settings(max_examples=200, deadline=None)
@given(completions=completions, max_tokens=st.integers(12, 60), share=st.booleans(), kinds=st.lists(st.integers(-1, 1)))
def test_every_packed_token_has_the_experts_of_its_trajectory(
    completions: list[tuple[int, list[int]]], max_tokens: int, share: bool, kinds: list[int]
) -> None:
    """Kind -1: a trajectory without recorded experts; kind 1: one whose experts differ from one of its tokens on."""
    items = [item(row, group, [7, 8, 9, 5], rest) for row, (group, rest) in enumerate(completions)]
    for row, kind in enumerate(kinds[: len(items)]):
        tokens = items[row].trajectory.token_ids
        experts = np.stack([tokens, tokens + kind * (np.arange(tokens.size) >= row)], axis=1)[:, :, None]
        chosen = None if kind < 0 else np.repeat(experts, 3, axis=2).astype(np.uint8)
        items[row] = replace(items[row], trajectory=replace(items[row].trajectory, routed_experts=chosen))
    for batch in split(items, max_tokens=max_tokens, share_prefixes=share):
        assert batch.packing.num_tokens <= max_tokens + (3 * len(batch.items) if share else 0)
        assert [s.end - s.start > 0 for s in batch.packing.segments].count(False) == 0
        if all(own.trajectory.routed_experts is None for own in batch.items):
            assert batch.routed_experts is None
            continue
        assert batch.routed_experts is not None
        assert batch.routed_experts.shape == (batch.packing.num_tokens, 2, 3)
        for own, path in zip(batch.items, batch.packing.paths, strict=True):
            np.testing.assert_array_equal(batch.packing.token_ids[path], own.trajectory.token_ids[:-1])
            chosen = own.trajectory.routed_experts
            np.testing.assert_array_equal(batch.routed_experts[path], -1 if chosen is None else chosen[:-1])


def test_a_prompt_is_shared_as_far_as_it_went_to_the_same_experts() -> None:
    items = [item(row, 0, [7, 8, 9, 5, 6, 7, 8, 9], [1 + row, 2]) for row in range(3)]
    experts = [np.zeros((10, 2, 2), np.uint8) + np.arange(2, dtype=np.uint8) for _ in items]
    experts[2][4:, 1, 0] = 3
    items = [
        replace(own, trajectory=replace(own.trajectory, routed_experts=chosen))
        for own, chosen in zip(items, experts, strict=True)
    ]
    # 8 of the prompt and one of each response for two of them; the third shares the first four, and computes 4 and 1.
    assert make_micro_batch(items, share_prefixes=True).packing.num_tokens == 8 + 2 + 5


def test_a_trajectory_longer_than_a_micro_batch_names_the_key_to_raise() -> None:
    with pytest.raises(LearnerError, match=r"has 12 tokens, but learner\.max_tokens_per_microbatch .* is 10"):
        split([item(0, 0, [1] * 10, [2, 2, 2])], max_tokens=10, share_prefixes=True)


def test_a_tree_may_be_deeper_than_pythons_stack() -> None:
    # Every turn of an agent may begin at an earlier token: 1,200 turns are a tree of 1,200 levels.
    tokens = np.arange(6000, dtype=np.int32)
    deep = [np.append(tokens[: 5 * level], 6000) for level in range(1, 1201)]

    packing = pack([deep], share_prefixes=True)

    assert packing.num_tokens == 1199 * 5 + 5 + 1200
    assert all((packing.token_ids[path] == given).all() for path, given in zip(packing.paths, deep, strict=True))

"""The sample has every kind of tensor, and checksums cover every row of a matrix, however the layer stores it."""

from __future__ import annotations

import pytest
import torch

from rayapp.engine.weights.buckets import (
    MAX_VALUES,
    NUM_COLUMNS,
    Checksums,
    Sampler,
    checksum_of,
    columns_of,
    pack,
    part_of,
)


def test_the_first_tensor_of_every_kind_all_norms_and_one_in_eight_of_the_rest_are_sampled() -> None:
    kinds = ("self_attn.q_proj", "mlp.experts.7.down_proj", "input_layernorm")
    layers = [[f"model.layers.{i}.{kind}.weight" for kind in kinds] for i in range(400)]
    sampler = Sampler()
    assert all(sampler.takes(name) for name in ("model.embed_tokens.weight", *layers[0]))
    taken = [[sampler.takes(name) for name in layer] for layer in layers[1:]]
    assert all(norm for _, _, norm in taken)
    assert all(30 < sum(column) < 70 for column in list(zip(*taken, strict=True))[:2])  # 400 / 8 = 50


def test_one_wrong_row_of_a_wide_matrix_is_seen_and_its_part_is_small() -> None:
    matrix = torch.randn(50, 4000).bfloat16()
    part = part_of("q", matrix)
    assert part.shape == (50, NUM_COLUMNS)
    assert torch.equal(part, matrix[:, columns_of("q", 50, 4000)])
    for row in range(50):
        wrong = matrix.clone()
        wrong[row] = -wrong[row]
        assert checksum_of(part_of("q", wrong)) != checksum_of(part)


def test_columns_are_others_for_every_tensor_and_the_same_for_everybody() -> None:
    assert columns_of("a", 9, 4000) == columns_of("a", 9, 4000) != columns_of("b", 9, 4000)
    assert columns_of("a", 9, 5) == [0, 1, 2, 3, 4]
    assert len(columns_of("a", MAX_VALUES // 2, 4000)) == 2
    assert len(columns_of("a", MAX_VALUES * 2, 4000)) == 1


def test_a_checksum_is_of_values_whatever_holds_them() -> None:
    tensor = torch.tensor([[1.5, -0.0], [2.0, 3.0]]).bfloat16()
    expected = checksum_of(tensor)
    assert checksum_of(tensor.t().contiguous().t()) == expected
    assert checksum_of(tensor.abs()) == expected  # a layer that adds products has no -0
    assert checksum_of(tensor.t()) != expected
    assert checksum_of(torch.empty(0, 3)) == 0


@pytest.mark.parametrize("fault", ["none", "changed", "missing"])
def test_an_update_is_refused_if_a_tensor_arrives_changed_or_not_at_all(fault: str) -> None:
    tensors = {f"layers.{i}.norm.weight": torch.randn(5) for i in range(3)} | {"head": torch.randn(4, 200)}
    sums = {name: value for bucket in pack(tensors.items(), 1 << 10) for name, value in bucket.checksums.items()}
    match fault:
        case "changed":
            tensors["head"][3] = -tensors["head"][3]
        case "missing":
            del tensors["layers.1.norm.weight"]
    arrivals = Checksums()
    assert dict(arrivals.passed(tensors.items())) == tensors
    if fault == "none":
        assert arrivals.check(sums) == 4
    else:
        with pytest.raises(ValueError, match=r"received by this server are not .* 1 of 4 .*: (head|layers\.1\.norm)"):
            arrivals.check(sums)

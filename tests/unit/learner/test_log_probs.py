"""Chunked log-probs, entropies and their gradients are those of the whole logits tensor."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.config.other_models import DistillationSection
from rayapp.core.types import AllowedTokens
from rayapp.learner.log_probs import (
    HeadOptions,
    Targets,
    TeacherHead,
    _adds_products,
    _fill_slopes,
    _log_norms,
    compiled,
    first_pairs_of,
    masks_on,
    token_log_probs,
)
from support.learners import counted_operators


def targets_of(rows: torch.Tensor, token_ids: torch.Tensor, num_positions: int) -> Targets:
    return Targets(rows=rows, token_ids=token_ids, first_pairs=first_pairs_of(rows.numpy(), num_positions))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    num_rows=st.integers(1, 30),
    num_pairs=st.integers(1, 40),
    chunk_rows=st.sampled_from([1, 4, 7, 64]),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    with_entropy=st.booleans(),
    softcap=st.none() | st.sampled_from([0.7, 20.0]),
    with_forms=st.booleans(),
    is_compiled=st.booleans(),
)
def test_values_and_gradients_are_those_of_whole_logits(
    seed: int,
    num_rows: int,
    num_pairs: int,
    chunk_rows: int,
    temperature: float,
    with_entropy: bool,
    softcap: float | None,
    with_forms: bool,
    is_compiled: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, 8, generator=generator).requires_grad_()
    weight = torch.randn(23, 8, generator=generator).requires_grad_()
    pairs = torch.randint(0, num_rows * 23, (num_pairs,), generator=generator).unique()  # type: ignore[no-untyped-call]
    num_pairs, rows = pairs.numel(), pairs // 23
    targets = targets_of(rows, pairs % 23, num_rows)
    options = HeadOptions(
        temperature=temperature,
        chunk_rows=chunk_rows,
        softcap=softcap,
        entropy_needs_grad=with_entropy,
        needs_sum_pi_squared=not is_compiled,
        is_compiled=is_compiled,
    )
    is_allowed = torch.ones(num_rows, 23, dtype=torch.bool)
    if with_forms:
        bits = torch.randint(0, 2, (3, 32), generator=generator).bool()
        bits[:, targets.token_ids] = True
        mask_of = torch.randint(-1, 3, (num_rows,), generator=generator)
        is_allowed[mask_of >= 0] = bits[mask_of[mask_of >= 0], :23]
        words = np.packbits(bits.numpy(), axis=1, bitorder="little").view(np.int32)
        allowed = AllowedTokens(masks=words, mask_of=mask_of.numpy().astype(np.int32))
        targets = replace(targets, allowed=masks_on(torch.device("cpu"), allowed))
    with torch.compiler.set_stance("force_eager"):  # compiling takes seconds for each dtype
        *found, no_kl = token_log_probs(hidden, weight, targets, options)
    assert not no_kl.any()
    logits = hidden @ weight.t()
    capped = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    whole = capped.masked_fill(~is_allowed, -1e4).log_softmax(-1)
    expected = (whole[rows, targets.token_ids], -(whole.exp() * whole).sum(-1), whole.exp().square().sum(-1))
    for ours, theirs in zip(found[: 2 if is_compiled else 3], expected, strict=False):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    slopes, more = torch.randn(num_pairs, generator=generator), torch.randn(num_rows, generator=generator)
    losses = [(out[0] * slopes).sum() + ((out[1] * more).sum() if with_entropy else 0) for out in (found, expected)]
    with torch.compiler.set_stance("force_eager"):
        gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in losses]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_head_reads_logits_in_one_kernel_each_way_and_keeps_none_of_their_size() -> None:
    from torch._inductor.utils import run_and_get_code

    logits = (4 * torch.randn(130, 5003)).bfloat16()
    exact = logits.double().log_softmax(-1)
    torch.compiler.reset()
    (log_norm, entropy), [forward] = run_and_get_code(compiled(_log_norms), logits, 1.0)
    torch.testing.assert_close(entropy, -(exact.exp() * exact).sum(-1).float(), atol=1e-5, rtol=1e-5)
    per_row = torch.randn(130)
    gradient = logits.clone()
    _, [backward] = run_and_get_code(compiled(_fill_slopes), gradient, log_norm, per_row, 1.0)
    torch.testing.assert_close(gradient, (-exact.exp() * per_row[:, None]).bfloat16(), atol=1e-6, rtol=1e-2)
    for code, num_rows in ((forward, 4), (backward, 0)):  # buffers of one number for each row
        assert code.count("async_compile.cpp_pybinding(") == 1
        assert code.count("= empty_strided_cpu((") == num_rows


@pytest.mark.parametrize(("dtype", "num_kept"), [(torch.float32, 4), (torch.bfloat16, 8)])
def test_logits_of_one_chunk_in_float32_are_kept_for_the_backward_and_no_more(
    dtype: torch.dtype, num_kept: int
) -> None:
    hidden, weight = torch.randn(17, 8, dtype=dtype).requires_grad_(), torch.randn(23, 8, dtype=dtype)
    rows = torch.arange(17)

    log_probs, *_ = token_log_probs(
        hidden, weight, targets_of(rows, rows, 17), HeadOptions(temperature=1.0, chunk_rows=4)
    )

    _, _, _, _, *kept = log_probs.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert sum(logits.shape[0] for logits in kept) == num_kept


def test_a_gpu_adds_the_product_of_each_chunk_to_the_gradient_of_the_head_in_one_kernel() -> None:
    """torch's meta device has the operators of a GPU, without numbers."""
    counts = {}
    assert _adds_products(torch.device("meta"))
    assert not _adds_products(torch.device("cpu"))
    for device in ("meta", "cpu"):
        hidden, weight = (torch.ones(n, 8, dtype=torch.bfloat16, device=device).requires_grad_() for n in (17, 23))
        rows = torch.arange(17)
        targets = replace(targets_of(rows, rows, 17), rows=rows.to(device), token_ids=rows.to(device))
        log_probs, *_ = token_log_probs(hidden, weight, targets, HeadOptions(temperature=1.0, chunk_rows=4))
        with counted_operators() as counts[device]:
            log_probs.sum().backward()
        assert weight.grad is not None
        assert weight.grad.dtype == torch.bfloat16
    # Five chunks of at most four positions.
    assert (counts["meta"]["aten::mm.dtype"], counts["meta"]["aten::addmm.dtype_out"]) == (1, 4)
    assert counts["cpu"]["aten::mm.dtype"] == counts["cpu"]["aten::addmm.dtype_out"] == 0
    assert counts["cpu"]["aten::mm"] - counts["meta"]["aten::mm"] == 5


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    chunk_rows=st.sampled_from([1, 4, 64]),
    temperature=st.sampled_from([0.6, 1.0]),
    softcap=st.none() | st.just(20.0),
    direction=st.sampled_from(["reverse", "forward"]),
)
def test_the_kl_to_a_teacher_and_its_gradient_are_those_of_whole_logits(
    seed: int, chunk_rows: int, temperature: float, softcap: float | None, direction: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(9, 8, generator=generator).requires_grad_()
    weight = torch.randn(23, 8, generator=generator).requires_grad_()
    theirs, their_weight = torch.randn(9, 5, generator=generator), torch.randn(23, 5, generator=generator)
    section = DistillationSection.model_validate({"teacher": "t", "kl": direction, "kl_over": "vocabulary"})
    options = HeadOptions(temperature=temperature, chunk_rows=chunk_rows, softcap=softcap, softmax_rows=2)
    teacher = TeacherHead(
        hidden=theirs,
        weight=their_weight,
        options=HeadOptions(temperature=temperature, chunk_rows=chunk_rows),
        section=section,
    )
    targets = targets_of(torch.arange(9), torch.zeros(9, dtype=torch.long), 9)
    found = token_log_probs(hidden, weight, targets, options, teacher)[3]

    logits = (hidden @ weight.t()).double()
    p = ((logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature).softmax(-1)
    q = (theirs @ their_weight.t() / temperature).double().softmax(-1)
    above, below = (p, q) if direction == "reverse" else (q, p)
    expected = (above * (above / below).log()).sum(-1).float()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    slopes = torch.randn(9, generator=generator)
    gradients = (torch.autograd.grad((kl * slopes).sum(), (hidden, weight)) for kl in (found, expected))
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-3)


def test_an_improbable_token_has_a_finite_log_prob() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [500.0]])
    targets = targets_of(torch.tensor([0]), torch.tensor([0]), 1)
    log_probs, entropy, *_ = token_log_probs(hidden, weight, targets, HeadOptions(temperature=1.0, chunk_rows=16))
    # exp(-500) underflows in float32; the log-prob must not
    assert float(log_probs[0]) == pytest.approx(-500.0)
    assert float(entropy[0]) == pytest.approx(0.0, abs=1e-6)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4)
    targets = targets_of(torch.tensor([0, 2]), torch.tensor([1, 8]), 3)
    token_log_probs(hidden, weight, targets, HeadOptions(temperature=1.0, chunk_rows=2))[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


BANDS = (0.0, 0.5, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)


@pytest.mark.parametrize(
    "more", ["log_probs alone", "compiled", "entropy bonus", "reverse KL", "forward KL", "soft cap"]
)
def test_in_bfloat16_slopes_of_confident_tokens_follow_a_float32_softmax(more: str) -> None:
    """Near 1 bfloat16 has steps of 1/256: probabilities that were rounded to it leave nothing of 1 - p."""
    hidden, weight, token_ids = confident(4096)
    cap = 30.0 if more == "soft cap" else None
    teacher = None
    if more.endswith("KL"):
        section = DistillationSection.model_validate(
            {"teacher": "t", "kl": more.split(maxsplit=1)[0], "kl_over": "vocabulary"}
        )
        own = HeadOptions(temperature=1.0, chunk_rows=512)
        teacher = TeacherHead(hidden=hidden[:, :32], weight=weight[:, :32], options=own, section=section)

    def slopes(head: str, dtype: torch.dtype) -> torch.Tensor:
        inputs, head_weight = hidden.to(dtype).requires_grad_(), weight.to(dtype)
        rows = torch.arange(len(token_ids))
        if head == "ours":
            options = HeadOptions(
                temperature=1.0,
                chunk_rows=512,
                softcap=cap,
                entropy_needs_grad=more == "entropy bonus",
                is_compiled=more == "compiled",
            )
            targets = targets_of(rows, token_ids, len(rows))
            log_probs, entropy, _, kl = token_log_probs(inputs, head_weight, targets, options, teacher)
        else:
            logits = (inputs @ head_weight.t()).float()
            whole = (logits if cap is None else cap * torch.tanh(logits / cap)).log_softmax(-1)
            log_probs, entropy = whole[rows, token_ids], -(whole.exp() * whole).sum(-1)
            theirs = whole if teacher is None else teacher.log_probs(0, len(rows))
            above, below = (theirs, whole) if more == "forward KL" else (whole, theirs)
            kl = (above.exp() * (above - below)).sum(-1)
        loss = log_probs.sum()
        if more == "entropy bonus":
            loss = loss + 0.5 * entropy.sum()
        if teacher is not None:
            loss = loss + 0.5 * kl.sum()
        return torch.autograd.grad(loss, inputs)[0].float()

    with torch.compiler.set_stance("force_eager"):
        exact = slopes("plain", torch.float32)
        ours, plain = (
            (slopes(head, torch.bfloat16) - exact).norm(dim=-1) / exact.norm(dim=-1) for head in ("ours", "plain")
        )
    p = (hidden.float() @ weight.float().t()).softmax(-1)[torch.arange(len(token_ids)), token_ids]
    for low, high in itertools.pairwise(BANDS):
        band = (p >= low) & (p < high)
        assert int(band.sum()) > 50
        assert float(ours[band].median()) < 1.05 * float(plain[band].median()) + 1e-4, (low, high)


def confident(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (R, 64) and a head of 2000 tokens in bfloat16, and tokens (R,) of all probabilities up to 1."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2000, 64, generator=generator)
    token_ids = torch.randint(0, 2000, (num_rows,), generator=generator)
    towards = weight[token_ids] / weight[token_ids].norm(dim=1, keepdim=True)
    noise = 0.15 * torch.randn(num_rows, 64, generator=generator)
    hidden = 8 * torch.linspace(0.02, 0.42, num_rows)[:, None] * towards + noise
    return hidden.bfloat16(), weight.bfloat16(), token_ids

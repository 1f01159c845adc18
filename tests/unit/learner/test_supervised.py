"""Supervised steps: the loss and the gradient are transformers' own, packing mixes nothing, and steps learn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayapp.core.errors import LearnerError
from rayapp.core.types import Trajectory
from rayapp.learner.step import PolicyLearner
from rayapp.learner.supervised import supervised_loss, supervised_step
from support import make
from support.learners import learner_alone, whole_weights


@contextmanager
def learner_of(model: Path, **learner: Any) -> Iterator[PolicyLearner]:
    own = {"max_tokens_per_microbatch": 64, "optimizer": {"lr": 1e-2}} | learner
    lengths = {"max_prompt_tokens": 32, "max_completion_tokens": 32}
    config = make.config(model, rollout=lengths, train={"num_steps": 8}, learner=own)
    with learner_alone(config) as (alone, _):
        yield alone


def conversations(number: int = 5) -> list[Trajectory]:
    """Rows of several lengths; the last has two turns with something that is only read between them."""
    rng = np.random.default_rng(0)
    rows = [make.trajectory(rng.integers(2, 90, 6 + 4 * i), 3 + i) for i in range(number)]
    mask = rows[-1].response_mask.copy()
    mask[12:15] = False
    return [*rows[:-1], replace(rows[-1], response_mask=mask)]


def padded(model: Path, rows: list[Trajectory]) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of transformers' own model on the padded batch."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    width = max(row.num_tokens for row in rows)
    tokens, labels = (torch.full((len(rows), width), fill) for fill in (0, -100))
    for i, row in enumerate(rows):
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        tokens[i, : ids.numel()] = ids
        labels[i, : ids.numel()] = torch.where(torch.from_numpy(row.response_mask), ids, -100)
    loss = reference(input_ids=tokens, attention_mask=(tokens != 0).long(), labels=labels).loss
    loss.backward()
    return float(loss), {f"causal_lm.{name}": p.grad.numpy() for name, p in reference.named_parameters()}


def test_a_step_is_that_of_adamw_on_the_loss_of_transformers_on_the_padded_batch(tiny_model: Path) -> None:
    rows = conversations()
    expected, gradients = padded(tiny_model, rows)
    norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
    with learner_of(tiny_model) as learner:
        before, loss = whole_weights(learner), supervised_loss(learner, rows)
        metrics = supervised_step(learner, 1, rows)
        moved = {name: after - before[name] for name, after in whole_weights(learner).items()}
    assert metrics["sft/loss"] == pytest.approx(expected, abs=2e-6)
    assert loss == pytest.approx(expected, abs=2e-6)
    assert metrics["sft/num_tokens"] == sum(row.num_response_tokens for row in rows)
    assert metrics["learner/grad_norm"] == pytest.approx(norm, rel=1e-5)
    # AdamW's first step moves each weight by lr against the sign of its gradient.
    for name, gradient in gradients.items():
        clear = np.abs(gradient) > 1e-4
        assert np.allclose(moved[name][clear], -1e-2 * np.sign(gradient[clear]), rtol=2e-3), name


def test_adapters_alone_learn_where_there_are_adapters(tiny_model: Path) -> None:
    with learner_of(tiny_model, lora={"rank": 4}) as learner:
        before = whole_weights(learner)
        supervised_step(learner, 1, conversations())
        moved = {name for name, after in whole_weights(learner).items() if not np.array_equal(after, before[name])}
    assert moved
    assert all("lora" in name for name in moved)


def test_a_row_that_no_micro_batch_holds_is_refused(tiny_model: Path) -> None:
    with learner_of(tiny_model) as learner, pytest.raises(LearnerError, match=r"70 tokens.*max_tokens_per_microbatch"):
        supervised_step(learner, 1, [make.trajectory(np.arange(2, 73), 3)])


def test_a_loss_that_is_no_number_moves_nothing_and_is_counted(tiny_model: Path) -> None:
    with learner_of(tiny_model) as learner:
        with torch.no_grad():
            next(learner.model.parameters()).fill_(float("nan"))
        metrics = supervised_step(learner, 1, conversations())
    assert metrics["learner/skipped_steps_total"] == 1

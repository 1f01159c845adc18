"""Two FSDP ranks over gloo with different numbers of pictures: the gradient is that of plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.family_trial import MAX_GRADIENT_ERROR, MAX_LOG_PROB_ERROR, save_tiny
from support.picture_trial import architecture_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

RANK = '''
"""One rank. Rank 0 prints a line for a frozen tower and for a trained one."""
import json, sys
from transformers import AutoModelForImageTextToText

from rayapp.config.config import with_values
from rayapp.learner.build import build_learner
from rayapp.learner.distributed import start_ranks
from rayapp.learner.families.pictures import PictureReader
from support import family_trial as trial
from support.picture_trial import groups_of, plain_inputs, process

rank, port, family, model, parts = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], int(sys.argv[5])
config = trial.trial_config(model, num_learners=2, sequence_parallel=parts)
config = with_values(config, rollout={"max_prompt_tokens": 64})
ranks = start_ranks(config, rank, 2, "127.0.0.1", port)
groups = groups_of(family)
for is_frozen in (True, False):
    learner = build_learner(with_values(config, model={"freeze_vision": is_frozen}), ranks)
    learner.pictures = PictureReader(learner.model.causal_lm, process)
    found = trial.learner_scores(learner, groups)
    if rank == 0:
        plain = AutoModelForImageTextToText.from_pretrained(model, dtype="float32", attn_implementation="eager")
        expected = trial.plain_scores(plain, groups, **plain_inputs(family, groups))
        kept = {name: g for name, g in expected.gradients.items() if not is_frozen or "visual" not in name}
        gradients = trial.Scores(log_probs=[], gradients=kept)
        errors = trial.log_prob_error(found, expected), trial.gradient_error(found, gradients)
        print("RESULT", json.dumps(errors), flush=True)
'''


@pytest.mark.parametrize("parts", [1, 2])
def test_two_ranks_have_the_gradient_of_the_padded_forward(
    run_two_ranks: Callable[..., list[Any]], tmp_path: Path, parts: int
) -> None:
    save_tiny(architecture_of("qwen3_vl"), tmp_path)

    results = run_two_ranks(RANK, "qwen3_vl", tmp_path, parts, timeout_s=500)

    assert len(results) == 2
    for log_prob_error, gradient_error in results:
        assert log_prob_error < MAX_LOG_PROB_ERROR
        assert gradient_error < MAX_GRADIENT_ERROR

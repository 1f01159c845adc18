"""Two FSDP ranks over gloo, one family of models after the other: the gradient is that of plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.family_trial import MAX_GRADIENT_ERROR, MAX_LOG_PROB_ERROR

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]

FAMILIES = (
    "qwen3_moe", "mixtral", "qwen3_5_moe_text", "qwen3_next", "gpt_oss", "deepseek_v3", "glm4_moe", "gemma2", "phi3",
    "lfm2_moe", "granitemoehybrid",
)  # fmt: skip
"""One or two of everything that a family can need."""

RANK = '''
"""One rank. Rank 0 prints a line for each family and for what is trained: weights, or adapters."""
import json, sys
from pathlib import Path

from rayapp.learner.build import build_learner
from rayapp.learner.distributed import start_ranks
from support import family_trial as trial
from support.family_check import plain_model, subject_of

rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
ranks = None
for name in sys.argv[4:]:
    model = folder / name
    if rank == 0:
        trial.save_tiny(subject_of(name).architecture, model)
    if ranks is None:
        ranks = start_ranks(trial.trial_config(model, num_learners=2), rank, 2, "127.0.0.1", port)
    ranks.gather("the model is written")
    groups = trial.trial_groups(61)
    for what, changes in (("weights", {}), ("adapters", {"lora": {"rank": 4}})):
        config = trial.trial_config(model, num_learners=2, **changes)
        learner = build_learner(config, ranks)
        found = trial.learner_scores(learner, groups)
        if rank == 0 and not changes:
            plain = trial.plain_scores(plain_model(model, config.max_model_tokens), groups)
        # Collective: it gathers the adapters.
        expected = trial.adapter_gradients(learner, plain if rank == 0 else None) if changes else None
        if rank == 0:
            expected = expected if changes else plain
            print("RESULT", json.dumps([name, what, trial.log_prob_error(found, plain),
                                        trial.gradient_error(found, expected)]), flush=True)
'''


def test_two_ranks_have_the_gradient_of_plain_attention(
    run_two_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    found = run_two_ranks(RANK, tmp_path, *FAMILIES, timeout_s=1500)

    assert len(found) == 2 * len(FAMILIES)
    wrong = [row for row in found if row[2] > MAX_LOG_PROB_ERROR or row[3] > MAX_GRADIENT_ERROR]
    assert wrong == []

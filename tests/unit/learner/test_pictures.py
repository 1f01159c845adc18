"""On pictures, log-probs and gradient equal those of transformers' own padded forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from rayapp.config.config import Config, with_values
from rayapp.core.errors import LearnerError
from rayapp.core.types import Group
from rayapp.learner.families.pictures import PictureReader, split_items
from rayapp.learner.step import PolicyLearner
from support import family_trial as trial
from support.picture_trial import (
    CONFIGS,
    PLACEHOLDER,
    Writer,
    architecture_of,
    group_of,
    items_of,
    plain_inputs,
    process,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for family in CONFIGS:
        trial.save_tiny(architecture_of(family), folder / family)
    return {family: folder / family for family in CONFIGS}


def words(seed: int, size: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, PLACEHOLDER, size)]


def text_alone(writer: Writer, index: int) -> None:
    writer.text(words(1, 7)).text(words(10 + index, 4 + index), is_response=True)


def picture_in_the_middle(writer: Writer, index: int) -> None:
    writer.text(words(2, 3)).picture(2, 3, seed=1).text(words(3, 2))
    writer.text(words(20 + index // 2, 3), is_response=True).text(words(30 + index, 3), is_response=True)


def several_pictures(writer: Writer, index: int) -> None:
    """The first picture twice; between the turns another one, as from a tool."""
    writer.text(words(4, 2)).picture(2, 3, seed=1).picture(1, 2, seed=2).text(words(5, 1)).picture(2, 3, seed=1)
    writer.text(words(40, 4), is_response=True).picture(3, 1, seed=3 + index % 2).text(words(6, 2))
    writer.text(words(50 + index, 3), is_response=True)


def pictures_of_one_size(writer: Writer, index: int) -> None:
    """All trajectories have the same ids before their answers, but two of them show another picture."""
    writer.text(words(7, 6)).picture(3, 2, seed=10 + index % 2).text(words(8, 4))
    writer.text(words(60 + index, 5), is_response=True)


def groups_of(family: str) -> list[Group]:
    written = (text_alone, picture_in_the_middle, several_pictures, pictures_of_one_size)
    return [group_of(number, family, write) for number, write in enumerate(written)]


@contextmanager
def learner_of(folder: Path, *, freeze_vision: bool = True, **learner: Any) -> Iterator[PolicyLearner]:
    config: Config = trial.trial_config(folder, **learner)
    config = with_values(config, model={"freeze_vision": freeze_vision}, rollout={"max_prompt_tokens": 64})
    with trial.learner_of(config) as made:
        made.pictures = PictureReader(made.model.causal_lm, process)
        yield made


@pytest.mark.parametrize(
    ("freeze_vision", "share_prefixes", "recomputed"), [(True, True, False), (False, True, True), (True, False, False)]
)
@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_and_gradient_are_those_of_the_padded_forward(
    models: dict[str, Path], family: str, freeze_vision: bool, share_prefixes: bool, recomputed: bool
) -> None:
    groups = groups_of(family)
    plain: Any = AutoModelForImageTextToText.from_pretrained(
        models[family], dtype="float32", attn_implementation="eager"
    )
    expected = trial.plain_scores(plain, groups, **plain_inputs(family, groups))
    options = {"share_prefixes": share_prefixes, "activation_checkpointing": recomputed}
    with learner_of(models[family], freeze_vision=freeze_vision, **options) as learner:
        found = trial.learner_scores(learner, groups)

    assert trial.log_prob_error(found, expected) < trial.MAX_LOG_PROB_ERROR
    in_tower = {name for name in expected.gradients if "visual" in name or "vision" in name or "connector" in name}
    trained = expected.gradients.keys() - (in_tower if freeze_vision else set())
    assert found.gradients.keys() >= trained
    assert not (freeze_vision and found.gradients.keys() & in_tower)
    kept = trial.Scores(log_probs=[], gradients={name: expected.gradients[name] for name in trained})
    assert trial.gradient_error(found, kept) < trial.MAX_GRADIENT_ERROR


@pytest.mark.parametrize("family", CONFIGS)
def test_a_shared_prefix_ends_where_the_pictures_differ(models: dict[str, Path], family: str) -> None:
    group = group_of(0, family, pictures_of_one_size)
    first, second = group.trajectories[0], group.trajectories[1]
    assert np.array_equal(first.token_ids[:10], second.token_ids[:10])
    with learner_of(models[family]) as learner, learner.reading(group.pictures):
        [batch] = learner.micro_batches(items_of(group))

    placeholders = np.count_nonzero(first.token_ids == PLACEHOLDER)
    assert np.count_nonzero(batch.packing.token_ids == PLACEHOLDER) == 2 * placeholders
    shared = batch.packing.segments[0]
    assert (shared.start, shared.end) == (0, 7)  # six words, and the token before the first placeholder


def test_a_frozen_tower_reads_each_picture_once_a_step(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, calls = groups_of("qwen2_5_vl"), []
    with learner_of(models["qwen2_5_vl"], max_tokens_per_microbatch=80) as learner:
        read = learner.model.causal_lm.get_image_features
        counted = lambda **inputs: calls.append(inputs) or read(**inputs)  # noqa: E731
        monkeypatch.setattr(learner.model.causal_lm, "get_image_features", counted)
        trial.take_step(learner, groups)

    assert len(calls) == len({sha256 for group in groups for sha256 in group.pictures})


def test_pictures_for_a_model_of_text_are_refused(models: dict[str, Path]) -> None:
    group = group_of(0, "qwen2_5_vl", picture_in_the_middle)
    with pytest.raises(LearnerError, match="not a model that can be trained on pictures"):
        split_items(None, items_of(group), max_tokens=128, share_prefixes=True)

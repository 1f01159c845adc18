"""On pictures, log-probs and gradient equal those of transformers' own padded forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from rayapp.config.config import Config, with_values
from rayapp.config.learner import LoraSection
from rayapp.core.errors import InputError, LearnerError
from rayapp.core.types import Fork, Group, Prompt
from rayapp.learner.families.pictures import PictureReader, split_items
from rayapp.learner.family import check_family
from rayapp.learner.memory.plan import plan_learner
from rayapp.learner.memory.shape import GPUS, model_shape
from rayapp.learner.memory.speed import step_load, train
from rayapp.learner.metrics import MfuMeter
from rayapp.learner.state.checkpoint import begin_save, load_learner
from rayapp.learner.state.export import export_hf, sent_weights, weight_shapes
from rayapp.learner.state.hf_folder import checkpoint_to_hf
from rayapp.learner.step import PolicyLearner
from rayapp.learner.supervised import log_probs_of, supervised_loss
from rayapp.storage.models.families import refuse_pictures
from support import family_trial as trial
from support.picture_trial import (
    CONFIGS,
    PLACEHOLDER,
    Writer,
    architecture_of,
    group_of,
    groups_of,
    items_of,
    picture_in_the_middle,
    pictures_of_one_size,
    plain_inputs,
    process,
    words,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for family in CONFIGS:
        trial.save_tiny(architecture_of(family), folder / family)
    return {family: folder / family for family in CONFIGS}


@contextmanager
def learner_of(
    folder: Path, *, freeze_vision: bool = True, algorithm: Mapping[str, Any] = trial.NOTHING, **learner: Any
) -> Iterator[PolicyLearner]:
    changes = {"model": {"freeze_vision": freeze_vision}, "rollout": {"max_prompt_tokens": 64}}
    config = with_values(trial.trial_config(folder, **learner), algorithm=algorithm, **changes)
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


def test_policy_and_reference_read_each_picture_once_a_step_with_one_frozen_tower(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, calls = groups_of("qwen2_5_vl"), []
    with learner_of(models["qwen2_5_vl"], algorithm={"kl_loss_coef": 0.1}, max_tokens_per_microbatch=80) as learner:
        causal_lm: Any = learner.model.causal_lm
        read = type(causal_lm).get_image_features
        counted = lambda model, **inputs: calls.append(inputs) or read(model, **inputs)  # noqa: E731
        monkeypatch.setattr(type(causal_lm), "get_image_features", counted)
        trial.take_step(learner, groups)
        towers = [model.causal_lm.model.visual for model in (learner.model, learner.frozen["reference"])]

    assert len(calls) == len({sha256 for group in groups for sha256 in group.pictures})
    assert towers[0].patch_embed.proj.weight.data_ptr() == towers[1].patch_embed.proj.weight.data_ptr()


def test_pictures_for_a_model_of_text_are_refused(models: dict[str, Path]) -> None:
    group = group_of(0, "qwen2_5_vl", picture_in_the_middle)
    with pytest.raises(LearnerError, match="not a model that can be trained on pictures"):
        split_items(None, items_of(group), max_tokens=128, share_prefixes=True)


def inside_tower(name: str) -> bool:
    return any(part in name for part in ("visual", "vision_model", "connector"))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_frozen_tower_is_in_the_final_model_but_not_sent(
    models: dict[str, Path], family: str, tmp_path: Path
) -> None:
    with learner_of(models[family]) as learner:
        sent = [name for name, _ in sent_weights(learner.model, LoraSection(), [torch.float32])]
        announced = [name for name, _ in weight_shapes(learner.model)]
        export_hf(learner.config, learner.model, tmp_path / "final", learner.ranks)

    first, final = (load_file(folder / "model.safetensors") for folder in (models[family], tmp_path / "final"))
    assert first.keys() == final.keys()
    assert all(torch.equal(first[name].float(), final[name].float()) for name in first)
    assert sent == announced
    assert set(sent) == {name for name in first if not inside_tower(name)}


def test_a_trained_tower_is_sent(models: dict[str, Path]) -> None:
    with learner_of(models["qwen2_5_vl"], freeze_vision=False) as learner:
        sent = {name for name, _ in sent_weights(learner.model, LoraSection(), [torch.float32])}
    assert sent == load_file(models["qwen2_5_vl"] / "model.safetensors").keys()


def test_a_checkpoint_leaves_out_a_frozen_tower_and_becomes_the_same_folder(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with learner_of(models["qwen3_vl"], optimizer={"lr": 1e-2}) as learner:
        trial.take_step(learner, groups_of("qwen3_vl"))
        begin_save(learner, str(tmp_path / "learner"), 1).wait()
        export_hf(learner.config, learner.model, tmp_path / "final", learner.ranks)
        checkpoint_to_hf(learner.config, tmp_path / "learner", tmp_path / "converted")
        stored = FileSystemReader(tmp_path / "learner").read_metadata().state_dict_metadata
        assert load_learner(learner, str(tmp_path / "learner")) == 1

    assert not any(inside_tower(name) for name in stored)
    final, converted = (load_file(tmp_path / name / "model.safetensors") for name in ("final", "converted"))
    assert final.keys() == converted.keys()
    assert all(torch.equal(final[name], converted[name].to(final[name].dtype)) for name in final)


def test_the_plan_counts_the_tower_and_the_features_of_pictures(models: dict[str, Path]) -> None:
    with learner_of(models["qwen3_vl"]) as learner:
        config, causal_lm = learner.config, learner.model.causal_lm
        in_tower = sum(p.numel() for name, p in causal_lm.named_parameters() if inside_tower(name))
        total = sum(p.numel() for p in causal_lm.parameters())
    frozen, trained = (model_shape(with_values(config, model={"freeze_vision": value})) for value in (True, False))
    assert (frozen.num_parameters, frozen.num_frozen_in_tower) == (total - in_tower, in_tower)
    assert (trained.num_parameters, trained.num_frozen_in_tower) == (total, 0)
    planned = plan_learner(frozen, config).frozen
    assert planned["vision tower"] == 4 * in_tower
    assert planned["features of pictures"] == 4 * 3 * 64 * 64 * 3  # three groups of 64 tokens, a vector and two deeper


def test_a_family_whose_pictures_cannot_be_trained_is_refused_by_name(models: dict[str, Path]) -> None:
    other = CONFIG_MAPPING["qwen2_vl"](text_config={"hidden_size": 32, "num_attention_heads": 2})
    config = trial.trial_config(models["qwen3_vl"])
    with pytest.raises(InputError, match="model_type 'qwen2_vl' can't be trained"):
        check_family(other, config.model, config.learner, config.max_model_tokens)
    assert "a qwen2_vl can't be trained on pictures" in refuse_pictures({"model_type": "qwen2_vl"})


@pytest.mark.parametrize("family", CONFIGS)
def test_branches_of_a_trajectory_show_their_own_pictures(models: dict[str, Path], family: str) -> None:
    """An agent replaces the second picture by another of its size: the branches share the first one."""
    pictures: dict[str, bytes] = {}
    whole = Writer(family, pictures).text(words(1, 3)).picture(2, 2, seed=1).text(words(2, 2))
    after = len(whole.ids) - 1
    alone = []
    for seed in (2, 3):
        start = len(whole.ids)
        branch = Writer(family, pictures, [*whole.ids[: after + 1]], [*whole.mask[: after + 1]], [*whole.media[:1]])
        for writer in (whole, branch):
            writer.picture(3, 1, seed=seed).text(words(3, 2)).text(words(4 + seed, 4), is_response=True)
        alone.append(branch.trajectory(0.0))
    forked = replace(whole.trajectory(0.0), forks=(Fork(start=start, after=after),))
    prompt = Prompt(task="t", text="", token_ids=forked.token_ids[: after + 1])
    as_tree, apart = (
        Group(group_id=0, prompt=prompt, trajectories=rows, pictures=pictures) for rows in ((forked,), tuple(alone))
    )
    with learner_of(models[family], share_prefixes=True) as learner:
        [found] = log_probs_of(learner, as_tree)
    with learner_of(models[family], share_prefixes=False) as learner:
        expected = log_probs_of(learner, apart)

    assert np.abs(found - np.concatenate(expected)).max() < trial.MAX_LOG_PROB_ERROR
    assert np.abs(expected[0] - expected[1]).max() > 1e-2


def test_adapters_have_the_gradient_of_the_padded_forward(models: dict[str, Path]) -> None:
    groups = groups_of("qwen2_5_vl")
    plain: Any = AutoModelForImageTextToText.from_pretrained(models["qwen2_5_vl"], dtype="float32")
    with learner_of(models["qwen2_5_vl"], lora={"rank": 4}) as learner:
        found = trial.learner_scores(learner, groups)
        scores = trial.plain_scores(plain, groups, **plain_inputs("qwen2_5_vl", groups))
        expected = trial.adapter_gradients(learner, scores)
    assert expected is not None
    assert trial.gradient_error(found, expected) < 2 * trial.MAX_GRADIENT_ERROR


def test_adapters_with_a_trained_tower_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.freeze_vision is false"):
        Config.model_validate({"model": {"freeze_vision": False}, "learner": {"lora": {"rank": 4}}})


@pytest.mark.parametrize("freeze_vision", [True, False])
def test_the_mfu_and_the_plan_count_the_towers_products(models: dict[str, Path], *, freeze_vision: bool) -> None:
    groups, flops = groups_of("qwen3_vl"), list[float]()
    with learner_of(models["qwen3_vl"], freeze_vision=freeze_vision, max_tokens_per_microbatch=4096) as learner:
        shape, config = model_shape(learner.config), learner.config
        in_tower = sum(p.numel() for name, p in learner.model.causal_lm.named_parameters() if inside_tower(name))
        for own in (shape, replace(shape, tower_flops=0)):
            learner.mfu = MfuMeter(shape=own, gpu=replace(GPUS["h100"], tflops=0.5), num_gpus=1)
            metrics = trial.take_step(learner, groups)
            flops.append(metrics["perf/tflops_per_gpu"] * metrics["timing_s/learner/forward_backward"] * 1e12)

    shown = {p.sha256: t.token_ids[p.start : p.end] for g in groups for t in g.trajectories for p in t.media}
    num_tokens = sum(int((ids == PLACEHOLDER).sum()) for ids in shown.values())
    passes, patches = 1 if freeze_vision else 3, 4
    assert shape.tower_flops == passes * 2 * in_tower * patches
    assert flops[0] - flops[1] == pytest.approx(shape.tower_flops * num_tokens, rel=1e-3)
    load, blind = step_load(config), replace(shape, tower_flops=0)
    planned = [train(own, config.learner, load, GPUS["h100"], is_compiled=False) for own in (shape, blind)]
    assert planned[0].flops - planned[1].flops == shape.tower_flops * load.prompts * load.prompt_tokens
    assert planned[0].seconds > planned[1].seconds


def test_a_supervised_loss_reads_the_rows_pictures(models: dict[str, Path]) -> None:
    group = group_of(1, "qwen3_vl", picture_in_the_middle)
    with learner_of(models["qwen3_vl"]) as learner:
        expected = -np.concatenate(log_probs_of(learner, group)).mean()
        found = supervised_loss(learner, group.trajectories, group.pictures)
        with pytest.raises(LearnerError, match="is not in its group"):
            supervised_loss(learner, group.trajectories)
    assert found == pytest.approx(expected, abs=1e-5)

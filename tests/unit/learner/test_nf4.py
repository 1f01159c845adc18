"""Adapters on weights in 4 bits: the learner computes what a dense model of the rounded weights computes."""

from __future__ import annotations

import builtins
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

from rayapp.cli import doctor
from rayapp.config.config import Config
from rayapp.config.sections import CheckpointSection
from rayapp.core.errors import InputError
from rayapp.learner.device import compiled
from rayapp.learner.memory.shape import model_shape
from rayapp.learner.policy import load_policy
from rayapp.learner.state.checkpoint import _state
from rayapp.learner.state.export import export_hf, sent_weights, weight_shapes
from rayapp.learner.state.hf_folder import checkpoint_to_hf
from rayapp.learner.state.packed import PackedLinear
from rayapp.learner.supervised import log_probs_of
from rayapp.storage.models.adapters import EXPORTED
from rayapp.storage.models.nf4 import BYTES_PER_VALUE, is_packed, pack, shape_of, unpack
from support import family_trial as trial
from support.family_check import VOCABULARY, plain_model, subject_of
from support.learners import take_step

LORA = {"rank": 4, "alpha": 16}


def packed_config(folder: Path, **learner: Any) -> Config:
    config = trial.trial_config(folder, **{"lora": LORA, **learner})
    return config.model_copy(update={"model": config.model.model_copy(update={"quantization": "nf4"})})


def test_rounding_is_that_of_the_paper_row_by_row() -> None:
    from bitsandbytes import functional

    weight = torch.randn(6, 192, generator=torch.Generator().manual_seed(0))
    levels = functional.get_4bit_type("nf4", device="cpu")
    blocks = weight.view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = ((blocks / scales)[..., None] - levels).abs().argmin(-1)

    assert torch.equal(unpack(pack(weight), torch.float32), (levels[nearest] * scales).view(6, 192))
    assert pack(weight).numel() == BYTES_PER_VALUE * weight.numel()
    assert torch.equal(pack(weight)[2:5], pack(weight[2:5]))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])
def test_log_probs_and_gradients_are_those_of_a_dense_model_of_the_rounded_weights(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    trial.save_tiny(subject_of(name).architecture, model)
    config, groups = packed_config(model), trial.trial_groups(VOCABULARY)
    dense = trial.rounded_copy(model, tmp_path / "dense")
    expected = trial.plain_scores(plain_model(dense, config.max_model_tokens), groups)

    with trial.learner_of(config) as learner:
        linears = [m for m in learner.model.modules() if isinstance(m, PackedLinear)]
        assert len(linears) == 7 * 2
        found = trial.learner_scores(learner, groups)
        adapters = trial.adapter_gradients(learner, expected)
        sent = dict(
            sent_weights(learner.model, config.learner.lora.model_copy(update={"send": "merged"}), [torch.float32])
        )
        assert weight_shapes(learner.model) == [(n, t.shape) for n, t in sent.items()]
        export_hf(config, learner.model, tmp_path / "final", learner.ranks)

    assert adapters is not None
    assert trial.log_prob_error(found, expected) < trial.MAX_LOG_PROB_ERROR
    assert trial.gradient_error(found, adapters) < trial.MAX_GRADIENT_ERROR
    # B is 0, so that what is sent and written are the rounded weights.
    weights = load_file(dense / "model.safetensors")
    assert all(torch.equal(tensor, weights[n]) for n, tensor in sent.items())
    final = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(tensor, weights[n].bfloat16()) for n, tensor in final.items())


def test_a_checkpoint_is_exported_as_the_learners_hold_it(tmp_path: Path) -> None:
    trial.save_tiny(subject_of("llama").architecture, tmp_path / "model")
    in_float32 = CheckpointSection(final_dtype="float32")
    config = packed_config(tmp_path / "model", compute_dtype="bfloat16").model_copy(update={"checkpoint": in_float32})
    with trial.learner_of(config) as learner:
        save(_state(learner), checkpoint_id=tmp_path / "learner", no_dist=True)
        export_hf(config, learner.model, tmp_path / "exported", learner.ranks)

    checkpoint_to_hf(config, tmp_path / "learner", tmp_path / "made")

    made, exported = (load_file(tmp_path / folder / "model.safetensors") for folder in ("made", "exported"))
    assert made.keys() == exported.keys()
    assert [name for name, tensor in exported.items() if not torch.equal(tensor, made[name])] == []


def train_and_export(config: Config, final: Path) -> tuple[trial.Scores, trial.Scores]:
    """Return the learner's log-probs before and after a step."""
    groups = trial.trial_groups(VOCABULARY)
    with trial.learner_of(config) as learner:
        before = trial.learner_scores(learner, groups)
    with trial.learner_of(config) as learner:
        take_step(learner, groups)
        trained = [row for group in groups for row in log_probs_of(learner, group)]
        export_hf(config, learner.model, final, learner.ranks)
    return before, trial.Scores(log_probs=trained, gradients={})


def test_the_final_folder_gives_the_learners_log_probs_in_peft_on_4_bits_and_in_transformers(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    trial.save_tiny(subject_of("llama").architecture, tmp_path / "model")
    in_float32 = CheckpointSection(final_dtype="float32")
    config = packed_config(tmp_path / "model", optimizer={"lr": 3e-2}).model_copy(update={"checkpoint": in_float32})
    groups, final = trial.trial_groups(VOCABULARY), tmp_path / "final"
    before, trained = train_and_export(config, final)

    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base: Any = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, quantization_config=in_4_bits
    )
    # In evaluation bitsandbytes computes on a CPU in bfloat16, whatever is asked for.
    adapted = PeftModel.from_pretrained(base, str(final / "adapter"), is_trainable=True).train()
    for model in (adapted, plain_model(final, config.max_model_tokens)):
        assert trial.log_prob_error(trial.plain_scores(model, groups), trained) < trial.MAX_LOG_PROB_ERROR
    assert trial.log_prob_error(before, trained) > 1000 * trial.MAX_LOG_PROB_ERROR


@pytest.mark.parametrize("final_dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_with_the_adapters_of_the_run_that_made_its_model(final_dtype: Any, tmp_path: Path) -> None:
    trial.save_tiny(subject_of("llama").architecture, tmp_path / "model")
    written = {"checkpoint": CheckpointSection(final_dtype=final_dtype)}
    config = packed_config(tmp_path / "model", optimizer={"lr": 3e-2}).model_copy(update=written)
    groups, final = trial.trial_groups(VOCABULARY), tmp_path / "final"
    before, trained = train_and_export(config, final)
    (final / EXPORTED).touch()

    later = packed_config(final)
    with trial.learner_of(later) as learner:
        found = trial.learner_scores(learner, groups)
        reference = load_policy(later, learner.ranks.mesh, trainable=False, is_checked=False)
        assert not [name for name, parameter in reference.named_parameters() if parameter.requires_grad]
        own = dict(learner.model.named_parameters())
        assert all(torch.equal(tensor, own[name]) for name, tensor in reference.named_parameters())

    limit = trial.MAX_LOG_PROB_ERROR if final_dtype == "float32" else 0.02
    assert trial.log_prob_error(found, trained) < limit
    assert trial.log_prob_error(before, trained) > 5 * limit
    with (
        pytest.raises(InputError, match=r"28 tensors of rank 4, but .* set learner\.lora\.rank"),
        trial.learner_of(packed_config(final, lora={"rank": 8, "alpha": 16})),
    ):
        pass


def test_recomputed_and_compiled_layers_have_the_same_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial.save_tiny(subject_of("qwen2").architecture, tmp_path)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled.cache_clear()
    groups, scores = trial.trial_groups(VOCABULARY), []
    for changes in ({}, {"activation_checkpointing": True}, {"compile": True}):
        with trial.learner_of(packed_config(tmp_path, **changes)) as learner:
            scores.append(trial.learner_scores(learner, groups))
    compiled.cache_clear()

    plain, recomputed, fused = (each.gradients for each in scores)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    for name, gradient in plain.items():  # a compiled head rounds otherwise
        torch.testing.assert_close(fused[name], gradient, atol=1e-4 * float(gradient.abs().max()), rtol=0)


def test_experts_are_refused_by_name_before_a_run_too(tmp_path: Path) -> None:
    trial.save_tiny(subject_of("qwen3_moe").architecture, tmp_path)
    config = packed_config(tmp_path, lora=LORA | {"send": "merged"})
    why = r"MoeForCausalLM has model\.layers\.0\.mlp\.experts\.\w+ .* can't be packed"

    with pytest.raises(InputError, match=why), trial.learner_of(config):
        pass
    with pytest.raises(InputError, match=why):
        model_shape(config)
    with pytest.raises(InputError, match=why):
        doctor._check_model(config, has_weights=False)


def test_without_bitsandbytes_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **others: Any) -> Any:
        if name == "bitsandbytes":
            raise ImportError("No module named 'bitsandbytes'")
        return real(name, *args, **others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'rayapp\[nf4\]'"):
        pack(torch.zeros(1, 64))


def test_only_matrices_of_layers_are_packed() -> None:
    assert is_packed("model.layers.0.self_attn.q_proj.weight", (128, 64))
    assert not is_packed("model.layers.0.self_attn.q_proj.weight", (128, 96))
    assert not is_packed("model.layers.0.self_attn.q_proj.bias", (128,))
    assert not is_packed("model.embed_tokens.weight", (128, 64))
    assert not is_packed("lm_head.weight", (128, 64))
    assert is_packed("model.language_model.layers.0.mlp.up_proj.weight", (128, 64))
    assert not is_packed("model.vision_model.encoder.layers.0.mlp.fc1.weight", (128, 64))
    assert shape_of(pack(torch.ones(3, 128))) == (3, 128)


def test_four_bits_need_adapters() -> None:
    with pytest.raises(ValueError, match=r"learner\.lora\.rank is 0: .* Set learner\.lora\.rank"):
        Config.model_validate({"model": {"quantization": "nf4"}})

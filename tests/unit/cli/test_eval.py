"""`rayapp eval --model CHECKPOINT` evaluates the checkpoint's weights, whatever save_contents was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rayapp.api.running import with_checkpoint_as_model
from rayapp.config.config import Config
from rayapp.config.loading import to_yaml
from rayapp.config.sections import CheckpointSection
from rayapp.core.errors import CheckpointError, InputError
from rayapp.runs.checkpoints import CheckpointFolder


def config_of(model: Path | str) -> Config:
    return Config.model_validate({"model": {"path": str(model)}, "cluster": {"device": "cpu"}})


def loaded(folder: Path) -> Mapping[str, Any]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return dict(model.named_parameters())


def checkpoint(run: Path, base: Path, contents: tuple[str, ...] = ("model", "optimizer"), *, drop: str = "") -> Path:
    """A checkpoint as the learners save it; every weight is the base model's plus one."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    section = CheckpointSection(save_contents=contents)  # type: ignore[arg-type]
    folder = CheckpointFolder(run / "checkpoints", section)
    pending = folder.begin(3)
    state: dict[str, Any] = {"counters": torch.zeros(3)}
    if "model" in contents:
        state |= {f"model.{name}": weight.detach() + 1 for name, weight in loaded(base).items() if name != drop}
    save(state, checkpoint_id=pending / "learner", no_dist=True)
    (run / "config.yaml").write_text(to_yaml(config_of(base)))
    return folder.commit(3, next_group_id=6).path


def test_the_weights_of_a_checkpoint_without_a_model_folder_are_made_one(tmp_path: Path, tiny_model: Path) -> None:
    path = checkpoint(tmp_path, tiny_model)

    with with_checkpoint_as_model(config_of(path)) as config:
        made = Path(config.model.path)
        weights, base = loaded(made), loaded(tiny_model)
        assert (made / "tokenizer.json").is_file()

    assert weights.keys() == base.keys()
    # Exports are in bfloat16: 8 bits of precision, for numbers near 1.
    assert all(abs(weights[name] - base[name] - 1).max() < 0.01 for name in base)
    assert not made.exists()


def with_experts(folder: Path, tiny_model: Path) -> Path:
    """A model with experts that transformers fuses, and a correction bias that is not a parameter."""
    import torch
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 8,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    }  # fmt: skip
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**shape))
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.randn(bias.shape))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    return folder


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("model", ["plain", "experts"])
def test_it_is_the_folder_that_the_learners_would_have_written(
    model: str, lora_rank: int, tmp_path: Path, tiny_model: Path
) -> None:
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict_saver import save

    from rayapp.learner.state.checkpoint import _state
    from rayapp.learner.state.export import export_hf
    from rayapp.learner.state.hf_folder import checkpoint_to_hf
    from support.learners import learner_alone

    base = tiny_model if model == "plain" else with_experts(tmp_path / "base", tiny_model)
    learner = {"cpu_threads": 1, "lora": {"rank": lora_rank, "target_modules": ["q_proj", "o_proj"]}}
    sections = {"learner": learner, "checkpoint": {"final_dtype": "float32"}}
    config = Config.model_validate(config_of(base).model_dump() | sections)
    with learner_alone(config) as (policy, ranks):
        for parameter in policy.model.parameters():
            parameter.data.add_(0.25) if parameter.requires_grad else None
        save(_state(policy), checkpoint_id=tmp_path / "learner", no_dist=True)
        export_hf(config, policy.model, tmp_path / "exported", ranks)

    checkpoint_to_hf(config, tmp_path / "learner", tmp_path / "made")

    found, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("made", "exported"))
    assert found.keys() == expected.keys() == load_file(base / "model.safetensors").keys()
    assert [name for name, tensor in expected.items() if not found[name].equal(tensor)] == []
    made, exported = (
        sorted(file.name for file in (tmp_path / folder).iterdir() if file.is_file()) for folder in ("made", "exported")
    )
    assert made == exported


def test_a_checkpoint_with_a_model_folder_is_evaluated_as_it_is_and_so_is_a_model(
    tmp_path: Path, tiny_model: Path
) -> None:
    path = checkpoint(tmp_path, tiny_model)
    (path / "hf_model").mkdir()
    with with_checkpoint_as_model(config_of(path)) as config:
        assert config.model.path == str(path / "hf_model")
    with with_checkpoint_as_model(config_of(tiny_model)) as config:
        assert config == config_of(tiny_model)


def test_a_checkpoint_that_is_not_whole_or_damaged_or_outside_its_run_folder_is_told(
    tmp_path: Path, tiny_model: Path
) -> None:
    path = checkpoint(tmp_path, tiny_model)
    torn = path.with_name("step=000009")
    torn.mkdir()
    with pytest.raises(InputError, match=r"step=000009 is incomplete.*Complete checkpoints of this run: step=000003"):
        with_checkpoint_as_model(config_of(torn)).__enter__()

    (tmp_path / "config.yaml").rename(tmp_path / "away.yaml")
    with pytest.raises(InputError, match="Use the checkpoint in its run's folder"):
        with_checkpoint_as_model(config_of(path)).__enter__()

    (tmp_path / "away.yaml").rename(tmp_path / "config.yaml")
    data = next(path.rglob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=r"step=000003 can't be evaluated: the checksum of learner/.* is wrong"):
        with_checkpoint_as_model(config_of(path)).__enter__()


@pytest.mark.parametrize(
    ("contents", "drop", "error", "words"),
    [
        (("optimizer",), "", InputError, "has no weights to evaluate, only optimizer"),
        (("model",), "model.norm.weight", CheckpointError, r"model\.model\.norm\.weight is missing in the"),
    ],
    ids=["no weights", "another model"],
)
def test_a_checkpoint_without_the_models_weights_is_told(
    tmp_path: Path, tiny_model: Path, contents: tuple[str, ...], drop: str, error: type[Exception], words: str
) -> None:
    path = checkpoint(tmp_path, tiny_model, contents, drop=drop)

    with pytest.raises(error, match=words):
        with_checkpoint_as_model(config_of(path)).__enter__()

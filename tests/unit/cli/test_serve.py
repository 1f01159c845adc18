"""`rayapp serve --adapter`: the folders that are made of checkpoints, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayapp.api.running import with_adapter_folders
from rayapp.cli.main import app
from rayapp.config.config import Config, with_values
from rayapp.config.loading import to_yaml
from rayapp.core.errors import InputError
from rayapp.runs.checkpoints import CheckpointFolder


def config_of(model: Path | str, rank: int = 4) -> Config:
    lora = {"rank": rank, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    learner = {"cpu_threads": 1, "lora": lora, "compute_dtype": "float32"}
    return Config.model_validate({"model": {"path": str(model)}, "cluster": {"device": "cpu"}, "learner": learner})


def saved(run: Path, config: Config, exported: Path) -> Path:
    """A checkpoint as the learners save it, of adapters that changed, and the whole model as they export it."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from rayapp.learner.state.checkpoint import _state
    from rayapp.learner.state.export import export_hf
    from support.learners import learner_alone

    folder = CheckpointFolder(run / "checkpoints", config.checkpoint)
    pending = folder.begin(3)
    with learner_alone(config) as (policy, ranks):
        for parameter in policy.model.parameters():
            parameter.data.add_(0.01) if parameter.requires_grad else None
        save(_state(policy), checkpoint_id=pending / "learner", no_dist=True)
        export_hf(config, policy.model, exported, ranks)
    (run / "config.yaml").write_text(to_yaml(config))
    return folder.commit(3, next_group_id=6).path


def test_the_adapter_of_a_checkpoint_is_what_the_learner_exports_once_peft_merges_it(
    tmp_path: Path, tiny_model: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = saved(tmp_path, config_of(tiny_model), tmp_path / "exported")
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}

    with with_adapter_folders(config_of(tiny_model), {"late": path}) as folders:
        merged: Any = PeftModel.from_pretrained(base, folders["late"]).merge_and_unload()

    found, wanted = merged.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], tensor, atol=1e-2) for name, tensor in wanted.items())
    changed = {name.split(".")[-2] for name, tensor in before.items() if not found[name].equal(tensor)}
    assert changed == {"q_proj", "down_proj"}


def test_what_is_no_adapter_of_the_served_model_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    path = saved(tmp_path, config_of(tiny_model), tmp_path / "exported")
    odd = tmp_path / "odd"
    odd.mkdir()

    def refused(adapter: Path, config: Config | None = None) -> str:
        with pytest.raises(InputError) as caught, with_adapter_folders(config or config_of(tiny_model), {"a": adapter}):
            pass
        return str(caught.value)

    other = with_values(config_of(tiny_model), model={"path": "other/model"})
    assert f"is an adapter of {tiny_model}, but other/model is served: give --model {tiny_model}" in refused(
        path, other
    )
    assert "none does not exist" in refused(tmp_path / "none")
    assert "adapter_config.json is not an adapter configuration of peft" in refused(odd)
    for settings, problem in (
        ({"peft_type": "IA3", "r": 4}, "vLLM serves only LORA"),
        ({"peft_type": "LORA", "r": 1024}, "vLLM serves ranks from 1 to 512"),
    ):
        (odd / "adapter_config.json").write_text(json.dumps(settings))
        assert problem in refused(odd)
    (tmp_path / "config.yaml").write_text(to_yaml(config_of(tiny_model, rank=0)))
    assert "has no adapter: its run trains all weights. Serve it with --model" in refused(path)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--adapter", "outputs/mine/checkpoints/step=000020"], "is not NAME=FOLDER"),
        (["--adapter", "late="], "is not NAME=FOLDER"),
        (["--adapter", "policy=x"], "another model is called 'policy' already"),
        (["--adapter", "a=x", "--adapter", "a=y"], "another model is called 'a' already"),
        (["--running", "--adapter", "a=x"], "leave --model, --adapter and --max-tokens out"),
        (["--adapter", "a=no/such/folder"], "adapter a: folder no/such/folder does not exist"),
    ],
)
def test_an_adapter_that_can_not_be_served_ends_the_command_before_anything_starts(
    tmp_path: Path, tiny_model: Path, arguments: list[str], problem: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config_of(tiny_model)))

    done = CliRunner().invoke(app, ["serve", str(file), "--port", "0", *arguments])

    assert isinstance(done.exception, InputError)
    assert problem in str(done.exception)

"""verl's FSDP checkpoints as a start: shards are refused with the command, and what that command writes is a model."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.storage.models.check import check_model


@pytest.fixture
def checkpoint(tiny_model: Path, tmp_path: Path) -> Path:
    """Return `global_step_1` as verl's FSDP trainer writes it on one GPU: a shard, and the model's files."""
    actor = tmp_path / "global_step_1" / "actor"
    shutil.copytree(tiny_model, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 1}))
    weights = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    torch.save(weights, actor / "model_world_size_1_rank_0.pt")
    return actor.parent


def checked(folder: Path | str) -> None:
    rollout = {"max_prompt_tokens": 32, "max_completion_tokens": 32}
    check_model(Config.model_validate({"model": {"path": str(folder)}, "rollout": rollout}))


def test_the_command_that_the_refusal_of_shards_names_makes_a_model(checkpoint: Path, tiny_model: Path) -> None:
    with pytest.raises(InputError, match="holds 1 FSDP shards of verl") as caught:
        checked(checkpoint)

    command = str(caught.value).split("`")[1]
    program, *arguments = shlex.split(command)
    assert program == "python"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    merged = str(caught.value).rpartition("model.path=")[2].rstrip(".")
    checked(merged)
    found = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    for name, expected in AutoModelForCausalLM.from_pretrained(tiny_model).state_dict().items():
        assert torch.equal(found[name].bfloat16(), expected.bfloat16()), name

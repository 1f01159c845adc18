"""verl's FSDP checkpoints as a start: shards are refused with the command, and a run starts from what it writes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayapp.core.errors import InputError
from rayapp.learner.build import build_learner
from rayapp.learner.distributed import end_ranks, start_ranks
from rayapp.storage.models.check import check_model
from support import make
from support.ports import free_port

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "data" / "write_verl_shards.py"


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `global_step_1` of two FSDP ranks, saved by verl's own checkpoint manager after a training step."""
    folder, port = tmp_path_factory.mktemp("verl"), str(free_port())
    command = [sys.executable, str(PROGRAM), str(tiny_model), str(folder)]
    ranks = [subprocess.Popen([*command, rank, port], stderr=subprocess.PIPE, text=True) for rank in ("0", "1")]
    said = [rank.communicate(timeout=500)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return folder / "global_step_1"


def test_a_run_starts_from_what_verls_merger_makes_of_the_shards_of_two_ranks(checkpoint: Path) -> None:
    with pytest.raises(InputError, match="holds 2 FSDP shards of verl") as caught:
        check_model(make.config(checkpoint))

    command = str(caught.value).split("`")[1]
    program, *arguments = shlex.split(command)
    assert program == "python"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    merged = str(caught.value).rpartition("model.path=")[2].rstrip(".")
    whole = torch.load(checkpoint.parent / "whole.pt")
    found = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert all(torch.equal(found[name].bfloat16(), weight.bfloat16()) for name, weight in whole.items())

    config = make.config(merged)
    check_model(config)
    ranks = start_ranks(config, 0, 1, "", 0)
    try:
        held = dict(build_learner(config, ranks).model.named_parameters())
        for name, weight in held.items():
            own = getattr(weight, "full_tensor", lambda weight=weight: weight)().detach()
            expected = next(each for full, each in whole.items() if name.endswith(full))
            assert torch.equal(own, expected.bfloat16().float()), name
    finally:
        end_ranks()

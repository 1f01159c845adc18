"""Compiled operators are compiled once: not again for other lengths, nor for every layer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.models.qwen3.modeling_qwen3 as qwen3
from torch._inductor.runtime.cache_dir_utils import cache_dir

from rayapp.core.types import Group
from rayapp.learner.build import import_ahead
from rayapp.learner.device import ROPE, compiled, keep_compiled
from support import make
from support.learners import learner_alone, take_step

LEARNER = {"compile": True, "max_tokens_per_microbatch": 64}
ROLLOUT = {"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 32}
KINDS = 6  # norms of hidden states, norms of heads, MLP, positions, the softmax and its gradient


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Graphs given to the compiler, which runs them as they are."""
    given: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        given.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(qwen3, ROPE, getattr(qwen3, ROPE))  # so that the end of the test restores it
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/unused")
    compiled.cache_clear()
    torch.compiler.reset()
    yield given
    compiled.cache_clear()
    torch.compiler.reset()


def save_qwen3(folder: Path, *, num_layers: int) -> Path:
    """Save a Qwen3 with random weights, none of whose widths is a possible number of tokens of a micro-batch."""
    shape = {"vocab_size": 100, "hidden_size": 96, "intermediate_size": 112, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40}
    config = qwen3.Qwen3Config(**shape, **heads, num_hidden_layers=num_layers, tie_word_embeddings=True)
    qwen3.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def groups(shortest: int, longest: int) -> list[Group]:
    rng = np.random.default_rng(shortest)
    tokens = [rng.integers(2, 90, 4 + rng.integers(shortest, longest)).tolist() for _ in range(8)]
    trajectories = [make.trajectory(each, 4, reward=float(rng.normal())) for each in tokens]
    return [make.group(*trajectories[start : start + 4], group_id=start // 4) for start in (0, 4)]


@pytest.mark.parametrize("num_layers", [2, 3])
def test_the_first_step_compiles_each_kind_of_operator_once_and_the_second_with_other_lengths_nothing(
    tmp_path: Path, graphs: list[torch.fx.GraphModule], num_layers: int
) -> None:
    folder = save_qwen3(tmp_path, num_layers=num_layers)
    config = make.config(folder, rollout=ROLLOUT, learner=LEARNER)
    with learner_alone(config) as (learner, _):
        take_step(learner, groups(5, 9), 1)
        assert len(graphs) == KINDS
        take_step(learner, groups(9, 28), 2)
        assert len(graphs) == KINDS


def test_compiled_code_is_kept_in_the_users_cache_folder_unless_the_user_has_named_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that the end of the test restores it
    for set_by_torch in (False, True):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        if set_by_torch:
            cache_dir()  # torch calls this when it is imported
        keep_compiled()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "rayapp" / "torchinductor")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


def test_a_learner_on_a_gpu_starts_torchs_compiler_while_servers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.async_compile import AsyncCompile

    started: list[str] = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(AsyncCompile, "warm_pool", lambda: started.append(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    import_ahead(compiles=True)
    assert not started  # there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    import_ahead(compiles=True)
    assert started == [str(tmp_path)]

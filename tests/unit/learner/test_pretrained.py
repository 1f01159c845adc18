"""Reading weights into a model without memory: the same as transformers reads, or a clear error.

tests/cluster/test_learner_parallel.py tests that several ranks read their parts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.learner.policy import PolicyModel, _give_memory, build_causal_lm
from rayapp.learner.state.hf_folder import hf_layout, write_file
from rayapp.learner.state.pretrained import hub_tensors, load_pretrained, tensors_of
from support.learners import save_llama

SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2,
    "intermediate_size": 32, "vocab_size": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},  # one tensor under two names
    "gemma3_text": {},  # buffers that no file has
    "mixtral": EXPERTS,  # experts apart in the file, under other names
    "qwen3_next": EXPERTS,  # parameters that are set in ways of their own where they are not read
    "jamba": {},
}


def config_of(folder: Path) -> Config:
    return Config.model_validate({"model": {"path": str(folder)}, "learner": {"compute_dtype": "float32"}})


def read(folder: Path) -> Any:
    config = config_of(folder)
    causal_lm = build_causal_lm(config.model, config.learner, config.max_model_tokens, is_checked=False)
    _give_memory(PolicyModel(causal_lm), torch.device("cpu"), on_host=False)
    load_pretrained(causal_lm, config.model)
    return causal_lm


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "llama", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_transformers_reads_and_an_export_is_what_was_read(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**(SMALL | FAMILIES[family]))
    made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    made.save_pretrained(tmp_path)
    expected: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = read(tmp_path)

    for kind in ("named_parameters", "named_buffers"):
        own, theirs = (dict(getattr(model, kind)()) for model in (found, expected))
        assert own.keys() == theirs.keys()
        assert all(torch.equal(own[name], tensor) for name, tensor in theirs.items())
    tensors = tensors_of(found)
    groups = [
        group for file in hf_layout(config_of(tmp_path).model, found, torch.bfloat16).files for group in file.groups
    ]
    exported = {k: t for group in groups for k, t in hub_tensors(found, {n: tensors[n] for n in group}).items()}
    in_file = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == in_file.keys()
    assert all(torch.equal(exported[name].detach(), tensor) for name, tensor in in_file.items())


def test_an_exported_file_can_be_read_by_whoever_may_enter_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "final"
    folder.mkdir(mode=0o755)

    write_file(folder / "model.safetensors", {"weight": torch.zeros(2)})

    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("kind", ["parts", "pickle"])
def test_parts_of_a_checkpoint_and_old_formats_are_read(kind: str, llama: Path) -> None:
    whole = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    if kind == "pickle":
        torch.save(whole, llama / "pytorch_model.bin")
    else:
        files = {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(whole)}
        for file in set(files.values()):
            save_file({name: whole[name] for name in whole if files[name] == file}, llama / file, {"format": "pt"})
        (llama / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    found = dict(read(llama).named_parameters())
    assert all(torch.equal(found[name].detach(), tensor) for name, tensor in whole.items())


def test_a_checkpoint_of_another_model_or_without_all_of_it_is_refused_with_the_tensor(llama: Path) -> None:
    whole = load_file(llama / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(whole | {name: torch.zeros(1, 32)}, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        InputError, match=rf"{name} has the shape \(1, 32\) in the files, but \(32, 32\) by config.json"
    ):
        read(llama)
    save_file({key: t for key, t in whole.items() if key != name}, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=rf"lacks 1 of the model's tensors, such as {name}"):
        read(llama)
    (llama / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        read(llama)


SEQUENCES, SPLIT = "sequence_parallel", "expert_parallel_size"


@pytest.mark.parametrize(
    ("family", "changes", "key", "size", "reason"),
    [
        ("llama", {}, SEQUENCES, 3, "4 attention heads, which 3 ranks can't share evenly.*to one of 1, 2, 4"),
        ("qwen3_next", EXPERTS, SEQUENCES, 2, r"mix tokens outside of attention \(Qwen3NextGatedDeltaNet"),
        ("jamba", {}, SEQUENCES, 2, r"mix tokens outside of attention \(JambaMambaMixer"),
        ("mixtral", EXPERTS, SPLIT, 6, r"4 experts, which 6 ranks can't share evenly.*to one of 1, 2\."),
        ("llama", {}, SPLIT, 2, "no experts that transformers computes as one module"),
        ("granitemoe", EXPERTS, SPLIT, 2, "no experts that transformers computes as one module"),
    ],
)
def test_what_ranks_can_not_compute_together_is_refused(
    family: str, changes: dict[str, Any], key: str, size: int, reason: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[family](**(SMALL | changes)).save_pretrained(tmp_path)
    learner = {"num_learners": size, key: size}
    config = Config.model_validate({"model": {"path": str(tmp_path)}, "learner": learner})
    with pytest.raises(InputError, match=reason):
        build_causal_lm(config.model, config.learner, config.max_model_tokens, is_checked=False)

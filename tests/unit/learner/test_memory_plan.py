"""The memory plan: its arithmetic by hand, and what autograd and the optimizer really hold on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayapp.cli.plan import plan_command
from rayapp.config.config import Config
from rayapp.config.loading import load_config
from rayapp.core.errors import InputError
from rayapp.learner.memory.plan import (
    GIB,
    RUNTIME_BYTES,
    ModelShape,
    activation_bytes,
    head_bytes,
    model_shape,
    plan_learner,
    plan_server,
    plan_shared,
)

SHAPE = ModelShape(
    num_parameters=1_000,
    num_layer_parameters=300,
    num_layers=3,
    hidden=8,
    intermediate=20,
    num_heads=4,
    num_key_heads=2,
    head_size=2,
    vocabulary=50,
)


def config(**learner: Any) -> Config:
    sections = {"learner": {"max_tokens_per_microbatch": 1000, "log_prob_chunk_tokens": 16} | learner}
    return Config.model_validate(sections | {"rollout": {"max_prompt_tokens": 60, "max_completion_tokens": 40}})


def test_a_learner_in_bfloat16_by_hand() -> None:
    plan = plan_learner(SHAPE, config(num_learners=2))
    # 1000 parameters on two learners: 500 each. Outside the layers: 1000 - 3 x 300 = 100.
    assert plan.weights == 4 * 500 + 2 * (100 + 2 * 300)
    assert plan.gradients == 4 * 500 + (2 + 4) * 300
    assert plan.optimizer == 8 * 500
    assert plan.reference == 0
    # A layer, a token: norms 2 x (4 x 8 + 2 x 8) = 96; inputs of projections 2 x 2 x 8 = 32; queries, output 2 x 4
    # heads and keys, values 2 x 2 heads of 2 numbers of 2 bytes = 48; MLP 4 x 2 x 20 = 160. Together 336. The last
    # norm: (4 + 2 x 2) x 8 = 64.
    assert plan.activations == 3 * 1000 * 336 + 1000 * 64
    # Kept 4 x 16 x 50 = 3200; the gradient's sum 4 x 50 x 8 = 1600; beside it one more chunk in its softmax,
    # (2 + 8) x 16 x 50 = 8000, or that chunk and its share of the gradient, 2 x (16 x 50 + 50 x 8) = 2400.
    assert plan.head == 3200 + 1600 + 8000
    assert plan.total == 3400 + 3800 + 4000 + 1_072_000 + 12_800 + RUNTIME_BYTES


def test_recomputing_activations_keeps_the_inputs_of_layers_and_one_layer() -> None:
    found = activation_bytes(SHAPE, config(activation_checkpointing=True))
    assert found == 3 * 1000 * 2 * 8 + 1000 * 336 + 1000 * 64


def test_a_reference_takes_its_own_weights() -> None:
    with_kl = config().model_copy(update={"algorithm": config().algorithm.model_copy(update={"kl_loss_coef": 0.1})})
    plan = plan_learner(SHAPE, with_kl)
    assert plan.reference == plan.weights == 4 * 1000 + 2 * 700


WITH_ADAPTERS = replace(SHAPE, num_adapter_parameters=60, adapter_rank_sum=14)


def test_adapters_alone_have_gradients_and_moments() -> None:
    plan = plan_learner(WITH_ADAPTERS, config(num_learners=2))
    # 500 frozen and 30 adapter parameters each; gathered: 100 outside the layers, two layers of 300 and 20 adapters.
    assert plan.weights == 4 * 530 + 2 * (100 + 2 * 320)
    assert plan.gradients == 4 * 30 + (2 + 4) * 20
    assert plan.optimizer == 8 * 30
    # 336 a layer and token as above, less two normed values of 2 x 8 each, and 14 numbers behind the first matrices.
    assert plan.activations == 3 * 1000 * (336 - 32 + 28) + 1000 * 64
    assert plan.head == 3200 + 8000  # the frozen head has no gradient


def test_what_is_offloaded_is_in_host_memory_and_not_on_the_gpu() -> None:
    on_gpu, offloaded = plan_learner(SHAPE, config()), plan_learner(SHAPE, config(cpu_offload=True))
    gathered, unreduced = 2 * 700, 6 * 300
    assert (offloaded.weights, offloaded.gradients, offloaded.optimizer) == (gathered, unreduced, 0)
    assert offloaded.host == 4 * 1000 + 4 * 1000 + 8 * 1000
    assert on_gpu.total - offloaded.total == offloaded.host
    assert (on_gpu.host, offloaded.resident) == (0, RUNTIME_BYTES)


def test_a_gpu_that_both_share_by_hand() -> None:
    shared = Config.model_validate(
        {
            "cluster": {"placement": "colocated"},
            "server": {"gpu_memory_utilization": 0.5},
            "learner": {"max_tokens_per_microbatch": 1000, "log_prob_chunk_tokens": 16},
            "rollout": {"max_prompt_tokens": 60, "max_completion_tokens": 40},
        }
    )
    learner, server = plan_learner(SHAPE, shared), plan_server(SHAPE, shared, 10 * GIB)
    plan = plan_shared(learner, server, shared, 10 * GIB)
    assert plan.training == learner.total + RUNTIME_BYTES
    # While the server generates: its half, and of the learner float32 weights, two moments and the runtime.
    assert plan.generating == 5 * GIB + (4 + 8) * 1000 + RUNTIME_BYTES
    assert plan.host == 2 * 1000


QWEN = {
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}


@pytest.mark.parametrize(
    ("name", "size", "gpu"),
    [("coding_8gpu", "3B", "h100"), ("gsm8k_tool_8gpu", "3B", "h100"), ("coding_1gpu", "1.5B", "rtx4090")],
)
def test_the_configs_for_gpus_fit_the_hardware_that_they_name(name: str, size: str, gpu: str, tmp_path: Path) -> None:
    common = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "model_type": "qwen2"}
    architecture = common | QWEN[size] | {"architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    file = Path("configs") / f"{name}.yaml"
    assert size in load_config(file, []).model.path
    no_data = ["data.train_files=[]", "data.eval_files=[]", "agent.tool_file=''"]
    config = load_config(file, [f"model.path={tmp_path}", *no_data])
    assert plan_command(config, gpu)


def test_a_shared_gpu_that_is_too_small_says_what_to_lower(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"model": {"path": str(tiny_model)}, "cluster": {"placement": "colocated"}}
    full = Config.model_validate(sections | {"server": {"gpu_memory_utilization": 1.0}})
    assert not plan_command(full, "h100")
    assert "too much: lower server.gpu_memory_utilization" in capsys.readouterr().out
    assert plan_command(Config.model_validate(sections), "h100")
    assert "the server asleep" in capsys.readouterr().out


def test_adapters_are_counted_without_weights(tiny_model: Path) -> None:
    sections = {"model": {"path": str(tiny_model)}, "learner": {"lora": {"rank": 4}}}
    shape = model_shape(Config.model_validate(sections))
    # All-linear, rank 4: q and o 128 -> 128, k and v 128 -> 64, gate and up 128 -> 256, down 256 -> 128.
    layer = 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 256))
    assert shape.num_adapter_parameters == 2 * layer
    assert shape.adapter_rank_sum == 7 * 4
    assert shape.num_parameters == model_shape(Config.model_validate({"model": sections["model"]})).num_parameters


def test_a_server_by_hand() -> None:
    changed = Config.model_validate(
        {
            "server": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5},
            "rollout": {"max_prompt_tokens": 60, "max_completion_tokens": 40},
        }
    )
    plan = plan_server(SHAPE, changed, 10 * GIB)
    assert plan.weights == 2 * 1000 // 2
    assert plan.kv_cache == 5 * GIB - 1000 - RUNTIME_BYTES
    # A token: key and value, 2 bytes, 3 layers, 1 of the 2 key heads, 2 numbers each.
    assert plan.kv_tokens == plan.kv_cache // (2 * 2 * 3 * 1 * 2)
    assert plan.num_sequences == plan.kv_tokens // 100


def test_the_shape_is_read_without_weights(tiny_model: Path) -> None:
    shape = model_shape(Config.model_validate({"model": {"path": str(tiny_model)}}))
    # A layer of 128: q and o 128 x 128, k and v 128 x 64 each, three matrices of 128 x 256, two norms.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128
    assert shape.num_layer_parameters == layer
    # Two layers, 97 tied embeddings, the last norm.
    assert shape.num_parameters == 2 * layer + 97 * 128 + 128
    assert shape.num_root_parameters == 97 * 128 + 128
    with pytest.raises(InputError, match=r"model\.path 'nowhere/at/all' can't be read"):
        model_shape(Config.model_validate({"model": {"path": "nowhere/at/all"}}))


def test_an_unknown_gpu_is_named(tiny_model: Path) -> None:
    with pytest.raises(InputError, match="use one of h200, h100, a100"):
        plan_command(Config.model_validate({"model": {"path": str(tiny_model)}}), "tpu")


def test_what_does_not_fit_says_what_to_lower(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = Config.model_validate(
        {"model": {"path": str(tiny_model)}, "learner": {"max_tokens_per_microbatch": 10**9}}
    )
    assert not plan_command(changed, "h100")
    printed = capsys.readouterr().out
    assert "GiB too much: raise learner.num_learners" in printed
    assert "Nothing here was measured on a GPU" in printed
    assert plan_command(Config.model_validate({"model": {"path": str(tiny_model)}}), "h100")


@pytest.mark.parametrize("rank", [0, 8])
def test_the_plan_is_what_a_learner_holds(tiny_model: Path, rank: int) -> None:
    """On CPU in float32: optimizer and gradients to the byte, activations and head within 15%."""
    from actors.learner import Learner
    from rayapp.core.types import Reward, RolloutStatus, Trajectory
    from rayapp.learner.batch import TrainItem, split
    from rayapp.learner.log_probs import HeadOptions
    from rayapp.learner.policy import to_device

    num_tokens = 512
    loaded = Config.model_validate(
        {
            "model": {"path": str(tiny_model)},
            "cluster": {"device": "cpu"},
            "rollout": {"max_prompt_tokens": 16, "max_completion_tokens": 112},
            "learner": {
                "compute_dtype": "float32",
                "cpu_threads": 1,
                "max_tokens_per_microbatch": num_tokens,
                "lora": {"rank": rank},
            },
        }
    )
    tokens = torch.randint(2, 90, (4, num_tokens // 4 + 1), generator=torch.Generator().manual_seed(0)).numpy()
    items = []
    for row, ids in enumerate(tokens.astype("int32")):
        trajectory = Trajectory(
            token_ids=ids,
            response_mask=(torch.arange(ids.size) >= 1).numpy(),
            rollout_log_probs=torch.zeros(ids.size).numpy(),
            completion_text="",
            reward=Reward(value=0.0),
            status=RolloutStatus.COMPLETED,
            min_policy_version=0,
            max_policy_version=0,
        )
        items.append(TrainItem(row=row, group=row, trajectory=trajectory, advantages=torch.ones(ids.size - 1).numpy()))
    learner = Learner(loaded, 0, 1, "", 0)
    try:
        model, optimizer = learner._learner.model, learner._learner.optimizer
        # What FSDP has gathered is kept for the backward too: it is in the plan's weights.
        weights = {shape for p in model.parameters() for shape in (tuple(p.shape), tuple(p.shape)[::-1])}
        (batch,) = split(items, max_tokens=num_tokens, share_prefixes=False)
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if tuple(tensor.shape) not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            scores = model(to_device(batch, torch.device("cpu")), HeadOptions(chunk_rows=1024, temperature=1.0))
        scores.log_probs.sum().backward()
        optimizer.step()
        shape, plan = model_shape(loaded), plan_learner(model_shape(loaded), loaded)
        gradients = sum(p.grad.to_local().nbytes for p in model.parameters() if p.grad is not None)  # type: ignore[attr-defined]
        moments = sum(
            state[name].to_local().nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
        )
        assert gradients == 4 * shape.num_trained
        assert moments == plan.optimizer
        kept_logits = 4 * num_tokens * shape.vocabulary  # fewer rows than a chunk: all of them, 4 bytes an entry
        assert sum(kept.values()) == pytest.approx(plan.activations + kept_logits, rel=0.15)
        assert head_bytes(shape, loaded) > kept_logits
    finally:
        learner.close()

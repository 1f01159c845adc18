"""The memory plan: its arithmetic by hand, and the bytes that autograd and the optimizer really hold on a CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rayapp.cli.plan import plan_command, step_seconds
from rayapp.config.config import Config, with_values
from rayapp.config.loading import load_config
from rayapp.core.errors import InputError
from rayapp.learner.memory.host import plan_host, plan_node
from rayapp.learner.memory.plan import (
    GRAPH_BYTES,
    RUNTIME_BYTES,
    ServerPlan,
    gathered_bytes,
    head_bytes,
    kept_bytes,
    least_recomputed,
    plan_gpu,
    plan_learner,
    plan_server,
    without_autos,
    working_bytes,
)
from rayapp.learner.memory.shape import GIB, Gpu, ModelShape, gpu_called, model_shape
from rayapp.learner.memory.speed import (
    Speed,
    _gather_s,
    generate,
    late_generation,
    score,
    step_load,
    step_speeds,
    step_timeline,
    train,
    weight_sync,
)
from rayapp.learner.memory.token_budget import compare_with_plan
from scripts import fit_table
from scripts.config_plans import ARCHITECTURES, PLANNED, planned, with_plan

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
    plain = {"max_tokens_per_microbatch": 1000, "log_prob_chunk_tokens": 16, "compile": False}
    sections = {"learner": plain | learner}
    return Config.model_validate(sections | {"rollout": {"max_prompt_tokens": 60, "max_completion_tokens": 40}})


LAYER = 300
"""A layer, a token: norms 2 x (4 x 8 + 2 x 8) = 96; inputs of projections 2 x 2 x 8 = 32; queries, output 2 x 4 heads
and keys, values 2 x 2 heads of 2 numbers of 2 bytes = 48; MLP 4 x 2 x 20 = 160."""
TOKEN = 96 + 32 + 48 + 160


def trained(shape: ModelShape, config: Config) -> Speed:
    return train(shape, config.learner, step_load(config), H100, is_compiled=config.compiles(on_gpu=True))


def served(shape: ModelShape, config: Config, num_bytes: int) -> ServerPlan:
    return plan_server(shape, config.server, config.max_model_tokens, num_bytes)


def test_a_learner_in_bfloat16_by_hand() -> None:
    plan = plan_learner(SHAPE, config(num_learners=2))
    # 1000 parameters on two learners: 500 each. Outside the layers: 1000 - 3 x 300 = 100.
    assert (plan.weights, plan.gradients, plan.optimizer, plan.frozen) == (4 * 500, 4 * 500, 8 * 500, {})
    head, backward, reduce = plan.moments
    assert head.gathered == 2 * (100 + LAYER)
    # All layers, and the last norm: (4 + 2 x 2) x 8 = 64.
    assert head.activations == 3 * 1000 * TOKEN + 1000 * 64
    # Kept 4 x 16 x 50 = 3200; the gradient's sum 4 x 50 x 8 = 1600; beside it one more chunk in its softmax,
    # (2 + 8) x 16 x 50 = 8000, or that chunk and its share of the gradient, 2 x (16 x 50 + 50 x 8) = 2400.
    assert head.head == 3200 + 1600 + 8000
    assert backward.gathered == 2 * (100 + 2 * LAYER)
    # Beside all that is kept, gradients of the MLP's products.
    assert backward.activations == head.activations + 1000 * 2 * 2 * (20 + 8)
    assert (backward.head, backward.unreduced) == (2 * 50 * 8, 4 * LAYER + 300)
    assert reduce.total == (2 + 4) * 100 + 4 * 50
    assert plan.total == 8000 + RUNTIME_BYTES + max(moment.total for moment in plan.moments)


def test_a_lone_gpu_keeps_the_gathered_weights_of_all_layers_unless_it_recomputes_any_of_them() -> None:
    for changes, in_head, in_backward in (
        ({}, 3, 3),
        ({"activation_checkpointing": 1}, 1, 2),
        ({"num_learners": 2}, 1, 2),
        ({"cpu_offload": True}, 1, 2),
    ):
        head, backward, _ = plan_learner(SHAPE, config(**changes)).moments  # type: ignore[arg-type]
        assert (head.gathered, backward.gathered) == (2 * (100 + in_head * LAYER), 2 * (100 + in_backward * LAYER))
    adapted = config(lora={"rank": 4}).learner
    assert not adapted.keeps_gathered(3)


def test_auto_recomputes_as_few_layers_as_fit() -> None:
    assert Config().learner.activation_checkpointing == "auto"
    auto = with_values(large(), learner={"activation_checkpointing": "auto"})
    number = without_autos(QWEN3_8B, auto, H100).learner.activation_checkpointing
    assert isinstance(number, int)
    assert 0 < number < QWEN3_8B.num_layers

    def total(layers: bool | int, tokens: int = 16384) -> int:
        own = {"activation_checkpointing": layers, "max_tokens_per_microbatch": tokens}
        plan = plan_gpu(QWEN3_8B, with_values(auto, learner=own), H100)
        return plan.training

    assert total(number) <= 0.9 * H100.room < total(number - 1)
    # What is recomputed costs time, in proportion to the layers.
    seconds = [
        trained(QWEN3_8B, with_values(auto, learner={"activation_checkpointing": layers})).seconds
        for layers in (False, number, True)
    ]
    share = (seconds[1] - seconds[0]) / (seconds[2] - seconds[0])
    assert share == pytest.approx(number / QWEN3_8B.num_layers)
    # With short micro-batches none is recomputed; if nothing fits, all are.
    assert least_recomputed(QWEN3_8B, with_values(auto, learner={"max_tokens_per_microbatch": 4096}), H100.room) == 0
    assert least_recomputed(QWEN3_8B, auto, 20 * GIB) == QWEN3_8B.num_layers
    # Both are auto: recompute until 8192 tokens fit, then take as many as fit.
    both = without_autos(QWEN3_8B, with_values(auto, learner={"max_tokens_per_microbatch": "auto"}), H100)
    assert both.learner.token_budget == 8192
    assert total(both.learner.activation_checkpointing, 8192) <= 0.9 * H100.room  # type: ignore[arg-type]


def test_a_head_whose_chunks_are_all_kept_takes_no_softmax_in_its_backward_and_few_rows_at_a_time_on_a_cpu() -> None:
    changed = config(log_prob_chunk_tokens=1000, compute_dtype="bfloat16")
    for rows in (None, 64):
        found = head_bytes(SHAPE, changed.learner, needs_logits=False, num_tokens=1000, softmax_rows=rows)
        # Logits of all 1000 tokens, and two float32 copies while the softmax of some is taken.
        assert found == 2 * 1000 * 50 + 8 * (rows or 1000) * 50
    chunk, small = (head_bytes(SHAPE, changed.learner, needs_logits=False, softmax_rows=rows) for rows in (None, 64))
    assert chunk - small == 8 * (1000 - 64) * 50
    on_host = plan_host(SHAPE, changed, 1 << 40)
    assert on_host.activations == kept_bytes(SHAPE, changed.learner) + working_bytes(SHAPE, changed.learner) + small


def test_compiled_layers_keep_neither_float32_inputs_of_norms_nor_the_activation_of_the_mlp() -> None:
    plain, compiled = (plan_learner(SHAPE, config(compile=is_on)).moments[0].activations for is_on in (False, "auto"))
    assert plain - compiled == 3 * 1000 * (2 * 4 * 8 + 2 * 20)


def test_a_reference_takes_its_own_shards() -> None:
    plan = plan_learner(SHAPE, with_values(config(), algorithm={"kl_loss_coef": 0.1}))
    assert plan.frozen == {"reference": 2 * 1000}  # bfloat16, as it is computed
    assert plan.resident == (4 + 2 + 8) * 1000 + RUNTIME_BYTES


def test_what_is_offloaded_is_in_host_memory_and_not_on_the_gpu() -> None:
    # One recomputed layer: without, the weights of all layers would stay gathered on the GPU.
    on_gpu, offloaded = (
        plan_learner(SHAPE, config(activation_checkpointing=1, cpu_offload=offload)) for offload in (False, True)
    )
    assert (offloaded.weights, offloaded.gradients, offloaded.optimizer) == (0, 0, 0)
    assert offloaded.host == (4 + 4 + 8) * 1000 == on_gpu.total - offloaded.total
    assert (on_gpu.host, offloaded.resident) == (0, RUNTIME_BYTES)


def gpu_of(gib: int) -> Gpu:
    return Gpu(name="g", room=gib * GIB, tflops=100, memory_gb_s=1000, link_gb_s=100)


def shared_config(**server: Any) -> Config:
    return Config.model_validate(
        {
            "cluster": {"placement": "colocated"},
            "server": {"gpu_memory_utilization": 0.5, "max_num_seqs": 1, "weight_bucket_mib": 1, **server},
            "learner": {"max_tokens_per_microbatch": 1000, "log_prob_chunk_tokens": 16},
            "rollout": {"max_prompt_tokens": 60, "max_completion_tokens": 40},
        }
    )


def test_a_gpu_that_both_share_by_hand() -> None:
    plan = plan_gpu(SHAPE, shared_config(enforce_eager=False), gpu_of(10))
    assert plan.training == plan.learner.total + RUNTIME_BYTES + GRAPH_BYTES
    # While the server generates: its half, its graphs, and of the learner float32 weights, two moments and CUDA.
    # A server that is started again then gets its weights, tensor by tensor: the largest is 8 x 50 numbers of 2 bytes.
    assert plan.generating == 5 * GIB + GRAPH_BYTES + (4 + 8) * 1000 + RUNTIME_BYTES + 2 * 400
    # While weights are sent: the largest tensor, and two buckets; the server has its own weights awake.
    buffers = 2 * 400 + 2 * 2**20
    assert plan.sending == (4 + 8) * 1000 + 2 * RUNTIME_BYTES + GRAPH_BYTES + 2 * 1000 + buffers
    assert plan.fits


def test_a_cache_in_bytes_is_counted_whatever_the_share() -> None:
    base = shared_config(enforce_eager=False)
    sized = with_values(base, server={"kv_cache_gib": 3})

    by_share, by_size = (plan_gpu(SHAPE, each, gpu_of(10)) for each in (base, sized))

    assert by_size.server.kv_cache == 3 * GIB
    assert by_size.generating - by_share.generating == 3 * GIB - by_share.server.kv_cache
    assert plan_gpu(SHAPE, with_values(sized, server={"gpu_memory_utilization": 0.1}), gpu_of(10)) == by_size


def test_a_learner_that_parks_leaves_its_gpu_to_the_cache_but_for_a_catch_up() -> None:
    shared = shared_config()
    parked = with_values(shared, learner={"offload_when_idle": True})
    before, after = (plan_gpu(SHAPE, each, gpu_of(10)) for each in (shared, parked))
    # The moments are gone; weights come back when a server that was started again needs them.
    assert before.beside_server - after.beside_server == 8 * 1000
    assert after.learner.giving == RUNTIME_BYTES + 4 * 1000
    # In host memory: weights of the server, weights and moments of the learner, and those once more while saved.
    node = plan_node(SHAPE, parked)
    assert (node.backups, node.learners, node.staging) == (1.5 * 2 * 1000, 1.5 * 12 * 1000, 12 * 1000)


def test_a_compiled_learner_is_faster() -> None:
    plain, compiled = large(learner={"compile": False, "num_learners": 8}), large()
    assert not compiled.compiles(on_gpu=False)
    assert not with_values(compiled, run={"deterministic": True}).compiles(on_gpu=True)
    assert with_values(compiled, learner={"compile": True}).compiles(on_gpu=False)
    assert trained(QWEN3_8B, compiled).seconds < trained(QWEN3_8B, plain).seconds


@pytest.mark.parametrize("name", PLANNED)
def test_the_configs_for_gpus_fit_the_hardware_that_they_name(name: str) -> None:
    text = Path("configs", f"{name}.yaml").read_text()
    assert text == with_plan(name, text), "stale: run python -m scripts.config_plans"
    shape, config, gpu = planned(name)
    plan = plan_gpu(shape, config, gpu)
    assert plan.fits
    assert plan.server.num_sequences >= 8
    assert not list(late_generation(shape, config, gpu, plan.server))


def test_the_table_of_cards_and_models_is_that_of_the_plan() -> None:
    page = Path("docs/scale.md").read_text()

    assert fit_table.table() in page, "stale: run python -m scripts.fit_table"
    assert "| 24 GB | 0.5B | 3B | 7B (2) |" in page


def test_an_asynchronous_step_takes_as_long_as_its_slower_side() -> None:
    shape, config, gpu = planned("coding_8gpu_async")
    rows = list(step_timeline(shape, config, gpu, plan_gpu(shape, config, gpu)))
    of = {row.phase: row.speed.seconds for row in rows}
    learners = of["train"] + of["optimizer"] + of["weight sync"]
    assert step_seconds(config, rows) == pytest.approx(max(of["generate"], learners))
    in_turns = with_values(config, train={"max_staleness": 0})
    assert step_seconds(in_turns, rows) == pytest.approx(of["generate"] + learners)


def test_only_what_crosses_nodes_is_planned_at_the_speed_of_their_network() -> None:
    gpu, config = gpu_called("h100"), shared_config()
    one, two = (with_values(config, learner={"num_learners": 16, "replicas": n}).learner for n in (1, 2))
    eight = with_values(config, learner={"num_learners": 8}).learner

    within, across = (weight_sync(SHAPE, eight, "nccl", gpu, num_gpus=n).seconds for n in (8, 16))
    assert across > within
    whole, halves = (_gather_s(SHAPE, each, gpu, is_backward=True) for each in (one, two))
    assert halves < whole


def test_adapters_are_counted_without_weights(tiny_model: Path) -> None:
    sections = {"model": {"path": str(tiny_model)}, "learner": {"lora": {"rank": 4}}}
    shape = model_shape(Config.model_validate(sections))
    # All-linear, rank 4: q and o 128 -> 128, k and v 128 -> 64, gate and up 128 -> 256, down 256 -> 128.
    layer = 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 256))
    assert shape.num_adapter_parameters == 2 * layer
    assert shape.adapter_rank_sum == 7 * 4
    assert shape.num_parameters == model_shape(Config.model_validate({"model": sections["model"]})).num_parameters


def test_a_server_by_hand() -> None:
    wide = {"cluster": {"placement": "split"}, "server": {"tensor_parallel_size": 2}}
    plan = served(SHAPE, with_values(shared_config(), **wide), 10 * GIB)
    assert plan.weights == 2 * 1000 // 2
    # The largest prefill: 4 x 8 numbers of the layer and 2 x 20 / 2 of its MLP; one sequence's logits.
    assert plan.runtime == RUNTIME_BYTES + 2 * 8192 * (4 * 8 + 20) + 3 * 4 * 50
    assert plan.kv_cache == 5 * GIB - 1000 - plan.runtime
    # A token: key and value, 2 bytes, 3 layers, 1 of the 2 key heads, 2 numbers each.
    assert plan.kv_tokens == plan.kv_cache // (2 * 2 * 3 * 1 * 2)
    assert plan.num_sequences == plan.kv_tokens // 100


def test_a_server_that_rounds_to_8_bits_by_hand() -> None:
    plain = shared_config()
    rounded = with_values(plain, server={"quantization": "fp8_per_block", "kv_cache_dtype": "fp8"})
    # Three layers of 300 parameters have a byte each; embedding and head, 100 parameters, keep two.
    small, large = served(SHAPE, rounded, 10 * GIB), served(SHAPE, plain, 10 * GIB)
    assert small.weights == 3 * 300 + 2 * 100
    assert 2 * small.kv_token_bytes == large.kv_token_bytes


def test_a_kind_of_gpu_without_the_kernels_is_named(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    rounded = ["server.kv_cache_dtype=fp8", "algorithm.rollout_correction.level=token", f"model.path={tiny_model}"]
    config = load_config(None, [*rounded, "cluster.placement=colocated", "rollout.group_size=2"])

    assert plan_command(config, gpu_called("h100"))
    assert not plan_command(config, gpu_called("a100"))
    assert "CAN'T RUN server.kv_cache_dtype is fp8" in capsys.readouterr().out


def test_the_shape_is_read_without_weights(tiny_model: Path) -> None:
    shape = model_shape(Config.model_validate({"model": {"path": str(tiny_model)}}))
    # A layer of 128: q and o 128 x 128, k and v 128 x 64 each, three matrices of 128 x 256, two norms.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128
    assert shape.num_layer_parameters == layer
    # Two layers, 97 tied embeddings, the last norm.
    assert shape.num_parameters == 2 * layer + 97 * 128 + 128
    assert shape.num_root_parameters == 97 * 128 + 128
    with pytest.raises(InputError, match=r"model\.path 'nowhere/at/all': there is no such folder"):
        model_shape(Config.model_validate({"model": {"path": "nowhere/at/all"}}))


def large(**sections: dict[str, Any]) -> Config:
    base = {"rollout": {"max_prompt_tokens": 1024, "max_completion_tokens": 3072},
            "cluster": {"placement": "colocated"}, "server": {"num_servers": 8, "gpu_memory_utilization": 0.5},
            "learner": {"num_learners": 8, "max_tokens_per_microbatch": 16384,
                        "activation_checkpointing": False}}  # fmt: skip
    return Config.model_validate({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


QWEN3_8B = ModelShape(
    num_parameters=8_190_735_360, num_layer_parameters=192_946_432, num_layers=36, hidden=4096, intermediate=12288,
    num_heads=32, num_key_heads=8, head_size=128, vocabulary=151936, norms_heads=True,
)  # fmt: skip
H100 = gpu_called("h100")


def test_what_does_not_fit_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    architecture = json.loads(Path("tests/data/architectures/qwen3-8b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    assert model_shape(large(model={"path": str(tmp_path)})) == QWEN3_8B
    assert not plan_command(large(model={"path": str(tmp_path)}), H100)
    assert "DOES NOT FIT training" in capsys.readouterr().out
    learner = {"num_learners": 8, "max_tokens_per_microbatch": 4096}
    assert plan_command(large(model={"path": str(tmp_path)}, learner=learner), H100)


def test_a_step_takes_as_long_as_its_products_and_bytes_say() -> None:
    config = large(
        learner={"activation_checkpointing": True, "num_learners": 8}, train={"groups_per_step": 16},
        rollout={"group_size": 8, "max_prompt_tokens": 1024, "max_completion_tokens": 3072},
    )  # fmt: skip
    load = step_load(config)
    assert load.computed_tokens == 16 * (1024 + 8 * 3072)
    training = trained(QWEN3_8B, config)
    scoring = score(QWEN3_8B, config.learner, load, H100, is_compiled=config.compiles(on_gpu=True))
    # Useful are three times a forward's products; done are four, and a GPU reaches no more than GEMM_SHARE.
    assert training.flops == pytest.approx(3 * scoring.flops)
    assert 0.25 < training.mfu(H100) < 0.68 * 3 / 4
    server = served(QWEN3_8B, config, H100.room)
    sampling = generate(QWEN3_8B, config.server, load, H100, server)
    # 16 sequences a server: each of 3072 steps reads the weights, and takes no less than that.
    assert sampling.seconds > 3072 * server.weights / 3.35e12
    assert sampling.mfu(H100) < 0.1
    in_two = {"num_minibatches": 2, "groups_per_step": 2}
    for algorithm, batch in (({"kl_loss_coef": 0.1}, in_two), ({"kl_in_reward": {"coef": 0.1}}, {})):
        with_reference = large(algorithm=algorithm, train=batch)
        assert list(step_speeds(QWEN3_8B, with_reference, H100, server)) == [
            "generate", "old log-probs", "reference", "train", "optimizer", "weight sync", "sleep, wake",
        ]  # fmt: skip


def test_split_experts_are_neither_gathered_nor_reduced_and_tokens_travel(tmp_path: Path) -> None:
    shutil.copy(ARCHITECTURES / "qwen3-30b-a3b.json", tmp_path / "config.json")

    def split(size: int) -> tuple[ModelShape, Config]:
        learner = {"num_learners": 8, "expert_parallel_size": size, "max_tokens_per_microbatch": 4096}
        config = large(model={"path": str(tmp_path)}, learner=learner)
        return model_shape(config), config

    (whole, with_all), (shape, with_part) = split(1), split(4)
    # 48 layers of 128 experts, each of three matrices 2048 x 768. A learner never gathers three quarters of them.
    experts = 48 * 128 * 3 * 2048 * 768
    assert (whole.num_elsewhere, shape.num_elsewhere) == (0, experts * 3 // 4)
    assert (
        gathered_bytes(whole, with_all.learner) - gathered_bytes(shape, with_part.learner)
        == 2 * 2 * shape.num_elsewhere // 48
    )
    assert plan_learner(whole, with_all).resident == plan_learner(shape, with_part).resident
    # A token goes to 8 experts in every layer, 6 of them on other learners.
    assert shape.rows_elsewhere == 48 * 6
    slow, fast = (trained(whole, with_all).seconds, trained(shape, with_part).seconds)
    load, bytes_per_s = step_load(with_part), 0.7 * 450e9
    rows = load.computed_tokens / 8 * 48 * 6
    travel = 2 * 2 * 2 * 2048 * rows / bytes_per_s  # there and back, in forward and backward, 2 bytes a value
    assert travel < fast < slow


@pytest.mark.parametrize(("name", "tflops"), [("b200", 2250), ("B200", 2250), ("GB200", 2500), ("MI300X", 1307),
    ("RTX 5090", 209), ("rtx-4090", 165), ("L40S", 362), ("H200", 989), ("a100", 312)])  # fmt: skip
def test_gpus_are_known_in_any_spelling(name: str, tflops: float) -> None:
    assert gpu_called(name).tflops == tflops


def test_a_gpu_can_be_given_by_its_figures() -> None:
    gpu = gpu_called("memory_gib=94, memory_gb_s=3900,tflops=835")
    assert (gpu.gib, gpu.memory_gb_s, gpu.tflops, gpu.link_gb_s) == (94, 3900, 835, 32)
    for wrong in (
        "memory_gib=94,tflops=835",
        "memory_gib=94,memory_gb_s=x,tflops=1",
        "memory_gib=1e999,tflops=-1",
        "tpu",
    ):
        with pytest.raises(InputError, match="describe another GPU"):
            gpu_called(wrong)


def test_an_auto_share_fits_and_leaves_a_margin() -> None:
    shared = {"cluster": {"placement": "colocated"}, "server": {"num_servers": 8, "gpu_memory_utilization": "auto"}}
    auto = Config.model_validate(
        shared | {"cluster": {"placement": "colocated", "device": "gpu", "num_gpus": 8},
                  "learner": {"num_learners": 8, "max_tokens_per_microbatch": "auto", "activation_checkpointing": True}}
    )  # fmt: skip
    numbers = without_autos(QWEN3_8B, auto, H100)
    for more, fits in ((0.0, True), (0.03, True), (0.05, False)):
        share = {"gpu_memory_utilization": numbers.server.gpu_share + more}
        assert plan_gpu(QWEN3_8B, with_values(numbers, server=share), H100).server_fits == fits
    assert numbers.learner.token_budget >= auto.max_model_tokens


def test_the_first_step_is_compared_with_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    metrics = compare_with_plan(20 * GIB, 21 * GIB, left=9 * GIB, tokens=4096)
    assert metrics["memory/first_step_measured_gib"] == 20
    assert [record.levelname for record in caplog.records] == ["INFO"]
    compare_with_plan(26 * GIB, 21 * GIB, left=3 * GIB, tokens=4096)
    assert "set learner.max_tokens_per_microbatch, now 4096, to 2048" in caplog.records[-1].message

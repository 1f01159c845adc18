"""Two and four learners over gloo that cut the work in other ways than by trajectory: all come to what one comes to.

`sequence_parallel` cuts a micro-batch by its tokens, `replicas` shards a model over some of the ranks,
`expert_parallel_size` splits experts. And however many there are, each reads its own part of the model, and writes its
own part of an export.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayapp.runs.trajectories import write_trajectories
from support import make
from support.learners import save_llama

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_ERROR = 2e-6
"""Of the gradient's largest entry, as in tests/unit/learner/test_exactness.py."""

RANKS = '''
"""Imports once and forks the ranks of each world. Every rank goes through all cases of its world."""
import json, logging, sys, time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import rayapp.learner.state.export as export
import rayapp.learner.state.hf_folder as hf_folder
from actors.learner import Learner
from rayapp.config.config import Config
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Reward, RolloutStatus
from rayapp.engine.weights.buckets import unpack
from rayapp.learner.shares import Share, deal
from rayapp.runs.trajectories import read_groups
from support.learners import fork_ranks, import_learner, take_sgd, whole_weights
import torch

import_learner("gemma2", "glm4_moe", "gpt_oss")
models, trajectories, out = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
CASES = {
    1: [("tiny", "one", {}), ("six_heads", "one", {}), ("experts", "one", {}), ("tiny", "resumed", {}),
        ("gpt_oss", "one", {}), ("gemma2", "one", {}), ("experts", "routed", {"router_replay": True}),
        ("tiny", "taught", {"taught": "vocabulary"}),
        ("tiny", "sampled", {"taught": "sampled"}), ("eight", "one", {}), ("eight", "routed", {"router_replay": True}),
        ("eight", "skewed", {"router_replay": True}), ("eight", "adapted", {"lora": {"rank": 2}}),
        ("eight", "clipped", {"optimizer": {"max_grad_norm": 0.1}}), ("eight", "resumed", {}),
        ("tiny", "failed", {}), ("tiny", "packed", {})],
    2: [("tiny", "two", {}), ("tiny", "failed", {}), ("tiny", "packed", {}),
        ("tiny", "tokens", {"sequence_parallel": 2, "max_tokens_per_microbatch": 16}),
        ("six_heads", "tokens", {"sequence_parallel": 2}), ("experts", "two", {}),
        ("gpt_oss", "tokens", {"sequence_parallel": 2}), ("gemma2", "tokens", {"sequence_parallel": 2}),
        ("tiny", "checkpointed", {"sequence_parallel": 2, "activation_checkpointing": True}),
        ("tiny", "taught", {"taught": "vocabulary"}),
        ("tiny", "taught_by_tokens", {"taught": "vocabulary", "sequence_parallel": 2}),
        ("tiny", "sampled", {"taught": "sampled"}), ("experts", "routed", {"router_replay": True}),
        ("experts", "routed_tokens", {"router_replay": True, "sequence_parallel": 2}),
        ("eight", "split", {"expert_parallel_size": 2}), ("gpt_oss", "split", {"expert_parallel_size": 2}),
        ("eight", "checkpointed", {"expert_parallel_size": 2, "activation_checkpointing": True}),
        ("eight", "split_tokens", {"expert_parallel_size": 2, "sequence_parallel": 2}),
        ("eight", "adapted", {"expert_parallel_size": 2, "lora": {"rank": 2}}),
        ("eight", "skewed", {"router_replay": True, "expert_parallel_size": 2}),
        ("eight", "resumed", {"expert_parallel_size": 2})],
    4: [("tiny", "tokens", {"sequence_parallel": 4, "max_tokens_per_microbatch": 16}),
        ("tiny", "replicas", {"replicas": 2}), ("tiny", "both", {"replicas": 2, "sequence_parallel": 2}),
        ("experts", "four", {}), ("tiny", "saved", {"replicas": 2}),
        ("eight", "split", {"expert_parallel_size": 2}), ("eight", "each", {"expert_parallel_size": 4}),
        ("eight", "routed", {"router_replay": True, "expert_parallel_size": 2}),
        ("eight", "skewed", {"router_replay": True, "expert_parallel_size": 4}),
        ("eight", "clipped", {"optimizer": {"max_grad_norm": 0.1}, "expert_parallel_size": 2}),
        ("eight", "saved", {"expert_parallel_size": 2})],
}
def experts_of(token_ids):
    """Of three layers, by place and token: the same for tokens that are shared."""
    seeds = enumerate(token_ids.tolist())
    return np.array([[np.random.default_rng(seed).permutation(7)[:2] for _ in range(3)] for seed in seeds], np.uint8)


def routed(group, experts_of):
    return replace(
        group, trajectories=tuple(replace(t, routed_experts=experts_of(t.token_ids)) for t in group.trajectories)
    )


groups = [routed(group, experts_of) for group in read_groups(Path(trajectories))]
to_two = [routed(group, lambda token_ids: experts_of(token_ids) % 1 + [0, 1]) for group in groups]
lost = {"reward": Reward.invalid("sandbox", "gone"), "status": RolloutStatus.ERROR_SANDBOX}
failed = [groups[0], replace(groups[1], trajectories=tuple(replace(t, **lost) for t in groups[1].trajectories))]
# An estimator and a KL in the reward that score everything first.
SCORES_FIRST = {"adv_estimator": "optimal_token_baseline", "kl_in_reward": {"coef": 0.5, "type": "k3"}}


def config_of(world, model, case, changes):
    changes = dict(changes)
    over = changes.pop("taught", None)
    if case == "packed":
        changes["lora"] = {"rank": 4, "send": "merged"}
    return Config.model_validate({
        "distillation": {"teacher": models["gemma2"], "kl_over": over} if over else {},
        "model": {"path": models[model], **({"quantization": "nf4"} if case == "packed" else {})},
        "cluster": {"device": "cpu"}, "train": {"groups_per_step": 2, "num_minibatches": 2} if case == "failed" else {},
        "algorithm": SCORES_FIRST if case == "failed" else {"entropy_coef": 0.01},
        "checkpoint": {"save_contents": ["model", "optimizer", "hf_model"]},
        "rollout": {"group_size": 4, "max_prompt_tokens": 16, "max_completion_tokens": 16},
        "learner": {"num_learners": world, "compute_dtype": "float32", "max_tokens_per_microbatch": 40,
                    "cpu_threads": 1, "optimizer": {"lr": 1e-3, "max_grad_norm": 1e9}, **changes},
    })


def train(learner, config, world, rank, step, groups=groups):
    summaries = tuple(summarize_group(group, time_total_s=0.0) for group in groups)
    shares = deal(summaries, config, world // config.learner.sequence_parallel)
    if groups is failed and world == 2:
        shares = ((Share(0),), (Share(1),))
    mine = shares[rank // config.learner.sequence_parallel]
    return learner.train_step(step, summaries, shares, *(groups[share.position] for share in mine))


def run(world, rank, next_port):
    read, written = [], []
    class Listener(logging.Handler):
        def emit(self, record):
            if record.msg.startswith("read "):
                read.append(record.args)
    loading = logging.getLogger("rayapp.learner.state.pretrained")
    loading.setLevel(logging.INFO), loading.addHandler(Listener())
    write_file = hf_folder.write_file
    export.write_file = lambda path, tensors: (written.append(path.name), write_file(path, tensors))
    export.hf_layout = partial(hf_folder.hf_layout, file_bytes=1)  # a file for each layer
    for model, case, changes in CASES[world]:
        read.clear(), written.clear()
        config = config_of(world, model, case, changes)
        learner = Learner(config, rank, world, "127.0.0.1", next_port())
        name, facts, later = f"{model}-{case}-{world}", {}, {}
        own_groups = to_two if case == "skewed" else groups
        checkpoint = str(out / f"{model}-checkpoint" / "learner")
        before = whole_weights(learner._learner)
        if case in ("failed", "packed"):
            for step in (1, 2):
                facts["metrics"] = train(learner, config, world, rank, step, failed if case == "failed" else groups)
            buckets = learner.export_weights(0, 1 << 20)
            after = {n: t.float().numpy() for b in buckets for n, t in unpack(b.entries, torch.from_numpy(b.data))}
        elif case == "resumed":
            assert learner.load_checkpoint(checkpoint) == 1
            after = whole_weights(learner._learner)
            train(learner, config, world, rank, 2)
            later = whole_weights(learner._learner)
        elif case == "saved":
            train(learner, config, world, rank, 1)
            after = whole_weights(learner._learner)
            learner.begin_checkpoint(checkpoint, 1)
            while not learner.checkpoint_done():
                time.sleep(0.01)
            train(learner, config, world, rank, 2)
            later = whole_weights(learner._learner)
        else:
            take_sgd(learner._learner)  # before a forward, which replaces the parameters by gathered ones
            facts["log_probs"] = [row.tolist() for row in learner.log_probs_of(own_groups[0])]
            facts["metrics"] = train(learner, config, world, rank, 1, own_groups)
            after = whole_weights(learner._learner)
            rows = tuple(t for group in own_groups[:2] for t in group.trajectories)
            size = config.learner.sequence_parallel
            mine = rows[rank // size :: world // size]
            facts["sft_loss"] = learner.supervised_loss(mine, {})
            facts["sft"] = learner.supervised_step(2, mine, {})
            learner.export_hf(str(out / name))
        facts |= {"read": read[0], "written": list(written)}
        (out / f"{name}-{rank}.json").write_text(json.dumps(facts))
        if rank == 0:
            before, later = ({f"{kind}.{n}": t for n, t in weights.items()}
                             for kind, weights in (("before", before), ("later", later)))
            np.savez(out / f"{name}.npz", **before, **later, **after)
        learner.close()


for world in (4, 2, 1):
    fork_ranks(world, run)
'''

AS_ONE = [
    ("tiny-two-2", "tiny-one-1"),
    ("tiny-tokens-2", "tiny-one-1"),
    ("tiny-checkpointed-2", "tiny-one-1"),
    ("six_heads-tokens-2", "six_heads-one-1"),
    ("gpt_oss-tokens-2", "gpt_oss-one-1"),
    ("gemma2-tokens-2", "gemma2-one-1"),
    ("tiny-tokens-4", "tiny-one-1"),
    ("tiny-both-4", "tiny-one-1"),
    ("tiny-taught_by_tokens-2", "tiny-taught-1"),
    ("experts-routed-2", "experts-routed-1"),
    ("experts-routed_tokens-2", "experts-routed-1"),
    ("eight-split-2", "eight-one-1"),
    ("eight-split-4", "eight-one-1"),
    ("eight-each-4", "eight-one-1"),
    ("eight-checkpointed-2", "eight-one-1"),
    ("eight-split_tokens-2", "eight-one-1"),
    ("eight-adapted-2", "eight-adapted-1"),
    ("eight-clipped-4", "eight-clipped-1"),
    ("eight-routed-4", "eight-routed-1"),
    ("eight-skewed-2", "eight-skewed-1"),
    ("eight-skewed-4", "eight-skewed-1"),
    ("gpt_oss-split-2", "gpt_oss-one-1"),
]
"""Two ranks; two that share micro-batches, of two key heads; as many ranks as make two ranks share one; three key heads
on two ranks; windows with sinks, and with caps on scores and logits; tokens and replicas at once; a teacher; experts
that a server chose, also where each rank has a micro-batch of its own; experts split over all ranks and over half of
them, also with tokens, adapters and experts that a server chose. In the skewed case all tokens go to one rank. gpt_oss
has experts with biases."""

BY_RANKS = [
    ("tiny", "two", 2),
    ("experts", "two", 2),
    ("experts", "four", 4),
    ("eight", "split", 2),
    ("eight", "split", 4),
    ("eight", "each", 4),
]


@pytest.fixture(scope="module")
def found(tiny_model: Path, run_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case: weights before and after rank 0's step, and each rank's facts."""
    out = tmp_path_factory.mktemp("parallel")
    models = {
        "tiny": tiny_model,
        "six_heads": saved(out / "six_heads", tiny_model, num_attention_heads=6, num_key_value_heads=3),
        "experts": saved_experts(out / "experts", tiny_model, 7),
        "eight": saved_experts(out / "eight", tiny_model, 8),
        "gpt_oss": saved_family(out / "gpt_oss"),
        "gemma2": saved_family(out / "gemma2"),
    }
    paths = json.dumps({name: str(path) for name, path in models.items()})
    run_ranks(RANKS, paths, written_groups(out, seed=5), out)
    cases: dict[str, Any] = {"folder": out, "models": models}
    for file in out.glob("*.npz"):
        world = int(file.stem.rpartition("-")[2])
        facts = [json.loads((out / f"{file.stem}-{rank}.json").read_text()) for rank in range(world)]
        cases[file.stem] = {"weights": dict(np.load(file)), "ranks": facts}
    return cases


def written_groups(folder: Path, *, seed: int) -> Path:
    """Three groups of four trajectories each, of random tokens and rewards: with two ranks one gets more."""
    rng = np.random.default_rng(seed)
    groups = []
    for group_id in range(3):
        prompt, members = rng.integers(2, 90, 5), []
        for _ in range(4):
            tokens = np.concatenate([prompt, rng.integers(2, 90, rng.integers(2, 12))])
            members.append(make.trajectory(tokens, prompt.size, reward=float(rng.normal()), log_prob=-4.0))
        groups.append(make.group(*members, group_id=group_id))
    path = folder / "step=000001.parquet"
    write_trajectories(path, 1, groups)
    return path


def saved(folder: Path, tiny_model: Path, **shape: int) -> Path:
    save_llama(
        folder, vocab_size=97, hidden_size=96, intermediate_size=64, num_hidden_layers=2, dtype="bfloat16", **shape
    )
    return with_tokenizer(folder, tiny_model)


def saved_experts(folder: Path, tiny_model: Path, num_experts: int) -> Path:
    """Experts, fused into one tensor by transformers and apart in the file; a head of its own. No number of ranks here
    divides seven."""
    import torch
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(
        Glm4MoeConfig(
            vocab_size=97, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, head_dim=8,
            num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, n_routed_experts=num_experts,
            num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=256,
        )
    ).to(torch.bfloat16)  # fmt: skip
    for layer in model.model.layers[1:]:
        bias = layer.mlp.gate.e_score_correction_bias
        bias.copy_(torch.randn(bias.shape))
    model.save_pretrained(folder)
    return with_tokenizer(folder, tiny_model)


def saved_family(folder: Path) -> Path:
    from transformers import CONFIG_MAPPING

    from rayapp.storage.models.families import FAMILIES, TINY
    from support.family_trial import save_tiny

    tiny = TINY | {"vocab_size": 97} | dict(FAMILIES[folder.name].tiny)
    save_tiny(CONFIG_MAPPING[folder.name](**tiny), folder)
    return folder


def with_tokenizer(folder: Path, tiny_model: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    return folder


def gradient(case: dict[str, Any]) -> dict[str, np.ndarray]:
    weights = case["weights"]
    return {name: weights[f"before.{name}"] - weights[name] for name in of_case(weights)}


def of_case(weights: dict[str, np.ndarray]) -> list[str]:
    return [name for name in weights if not name.startswith(("before.", "later."))]


def assert_same_gradient(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(np.abs(array).max()) for array in expected.values())
    assert scale > 1e-3
    for name, array in expected.items():
        error = float(np.abs(found[name] - array).max())
        assert error < MAX_ERROR * scale + 1e-7, f"{name}: {error} of {scale}"


@pytest.mark.parametrize(("case", "alone"), AS_ONE)
def test_ranks_have_the_gradient_the_log_probs_and_the_metrics_of_one(
    case: str, alone: str, found: dict[str, Any]
) -> None:
    assert_same_gradient(gradient(found[case]), gradient(found[alone]))
    [expected], ranks = found[alone]["ranks"], found[case]["ranks"]
    for rank in ranks:
        for own, row in zip(rank["log_probs"], expected["log_probs"], strict=True):
            np.testing.assert_allclose(own, row, atol=2e-6)
    counts = ["tokens_trained", "num_trajectories", "share_computed", "overlong_filtered"]
    means = ["loss", "entropy", "grad_norm", "pg_clipfrac"]
    for name in counts:
        assert ranks[0]["metrics"][f"learner/{name}"] == expected["metrics"][f"learner/{name}"], name
    for name in means:
        np.testing.assert_allclose(
            ranks[0]["metrics"][f"learner/{name}"], expected["metrics"][f"learner/{name}"], rtol=1e-5, atol=1e-7
        )
    for name in ("sft/loss", "sft/entropy", "sft/num_tokens", "learner/grad_norm"):
        np.testing.assert_allclose(ranks[0]["sft"][name], expected["sft"][name], rtol=1e-5)
    np.testing.assert_allclose(ranks[0]["sft_loss"], expected["sft_loss"], rtol=1e-5)


@pytest.mark.parametrize("case", ["failed", "packed"])
def test_two_ranks_take_the_steps_of_one(case: str, found: dict[str, Any]) -> None:
    """What a rank holds, here failed groups only, must not decide what it does next. Packed: weights of four bits."""
    two, one = found[f"tiny-{case}-2"], found[f"tiny-{case}-1"]
    norms = [each["ranks"][0]["metrics"]["learner/grad_norm"] for each in (two, one)]
    np.testing.assert_allclose(*norms, rtol=1e-4)
    assert of_case(two["weights"]) == of_case(one["weights"])
    for name in of_case(one["weights"]):
        # Two Adam steps at 1e-3: a gradient that differs in its last bits moves a weight by far less than one of bf16.
        np.testing.assert_allclose(two["weights"][name], one["weights"][name], rtol=1e-2, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("case", ["taught", "sampled"])
def test_two_ranks_distil_as_one_does(case: str, found: dict[str, Any]) -> None:
    two, one = found[f"tiny-{case}-2"], found[f"tiny-{case}-1"]
    assert_same_gradient(gradient(two), gradient(one))
    kl = [case["ranks"][0]["metrics"]["distillation/kl"] for case in (two, one)]
    np.testing.assert_allclose(*kl, rtol=1e-5)


def test_a_model_that_is_there_twice_has_the_gradient_of_one_that_is_sharded_over_all(found: dict[str, Any]) -> None:
    assert_same_gradient(gradient(found["tiny-replicas-4"]), gradient(found["tiny-one-1"]))


@pytest.mark.parametrize(("model", "world"), [("tiny", 1), ("eight", 1), ("eight", 2)])
def test_other_ranks_go_on_with_what_four_ranks_saved(model: str, world: int, found: dict[str, Any]) -> None:
    """With two replicas of two (tiny), with experts over two of four (eight)."""
    saved, resumed = found[f"{model}-saved-4"]["weights"], found[f"{model}-resumed-{world}"]["weights"]
    own = of_case(saved)
    assert all(np.array_equal(saved[name], resumed[name]) for name in own)
    assert any(not np.array_equal(saved[name], saved[f"before.{name}"]) for name in own)
    assert any(not np.array_equal(saved[name], saved[f"later.{name}"]) for name in own)
    for name in own:
        np.testing.assert_allclose(resumed[f"later.{name}"], saved[f"later.{name}"], atol=1e-6)


@pytest.mark.parametrize(("model", "case", "world"), BY_RANKS)
def test_every_rank_reads_its_own_part_of_the_model_and_writes_its_own_files_under_the_hubs_names(
    model: str, case: str, world: int, found: dict[str, Any]
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    case_found = found[f"{model}-{case}-{world}"]
    expected = AutoModelForCausalLM.from_pretrained(found["models"][model], dtype="float32")
    for name, parameter in expected.named_parameters():
        assert np.array_equal(case_found["weights"][f"before.causal_lm.{name}"], parameter.detach().numpy()), name
    parts = [rank["read"][0] / rank["read"][1] for rank in case_found["ranks"]]
    assert max(parts) < 1.2 / world + 0.05  # seven experts on four ranks are two on the busiest
    assert sum(parts) < 1.05

    folder: Path = found["folder"] / f"{model}-{case}-{world}"
    written = [rank["written"] for rank in case_found["ranks"]]
    assert sorted(name for names in written for name in names) == sorted(
        file.name for file in folder.glob("*.safetensors")
    )
    assert max(map(len, written)) - min(map(len, written)) <= 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    exported = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    original = load_file(found["models"][model] / "model.safetensors")
    assert index.keys() == exported.keys() == original.keys()
    assert {name: t.shape for name, t in exported.items()} == {name: t.shape for name, t in original.items()}


def test_what_is_saved_while_training_goes_on_is_written_by_all_ranks_too(found: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = found["folder"] / "tiny-checkpoint" / "hf_model"
    assert all(rank["written"] for rank in found["tiny-saved-4"]["ranks"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        saved = found["tiny-saved-4"]["weights"][f"causal_lm.{name}"]
        np.testing.assert_allclose(parameter.float().detach().numpy(), saved, rtol=2**-8, atol=1e-8)
    assert AutoTokenizer.from_pretrained(folder).encode("a")

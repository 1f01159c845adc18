"""However the work is split, the gradient equals that of one plain padded float32 computation."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayapp.config.config import Config, with_values
from rayapp.config.other_models import DistillationSection
from rayapp.core.errors import InputError, LearnerError
from rayapp.core.trajectories import path_to
from rayapp.core.types import AllowedTokens, Group, Reward, RolloutStatus, Trajectory
from rayapp.learner.batch import TrainItem, make_micro_batch
from rayapp.learner.build import with_recomputation
from rayapp.learner.device import check_compiler, compiled
from rayapp.learner.distributed import NCCL_OF_BATCH_INVARIANCE
from rayapp.learner.metrics import row_facts
from rayapp.learner.policy import PolicyModel, recompute, reduce_gradients, to_device
from rayapp.rollout.recorder import Recorder
from support import make
from support.learners import counted_operators, learner_alone, save_llama, take_step, whole_weights

MAX_GRADIENT_ERROR = 2e-6
"""Relative to the gradient's largest entry: float32 has 24 bits, and the sums run over a few hundred terms."""
GROUP_SIZE = 4
PLAIN = DistillationSection()


def trajectory(prompt: list[int], response: list[int], reward: float, *, valid: bool = True) -> Trajectory:
    lost: dict[str, Any] = {"status": RolloutStatus.ERROR_SANDBOX}
    scored = Reward(value=reward) if valid else Reward.invalid("test", "")
    return make.trajectory(prompt + response, len(prompt), reward=scored, log_prob=-1.0, **({} if valid else lost))


def make_groups(seed: int, *, with_invalid: bool = False) -> list[Group]:
    """Two groups; two trajectories of each begin alike, and two are the same, as those of small models often are."""
    rng = np.random.default_rng(seed)
    groups = []
    for group_id in range(2):
        prompt = rng.integers(2, 90, rng.integers(2, 9)).tolist()
        begin = rng.integers(2, 90, 3).tolist()
        responses = [begin + rng.integers(2, 90, rng.integers(1, 12)).tolist() for _ in range(2)]
        responses += [rng.integers(2, 90, rng.integers(1, 12)).tolist()] * 2
        rewards = rng.normal(size=GROUP_SIZE)
        trajectories = (
            trajectory(prompt, response, float(reward), valid=not (with_invalid and i == 1))
            for i, (response, reward) in enumerate(zip(responses, rewards, strict=True))
        )
        groups.append(make.group(*trajectories, group_id=group_id))
    return groups


def make_config(tiny_model: Path, *, distillation: DistillationSection = PLAIN, **learner: object) -> Config:
    own = {"max_tokens_per_microbatch": 64, "optimizer": {"lr": 1.0, "max_grad_norm": 1e9}, **learner}
    lengths = {"group_size": GROUP_SIZE, "max_prompt_tokens": 16, "max_completion_tokens": 16}
    return make.config(tiny_model, distillation=distillation.model_dump(), rollout=lengths, learner=own)


def gradient_of_step(config: Config, groups: list[Group]) -> dict[str, torch.Tensor]:
    """Return the gradient of a step: with plain SGD at learning rate 1 it is the weights before minus the weights
    after."""
    with learner_alone(config) as (learner, _):
        learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)  # type: ignore[assignment]
        before = whole_weights(learner)
        take_step(learner, groups)
        after = whole_weights(learner)
    return {name.rpartition("model.")[2]: torch.from_numpy(before[name] - after[name]) for name in before}


def test_one_gpu_reduces_gradients_and_reads_results_once_a_step_with_the_bits_of_a_cpu(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced, done = list[bool](), list[str]()

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            done.append(name)
            return function(*args)

        return call

    def as_on_gpu(model: PolicyModel, *, is_last: bool) -> None:
        reduced.append(is_last and model.reduces_once)
        reduce_gradients(model, is_last=is_last)

    config = make_config(tiny_model, max_tokens_per_microbatch=32)
    expected = gradient_of_step(config, make_groups(5))
    monkeypatch.setattr("rayapp.learner.step.reduce_gradients", as_on_gpu)
    monkeypatch.setattr("rayapp.learner.step.row_facts", noted("read", row_facts))
    monkeypatch.setattr("rayapp.learner.step.to_device", noted("compute", to_device))
    found = gradient_of_step(config, make_groups(5))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert reduced == [False, True]  # two micro-batches
    assert done == ["compute", "compute", "read", "read"]  # reading waits for the GPU


def test_weights_are_cast_once_a_step_where_they_stay_gathered_else_for_each_forward_and_backward(
    tiny_model: Path,
) -> None:
    config = make_config(tiny_model, max_tokens_per_microbatch=32, compute_dtype="bfloat16")
    casts, weights = list[int](), list[dict[str, Any]]()
    for keeps in (True, False):
        with learner_alone(config) as (learner, _):
            assert learner.model.keeps_gathered  # on a CPU
            layers: Any = learner.model.causal_lm.get_decoder().layers  # type: ignore[operator]
            inside, everywhere = (len(list(each.parameters())) for each in (layers, learner.model))
            learner.model.keeps_gathered = keeps
            for layer in layers:
                layer.set_reshard_after_forward(not keeps)
            with counted_operators() as counts:
                take_step(learner, make_groups(5))
            casts.append(counts["aten::_to_copy"])
            weights.append(whole_weights(learner))
    # Two micro-batches: a layer's weights are cast four times, not once, and embedding and last norm twice.
    assert casts[1] - casts[0] == 3 * inside + (everywhere - inside)
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_with_deterministic_kernels_a_step_runs_and_asks_torch_cublas_and_nccl_for_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", *NCCL_OF_BATCH_INVARIANCE):
        monkeypatch.setenv(name, "")
    config = make_config(tiny_model)
    again = with_values(config, run={"deterministic": True})
    try:
        assert gradient_of_step(again, make_groups(3))
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert all(os.environ[name] for name in NCCL_OF_BATCH_INVARIANCE)
    finally:
        torch.use_deterministic_algorithms(False)


def plain_gradient(
    tiny_model: Path, groups: list[Group], distillation: DistillationSection = PLAIN
) -> dict[str, torch.Tensor]:
    """GRPO on a padded batch: -sum(advantage x log-prob) / number of response tokens, as arXiv:2402.03300 has it when
    the policy is the one that sampled. A teacher adds to the advantages, or its KL at every position to the loss."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    whole = [(t, a) for group in groups for t, a in zip(group.trajectories, plain_advantages(group), strict=True)]
    rows = [(part, a) for t, a in whole for part in unfolded(t)]
    width = max(t.num_tokens for t, _ in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width)
    attended = torch.zeros(len(rows), width, dtype=torch.long)
    for i, (t, _) in enumerate(rows):
        tokens[i, : t.num_tokens] = torch.from_numpy(t.token_ids.astype(np.int64))
        attended[i, : t.num_tokens] = 1
        if t.is_trainable:
            mask[i, : t.num_tokens] = torch.from_numpy(t.response_mask.astype(np.float32))
    logits = model(tokens, attention_mask=attended).logits[:, :-1]
    allowed = torch.ones_like(logits, dtype=torch.bool)
    for i, (t, _) in enumerate(rows):
        allowed[i, : t.num_tokens - 1] = torch.from_numpy(allowed_of(t, logits.shape[-1])[1:])
    logits = logits.masked_fill(~allowed, float("-inf"))
    log_p = logits.log_softmax(-1)
    log_probs = log_p.gather(2, tokens[:, 1:, None])[..., 0]
    advantages = torch.tensor([a for _, a in rows])[:, None] * distillation.reward_weight
    pull = torch.zeros_like(log_probs)
    if distillation.teacher:
        teacher = AutoModelForCausalLM.from_pretrained(distillation.teacher, dtype=torch.float32)
        log_q = teacher(tokens, attention_mask=attended).logits[:, :-1, : logits.shape[-1]].log_softmax(-1).detach()
        if distillation.kl_over == "sampled":
            log_ratio = (log_q.gather(2, tokens[:, 1:, None])[..., 0] - log_probs).detach()
            worth = log_ratio if distillation.kl == "reverse" else log_ratio.exp() - 1
            advantages = advantages + distillation.weight * worth
        else:
            pull = distillation.weight * plain_kl(log_p, log_q, distillation)
    loss = ((pull - advantages * log_probs) * mask[:, 1:]).sum() / mask[:, 1:].sum()
    loss.backward()
    gradients = ((name, p.grad) for name, p in model.named_parameters())
    return {name.rpartition("model.")[2]: grad for name, grad in gradients if grad is not None}


def plain_kl(log_p: torch.Tensor, log_q: torch.Tensor, distillation: DistillationSection) -> torch.Tensor:
    """Of the last dimension."""
    p, q = log_p.exp(), log_q.exp()
    above, below = (p, q) if distillation.kl == "reverse" else (q, p)
    return (above * (above.log() - below.log())).sum(-1)


def allowed_of(t: Trajectory, vocabulary: int) -> np.ndarray:
    """Return the tokens that a form allowed in the place of each token, (T, V)."""
    dense = np.ones((t.num_tokens, vocabulary), np.bool_)
    if t.allowed is not None:
        bits = np.unpackbits(t.allowed.masks.view(np.uint8), axis=1, bitorder="little")[:, :vocabulary].astype(np.bool_)
        is_masked = t.allowed.mask_of >= 0
        dense[is_masked] = bits[t.allowed.mask_of[is_masked]]
    return dense


def random_masks(rng: np.random.Generator, token_ids: np.ndarray) -> AllowedTokens:
    """Return masks of about half of 97 tokens, each with the token that was sampled; some tokens have none."""
    bits = np.zeros((token_ids.size, 128), np.bool_)
    bits[:, :97] = rng.random((token_ids.size, 97)) < 0.5
    bits[np.arange(token_ids.size), token_ids] = True
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return AllowedTokens(masks=masks, mask_of=np.where(rng.random(token_ids.size) < 0.3, -1, np.arange(token_ids.size)))


def under_forms(group: Group, seed: int) -> Group:
    """Return the trajectories with masks, different ones also where two trajectories are the same tokens."""
    rng = np.random.default_rng(seed)
    masked = [
        t if i == 0 else replace(t, allowed=random_masks(rng, t.token_ids)) for i, t in enumerate(group.trajectories)
    ]
    return replace(group, trajectories=tuple(masked))


def unfolded(t: Trajectory) -> list[Trajectory]:
    """Return a forked trajectory as one sequence for each turn, in which only that turn is trained."""
    if not t.forks:
        return [t]
    parts = []
    for turn in t.turns:
        path = path_to(turn.end - 1, t.forks)
        own = path >= turn.start
        allowed = None if t.allowed is None else t.allowed.of(path)
        parts.append(replace(t, token_ids=t.token_ids[path], response_mask=own, forks=(), turns=(), allowed=allowed))
    return parts


def plain_advantages(group: Group) -> np.ndarray:
    valid = np.array([t.is_trainable for t in group.trajectories])
    rewards = np.array([t.reward.value for t in group.trajectories])
    mean, std = rewards[valid].mean(), rewards[valid].std(ddof=1)
    return np.where(valid, (rewards - mean) / (std + 1e-6), 0.0).astype(np.float32)


def assert_same_gradient(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected.keys() <= found.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max())
        assert error < MAX_GRADIENT_ERROR * scale + 1e-7, f"{name}: {error} of {scale}"


@pytest.mark.timeout(240)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**16),
    max_tokens=st.sampled_from([32, 40, 64, 512]),
    share_prefixes=st.booleans(),
    checkpointing=st.sampled_from([False, True, 1]),  # 1: the first of two layers
    chunk=st.sampled_from([16, 1024]),
    cpu_offload=st.booleans(),
)
def test_any_packing_and_split_gives_the_plain_gradient(
    tiny_model: Path,
    seed: int,
    max_tokens: int,
    share_prefixes: bool,
    checkpointing: bool | int,
    chunk: int,
    cpu_offload: bool,
) -> None:
    groups = make_groups(seed)
    config = make_config(
        tiny_model,
        max_tokens_per_microbatch=max_tokens,
        share_prefixes=share_prefixes,
        activation_checkpointing=checkpointing,
        log_prob_chunk_tokens=chunk,
        cpu_offload=cpu_offload,
    )
    assert_same_gradient(gradient_of_step(config, groups), plain_gradient(tiny_model, groups))


@pytest.fixture(scope="module")
def tiny_teacher(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another size over the same characters, whose head has three rows of padding."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    shutil.copytree(tiny_model, folder)
    return save_llama(folder, dtype="float32", vocab_size=100, hidden_size=64, num_hidden_layers=3)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
@pytest.mark.parametrize("kl_over", ["sampled", "vocabulary"])
@pytest.mark.parametrize(("weight", "reward_weight", "share_prefixes"), [(1.0, 0.0, True), (0.5, 2.0, False)])
def test_a_teacher_gives_the_gradient_of_a_dense_padded_batch(
    tiny_model: Path, tiny_teacher: Path, kl: str, kl_over: str, weight: float, reward_weight: float, *,
    share_prefixes: bool,
) -> None:  # fmt: skip
    values = {"kl": kl, "kl_over": kl_over, "weight": weight, "reward_weight": reward_weight}
    section = DistillationSection.model_validate({"teacher": str(tiny_teacher), **values})
    groups, split = make_groups(5), {"max_tokens_per_microbatch": 40, "log_prob_chunk_tokens": 16}
    config = make_config(tiny_model, distillation=section, share_prefixes=share_prefixes, **split)

    assert_same_gradient(gradient_of_step(config, groups), plain_gradient(tiny_model, groups, section))


def test_invalid_trajectories_are_in_neither_the_baseline_nor_the_loss(tiny_model: Path) -> None:
    groups = make_groups(7, with_invalid=True)
    assert_same_gradient(gradient_of_step(make_config(tiny_model), groups), plain_gradient(tiny_model, groups))


@pytest.mark.timeout(240)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**16),
    max_tokens=st.sampled_from([40, 512]),
    share_prefixes=st.booleans(),
    chunk=st.sampled_from([16, 1024]),
    forks=st.booleans(),
)
def test_under_forms_the_gradient_is_that_of_the_distribution_over_the_allowed_tokens(
    tiny_model: Path, seed: int, max_tokens: int, chunk: int, *, share_prefixes: bool, forks: bool
) -> None:
    groups = make_groups(seed)
    if forks:
        groups, max_tokens = [forking(group, seed + i, with_forms=True) for i, group in enumerate(groups)], 512
    else:
        groups = [under_forms(group, seed + i) for i, group in enumerate(groups)]
    config = make_config(
        tiny_model,
        max_tokens_per_microbatch=max_tokens,
        share_prefixes=share_prefixes,
        log_prob_chunk_tokens=chunk,
    )
    assert_same_gradient(gradient_of_step(config, groups), plain_gradient(tiny_model, groups))


def forking(group: Group, seed: int, *, with_forms: bool = False) -> Group:
    """Return trajectories that are trees: turns continue from any earlier turn, are retried, or begin a
    conversation."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for t in group.trajectories:
        tree, ends = Recorder(), [-1]
        prompt = group.prompt.token_ids.tolist()
        for number in range(rng.integers(1, 7)):
            after = int(rng.choice(ends)) if number else -1
            goes_on = rng.integers(2, 90, rng.integers(0, 4)).tolist()
            read = prompt[: rng.integers(2, len(prompt) + 1)] if after < 0 else goes_on
            sampled = make.completion(*rng.integers(2, 90, int(rng.integers(1, 6))).tolist())
            if with_forms and rng.random() < 0.6:
                sampled = replace(sampled, allowed=random_masks(rng, sampled.token_ids))
            ends += tree.add_turn(after, read, sampled, text="", started_at_s=0.0)
        trajectories.append(replace(tree.trajectory(), reward=t.reward))
    return replace(group, trajectories=tuple(trajectories))


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**16), max_tokens=st.sampled_from([96, 512]), share_prefixes=st.booleans())
def test_a_rollout_that_forks_trains_each_sampled_token_once_and_weighs_once(
    tiny_model: Path, seed: int, max_tokens: int, *, share_prefixes: bool
) -> None:
    groups = [forking(group, seed + i) for i, group in enumerate(make_groups(seed))]
    config = make_config(tiny_model, max_tokens_per_microbatch=max_tokens, share_prefixes=share_prefixes)
    assert_same_gradient(gradient_of_step(config, groups), plain_gradient(tiny_model, groups))


def multi_turn(group: Group, seed: int) -> Group:
    """Return the same tokens, some in the middle marked as a tool's: read, but not trained on."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for t in group.trajectories:
        mask = t.response_mask.copy()
        inside = np.flatnonzero(mask)[1:-1]
        mask[inside[rng.random(inside.size) < 0.4]] = False
        trajectories.append(replace(t, response_mask=mask, rollout_log_probs=np.where(mask, -1.0, 0.0).astype("f4")))
    return replace(group, trajectories=tuple(trajectories))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), share_prefixes=st.booleans())
def test_positions_and_targets_are_those_that_transformers_has_for_padded_rows(
    seed: int, *, share_prefixes: bool
) -> None:
    groups = [multi_turn(group, seed) for group in make_groups(seed)]
    rows = [(g, t) for g, group in enumerate(groups) for t in group.trajectories]
    items = [
        TrainItem(row=i, group=g, trajectory=t, advantages=np.ones(t.num_response_tokens, np.float32))
        for i, (g, t) in enumerate(rows)
    ]
    batch = make_micro_batch(items, share_prefixes=share_prefixes)
    width = max(t.num_tokens for _, t in rows)
    for i, (path, item) in enumerate(zip(batch.packing.paths, batch.items, strict=True)):
        t = item.trajectory
        attended = (np.arange(width) >= width - t.num_tokens).astype(int)  # padded on the left, as for generation
        # transformers' position ids where a caller gives a mask only: (mask.cumsum - 1), 1 on padding
        positions = (attended.cumsum() - 1)[attended == 1]
        assert batch.packing.position_ids[path].tolist() == positions[: path.size].tolist()
        assert batch.packing.token_ids[path].tolist() == t.token_ids[: path.size].tolist()
        # transformers shifts labels by one: token k is predicted where token k - 1 is read
        responses = np.flatnonzero(t.response_mask)
        predicted_at = batch.head_positions[batch.row_heads[i, : responses.size]]
        assert predicted_at.tolist() == path[responses - 1].tolist()
        assert batch.pair_targets[batch.row_pairs[i, : responses.size]].tolist() == t.token_ids[responses].tolist()
        assert batch.mask[i].sum() == responses.size


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_norms_positions_and_mlps_give_the_plain_gradient(tiny_model: Path, *, checkpointing: bool) -> None:
    import transformers.models.llama.modeling_llama as llama

    rotary, groups = llama.apply_rotary_pos_emb, make_groups(5)
    try:
        config = make_config(tiny_model, compile=True, activation_checkpointing=checkpointing)
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        found = gradient_of_step(config, groups)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 3
        assert not torch._dynamo.utils.counters["graph_break"]
    finally:
        llama.apply_rotary_pos_emb = rotary
    assert_same_gradient(found, plain_gradient(tiny_model, groups))


def test_a_compiled_norm_has_its_epsilon_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    inputs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, given: list[Any]) -> Any:
        inputs.extend(given)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    norm, hidden = LlamaRMSNorm(8), torch.randn(1, 33, 8)
    assert torch.equal(compiled.__wrapped__(LlamaRMSNorm.forward)(norm, hidden), norm(hidden))
    # An input with one number would be a tensor on the CPU, also if everything else is on a GPU.
    assert sorted(tensor.numel() for tensor in inputs if isinstance(tensor, torch.Tensor)) == [8, 33 * 8]


def test_a_model_without_a_switch_for_each_layer_recomputes_all_or_none() -> None:
    asked: list[object] = []
    decoder = SimpleNamespace(layers=[object(), object()])
    model = SimpleNamespace(
        gradient_checkpointing_enable=lambda **keys: asked.append(keys), get_decoder=lambda: decoder
    )
    recompute(model, 0)
    assert not asked
    recompute(model, 2)
    assert asked
    with pytest.raises(InputError, match="can't recompute only 1 of its 2 layers"):
        recompute(model, 1)


def test_every_rank_on_a_gpu_recomputes_as_many_layers_as_the_one_that_needs_most(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayapp.learner.build.room_here", lambda: 8 << 30)
    config = make_config(tiny_model, activation_checkpointing="auto")
    for device, others, number in (("cuda", 0, 0), ("cuda", 2, 2), ("cpu", 2, 0)):
        ranks: Any = SimpleNamespace(device=torch.device(device), gather=lambda mine, others=others: [mine, others])
        assert with_recomputation(config, ranks).learner.activation_checkpointing == number


def test_what_can_not_be_compiled_here_is_said_at_the_start(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LearnerError, match=r"has no C\+\+ compiler .* which torch.compile needs for device cpu"):
        gradient_of_step(make_config(tiny_model, compile=True), make_groups(5))
    with pytest.raises(LearnerError, match=r"has no C compiler \(CC, or gcc or clang\).* set learner.compile=false"):
        check_compiler("cuda")
    monkeypatch.setenv("CC", sys.executable)  # any program: only its place is looked up
    with pytest.raises(LearnerError, match="has no Triton, which"):
        check_compiler("cuda")

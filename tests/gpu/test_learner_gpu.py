"""The learner on one CUDA device: memory against the plan, varlen packing, chunked log-probs, asynchronous checkpoints.

make test ARGS=tests/gpu
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayapp.config.config import Config
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Group, Prompt
from rayapp.learner.attention import packed_attention, plan_attention
from rayapp.learner.distributed import Ranks
from rayapp.learner.log_probs import HeadOptions, Targets, token_log_probs
from rayapp.learner.memory.plan import RUNTIME_BYTES, plan_learner
from rayapp.learner.memory.shape import model_shape
from rayapp.learner.memory.token_budget import find_token_budget, measure_need
from rayapp.learner.packing import pack
from rayapp.learner.shares import Share
from rayapp.learner.state.checkpoint import begin_save, load_learner
from rayapp.learner.step import PolicyLearner
from support import make
from support.learners import learner_alone, save_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine"),
]

MIB, GIB = 2**20, 2**30
MAX_PLAN_ERROR = 0.15
"""Of the plan without its guess of the CUDA runtime, which torch's allocator does not see (issue 6)."""
GROUP_SIZE, PROMPT, COMPLETION = 8, 128, 384


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """168M parameters: 12 layers of 1024 and 16384 tied embeddings."""
    return save_llama(
        tmp_path_factory.mktemp("model"),
        dtype="bfloat16",
        vocab_size=16384,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )


def config_of(model: Path, **learner: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "cluster": {"device": "gpu"},
            "rollout": {
                "group_size": GROUP_SIZE,
                "max_prompt_tokens": PROMPT,
                "max_completion_tokens": COMPLETION,
            },
            "learner": {"max_tokens_per_microbatch": 8192, **learner},
        }
    )


@contextmanager
def learner_of(config: Config) -> Iterator[tuple[PolicyLearner, Ranks]]:
    gc.collect()  # one before may be part of a circle, and what it held would count as this one's
    with learner_alone(config) as (learner, ranks):
        assert ranks.device.type == "cuda"
        yield learner, ranks


def groups_of(num_groups: int, *, seed: int = 0, is_full: bool = True) -> list[Group]:
    """Groups whose completions follow one prompt and end where they like, or at the limit."""
    rng = np.random.default_rng(seed)
    groups = []
    for group_id in range(num_groups):
        prompt = rng.integers(2, 16384, PROMPT).astype(np.int32)
        trajectories = []
        for _ in range(GROUP_SIZE):
            rest = rng.integers(2, 16384, COMPLETION if is_full else rng.integers(1, COMPLETION)).astype(np.int32)
            tokens = np.concatenate([prompt, rest])
            trajectories.append(make.trajectory(tokens, prompt.size, reward=float(rng.normal()), log_prob=-9.7))
        rendered = Prompt(task="t", text="", token_ids=prompt)
        groups.append(Group(group_id=group_id, prompt=rendered, trajectories=tuple(trajectories)))
    return groups


def take_step(learner: PolicyLearner, number: int, groups: list[Group]) -> dict[str, float]:
    summaries = tuple(summarize_group(group, time_total_s=0.0) for group in groups)
    return learner.train_step(number, summaries, tuple(map(Share, range(len(groups)))), groups)


def peak_of_second_step(config: Config, num_tokens: int) -> int:
    """Bytes of torch's allocator, with weights and moments, over a step of two micro-batches of so many tokens."""
    section = config.learner.model_copy(update={"max_tokens_per_microbatch": num_tokens, "share_prefixes": False})
    groups = groups_of(2 * num_tokens // (GROUP_SIZE * (PROMPT + COMPLETION)))
    with learner_of(config.model_copy(update={"learner": section})) as (learner, ranks):
        take_step(learner, 1, groups)
        torch.cuda.reset_peak_memory_stats(ranks.device)
        take_step(learner, 2, groups)
        return torch.cuda.max_memory_allocated(ranks.device)


CHANGES = [{}, {"activation_checkpointing": True}, {"lora": {"rank": 16}}, {"cpu_offload": True}]
IDS = ["plain", "recomputed", "adapters", "offloaded"]


@pytest.mark.parametrize("changes", CHANGES, ids=IDS)
def test_the_plan_is_what_the_device_holds(model: Path, changes: dict[str, Any]) -> None:
    config = config_of(model, **changes)
    planned = plan_learner(model_shape(config), config).total - RUNTIME_BYTES

    taken = peak_of_second_step(config, config.learner.token_budget)

    assert taken == pytest.approx(planned, rel=MAX_PLAN_ERROR), f"{taken / MIB:.0f} of {planned / MIB:.0f} MiB planned"


@pytest.mark.parametrize("changes", CHANGES[:3], ids=IDS[:3])
def test_a_token_budget_that_is_found_fits(model: Path, changes: dict[str, Any]) -> None:
    config, room = config_of(model, max_tokens_per_microbatch="auto", **changes), 8 * GIB
    with learner_of(config) as (learner, ranks):
        there = torch.cuda.memory_allocated(ranks.device)
        need = measure_need(config, ranks, learner.model)
        found = find_token_budget(config, ranks, learner.model, room_bytes=room)
        moments = 8 * sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    del learner  # its memory is not the next one's
    # The need is a bound from above, which may not be so loose that half of the room is never used.
    taken = peak_of_second_step(config, found) - there - moments
    assert need.of(found) <= room < need.of(2 * found)
    assert 0.7 * need.of(found) <= taken <= need.of(found), f"{taken / MIB:.0f}, need {need.of(found) / MIB:.0f} MiB"


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_varlen_packing_gives_the_padded_gradient(model: Path, *, share_prefixes: bool) -> None:
    groups = groups_of(2, is_full=False)
    config = config_of(model, share_prefixes=share_prefixes, optimizer={"max_grad_norm": 1e9, "lr": 1.0})
    with learner_of(config) as (learner, _):
        learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)  # type: ignore[assignment]
        before = whole_weights(learner)
        take_step(learner, 1, groups)
        after = whole_weights(learner)
    found = {name: before[name] - after[name] for name in before}
    exact, narrow = padded_gradient(model, groups, torch.float32), padded_gradient(model, groups, torch.bfloat16)
    # Packed attention on a GPU computes in bfloat16, so it is measured by what bfloat16 costs without any packing.
    assert distance(found, exact) <= 1.5 * distance(narrow, exact)
    assert distance(narrow, exact) < 0.1


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_caps_and_sinks_are_those_of_the_cpu(
    window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 99, 100)
    rows = [np.concatenate([prompt, rng.integers(0, 99, 60)]).astype(np.int32) for _ in range(4)]
    packing, results = pack([rows], share_prefixes=True), []
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, heads, packing.num_tokens, 64, generator=generator).bfloat16() for heads in (8, 2, 2)]
    exact += [torch.randn(8, generator=generator).bfloat16()] if has_sinks else []
    slopes = torch.randn(1, packing.num_tokens, 8, 64, generator=generator).bfloat16()
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in exact]
        output, _ = packed_attention(
            torch.nn.Identity(), inputs[0], inputs[1], inputs[2], None,
            plan=plan_attention(packing, torch.device(device)), scaling=0.125, sliding_window=window, softcap=softcap,
            s_aux=inputs[3] if has_sinks else None,
        )  # fmt: skip
        gradients = torch.autograd.grad(output, inputs, slopes.to(device, dtype))
        results.append([tensor.detach().float().cpu() for tensor in (output, *gradients)])
    for wide, narrow in zip(*results, strict=True):
        assert float((wide - narrow).abs().max()) < 0.02 * float(wide.abs().max())


def whole_weights(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    parameters = learner.model.causal_lm.named_parameters()
    return {name: p.full_tensor().detach().float().cpu() for name, p in parameters}  # type: ignore[attr-defined]


def padded_gradient(model: Path, groups: list[Group], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """GRPO with transformers alone, a trajectory at a time: -sum(advantage x log-prob) / number of response tokens."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda()
    total = sum(t.num_response_tokens for group in groups for t in group.trajectories)
    for group in groups:
        rewards = np.array([t.reward.value for t in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for t, advantage in zip(group.trajectories, advantages, strict=True):
            tokens = torch.from_numpy(t.token_ids.astype(np.int64)).cuda()
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                logits = policy(tokens[None]).logits[0, :-1].float()
            log_probs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            mask = torch.from_numpy(t.response_mask[1:].astype(np.float32)).cuda()
            (-(float(advantage) / total) * (log_probs * mask).sum()).backward()
    return {name: p.grad.cpu() for name, p in policy.named_parameters() if p.grad is not None}


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, all parameters together."""
    assert exact.keys() <= found.keys()
    differ = sum(float((found[name] - exact[name]).double().square().sum()) for name in exact)
    return float(np.sqrt(differ / sum(float(grad.double().square().sum()) for grad in exact.values())))


def test_chunked_log_probs_are_those_of_whole_logits_in_less_memory() -> None:
    rng = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(8192, 512, device="cuda", generator=rng)
    weight = 0.05 * torch.randn(50_000, 512, device="cuda", generator=rng)
    tokens = torch.randint(0, 50_000, (8192,), device="cuda", generator=rng)

    def run(chunk_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if chunk_rows:
            targets = Targets(rows=torch.arange(8192, device="cuda"), token_ids=tokens, first_pairs=np.arange(8193))
            options = HeadOptions(temperature=1.0, chunk_rows=chunk_rows)
            log_probs, *_ = token_log_probs(*inputs, targets, options)
        else:
            log_probs = (inputs[0] @ inputs[1].t()).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        log_probs.sum().backward()
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        return log_probs.detach(), inputs[0].grad, inputs[1].grad, torch.cuda.max_memory_allocated() - before

    chunked, whole = run(512), run(0)
    for found, expected in zip(chunked[:3], whole[:3], strict=True):
        scale = float(expected.abs().max())
        assert float((found - expected).abs().max()) < 1e-5 * scale
    # Whole: logits, their softmax and its gradient, 3 x 8192 rows. Chunked: 512 kept, and 3 x 512 of one chunk.
    assert chunked[3] < whole[3] / 4


def test_a_checkpoint_is_of_the_step_it_began_after_while_training_goes_on(model: Path, tmp_path: Path) -> None:
    config = config_of(model)
    with learner_of(config) as (learner, _):
        take_step(learner, 1, groups_of(2))
        before, started = whole_weights(learner), time.perf_counter()
        saving = begin_save(learner, str(tmp_path / "c"), 1)
        blocked_s = time.perf_counter() - started
        expected = take_step(learner, 2, groups_of(2, seed=1))
        saving.wait()
        print(f"\nsave: {time.perf_counter() - started:.2f} s, of which training waited {blocked_s:.2f} s")
    with learner_of(config) as (learner, _):
        assert load_learner(learner, str(tmp_path / "c")) == 1
        assert all(torch.equal(before[name], after) for name, after in whole_weights(learner).items())
        found = take_step(learner, 2, groups_of(2, seed=1))
    # Not to the last bit: atomic additions on a GPU come in any order.
    assert found["learner/grad_norm"] == pytest.approx(expected["learner/grad_norm"], rel=1e-2)

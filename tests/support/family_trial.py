"""Compares the learner with plain transformers and with vLLM on a tiny model of a family.

`family_check` prints the differences, and the tests compare them with limits. Plain transformers computes padded
rows with eager attention. vLLM loads the model that the learner exported, and gets weights by syncs.
"""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayapp.config.config import Config, with_values
from rayapp.core.types import FloatArray, Group
from rayapp.engine.vllm import VllmEngine
from rayapp.engine.weights.buckets import SharedWeights, WeightBucket, pack
from rayapp.learner.distributed import whole
from rayapp.learner.families.pictures import build_model
from rayapp.learner.family import persistent_buffers
from rayapp.learner.state.export import export_hf, sent_weights
from rayapp.learner.step import PolicyLearner
from rayapp.learner.supervised import log_probs_of
from rayapp.storage.models.nf4 import rounded
from support import make
from support.learners import learner_alone, take_step

NOTHING: Mapping[str, Any] = MappingProxyType({})
GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 12, 16
MAX_LOG_PROB_ERROR, MAX_GRADIENT_ERROR = 2e-5, 5e-6
"""Limits of the errors in float32. The gradient's error is relative to the largest entry of all gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probs and gradients of one computation of the groups."""

    log_probs: list[FloatArray]
    """Log-probs of the sampled tokens, (R,), by trajectory."""
    gradients: dict[str, Tensor]
    """Gradients of a GRPO step, by transformers' names."""


def save_tiny(architecture: Any, folder: Path, *, seed: int = 0) -> None:
    """Save a model of this config, with random weights that bfloat16 holds exactly, and a tokenizer with the words w0,
    w1, ...
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    architecture = copy.deepcopy(architecture)  # a copy, because save_pretrained replaces its dtype by a string
    with torch.random.fork_rng(devices=[]):
        causal_lm = build_model(architecture, "eager")
    randomize(causal_lm, seed=seed)
    narrow = {name: p for name, p in causal_lm.named_parameters() if p.is_floating_point()}
    for parameter in narrow.values():
        parameter.data = parameter.data.bfloat16()
    causal_lm.config.dtype = torch.bfloat16
    causal_lm.save_pretrained(folder)
    size = architecture.get_text_config().vocab_size
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w0").save_pretrained(folder)


def rounded_copy(model: Path, folder: Path) -> Path:
    """Return a copy of the model that has weights rounded to NF4, in float32."""
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    save_file({name: rounded(name, t).float() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def randomize(causal_lm: Any, *, seed: int) -> None:
    """Set random weights, so large that each part of the model affects its scores. Buffers don't depend on the seed."""
    weights, others = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            noise = torch.randn(parameter.shape, generator=weights)
            large = parameter.ndim >= 2
            new = 0.5 * noise / math.sqrt(parameter.shape[-1]) if large else parameter + 0.1 * noise
            parameter.copy_(new.bfloat16())
        for buffer in persistent_buffers(causal_lm).values():
            if buffer.is_floating_point():
                buffer.add_((0.1 * torch.randn(buffer.shape, generator=others)).bfloat16())


def trial_config(folder: Path, *, server: Mapping[str, Any] = NOTHING, **learner: Any) -> Config:
    """Return the config of a run with the model in `folder`, in float32 on one CPU."""
    rollout = {"group_size": GROUP_SIZE, "max_prompt_tokens": 32, "max_completion_tokens": 32}
    section = {
        "compute_dtype": "float32",
        "max_tokens_per_microbatch": 128,
        "cpu_threads": 1,
        "optimizer": {"max_grad_norm": 1e9},
    }
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "cluster": {"device": "cpu"},
            "rollout": rollout,
            "learner": section | learner,
            "server": {"kv_cache_gib": 0.1, "dtype": "float32", "cpu_threads": 1, "max_num_seqs": 8, **server},
        }
    )


def trial_groups(vocabulary: int, *, seed: int = 0) -> list[Group]:
    """Return two groups of trajectories that contain tool tokens. Trajectories of a group share the prompt and some
    tokens after it.
    """
    rng = np.random.default_rng(seed)
    return [_group(rng, number, vocabulary) for number in range(2)]


def _group(rng: np.random.Generator, number: int, vocabulary: int) -> Group:
    def draw(low: int, high: int) -> list[int]:
        return [int(token) for token in rng.integers(2, vocabulary, rng.integers(low, high))]

    prompt, begin = draw(PROMPT_TOKENS // 2, PROMPT_TOKENS), draw(5, 6)
    responses = [begin + draw(3, RESPONSE_TOKENS - 6), begin + draw(3, RESPONSE_TOKENS - 6), draw(2, 4), draw(8, 16)]
    made = []
    for response, reward in zip(responses, rng.normal(size=GROUP_SIZE), strict=True):
        mask = np.arange(len(prompt) + len(response)) >= len(prompt)
        if len(response) > 6:
            mask[len(prompt) + 2 : len(prompt) + 4] = False  # tool tokens
        made.append(make.trajectory(prompt + response, reward=float(reward), response_mask=mask, log_prob=-1.0))
    return make.group(*made, group_id=number)


def plain_scores(causal_lm: Any, groups: list[Group], **pictures: Tensor) -> Scores:
    """Compute log-probs and gradients with transformers on padded rows. Loss: -sum(advantage x log-prob) / number of
    response tokens. `pictures` are arguments of the model."""
    rows = [(t, a) for group in groups for t, a in zip(group.trajectories, _advantages(group), strict=True)]
    width = max(t.num_tokens for t, _ in rows)
    tokens, mask, attended = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for i, (t, _) in enumerate(rows):
        tokens[i, : t.num_tokens] = torch.from_numpy(t.token_ids.astype(np.int64))
        attended[i, : t.num_tokens] = 1
        mask[i, : t.num_tokens] = torch.from_numpy(t.response_mask.astype(np.int64))
    logits = causal_lm(tokens, attention_mask=attended, use_cache=False, **pictures).logits[:, :-1].float()
    log_probs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    advantages = torch.tensor([a for _, a in rows], dtype=torch.float32)[:, None]
    (-(advantages * log_probs * mask[:, 1:]).sum() / mask[:, 1:].sum()).backward()
    return Scores(
        log_probs=[row[own == 1].detach().numpy() for row, own in zip(log_probs, mask[:, 1:], strict=True)],
        gradients={name: p.grad for name, p in causal_lm.named_parameters() if p.grad is not None},
    )


def _advantages(group: Group) -> FloatArray:
    rewards = np.array([t.reward.value for t in group.trajectories])
    return np.asarray((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6), np.float32)


@contextmanager
def learner_of(config: Config) -> Iterator[PolicyLearner]:
    """Context manager for the learner of this config, as the only rank, in this process."""
    with learner_alone(config) as (learner, _):
        yield learner


def learner_scores(learner: PolicyLearner, groups: list[Group]) -> Scores:
    """Compute log-probs and gradients with a learner without changing its weights. Collective: every rank computes its
    share of the gradients.
    """
    # Get the parameters first, because a forward replaces them by gathered ones.
    named = dict(learner.model.causal_lm.named_parameters())
    learner.optimizer = kept = _KeepGradients(learner.model.parameters(), lr=0.0)  # type: ignore[assignment]
    log_probs = [row for group in groups for row in log_probs_of(learner, group)]
    take_step(learner, groups)
    gradients = {name: kept.gradients[p] for name, p in named.items() if p in kept.gradients}
    return Scores(log_probs=log_probs, gradients=gradients)


class _KeepGradients(torch.optim.SGD):
    """Optimizer that changes no weights and keeps the gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.gradients = {p: whole(p.grad).clone() for p in parameters}


def log_prob_error(found: Scores, expected: Scores) -> float:
    """Return the largest difference between two log-probs of the same token."""
    pairs = zip(found.log_probs, expected.log_probs, strict=True)
    return max(float(np.abs(own - theirs).max()) for own, theirs in pairs)


def gradient_error(found: Scores, expected: Scores) -> float:
    """Return the largest difference between two entries of the same gradient, relative to the largest entry of all
    gradients.
    """
    missing = expected.gradients.keys() - found.gradients.keys()
    if missing:
        return math.inf
    scale = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    differences = (float((found.gradients[name] - g).abs().max()) for name, g in expected.gradients.items())
    return max(differences) / scale


def adapter_gradients(learner: PolicyLearner, expected: Scores | None) -> Scores | None:
    """Derive the gradients of a learner's adapters (W + alpha / rank * B A) from the weights' gradients in `expected`.

    Collective; None on ranks where `expected` is None."""
    section = learner.config.learner.lora
    parameters = {name: whole(p).clone() for name, p in learner.model.causal_lm.named_parameters() if ".lora_" in name}
    if expected is None:
        return None
    gradients = {}
    for name, down in parameters.items():
        if ".lora_A." not in name:
            continue
        up_name = name.replace(".lora_A.", ".lora_B.")
        weight = expected.gradients[f"{name.partition('.lora_A.')[0]}.weight"]
        scale = section.alpha / section.rank
        gradients[name] = scale * parameters[up_name].t() @ weight
        gradients[up_name] = scale * weight @ down.t()
    return replace(expected, gradients=gradients)


MAX_ENGINE_ERROR = {"float32": 1e-4, "bfloat16": 0.2}
"""Limits of log-prob errors, by the engine's dtype. Families that vLLM serves correctly differ by at most 2e-5 in
float32, and by at most 0.12 in bfloat16 (if two experts score nearly equally). Families that it serves wrongly differ
by 0.7 or more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineErrors:
    """Largest differences of log-probs between engine and learner."""

    at_start: float
    """Difference after vLLM has loaded the folder `final/` that the learner wrote."""
    after_syncs: tuple[float, ...]
    """Difference after a sync of other weights, and difference after a sync back to the first weights."""

    @property
    def largest(self) -> float:
        return max(self.at_start, *self.after_syncs)


async def engine_errors(configs: tuple[Config, Config], groups: list[Group], final: Path) -> EngineErrors:
    """Start vLLM with a model that a learner exported, sync weights twice, and return the differences of log-probs.

    Args:
        configs: configs of two models of one architecture; the engine starts with the first.
        final: folder to write the export to.
    Raises:
        EngineError: vLLM can't load the model.
        WeightSyncError: vLLM refused the weights.
    """
    first, second = _sent(configs[0], groups, final), _sent(configs[1], groups)
    config = with_values(configs[0], model={"path": str(final)})
    engine = await VllmEngine.start(config)
    try:
        at_start = await _error(engine, groups, first[1])
        after = []
        for version, (bucket, expected) in enumerate((second, first), start=1):
            await load_weights(engine, version, bucket)
            after.append(await _error(engine, groups, expected))
    finally:
        engine.close()
    return EngineErrors(at_start=at_start, after_syncs=tuple(after))


def _sent(config: Config, groups: list[Group], final: Path | None = None) -> tuple[WeightBucket, list[FloatArray]]:
    """Return the weights that a learner of this model sends, and its log-probs."""
    with learner_of(config) as learner:
        if final is not None:
            export_hf(config, learner.model, final, learner.ranks)
        bucket = bucket_of(list(sent_weights(learner.model, config.learner.lora, [torch.bfloat16])))
        log_probs = [row for group in groups for row in log_probs_of(learner, group)]
    return bucket, log_probs


def bucket_of(tensors: list[tuple[str, Tensor]]) -> WeightBucket:
    # Leave room for alignment: `pack` starts each tensor on a cache line.
    num_bytes = sum(tensor.numel() * tensor.element_size() + 64 for _, tensor in tensors)
    return next(pack(tensors, num_bytes))


async def load_weights(engine: VllmEngine, version: int, bucket: WeightBucket) -> int:
    """Let the engine take these weights as a version. Return how many tensors it loaded."""
    with tempfile.NamedTemporaryFile() as file:
        bucket.data.tofile(file.name)
        await engine.begin_update("memory")
        weights = SharedWeights(path=file.name, entries=bucket.entries, checksums=dict(bucket.checksums))
        await engine.receive_weights(weights)
        num_loaded = await engine.finish_update(version, weights.checksums)
        await engine.go_on()
    return num_loaded


async def _error(engine: VllmEngine, groups: list[Group], expected: list[FloatArray]) -> float:
    rows = [t for group in groups for t in group.trajectories]
    found = [(await engine.prompt_log_probs(t.token_ids.tolist()))[t.response_mask[1:]] for t in rows]
    return max(float(np.abs(own - theirs).max()) for own, theirs in zip(found, expected, strict=True))

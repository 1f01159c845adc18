"""Simulates one step of a learner of any size, without a GPU or its memory, to measure the bytes that it would
allocate.

The plan's formulas are tested against it. It runs the learner's own model, FSDP, packing, head and optimizer on torch's
fake tensors, which have shapes but no values, as one of `learner.num_learners` ranks whose collectives do nothing. The
loss is the sum of the log-probs. The fake tensors are on the device `cpu`, with a GPU's choices set by hand: layers are
gathered one by one, attention is the varlen kernel, and the softmax of a chunk is taken at once. Memory inside kernels,
fragmentation and CUDA's own memory are not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from rayapp.config.config import Config, frozen_models, with_number_formats, with_values
from rayapp.config.learner import LearnerSection
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Group, GroupSummary, Prompt, Reward, Trajectory
from rayapp.learner.attention import AttentionLayout, varlen_plan
from rayapp.learner.batch import MicroBatch, TrainItem, make_micro_batch
from rayapp.learner.distributed import learner_mesh, local_part
from rayapp.learner.log_probs import HeadOptions
from rayapp.learner.memory.token_budget import CpuMeter
from rayapp.learner.policy import (
    DTYPES,
    DeviceBatch,
    PolicyModel,
    build_causal_lm,
    make_optimizer,
    policy_of,
    shard,
    to_device,
)
from rayapp.learner.shares import Share

CPU = torch.device("cpu")
STORAGES: Any = torch.UntypedStorage
"""Class whose `resize_` a meter intercepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLearner:
    """Bytes on one learner's GPU, without CUDA's own memory."""

    weights: int
    """Parameter shards of the policy, trained or not; with LoRA most are not."""
    frozen: int
    """Shards of the frozen models (a reference, a teacher)."""
    gradients: int
    optimizer: int
    """AdamW's two moments."""
    peaks: dict[str, int]
    """Peak of each part of a micro-batch that is not the first of its step. Clipping and AdamW are fused and need no
    temporary tensors.
    """
    host: int
    """Bytes that `learner.cpu_offload` keeps in host memory. The peaks don't include them."""

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def resident(self) -> int:
        """Bytes that stay between steps."""
        return self.weights + self.frozen + self.optimizer - (self.host - self.gradients if self.host else 0)


def simulate_learner(config: Config) -> SimulatedLearner:
    """Simulate a step of `config` on full micro-batches of the longest trajectories, whose groups share prompts.

    The process must not have a torch process group; the simulation makes one and removes it.
    """
    # The token budget is per rank: with sequence parallelism a rank holds as much as without.
    config = with_values(with_number_formats(config, on_gpu=True), learner={"sequence_parallel": 1})
    batch = _as_on_gpu(_full_micro_batch(config))
    with _fake_ranks(config.learner) as mesh, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = _fake_policy(config, mesh, trainable=True)
        frozen = {name: _fake_policy(own, mesh, trainable=False) for name, own in frozen_models(config).items()}
        with FakeMeter(mode) as meter:
            return _step(config, model, frozen, batch, meter)


def _step(
    config: Config, model: PolicyModel, frozen: Mapping[str, PolicyModel], batch: DeviceBatch, meter: FakeMeter
) -> SimulatedLearner:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(model, config.learner.optimizer)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)  # the sum of the micro-batches before this one
    optimizer.step()  # creates AdamW's moments
    kinds = {
        "weights": _bytes(model.parameters()),
        "frozen": sum(_bytes(other.parameters()) for other in frozen.values()),
        "gradients": _bytes(p.grad for p in trained if p.grad is not None),
        "optimizer": _bytes(state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")),
    }
    meter.follow([p for each in (model, *frozen.values()) for p in each.parameters()])
    host = sum(kinds.values()) if config.learner.cpu_offload else 0
    peaks: dict[str, int] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        meter.restart()
        yield
        peaks[name] = max(meter.marks) - host

    options = HeadOptions(
        temperature=config.rollout.temperature,
        chunk_rows=config.learner.log_prob_chunk_tokens,
        entropy_needs_grad=config.algorithm.entropy_coef > 0,
        softmax_rows=config.learner.log_prob_chunk_tokens,
    )
    head = None
    for name, other in frozen.items():
        with part(name), torch.no_grad():
            if name == "teacher" and config.distillation.needs_logits:
                head = other.read(batch, options, config.distillation)
            else:
                other(batch, options)
                other.reshard()  # type: ignore[operator]
    with part("forward"):
        scores = model(batch, options, head)
    with part("backward"):
        (scores.log_probs.sum() + scores.teacher_kl.sum()).backward()
        del scores
    return SimulatedLearner(**kinds, peaks=peaks, host=host)


class FakeMeter(CpuMeter):
    """Meter of the storages of fake tensors. It also notes storages that FSDP frees by resizing, which runs no
    operator.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__(())
        self._mode = mode
        self._resize = STORAGES.resize_

    def follow(self, tensors: list[Any]) -> None:
        """Count these tensors from now on."""
        self.mark([local_part(tensor) for tensor in tensors])

    def __enter__(self) -> FakeMeter:
        def resize(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            self._see(storage)
            self.marks.append(self._now)

        STORAGES.resize_ = resize
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        STORAGES.resize_ = self._resize
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if active_fake_mode() is not self._mode:  # DTensor calls this only to infer a result's shape
            return func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # on fake tensors this operator would copy
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _fake_ranks(section: LearnerSection) -> Iterator[DeviceMesh]:
    """Context manager in which this process is rank 0 of all learners, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=section.num_learners)
    try:
        yield learner_mesh("cpu", section.num_learners, section)
    finally:
        dist.destroy_process_group()


def _fake_policy(config: Config, mesh: DeviceMesh, *, trainable: bool) -> PolicyModel:
    """Build the learner's model with fake weights, sharded as on GPUs. Call it within torch's FakeTensorMode."""
    section = config.learner
    model = _meta_policy(config, trainable=trainable)
    _make_fake(model)
    sharded = shard(model, mesh, compute_dtype=DTYPES[section.compute_dtype], cpu_offload=section.cpu_offload)
    decoder: Any = sharded.causal_lm.get_decoder()  # type: ignore[operator]
    for layer in decoder.layers:
        layer.set_reshard_after_forward(True)
    return sharded


def _meta_policy(config: Config, *, trainable: bool) -> PolicyModel:
    with unset_fake_temporarily(), torch.device("meta"):
        causal_lm = build_causal_lm(config.model, config.learner, config.max_model_tokens, is_checked=False)
        return policy_of(causal_lm, config, trainable=trainable)


def _make_fake(model: torch.nn.Module) -> None:
    """Replace each meta tensor by a fake tensor on the CPU; tied tensors stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
            module._parameters[name] = made[id(parameter)] if parameter is not None else None
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype) if buffer is not None else None


def full_step(config: Config) -> tuple[tuple[GroupSummary, ...], tuple[Share, ...], list[Group]]:
    """Return the arguments of one rank's `train_step`: groups of the longest trajectories for two full micro-batches.
    Rewards differ within each group, so that every trajectory is trained on.
    """
    groups = []
    for number, rows in enumerate(_full_groups(config, 2 * config.learner.token_budget)):
        prompt = Prompt(task="full", text="", token_ids=rows[0].token_ids[: config.rollout.max_prompt_tokens])
        groups.append(Group(group_id=number, prompt=prompt, trajectories=tuple(rows)))
    summaries = tuple(summarize_group(group, time_total_s=0.0) for group in groups)
    return summaries, tuple(map(Share, range(len(groups)))), groups


def _full_micro_batch(config: Config) -> MicroBatch:
    groups = _full_groups(config, config.learner.token_budget)
    rows = [(number, row) for number, group in enumerate(groups) for row in group]
    items = [
        TrainItem(row=i, group=group, trajectory=row, advantages=np.ones(row.num_response_tokens, np.float32))
        for i, (group, row) in enumerate(rows)
    ]
    return make_micro_batch(items, share_prefixes=config.learner.share_prefixes)


def _full_groups(config: Config, num_tokens: int) -> list[list[Trajectory]]:
    """Return groups of trajectories with `num_tokens` computed tokens in total; all but the last have full length.

    Trajectories of a group share the prompt, and their completions differ from the first token on.
    """
    prompt, completion = config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens
    groups: list[list[Trajectory]] = []
    room = num_tokens
    while True:
        is_new = not groups or len(groups[-1]) == config.rollout.group_size
        # The model reads all tokens of a trajectory but the last. The prompt counts only for the first trajectory of a
        # group.
        room -= prompt if is_new or not config.learner.share_prefixes else 0
        length = min(completion, room + 1)
        if length < 2 and groups:
            return groups
        if is_new:
            groups.append([])
        room -= length - 1
        tokens = np.zeros(prompt + length, np.int32)
        tokens[prompt:] = 1 + len(groups[-1])
        groups[-1].append(plain_trajectory(tokens, prompt, reward=float(len(groups[-1]) % 2)))


def plain_trajectory(tokens: NDArray[np.int32], num_prompt_tokens: int, *, reward: float = 0.0) -> Trajectory:
    """Return a trajectory of these tokens, with log-probs of 0."""
    mask = np.arange(tokens.size) >= num_prompt_tokens
    return Trajectory.of_tokens(tokens, mask, reward=Reward(value=reward))


def _as_on_gpu(batch: MicroBatch) -> DeviceBatch:
    moved = to_device(batch, CPU)
    assert isinstance(moved.attention, AttentionLayout)
    return replace(moved, attention=replace(moved.attention, varlen=varlen_plan(batch.packing, CPU)))


def _bytes(tensors: Any) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)

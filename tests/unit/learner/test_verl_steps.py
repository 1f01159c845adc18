"""A small script of verl trains two steps here and in verl's own advantages, losses and optimizer: the same weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rayapp.config.config import Config
from rayapp.core.types import Group, Trajectory
from rayapp.extras.verl.importing import import_verl, read_verl
from support import make
from support.learners import learner_alone, take_step, whole_weights

SCRIPT = """#!/usr/bin/env bash
group=4
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    algorithm.norm_adv_by_std_in_grpo={by_std} \\
    data.train_files=train.parquet \\
    data.train_batch_size=2 data.max_prompt_length=16 data.max_response_length=16 \\
    actor_rollout_ref.model.path={model} \\
    actor_rollout_ref.actor.ppo_mini_batch_size=1 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.optim.weight_decay={decay} \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.05 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.loss_agg_mode={aggregation} \\
    actor_rollout_ref.actor.policy_loss.loss_mode={loss} \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=$group \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    trainer.n_gpus_per_node=1 trainer.total_training_steps=2 "$@"
"""
CPU = ["rayapp.cluster.device=cpu", "rayapp.learner.compute_dtype=float32", "rayapp.learner.cpu_threads=1"]
NUM_STEPS = 2


def sampled_groups(seed: int, size: int = 4) -> list[Group]:
    """Two groups of completions with drawn rewards."""
    rng = np.random.default_rng(seed)

    def drawn_trajectory(prompt: np.ndarray[Any, Any]) -> Trajectory:
        tokens = np.concatenate([prompt, rng.integers(2, 90, int(rng.integers(2, 12)))])
        given = np.where(np.arange(tokens.size) >= prompt.size, rng.normal(-4.5, 0.3, tokens.size), 0.0)
        return make.trajectory(
            tokens, prompt.size, reward=float(rng.normal()), rollout_log_probs=given.astype(np.float32)
        )

    def drawn_group(group_id: int) -> Group:
        prompt = rng.integers(2, 90, int(rng.integers(3, 9)))
        return make.group(*(drawn_trajectory(prompt) for _ in range(size)), group_id=group_id)

    return [drawn_group(0), drawn_group(1)]


def trained_here(config: Config, batches: list[list[Group]]) -> dict[str, torch.Tensor]:
    """Return the weights after one training step for each batch."""
    with learner_alone(config) as (learner, _):
        for number, groups in enumerate(batches, start=1):
            take_step(learner, groups, number)
        return {name.rpartition("model.")[2]: torch.from_numpy(w) for name, w in whole_weights(learner).items()}


class VerlsOwn:
    """verl's functions on padded rows of a model of transformers, with verl's own configuration of the actor."""

    def __init__(self, model: Path, overrides: list[str]) -> None:
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config.optimizer import build_optimizer

        package = importlib.util.find_spec("verl")
        assert package is not None
        assert package.submodule_search_locations is not None
        folder = Path(package.submodule_search_locations[0]) / "trainer" / "config"
        with initialize_config_dir(str(folder), version_base=None):
            self.config = compose("ppo_trainer", overrides=overrides)
        OmegaConf.set_struct(self.config, False)
        self.actor: Any = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        # The one difference: norms and biases are not decayed here.
        flat = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim >= 2]},
            {"params": flat, "weight_decay": 0.0},
        ]
        self.optimizer = build_optimizer(groups, self.actor.optim)

    def log_probs(self, model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return log-probs of each next token, 0 outside of responses, (B, T - 1)."""
        logits = model(input_ids=tokens, attention_mask=(tokens >= 0).long()).logits[:, :-1]
        found = torch.log_softmax(logits / self.config.actor_rollout_ref.rollout.temperature, -1)
        return found.gather(-1, tokens[:, 1:, None].clamp(min=0))[..., 0] * mask[:, 1:]

    def corrected(self, old: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the old log-probs and the weights of verl's rollout correction, as its trainer does."""
        from verl import DataProto
        from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode, compute_rollout_correction_and_add_to_batch
        from verl.utils.config import omega_conf_to_dataclass

        correction = self.config.algorithm.rollout_correction
        batch = DataProto.from_dict(tensors={"old_log_probs": old, "rollout_log_probs": engine, "response_mask": mask})
        if correction.bypass_mode:
            apply_bypass_mode(batch, correction, self.config.actor_rollout_ref.actor.policy_loss)
            self.actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            return batch.batch["old_log_probs"], None
        batch, _ = compute_rollout_correction_and_add_to_batch(batch, correction)
        return old, batch.batch.get("rollout_is_weights")

    def step(self, groups: list[Group]) -> None:
        from verl.trainer.ppo.core_algos import agg_loss, get_adv_estimator_fn, get_policy_loss_fn, kl_penalty

        rows = [trajectory for group in groups for trajectory in group.trajectories]
        width = max(row.token_ids.size for row in rows)
        tokens = torch.stack([_padded(row.token_ids, width, 0) for row in rows])
        mask = torch.stack([_padded(row.response_mask.astype(np.int64), width, 0) for row in rows])
        scores = torch.zeros(tokens.shape)
        for row, trajectory in enumerate(rows):
            scores[row, trajectory.token_ids.size - 1] = trajectory.reward.value
        algorithm = self.config.algorithm
        advantages, _ = get_adv_estimator_fn(algorithm.adv_estimator)(
            token_level_rewards=scores,
            response_mask=mask.float(),
            index=np.array([str(group.group_id) for group in groups for _ in group.trajectories], object),
            config=algorithm,
            **(
                {"norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo}
                if "grpo" in algorithm.adv_estimator
                else {}
            ),
        )
        with torch.no_grad():
            old, reference = (self.log_probs(each, tokens, mask) for each in (self.model, self.reference))
        engine = torch.stack([_padded(row.rollout_log_probs, width, 0, torch.float32) for row in rows])[:, 1:]
        old, weights = self.corrected(old, engine, mask[:, 1:])
        size = self.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        for begin in range(0, len(rows), size):
            part = slice(begin, begin + size)
            given = mask[part, 1:].float()
            self.actor.global_batch_info.update(
                dp_size=1, batch_num_tokens=int(given.sum()), global_batch_size=size, loss_scale_factor=None
            )
            log_probs = self.log_probs(self.model, tokens[part], mask[part])
            loss, _ = get_policy_loss_fn(self.actor.policy_loss.loss_mode)(
                old_log_prob=old[part],
                log_prob=log_probs,
                advantages=advantages[part, 1:],
                response_mask=given,
                loss_agg_mode=self.actor.loss_agg_mode,
                config=self.actor,
                rollout_is_weights=None if weights is None else weights[part],
            )
            kl = kl_penalty(log_probs, reference[part], self.actor.kl_loss_type)
            batch = self.actor.global_batch_info
            loss = loss + self.actor.kl_loss_coef * agg_loss(kl, given, self.actor.loss_agg_mode, **batch)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.actor.optim.clip_grad)
            self.optimizer.step()


def _padded(values: np.ndarray[Any, Any], width: int, fill: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.nn.functional.pad(torch.from_numpy(values).to(dtype), (0, width - values.size), value=fill)


_CORRECTION = "algorithm.rollout_correction"
NORMALIZED = (f"{_CORRECTION}.rollout_is_batch_normalize=True", f"{_CORRECTION}.rollout_is_threshold=1.1")
ALONE = ("actor_rollout_ref.rollout.n=1", f"{_CORRECTION}.bypass_mode=True", f"{_CORRECTION}.loss_type=reinforce")


@pytest.mark.parametrize(
    ("loss", "aggregation", "by_std", "more"),
    [
        ("vanilla", "token-mean", True, ()),
        ("gspo", "seq-mean-token-mean", False, ()),
        ("vanilla", "token-mean", True, (f"{_CORRECTION}.rollout_is=token", *NORMALIZED)),
        ("vanilla", "seq-mean-token-mean", True, (f"{_CORRECTION}.rollout_is=sequence", *NORMALIZED)),
        ("vanilla", "token-mean", True, (f"{_CORRECTION}.rollout_is=sequence", *NORMALIZED, *ALONE)),
        ("vanilla", "token-mean", False, ("actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=rloo")),
    ],
)
def test_a_script_trains_two_steps_as_in_verls_own_functions(
    tiny_model: Path, tmp_path: Path, loss: str, aggregation: str, more: tuple[str, ...], *, by_std: bool
) -> None:
    script = tmp_path / "run_tiny.sh"
    script.write_text(SCRIPT.format(model=tiny_model, loss=loss, aggregation=aggregation, by_std=by_std, decay=0.01))
    overrides = [f"{key}={value}" for key, value in read_verl(script, more).items()]
    verl = VerlsOwn(tiny_model, overrides)
    size = verl.config.actor_rollout_ref.rollout.n
    batches = [sampled_groups(seed, size) for seed in range(NUM_STEPS)]

    found = trained_here(import_verl(script, [*more, *CPU]).config, batches)
    for groups in batches:
        verl.step(groups)

    begun = dict(verl.reference.named_parameters())
    for name, expected in verl.model.named_parameters():
        before = begun[name].detach()
        moved, ours = expected.detach() - before, found[name.rpartition("model.")[2]] - before
        assert float(moved.abs().max()) > 1e-3, f"{name} was trained"
        np.testing.assert_allclose(ours.numpy(), moved.numpy(), atol=5e-5, err_msg=name)

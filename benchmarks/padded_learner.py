"""A plain learner to compare with rayapp's: padded rows, whole logits, one reduction of the gradients.

It uses transformers with SDPA, bfloat16 autocast on float32 weights, rows padded to the longest row of the rank's
batch, and fused AdamW. With several ranks, each rank trains on its own groups, and gradients are summed once per step.
Only learner.py uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayapp.config.config import Config
from rayapp.core.types import Group, Trajectory

ROWS = 8
"""Number of rows of a padded micro-batch."""


class PaddedLearner:
    """One rank of a learner that pads sequences. With several ranks, the caller starts the process group."""

    def __init__(self, config: Config) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learner.optimizer.lr, fused=True)

    def step(self, groups: Sequence[Group], num_response_tokens: int) -> None:
        """Train on this rank's groups. `num_response_tokens` is the number of response tokens of all ranks together."""
        torch = self._torch
        rows = [(t, a) for group in groups for t, a in zip(group.trajectories, advantages(group), strict=True)]
        for start in range(0, len(rows), ROWS):
            width = max(t.num_tokens for t, _ in rows)
            self._backward(rows[start : start + ROWS], width, num_response_tokens)
        self._reduce()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self, part: Sequence[tuple[Trajectory, float]], width: int, total: int) -> None:
        torch = self._torch
        tokens, attended = torch.zeros(2, len(part), width, dtype=torch.long)
        mask = torch.zeros(len(part), width)
        for i, (t, _) in enumerate(part):
            tokens[i, : t.num_tokens] = torch.from_numpy(t.token_ids.astype(np.int64))
            attended[i, : t.num_tokens] = 1
            mask[i, : t.num_tokens] = torch.from_numpy(t.response_mask.astype(np.float32))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(tokens, attention_mask=attended).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        weights = torch.tensor([a for _, a in part])[:, None]
        (-(weights * log_probs * mask[:, 1:]).sum() / total).backward()

    def _reduce(self) -> None:
        dist = self._torch.distributed
        if dist.get_world_size() == 1:
            return
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = self._torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def advantages(group: Group) -> list[float]:
    """Return the GRPO advantage of every trajectory."""
    rewards = np.array([t.reward.value for t in group.trajectories])
    return [float(a) for a in (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)]

"""Names that `algorithm.adv_estimator` and `algorithm.policy_loss` accept, known without importing verl.

`import verl` takes seconds (it brings ray, torch and transformers), so the CLI validates against these tuples; a test
holds them equal to verl 0.9.1's registries, less the estimators that need a critic.
"""

from __future__ import annotations

ADV_ESTIMATORS = (
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
)
NEEDS_CRITIC = ("gae",)
"""Estimators of verl's registry that are refused here, as there is no value model."""

NEEDS_LOG_PROBS = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators whose baseline weighs every token by the policy's own probabilities: one more forward pass."""
NEEDS_NO_GROUP = ("reinforce_plus_plus", "remax")
"""Estimators whose baseline is not the mean of the group's other trajectories, so one valid trajectory is enough."""
NEEDS_GREEDY_BASELINE = ("remax",)
"""Estimators whose baseline is the reward of each group's last trajectory: sampled greedily, not trained on."""

POLICY_LOSSES = (
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "sapo",
    "vanilla",
)
BATCH_COUPLED_LOSSES = ("clip_cov", "kl_cov")
"""Losses that choose tokens by all tokens of the mini-batch, and so are computed on all of them at once."""

"""Puts a learner together: model, reference, optimizer."""

from __future__ import annotations

import logging

import torch

from rayapp.config.config import Config, with_values
from rayapp.learner.distributed import Ranks
from rayapp.learner.families.mixers import mixers_of
from rayapp.learner.memory.token_budget import find_token_budget
from rayapp.learner.optimizer import make_optimizer
from rayapp.learner.policy import PolicyModel, load_policy
from rayapp.learner.step import PolicyLearner

log = logging.getLogger(__name__)


def build_learner(config: Config, ranks: Ranks) -> PolicyLearner:
    """A learner at version 0: the weights of `config.model.path` and an optimizer that has not stepped.

    Raises:
        InputError: the model can't be loaded.
        LearnerError: the longest trajectory does not fit into the memory that is free.
    """
    torch.manual_seed(config.run.seed)
    model = load_policy(config, ranks.mesh, trainable=True)
    needs_reference = config.algorithm.kl_loss_coef > 0
    reference = load_policy(config, ranks.mesh, trainable=False) if needs_reference else None
    config = with_token_budget(with_sharing(config, model), ranks, model)
    return PolicyLearner(
        config=config,
        ranks=ranks,
        model=model,
        optimizer=make_optimizer(model, config.learner.optimizer),
        reference=reference,
    )


def with_sharing(config: Config, model: PolicyModel) -> Config:
    """The config without shared prefixes for a model whose layers compute every sequence whole all the same: its
    memory would follow all tokens, and its micro-batches count those that are computed once."""
    if not config.learner.share_prefixes or not mixers_of(model.causal_lm):
        return config
    log.info("learner.share_prefixes is off: layers of this model read along the sequence otherwise than by attention")
    return with_values(config, learner={"share_prefixes": False})


def with_token_budget(config: Config, ranks: Ranks, model: PolicyModel) -> Config:
    """The config with a number in place of `learner.max_tokens_per_microbatch: auto`. Collective."""
    if config.learner.max_tokens_per_microbatch != "auto":
        return config
    budget = find_token_budget(config, ranks, model)
    return with_values(config, learner={"max_tokens_per_microbatch": budget})

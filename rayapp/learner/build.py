"""Puts a learner together: model, reference, optimizer."""

from __future__ import annotations

import torch

from rayapp.config import Config
from rayapp.learner.distributed import Ranks
from rayapp.learner.optimizer import make_optimizer
from rayapp.learner.policy import load_policy
from rayapp.learner.step import PolicyLearner


def build_learner(config: Config, ranks: Ranks) -> PolicyLearner:
    """A learner at version 0: the weights of `config.model.path` and an optimizer that has not stepped.

    Raises:
        InputError: the model can't be loaded.
    """
    torch.manual_seed(config.run.seed)
    model = load_policy(config, ranks.mesh, trainable=True)
    needs_reference = config.algorithm.kl_loss_coef > 0
    return PolicyLearner(
        config=config,
        ranks=ranks,
        model=model,
        optimizer=make_optimizer(model, config.learner.optimizer),
        reference=load_policy(config, ranks.mesh, trainable=False) if needs_reference else None,
    )

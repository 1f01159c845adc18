"""Builds a learner: model, frozen models, optimizer."""

from __future__ import annotations

import logging
from functools import partial

import torch

from rayapp.config.config import Config, frozen_models, with_number_formats, with_values
from rayapp.config.sections import ModelSection
from rayapp.core.errors import InputError
from rayapp.learner.batch import Inputs
from rayapp.learner.device import keep_compiled
from rayapp.learner.distributed import Ranks
from rayapp.learner.families.mixers import mixers_of
from rayapp.learner.families.pictures import PictureReader
from rayapp.learner.memory.plan import least_recomputed
from rayapp.learner.memory.shape import model_shape, room_here
from rayapp.learner.memory.token_budget import find_token_budget
from rayapp.learner.metrics import mfu_meter
from rayapp.learner.policy import PolicyModel, load_policy, make_optimizer
from rayapp.learner.step import PolicyLearner
from rayapp.storage.models.fetch import with_local_model
from rayapp.storage.models.pictures import load_pictures

log = logging.getLogger(__name__)


def import_ahead(*, compiles: bool) -> None:
    """Import what the model and its first step need, without using the GPU: a server that shares it starts meanwhile.
    Without a GPU these imports would only take time from the server."""
    if not torch.cuda.is_available():
        return
    from transformers import AutoModelForCausalLM  # noqa: F401
    from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: F401
    from verl.workers.config import actor  # noqa: F401

    if compiles:
        keep_compiled()
        from torch._inductor import compile_fx  # noqa: F401
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()  # a process that imports torch, and compiles kernels for this one


def build_learner(config: Config, ranks: Ranks) -> PolicyLearner:
    """Build a learner at version 0. LearnerError: the longest trajectory does not fit into free memory."""
    torch.manual_seed(config.run.seed)
    config = with_recomputation(with_number_formats(config, on_gpu=ranks.device.type == "cuda"), ranks)
    model = load_policy(config, ranks.mesh, trainable=True)
    frozen = {name: load_frozen(name, own, ranks, model) for name, own in frozen_models(config).items()}
    if config.learner.share_prefixes and any(mixers_of(each.causal_lm) for each in (model, *frozen.values())):
        # Such layers compute every sequence whole: they need memory for all tokens, not only for unique ones.
        log.info("learner.share_prefixes is off: this model has layers that carry a state along the sequence")
        config = with_values(config, learner={"share_prefixes": False})
    config = with_token_budget(config, ranks, model)
    return PolicyLearner(
        config=config,
        ranks=ranks,
        model=model,
        optimizer=make_optimizer(model, config.learner.optimizer),
        frozen=frozen,
        mfu=mfu_meter(config, ranks.device),
        pictures=None if model.tower is None else PictureReader(model.causal_lm, partial(_inputs, config.model)),
    )


def _inputs(model: ModelSection, encoded: bytes) -> Inputs:
    # The processor is loaded at the first picture: text trains without it.
    return load_pictures(model).inputs(encoded)


def load_frozen(name: str, config: Config, ranks: Ranks, policy: PolicyModel) -> PolicyModel:
    """Load a model that the learners don't train, sharded like the policy. InputError: its vocabulary is smaller."""
    if name == "reference":
        reference = load_policy(config, ranks.mesh, trainable=False, is_checked=False)
        if reference.tower is not None and policy.tower is not None and config.model.freeze_vision:
            reference.tower.share(policy.tower)
        return reference
    try:
        model = load_policy(with_local_model(config), ranks.mesh, trainable=False)
        found, wanted = model.vocabulary, policy.vocabulary
        if found < wanted:
            raise InputError(
                f"its vocabulary has {found} tokens, but the policy's has {wanted}: some tokens would have no log-prob"
            )
        model.num_tokens = wanted
    except InputError as error:
        raise InputError(f"distillation.teacher {config.model.path!r} can't be the {name}: {error}") from error
    return model


def with_recomputation(config: Config, ranks: Ranks) -> Config:
    """Replace `activation_checkpointing: auto` by the fewest layers that fit by the plan; on CPU by 0. Collective."""
    if config.learner.activation_checkpointing != "auto":
        return config
    number = 0
    if ranks.device.type == "cuda":
        shape = model_shape(config)
        number = max(ranks.gather(least_recomputed(shape, config, room_here())))
        log.info("the activations of %d of %d layers are recomputed", number, shape.num_layers)
    return with_values(config, learner={"activation_checkpointing": number})


def with_token_budget(config: Config, ranks: Ranks, model: PolicyModel) -> Config:
    """Replace `max_tokens_per_microbatch: auto` by a measured number. Collective."""
    if config.learner.max_tokens_per_microbatch != "auto":
        return config
    budget = find_token_budget(config, ranks, model)
    return with_values(config, learner={"max_tokens_per_microbatch": budget})

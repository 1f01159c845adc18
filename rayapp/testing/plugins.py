"""Contract checks for each kind of plug-in, for a package's own tests.

    from rayapp.testing.plugins import check_loss
    def test_it_is_a_loss(): check_loss(my_loss)

A check that fails raises AssertionError with the reason. No check needs a GPU, a model or a network.
"""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rayapp.config.config import Config
from rayapp.core.names import Kind, Plugin


def check_plugin(plugin: Plugin) -> None:
    """Load a plug-in and run the checks of its kind.

    Raises:
        ConfigError: the plug-in can't be loaded.
        AssertionError: the plug-in breaks its contract. The message says how.
    """
    _CHECKS[plugin.kind](plugin.load())


def check_tracker(make: Any) -> None:
    """Check a tracker factory (config, folder, first_step): its tracker logs steps in order and can be closed twice."""
    with tempfile.TemporaryDirectory() as folder:
        tracker = make(Config(), Path(folder), 1)
        for step in (1, 2):
            tracker.log(step, {"reward/mean": 0.5, "not/a number": math.nan})
        tracker.close()
        tracker.close()


def check_loss(function: Any) -> None:
    """Check a policy loss of verl's signature: it returns a finite loss with a gradient, and metrics."""
    import torch

    assert callable(function), f"a loss must be a function, not a {type(function).__name__}"
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    missing = [name for name in ("old_log_prob", "log_prob", "advantages", "response_mask") if name not in parameters]
    assert takes_any or not missing, f"a loss must take the arguments {', '.join(missing)}"
    log_prob = torch.full((2, 3), -1.0, requires_grad=True)
    arguments = {
        "old_log_prob": torch.full((2, 3), -1.1),
        "log_prob": log_prob,
        "advantages": torch.tensor([[1.0] * 3, [-1.0] * 3]),
        "response_mask": torch.ones(2, 3),
    }
    from rayapp.learner.algo.losses import LossScale, make_actor_config

    scale = LossScale(num_tokens=6, num_trajectories=2, dp_size=1, max_response_tokens=3)
    actor = make_actor_config(Config().algorithm, scale, group_size=1)
    loss, metrics = function(**arguments, loss_agg_mode="token-mean", config=actor, rollout_is_weights=None)
    assert loss.ndim == 0, f"a loss must be one number, not an array of shape {tuple(loss.shape)}"
    assert torch.isfinite(loss), f"a loss must be finite, not {loss}"
    loss.backward()
    assert log_prob.grad is not None, "a loss must depend on log_prob: it has no gradient"
    assert isinstance(metrics, Mapping), "a loss must return (loss, metrics)"


def check_estimator(function: Any) -> None:
    """Check an estimator of verl's signature: it returns finite advantages for all tokens, 0 for unsampled ones."""
    import torch

    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    found = function(token_level_rewards=rewards, response_mask=mask, index=np.array([0, 0]), config=None)
    advantages, returns = found
    assert advantages.shape == mask.shape, f"advantages must be {tuple(mask.shape)}, not {tuple(advantages.shape)}"
    assert returns.shape == mask.shape, f"returns must be {tuple(mask.shape)}, not {tuple(returns.shape)}"
    assert torch.isfinite(advantages).all(), "advantages must be finite"
    assert bool((advantages[mask == 0] == 0).all()), "tokens that were not sampled must have advantage 0"


def check_provider(make: Any) -> None:
    """Check a provider factory: it makes a provider from the options of a config section. `sandbox_contract` checks
    sandboxes.
    """
    provider = make({})
    for name in ("create", "attach", "list", "kill", "close"):
        assert callable(getattr(provider, name, None)), f"a sandbox provider must have a method {name}"
    assert isinstance(provider.name, str), "a sandbox provider must have a name"


_CHECKS: Mapping[Kind, Callable[[Any], None]] = {
    "sandbox_providers": check_provider,
    "trackers": check_tracker,
    "losses": check_loss,
    "estimators": check_estimator,
}

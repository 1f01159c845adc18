"""What a model does to its logits beside the product with the output embedding: a scale, and a soft cap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from rayapp.core.errors import InputError
from rayapp.learner.log_probs import HeadOptions

_DIVISORS, _FACTORS = ("logits_scaling",), ("logit_scale", "lm_head_multiplier")
"""Names in configs: Granite divides its logits; Cohere and Falcon-H1 multiply theirs."""


class HeadRule(NamedTuple):
    """From products to logits."""

    factor: float = 1.0
    softcap: float | None = None
    """Logits become cap * tanh(logit / cap)."""

    def applied_to(self, options: HeadOptions) -> HeadOptions:
        """The options for this model. A factor is a temperature; a cap comes before that of sampling."""
        if self.softcap is None:
            return replace(options, temperature=options.temperature / self.factor)
        return replace(options, softcap=self.softcap)


def head_rule(causal_lm: Any) -> HeadRule:
    """Raises InputError: the head does more than that."""
    name, text = type(causal_lm).__name__, causal_lm.config.get_text_config()
    if getattr(causal_lm.get_output_embeddings(), "bias", None) is not None:
        raise InputError(f"{name} has a bias in its output embedding, which the learner lacks")
    factor = 1.0
    for key in (*_DIVISORS, *_FACTORS):
        if (value := getattr(text, key, None)) is not None:
            factor *= 1.0 / value if key in _DIVISORS else value
    cap = getattr(text, "final_logit_softcapping", None)
    if cap is not None and factor != 1.0:
        raise InputError(f"{name} scales its logits by {factor:g} and caps them at {cap:g}: the learner does only one")
    return HeadRule(factor=factor, softcap=cap)

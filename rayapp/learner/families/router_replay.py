"""Router replay (R3, arXiv 2510.11370): a mixture of experts is trained with the experts that the server chose.

Where two experts score nearly alike, rounding decides which of them a token goes to, and server and learner may decide
otherwise: other experts, another log-prob. So the server says what it chose, and the learner's routers take that. What
each chosen expert weighs stays the learner's own, with its gradient: of a router's forward only the result of
`topk(scores, k)` is replaced, by the recorded experts and their scores.

`check_replay` tries that on a small model of the family: one that chooses by other means is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rayapp.core.errors import InputError, LearnerError
from rayapp.learner.state.lora import ROUTERS

EXPERTS = "routed_experts"
"""Keyword of a decoder's forward: (N, layers, k) numbers of experts, -1 for a router's own choice; None: no replay."""
_ROUTE = "route_tokens_to_experts"
"""The method in which transformers' blocks choose, where their router does not itself."""
_TOPK = (torch.topk, Tensor.topk)


def num_experts_of(text: Any) -> int:
    """Experts of a layer, by the model's config; 0 without any."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((count for name in names if (count := getattr(text, name, None))), 0)


class RouterReplay:
    """Makes the routers of a model take the experts that its decoder is given as EXPERTS. Make it before sharding."""

    def __init__(self, causal_lm: Any) -> None:
        num_experts = num_experts_of(causal_lm.config.get_text_config())
        layers = [_Layer(number, num_experts) for number in range(len(causal_lm.get_decoder().layers))]
        self.num_layers = len(layers)
        self.routed = [
            own for own, layer in zip(layers, causal_lm.get_decoder().layers, strict=True) if own.join(layer)
        ]
        """Those that have routers."""

    def check(self, recorded: Sequence[NDArray[np.int16] | None]) -> None:
        """Raises LearnerError: what an engine has recorded are not the choices of this model's routers."""
        routed = [layer.number for layer in self.routed]
        for experts in recorded:
            if experts is None:
                continue
            if experts.shape[1] != self.num_layers or experts.max() >= self.routed[0].num_experts:
                raise LearnerError(
                    f"the server's experts have shape {experts.shape} and numbers up to {experts.max()}, but the "
                    f"learner has {self.num_layers} layers of {self.routed[0].num_experts} experts: another model"
                )
            # Nobody chooses an expert twice: zeros are what a layer has that the server did not record.
            if experts.shape[2] > 1 and (empty := (experts[:, routed] == 0).all(2)).any():
                token, layer = np.argwhere(empty)[0]
                raise LearnerError(
                    f"the server has recorded no experts for token {token} in layer {routed[layer]}, which has a "
                    "router. Set learner.router_replay: false."
                )

    def take_agreement(self) -> tuple[int, int]:
        """Experts taken since it was last asked: those that the learner's routers would have taken too, and all."""
        found = [layer.counts for layer in self.routed if layer.counts is not None]
        for layer in self.routed:
            layer.counts = None
        alike, taken = torch.stack(found).sum(0).tolist() if found else (0, 0)
        return alike, taken


class _Layer:
    """One layer of the decoder, and what its routers are to choose in the running forward."""

    def __init__(self, number: int, num_experts: int) -> None:
        self.number, self.num_experts = number, num_experts
        self.experts: Tensor | None = None
        """(N, k)"""
        self.counts: Tensor | None = None
        """(2,) as `RouterReplay.take_agreement`."""

    def join(self, layer: nn.Module) -> bool:
        """Take the experts out of what the layer is called with, also where it is called again by checkpointing, and
        wrap what chooses in it; False where nothing does."""
        layer.register_forward_pre_hook(self._begin, with_kwargs=True)
        routers = [(m, _ROUTE) for m in layer.modules() if hasattr(m, _ROUTE)]
        routers += [(part, "forward") for m in layer.modules() for name, part in m.named_children() if name in ROUTERS]
        for module, method in routers:
            setattr(module, method, partial(self._route, getattr(module, method)))
        return bool(routers)

    def _begin(self, _: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        experts = options.pop(EXPERTS, None)
        self.experts = None if experts is None else experts[:, self.number].long()
        return args, options

    def _route(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.experts is None:
            return forward(*args, **options)
        with _Choosing(self):
            return forward(*args, **options)

    def chosen(self, scores: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (N, k) and numbers of what is taken in place of a router's own choice."""
        assert self.experts is not None
        experts = torch.where(self.experts < 0, own, self.experts)
        alike = (self.experts[:, :, None] == own[:, None]).any(2).sum()
        counts = torch.stack([alike, (self.experts >= 0).sum()])
        self.counts = counts if self.counts is None else self.counts + counts
        return scores.gather(1, experts), experts


class _Choosing(TorchFunctionMode):
    """Within, `topk` over all experts of a layer finds what it is told. Others, over groups of experts, stay."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK or args[0].ndim != 2 or args[0].shape[1] != self._layer.num_experts:
            return found
        return torch.return_types.topk(self._layer.chosen(args[0], found.indices))


def check_replay(causal_lm: Any) -> None:
    """Raises InputError: the routers of this model can't be told what to choose.

    Args:
        causal_lm: a small one, which can't be used afterwards.
    """
    text = causal_lm.config.get_text_config()
    refused = f"learner.router_replay: model_type {text.model_type!r}"
    if not num_experts_of(text):
        raise InputError(f"{refused} is no mixture of experts. Set it to false.")
    if getattr(text, "topk_method", "") == "group_limited_greedy":
        raise InputError(
            f"{refused} gives experts outside of the best groups no weight (topk_method: group_limited_greedy), also "
            "where the server has chosen them. Set it to false."
        )
    replay = RouterReplay(causal_lm)
    if not replay.routed:
        raise InputError(f"{refused} has no layer with a part named {' or '.join(sorted(ROUTERS))}. Set it to false.")
    k, num_experts = text.num_experts_per_tok, num_experts_of(text)
    first, last = (_told(causal_lm, torch.arange(start, start + k), replay) for start in (0, num_experts - k))
    deaf = [layer.number for layer in replay.routed if layer.counts is None]
    if deaf or (k < num_experts and torch.equal(first, last)):
        raise InputError(
            f"{refused} chooses its experts by other means than the best k of their scores (layers {deaf or 'all'}), "
            "which nothing can be put in the place of. Set it to false."
        )


def _told(causal_lm: Any, experts: Tensor, replay: RouterReplay) -> Tensor:
    """Hidden states of a few tokens that all go to these experts."""
    tokens = torch.arange(1, 9)[None]
    told = experts.expand(tokens.numel(), replay.num_layers, -1)
    with torch.no_grad():
        hidden: Tensor = causal_lm.get_decoder()(tokens, use_cache=False, **{EXPERTS: told}).last_hidden_state
    return hidden

"""Router replay (R3, arXiv 2510.11370): trains a mixture of experts with the experts that the server chose.

If two experts score nearly equally, rounding decides, and the learner may choose another. So the result of a router's
`topk(scores, k)` is replaced by the recorded experts; their weights, with gradients, are still computed.
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

EXPERTS = "routed_experts"  # argument of a decoder's forward: (N, layers, k), -1 for a router's own choice
_ROUTE = "route_tokens_to_experts"  # chooses the experts in transformers' expert blocks without a router module
_TOPK = (torch.topk, Tensor.topk)


def num_experts_of(text: Any) -> int:
    """Return the number of experts of a layer; 0 without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((count for name in names if (count := getattr(text, name, None))), 0)


class RouterReplay:
    """Makes a model's routers choose the experts in the forward's argument EXPERTS. Create it before sharding."""

    def __init__(self, causal_lm: Any) -> None:
        num_experts = num_experts_of(causal_lm.config.get_text_config())
        layers = [_Layer(number, num_experts) for number in range(len(causal_lm.get_decoder().layers))]
        self.num_layers = len(layers)
        # Layers with routers.
        self.routed = [
            own for own, layer in zip(layers, causal_lm.get_decoder().layers, strict=True) if own.join(layer)
        ]

    def check(self, recorded: Sequence[NDArray[np.int16] | None]) -> None:
        """Raise LearnerError if this model's routers can't have chosen the recorded experts."""
        routed = [layer.number for layer in self.routed]
        for experts in recorded:
            if experts is None:
                continue
            if experts.shape[1] != self.num_layers or experts.max() >= self.routed[0].num_experts:
                raise LearnerError(
                    f"the server recorded experts of another model: {experts.shape[1]} layers and expert numbers up to "
                    f"{experts.max()}, but the learner's model has {self.num_layers} layers of "
                    f"{self.routed[0].num_experts} experts"
                )
            # A router never chooses an expert twice: all zeros mean that the server did not record the layer.
            if experts.shape[2] > 1 and (empty := (experts[:, routed] == 0).all(2)).any():
                token, layer = np.argwhere(empty)[0]
                raise LearnerError(
                    f"the server has recorded no experts for token {token} in layer {routed[layer]}, which has a "
                    "router. Set learner.router_replay: false."
                )

    def take_agreement(self) -> tuple[int, int]:
        """Return and reset two counts: replayed experts that the routers would have chosen too, and all of them."""
        found = [layer.counts for layer in self.routed if layer.counts is not None]
        for layer in self.routed:
            layer.counts = None
        alike, taken = torch.stack(found).sum(0).tolist() if found else (0, 0)
        return alike, taken


class _Layer:
    def __init__(self, number: int, num_experts: int) -> None:
        self.number, self.num_experts = number, num_experts
        self.experts: Tensor | None = None  # to choose, (N, k)
        self.counts: Tensor | None = None  # replayed experts that the routers would have chosen, and all, (2,)

    def join(self, layer: nn.Module) -> bool:
        """Hook the experts out of the layer's arguments, also when checkpointing calls it again, and wrap its router.
        False without one."""
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
        """Return scores (N, k) and numbers of the experts that replace the router's choice `own`."""
        assert self.experts is not None
        experts = torch.where(self.experts < 0, own, self.experts)
        alike = (self.experts[:, :, None] == own[:, None]).any(2).sum()
        counts = torch.stack([alike, (self.experts >= 0).sum()])
        self.counts = counts if self.counts is None else self.counts + counts
        return scores.gather(1, experts), experts


class _Choosing(TorchFunctionMode):
    """Context in which `topk` over all experts of a layer returns the recorded ones."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK or args[0].ndim != 2 or args[0].shape[1] != self._layer.num_experts:
            return found
        return torch.return_types.topk(self._layer.chosen(args[0], found.indices))


def check_replay(causal_lm: Any) -> None:
    """Check router replay on a small model, which can't be used afterwards; else InputError."""
    text = causal_lm.config.get_text_config()
    refused = f"learner.router_replay: model_type {text.model_type!r}"
    if not num_experts_of(text):
        raise InputError(f"{refused} is not a mixture of experts. Set learner.router_replay: false.")
    if getattr(text, "topk_method", "") == "group_limited_greedy":
        raise InputError(
            f"{refused} can't use the experts that the server chose: experts outside of the learner's best groups get "
            "no weight (topk_method: group_limited_greedy). Set learner.router_replay: false."
        )
    replay = RouterReplay(causal_lm)
    if not replay.routed:
        raise InputError(
            f"{refused} has no router that can be replayed: no layer has a part named {' or '.join(sorted(ROUTERS))}. "
            "Set learner.router_replay: false."
        )
    k, num_experts = text.num_experts_per_tok, num_experts_of(text)
    first, last = (_told(causal_lm, torch.arange(start, start + k), replay) for start in (0, num_experts - k))
    deaf = [layer.number for layer in replay.routed if layer.counts is None]
    if deaf or (k < num_experts and torch.equal(first, last)):
        raise InputError(
            f"{refused} can't use the experts that the server chose: its routers don't simply take the k best scores "
            f"(layers {deaf or 'all'}). Set learner.router_replay: false."
        )


def _told(causal_lm: Any, experts: Tensor, replay: RouterReplay) -> Tensor:
    tokens = torch.arange(1, 9)[None]
    told = experts.expand(tokens.numel(), replay.num_layers, -1)
    with torch.no_grad():
        hidden: Tensor = causal_lm.get_decoder()(tokens, use_cache=False, **{EXPERTS: told}).last_hidden_state
    return hidden

"""Adapts a family of models to packed training, and checks from its config alone that the results are right.

`check_family` scores two packed sequences that share a prefix with a small random model, and compares with plain eager
attention. `pin_positions` handles longrope, whose frequencies depend on a forward's longest sequence; vLLM chooses them
once, by `max_model_len`, so every forward also computes the last possible position.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rayapp.config.learner import LearnerSection, LoraSection
from rayapp.config.sections import ModelSection
from rayapp.core.errors import InputError, RayappError
from rayapp.learner.attention import ATTENTION_NAME, plan_attention, register_attention
from rayapp.learner.families.mixers import give_borders
from rayapp.learner.families.pictures import attention_of, build_model, small_tower
from rayapp.learner.families.router_replay import check_replay
from rayapp.learner.log_probs import HeadOptions
from rayapp.learner.packing import pack
from rayapp.learner.state.lora import ADAPTER, BASE, add_adapters, merged_weight
from rayapp.storage.models.families import FAMILIES, PICTURE_FAMILIES

# Granite divides; Cohere and Falcon-H1 multiply
_DIVISORS, _FACTORS = ("logits_scaling",), ("logit_scale", "lm_head_multiplier")


class HeadRule(NamedTuple):
    """Rule that makes logits of products with the output embedding: a factor and a soft cap."""

    factor: float = 1.0
    softcap: float | None = None  # logits become cap * tanh(logit / cap)

    def applied_to(self, options: HeadOptions) -> HeadOptions:
        """Return the options for this model: its factor in the temperature, its cap before the temperature."""
        if self.softcap is None:
            return replace(options, temperature=options.temperature / self.factor)
        return replace(options, softcap=self.softcap)


def head_rule(causal_lm: Any) -> HeadRule:
    """Return the model's rule. InputError: its head has a bias, or both a scale and a cap."""
    name, text = type(causal_lm).__name__, causal_lm.config.get_text_config()
    if getattr(causal_lm.get_output_embeddings(), "bias", None) is not None:
        raise InputError(f"{name} has a bias in its output embedding, which the learner does not support")
    factor = 1.0
    for key in (*_DIVISORS, *_FACTORS):
        if (value := getattr(text, key, None)) is not None:
            factor *= 1.0 / value if key in _DIVISORS else value
    cap = getattr(text, "final_logit_softcapping", None)
    if cap is not None and factor != 1.0:
        raise InputError(
            f"{name} scales its logits by {factor:g} and caps them at {cap:g}: the learner supports only one of the two"
        )
    return HeadRule(factor=factor, softcap=cap)


PINNED = "longrope"


def pin_positions(causal_lm: nn.Module, num_tokens: int) -> None:
    """Make every forward use longrope's frequencies for `num_tokens` tokens. Call it once."""
    for module in causal_lm.modules():
        kinds = getattr(module, "rope_type", None)
        if PINNED in (kinds.values() if isinstance(kinds, dict) else (kinds,)):
            module.forward = partial(_with_last, module.forward, num_tokens - 1)


def _with_last(
    forward: Callable[..., Any], last: int, hidden: Tensor, position_ids: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, ...]:
    told = torch.cat([position_ids, position_ids.new_full((*position_ids.shape[:-1], 1), last)], dim=-1)
    return tuple(turns[:, :-1] for turns in forward(hidden, told, *args, **options))


MAX_DIFFERENCE = 1e-2  # of float32 log-probs: right families differ by at most 2e-4, others by 0.65 or more
_LAYERS, _HEADS, _VOCABULARY, _WIDTH = 6, 4, 64, 32
_SHARED_TOKENS, _OWN_TOKENS = 8, (6, 9)
_WINDOW = 5  # shorter than the prompt, so that it affects both sequences


def read_architecture(model: ModelSection) -> Any:
    """Return the config of `model.path` without dropout and jitter, which act in training mode."""
    from transformers import AutoConfig

    try:
        architecture = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model.path {model.path!r} can't be loaded: {error}") from error
    for section in _sections(architecture):
        for name in [name for name, value in vars(section).items() if _is_noise(section, name) and value]:
            setattr(section, name, 0.0)
    if model.max_position_embeddings is not None:
        architecture.get_text_config().max_position_embeddings = model.max_position_embeddings
    return architecture


def check_family(architecture: Any, model: ModelSection, learner: LearnerSection, max_tokens: int) -> None:
    """Check that the learner computes this model as transformers does; else InputError."""
    reads_pictures = architecture.model_type in PICTURE_FAMILIES
    text = architecture if reads_pictures else architecture.get_text_config()
    known = FAMILIES.get(text.model_type)
    if known is not None and known.refused:
        raise InputError(f"model_type {text.model_type!r} can't be trained: {known.refused}.")
    if not reads_pictures:
        _check_class(architecture, model)
    subject, trusted = f"model_type {text.model_type!r}", model.trust_remote_code
    packed = partial(largest_difference, text, num_tokens=max_tokens, trust_remote_code=trusted)
    _check_difference(packed, subject, "packed sequences")
    if learner.lora.rank > 0:
        adapted = partial(
            _difference_with_adapters,
            text,
            learner.lora,
            num_tokens=max_tokens,
            trust_remote_code=trusted,
        )
        _check_difference(adapted, f"{subject} with learner.lora", "packed sequences with adapters")
    if learner.router_replay:
        with _one_thread(), torch.random.fork_rng(devices=[]):
            check_replay(_small_model(text, trust_remote_code=model.trust_remote_code))


def _check_difference(measure: Callable[[], float], subject: str, computed: str) -> None:
    try:
        difference = measure()
    except RayappError as error:
        raise InputError(f"{subject} can't be trained: {error}") from error
    except Exception as error:  # a model's code may raise anything
        raise InputError(
            f"{subject} can't be trained: the learner failed to compute a small model with its config: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not difference <= MAX_DIFFERENCE:
        raise InputError(
            f"{subject} can't be trained: the learner computes it wrongly. In a small model with its config, log-probs "
            f"of {computed} differ by {difference:.2g} from those of plain transformers; at most {MAX_DIFFERENCE:g} is "
            "allowed. Use another model."
        )


def _check_class(architecture: Any, model: ModelSection) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if model.trust_remote_code or type(architecture) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    text_type = architecture.get_text_config().model_type
    alone = f" Use a checkpoint of its language model alone (model_type {text_type})."
    raise InputError(
        f"model_type {architecture.model_type!r} can't be trained: transformers has no text-only causal language model "
        f"of this type.{alone if text_type != architecture.model_type else ''}"
    )


def largest_difference(text: Any, *, num_tokens: int, trust_remote_code: bool = False) -> float:
    """Return the largest difference of log-probs between packed and plain computation of a small model. Some models'
    positions depend on `num_tokens`, the longest possible sequence."""
    if not getattr(text.get_text_config(), "num_attention_heads", None):
        raise InputError("its config has no num_attention_heads, and the learner supports only models with attention")
    with _one_thread(), torch.random.fork_rng(devices=[]):
        causal_lm = _small_model(text, trust_remote_code=trust_remote_code)
        if not isinstance(getattr(causal_lm.get_decoder(), "layers", None), nn.ModuleList):
            raise InputError("its decoder has no list of `layers`, which the learner shards one by one")
        fit_to_packing(causal_lm, num_tokens)
        plain = _plain(causal_lm)
        return _difference(_packed(causal_lm), plain)


def _difference_with_adapters(text: Any, section: LoraSection, *, num_tokens: int, trust_remote_code: bool) -> float:
    """Compare with the plain model with merged adapters: some model's code bypasses an adapted layer."""
    with _one_thread(), torch.random.fork_rng(devices=[]):
        adapted, merged = (
            fit_to_packing(_small_model(text, trust_remote_code=trust_remote_code), num_tokens) for _ in range(2)
        )
        add_adapters(adapted, section)
        generator = torch.Generator().manual_seed(1)
        named = dict(adapted.named_parameters())
        with torch.no_grad():
            for name, parameter in named.items():
                if ADAPTER in name:
                    # Make alpha / rank * B A half as large as the weights that it is added to.
                    size = 0.5 * section.rank**0.5 / section.alpha if ".lora_B." in name else parameter.shape[1] ** -0.5
                    parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
            for name, parameter in merged.named_parameters():
                parameter.copy_(merged_weight(named, _name_inside(name, named), section))
        return _difference(_packed(adapted), _plain(merged))


def _name_inside(name: str, named: Mapping[str, Any]) -> str:
    module, _, kind = name.rpartition(".")
    return name if name in named else f"{module}{BASE}.{kind}"


def fit_to_packing(causal_lm: Any, num_tokens: int) -> Any:
    """Make the model compute packed sequences like single ones, of at most `num_tokens`. Call once, before sharding."""
    give_borders(causal_lm)
    pin_positions(causal_lm, num_tokens)
    return causal_lm


def _difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def _packed(causal_lm: Any) -> list[Tensor]:
    causal_lm.set_attn_implementation(attention_of(causal_lm.config, ATTENTION_NAME))
    packing = pack([list(_sequences())], share_prefixes=True)
    with torch.no_grad():
        hidden = training_mode(causal_lm).get_decoder()(
            input_ids=torch.from_numpy(packing.token_ids)[None],
            position_ids=torch.from_numpy(packing.position_ids)[None],
            use_cache=False,
            plan=plan_attention(packing, torch.device("cpu")),
        )
        packed = _scores(_logits(causal_lm, hidden.last_hidden_state[0]))
    return [packed[path] for path in packing.paths]


def training_mode(causal_lm: Any) -> Any:
    """Put layers in training mode, for checkpointing, but leaf modules (dropout, routers) in evaluation mode."""
    causal_lm.train()
    for module in causal_lm.modules():
        if not any(True for _ in module.children()):
            module.eval()
    return causal_lm


def _logits(causal_lm: Any, hidden: Tensor) -> Tensor:
    rule = head_rule(causal_lm)
    logits = (hidden @ causal_lm.get_output_embeddings().weight.t()) * rule.factor
    return logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)


@contextmanager
def _one_thread() -> Iterator[None]:
    # Two threads are no faster for a small model, and 20 times as slow on busy cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _sections(architecture: Any) -> Iterator[Any]:
    yield architecture
    for name in getattr(architecture, "sub_configs", {}):
        if (section := getattr(architecture, name, None)) is not None:
            yield from _sections(section)


def _is_noise(section: Any, name: str) -> bool:
    if section.model_type == "phimoe" and name == "router_jitter_noise":
        return False  # not noise: the router also uses this threshold in the engine
    return "dropout" in name or "jitter" in name or name.endswith(("_pdrop", "layerdrop"))


def _sequences() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shared, first, second = (rng.integers(1, _VOCABULARY, n).astype(np.int32) for n in (_SHARED_TOKENS, *_OWN_TOKENS))
    return np.concatenate([shared, first]), np.concatenate([shared, second])


def _small_model(text: Any, *, trust_remote_code: bool = False) -> Any:
    # The random weights are so large that each part affects the scores.
    register_attention()
    causal_lm: nn.Module = build_model(small_config(text), "eager", trust_remote_code=trust_remote_code)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*causal_lm.parameters(), *persistent_buffers(causal_lm).values()):
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise / math.sqrt(tensor.shape[-1]) if tensor.ndim >= 2 else tensor + 0.3 * noise)
    return causal_lm.eval()


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    names = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in names}


def small_config(text: Any) -> Any:
    """Return the config with few layers, heads and tokens. Heads keep their width: position scales depend on it."""
    small = copy.deepcopy(text)
    if text.model_type in PICTURE_FAMILIES:
        small.text_config = small_config(text.text_config)
        for name, value in small_tower(text.vision_config, small.text_config.hidden_size).items():
            setattr(small.vision_config, name, value)
        return small
    num_layers, heads = _num_layers(text), text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    changed: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS if key_heads == heads else min(key_heads, _HEADS // 2),
        "hidden_size": _HEADS * (getattr(text, "head_dim", None) or text.hidden_size // heads),
        "first_k_dense_replace": min(getattr(text, "first_k_dense_replace", 0) or 0, num_layers - 1),
        "num_kv_shared_layers": min(getattr(text, "num_kv_shared_layers", 0) or 0, num_layers // 4),
    }
    for name, value in vars(text).items():
        if isinstance(value, list | tuple) and len(value) == text.num_hidden_layers:
            changed[name] = list(value)[:num_layers]
        elif name.startswith("vocab_size"):
            changed[name] = _VOCABULARY
        elif name.endswith("intermediate_size") and value:
            changed[name] = _WIDTH
        elif name.endswith("_token_id"):
            changed[name] = None if name == "pad_token_id" else 0
        elif name == "sliding_window" and value:
            changed[name] = _WINDOW
    for name, value in changed.items():
        if hasattr(text, name):
            setattr(small, name, value)
    return small


def _num_layers(text: Any) -> int:
    """Return the fewest layers that include each type."""
    lists = [value for value in vars(text).values() if isinstance(value, list) and len(value) == text.num_hidden_layers]
    kinds = [kinds for kinds in lists if all(isinstance(kind, str) for kind in kinds)]
    firsts = [layers.index(kind) for layers in kinds for kind in layers]
    return min(int(text.num_hidden_layers), max([_LAYERS, *(first + 1 for first in firsts)]))


def _plain(causal_lm: Any) -> list[Tensor]:
    with torch.no_grad():
        return [
            _scores(causal_lm(torch.as_tensor(tokens, dtype=torch.long)[None], use_cache=False).logits[0])
            for tokens in _sequences()
        ]


def _scores(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)

"""Checks that the learner computes a family of models as transformers does, from its config alone, without weights.

`rayapp doctor` calls `check_family`, and so does `load_policy` before a weight is read. It makes a small model of
the same config, scores two sequences that share a prefix packed as training packs them, and compares that with plain
eager attention, one sequence at a time. What the learner lacks (a convolution that reads the neighbour's tokens, an
attention option, noise of the training mode) shows as a difference, whether anybody has heard of the family or not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayapp.config.config import Config
from rayapp.core.errors import InputError, RayappError
from rayapp.core.imports import large_imports
from rayapp.learner.attention import ATTENTION_NAME, plan_attention, register_attention
from rayapp.learner.families.head import head_rule
from rayapp.learner.families.mixers import give_borders
from rayapp.learner.families.rope import pin_positions
from rayapp.learner.families.router_replay import check_replay
from rayapp.learner.packing import pack
from rayapp.storage.models.families import FAMILIES

MAX_DIFFERENCE = 1e-2
"""Limit for float32 log-probs: families computed rightly differ by 2e-4 at most, wrong ones by 0.65 and more."""
_LAYERS, _HEADS, _VOCABULARY, _WIDTH = 6, 4, 64, 32
_SHARED_TOKENS, _OWN_TOKENS = 8, (6, 9)
_WINDOW = 5
"""Shorter than the prompt, so that windows matter in both sequences."""


def read_architecture(config: Config) -> Any:
    """The transformers config at `model.path`, without noise: dropout and jitter would be on while training.

    Raises:
        InputError: it can't be read.
    """
    from transformers import AutoConfig

    try:
        architecture = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model.path {config.model.path!r} can't be loaded: {error}") from error
    for section in _sections(architecture):
        for name in [name for name, value in vars(section).items() if _is_noise(section, name) and value]:
            setattr(section, name, 0.0)
    return architecture


def check_family(architecture: Any, config: Config) -> None:
    """Raises InputError: the learner would compute another model than this one."""
    text = architecture.get_text_config()
    known = FAMILIES.get(text.model_type)
    if known is not None and known.refused:
        raise InputError(f"model_type {text.model_type!r} can't be trained: {known.refused}.")
    _check_class(architecture, config)
    try:
        difference = largest_difference(text, num_tokens=config.max_model_tokens)
    except RayappError as error:
        raise InputError(f"model_type {text.model_type!r} can't be trained: {error}") from error
    except Exception as error:  # boundary: any model's code
        raise InputError(
            f"model_type {text.model_type!r} can't be trained: a small model of its config can't be computed by the "
            f"learner: {type(error).__name__}: {error}"
        ) from error
    if not difference <= MAX_DIFFERENCE:
        raise InputError(
            f"model_type {text.model_type!r} can't be trained: log-probs of a small model of its config differ by "
            f"{difference:.2g} between the learner's packed sequences and plain ones; {MAX_DIFFERENCE:g} is allowed."
        )
    if config.learner.router_replay:
        with _one_thread(), torch.random.fork_rng(devices=[]):
            check_replay(_small_model(text))


def _check_class(architecture: Any, config: Config) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.model.trust_remote_code or type(architecture) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    raise InputError(
        f"model_type {architecture.model_type!r} can't be trained: transformers has no causal language model of it, "
        f"only models that read more than text. Take a release of its language model "
        f"({architecture.get_text_config().model_type}) alone."
    )


def largest_difference(text: Any, *, num_tokens: int) -> float:
    """Largest difference of log-probs between packed and plain computation of a small model.

    Args:
        text: config of the language model.
        num_tokens: tokens of the longest sequence that there may be, for positions that depend on it.
    Raises:
        LearnerError: the attention has an option that packing does not do.
    """
    with _one_thread(), torch.random.fork_rng(devices=[]):
        causal_lm = _small_model(text)
        if not isinstance(getattr(causal_lm.get_decoder(), "layers", None), nn.ModuleList):
            raise InputError("its decoder has no list of `layers`, which the learner shards one by one")
        return _difference(fit_to_packing(causal_lm, num_tokens))


def fit_to_packing(causal_lm: Any, num_tokens: int) -> Any:
    """The same model, which computes packed tokens as it would plain ones. Call it once, before it is sharded.

    Args:
        num_tokens: of the longest sequence that there may be.
    """
    give_borders(causal_lm)
    pin_positions(causal_lm, num_tokens)
    return causal_lm


def _difference(causal_lm: Any) -> float:
    first, second = _sequences()
    plain = [_plain(causal_lm, tokens) for tokens in (first, second)]
    causal_lm.set_attn_implementation(ATTENTION_NAME)
    packing = pack([[first, second]], share_prefixes=True)
    with torch.no_grad():
        hidden = training_mode(causal_lm).get_decoder()(
            input_ids=torch.from_numpy(packing.token_ids)[None],
            position_ids=torch.from_numpy(packing.position_ids)[None],
            use_cache=False,
            plan=plan_attention(packing, torch.device("cpu")),
        )
        packed = _scores(_logits(causal_lm, hidden.last_hidden_state[0]))
    return max(float((packed[path] - own).abs().max()) for path, own in zip(packing.paths, plain, strict=True))


def training_mode(causal_lm: Any) -> Any:
    """The model with its layers as in training, which checkpointing asks for, and without noise: the smallest parts,
    such as routers and dropout, as in the engine."""
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
    """Compute on one thread. Two are no faster for a small model, and 20 times as slow where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _sections(architecture: Any) -> Iterator[Any]:
    """A config and all configs nested in it."""
    yield architecture
    for name in getattr(architecture, "sub_configs", {}):
        if (section := getattr(architecture, name, None)) is not None:
            yield from _sections(section)


def _is_noise(section: Any, name: str) -> bool:
    if section.model_type == "phimoe" and name == "router_jitter_noise":
        return False  # its router looks at it in the engine, too: which experts are so close that they count as equal
    return "dropout" in name or "jitter" in name or name.endswith(("_pdrop", "layerdrop"))


def _sequences() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shared, first, second = (rng.integers(1, _VOCABULARY, n).astype(np.int32) for n in (_SHARED_TOKENS, *_OWN_TOKENS))
    return np.concatenate([shared, first]), np.concatenate([shared, second])


def _small_model(text: Any) -> Any:
    """A model of this family with random weights, large enough that each of its parts moves the scores."""
    with large_imports():
        from transformers import AutoModelForCausalLM

    register_attention()
    causal_lm: nn.Module = AutoModelForCausalLM.from_config(
        small_config(text), dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*causal_lm.parameters(), *persistent_buffers(causal_lm).values()):
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise / math.sqrt(tensor.shape[-1]) if tensor.ndim >= 2 else tensor + 0.3 * noise)
    return causal_lm.eval()


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are saved with the model, by name: all but those that it computes again."""
    names = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in names}


def small_config(text: Any) -> Any:
    """The config with few layers, heads and words. Heads keep their width, which scales of positions are lists over."""
    small = copy.deepcopy(text)
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
    """As many as it takes until a layer of each type is there."""
    lists = [value for value in vars(text).values() if isinstance(value, list) and len(value) == text.num_hidden_layers]
    kinds = [kinds for kinds in lists if all(isinstance(kind, str) for kind in kinds)]
    firsts = [layers.index(kind) for layers in kinds for kind in layers]
    return min(int(text.num_hidden_layers), max([_LAYERS, *(first + 1 for first in firsts)]))


def _plain(causal_lm: Any, tokens: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return _scores(causal_lm(torch.as_tensor(tokens, dtype=torch.long)[None], use_cache=False).logits[0])


def _scores(logits: Tensor) -> Tensor:
    """(T, V) log-probs."""
    return logits.float().log_softmax(-1)

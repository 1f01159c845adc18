"""Weights under the names and in the shapes that checkpoints on the hub have, which are the ones that vLLM loads.

transformers 5 has its own for some families: experts of a layer as one tensor, a prefix less where a model reads
pictures too. It keeps how it converted them at loading, and can turn that back. Here that happens tensor by tensor, so
that no second model is ever held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

NamedTensor = tuple[str, Tensor]


def hub_tensors(causal_lm: Any, names: Iterable[str], tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """The tensors as the hub has them, in their order.

    Args:
        names: of all tensors that will come: what becomes one tensor of the hub is waited for.
    """
    from transformers.core_model_loading import revert_weight_conversion

    converters = _converters(causal_lm)
    if converters is None:
        yield from tensors
        return
    missing = Counter(_group(name, converters) for name in names)
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        group = _group(name, converters)
        waiting.setdefault(group, {})[name] = tensor
        if len(waiting[group]) == missing[group]:
            converted: dict[str, Tensor] = revert_weight_conversion(causal_lm, waiting.pop(group))
            yield from ((hub_name, part.contiguous()) for hub_name, part in converted.items())


def _group(name: str, converters: list[Any]) -> str:
    """Equal for tensors that are converted together."""
    from transformers.core_model_loading import rename_source_key

    group: str = rename_source_key(name, [], converters)[0]
    return group


def _converters(causal_lm: Any) -> list[Any] | None:
    """What turns tensors of transformers into the hub's; None where nothing does, not even a name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    conversions = getattr(causal_lm, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(causal_lm, add_legacy=False)
    if not conversions:
        return None
    inverted = [conversion.reverse_transform() for conversion in reversed(conversions)]
    return [transform for transform in inverted if isinstance(transform, WeightConverter)]

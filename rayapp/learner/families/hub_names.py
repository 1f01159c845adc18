"""Which tensors of a checkpoint on the hub, whose names vLLM knows, are which of the model's: one mapping, both ways.

transformers 5 has names and shapes of its own for some families: experts of a layer as one tensor, a prefix less where
a model reads pictures too. It says how each family is converted. `sources_of` reads that for loading, and leaves what
was used on the model; `hub_tensors` turns that back, for exports and for the servers. `groups_of` are the tensors that
are converted together: whoever goes from group to group never holds a second model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Source:
    """What one or more of the model's tensors are made of."""

    converter: Any = None
    """A `WeightConverter` of transformers; None where the file's tensor is the model's, maybe under another name."""
    names: dict[str, list[str]] = field(default_factory=dict)
    """Names in the files, by the pattern of the converter's that they match."""


def sources_of(causal_lm: Any, files: Iterable[str], targets: dict[str, Tensor]) -> dict[str, Source]:
    """By the first of the model's tensors that it gives. What the model has no place for is left out: layers for
    speculation, for example. As `transformers.core_model_loading` does it for models that fit into one process.

    Args:
        files: names of the tensors in the files.
        targets: the model's tensors by name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(causal_lm)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    renamings = [each for each in conversions if not isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, sources = causal_lm.base_model_prefix, dict[str, Source]()
    for name in sorted(files, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, targets)
        if target not in targets and name in targets:
            target, pattern = name, None
        if target in targets:
            source = sources.setdefault(target, Source(copy.deepcopy(by_pattern[pattern]) if pattern else None))
            source.names.setdefault(pattern or name, []).append(name)
    # What was used here is what `hub_tensors` undoes.
    causal_lm._weight_conversions = [each for each in conversions if each.was_used()]  # noqa: SLF001 - read by transformers
    return sources


def groups_of(causal_lm: Any, names: Iterable[str]) -> list[tuple[str, ...]]:
    """The model's names in their order, those of tensors that are converted together in one group."""
    from transformers.core_model_loading import WeightConverter, rename_source_key

    used = reversed(causal_lm._weight_conversions)  # noqa: SLF001 - of `sources_of`
    inverted = [each.reverse_transform() for each in used if isinstance(each, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(rename_source_key(name, [], inverted)[0], []).append(name)
    return [tuple(group) for group in groups.values()]


def hub_tensors(causal_lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the hub has for whole groups of the model's tensors, each contiguous."""
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(causal_lm, dict(tensors))
    return {name: tensor.contiguous() for name, tensor in found.items()}

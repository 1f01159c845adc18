"""Maps tensors between hub checkpoints, whose names vLLM knows, and transformers' models, in both directions.

transformers 5 has its own names and shapes for some families: one tensor for all experts of a layer, or a shorter
prefix for models that also read images. It defines each family's conversions. `sources_of` reads them for loading, and
stores the conversions that it used on the model; `hub_tensors` reverses them, for exports and for the servers.
`groups_of` returns the tensors that are converted together: converting group by group never holds a second model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class TensorOrigin:
    """Tensors of the files that one or more of the model's tensors are made from."""

    converter: Any = None
    """A `WeightConverter` of transformers; None if the file's tensor is used as it is, maybe under another name."""
    names: dict[str, list[str]] = field(default_factory=dict)
    """Names in the files, by the converter's pattern that they match."""


def sources_of(causal_lm: Any, files: Iterable[str], targets: dict[str, Tensor]) -> dict[str, TensorOrigin]:
    """Return the origins of the model's tensors, each by the first tensor that it gives.

    Tensors that the model lacks, such as layers for speculation, are left out. Follows
    `transformers.core_model_loading`, which needs the model in one process.

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
    prefix, sources = causal_lm.base_model_prefix, dict[str, TensorOrigin]()
    for name in sorted(files, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, targets)
        if target not in targets and name in targets:
            target, pattern = name, None
        if target in targets:
            source = sources.setdefault(target, TensorOrigin(copy.deepcopy(by_pattern[pattern]) if pattern else None))
            source.names.setdefault(pattern or name, []).append(name)
    # `hub_tensors` reverses the conversions that were used here.
    causal_lm._weight_conversions = [each for each in conversions if each.was_used()]  # noqa: SLF001 - read by transformers
    return sources


def groups_of(causal_lm: Any, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the model's names in order, in groups of tensors that are converted together."""
    from transformers.core_model_loading import WeightConverter, rename_source_key

    used = reversed(causal_lm._weight_conversions)  # noqa: SLF001 - of `sources_of`
    inverted = [each.reverse_transform() for each in used if isinstance(each, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(rename_source_key(name, [], inverted)[0], []).append(name)
    return [tuple(group) for group in groups.values()]


def hub_tensors(causal_lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert whole groups of the model's tensors to the hub's names and shapes; all contiguous."""
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(causal_lm, dict(tensors))
    return {name: tensor.contiguous() for name, tensor in found.items()}

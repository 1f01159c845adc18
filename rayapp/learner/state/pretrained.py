"""Reads the weights at `model.path`; every rank reads only its own rows of each tensor.

A rank reads full tensors only if transformers joins several along the rows (`WeightConverter`), one at a time.
Transformers 5 has its own names and shapes for some families: `sources_of` reads its conversions for loading, and
`hub_tensors` reverses them for exports and servers.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rayapp.config.learner import LoraSection
from rayapp.config.sections import ModelSection
from rayapp.core.errors import InputError
from rayapp.learner.distributed import local_part
from rayapp.learner.family import persistent_buffers
from rayapp.learner.state.lora import ADAPTER, BASE, peft_name
from rayapp.storage.models.adapters import beneath, merged_adapter
from rayapp.storage.models.nf4 import pack, shape_of


@dataclass(slots=True)
class TensorOrigin:
    """Tensors of the files from which one or more of the model's are made."""

    converter: Any = None  # None if the file's tensor is used unchanged, possibly under another name
    names: dict[str, list[str]] = field(default_factory=dict)  # names in the files, by the converter's pattern


def sources_of(causal_lm: Any, files: Iterable[str], targets: dict[str, Tensor]) -> dict[str, TensorOrigin]:
    """Return the origins of the model's tensors (`targets`), by the first tensor that is made from each.

    It follows `transformers.core_model_loading`, which needs the whole model in one process.
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
    # `hub_tensors` reverses the conversions that are stored here.
    causal_lm._weight_conversions = [each for each in conversions if each.was_used()]  # noqa: SLF001 - read by transformers
    return sources


def groups_of(causal_lm: Any, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the model's tensor names in groups that are converted together, in order."""
    from transformers.core_model_loading import WeightConverter, rename_source_key

    used = reversed(causal_lm._weight_conversions)  # noqa: SLF001 - of `sources_of`
    inverted = [each.reverse_transform() for each in used if isinstance(each, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(rename_source_key(name, [], inverted)[0], []).append(name)
    return [tuple(group) for group in groups.values()]


def hub_tensors(causal_lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert whole groups to contiguous tensors with the hub's names and shapes."""
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(causal_lm, dict(tensors))
    return {name: tensor.contiguous() for name, tensor in found.items()}


log = logging.getLogger(__name__)


class WeightFiles(Mapping[str, Any]):
    """Lazy mapping to tensors of a folder or of the hub: `[name]` reads nothing, `[name][3:5]` two rows. Weights that
    are to be rounded come without the adapter that is merged into them."""

    def __init__(self, model: ModelSection) -> None:
        path = model.path
        self.adapter = merged_adapter(path) if model.quantization != "none" else {}
        try:
            self._tensors = {name: tensor for file in _files(path) for name, tensor in _opened(file)}
        except Exception as error:  # the hub's client, safetensors and torch may raise anything
            raise InputError(f"model.path {path!r} can't be loaded: {error}") from error

    def __getitem__(self, name: str) -> Any:
        return _Beneath(self._tensors[name], name, self.adapter) if self.adapter else self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True, slots=True)
class _Beneath:
    tensor: Any
    name: str
    adapter: Mapping[str, Tensor]

    def get_shape(self) -> list[int]:
        return list(_shape(self.tensor))

    def __getitem__(self, rows: Any) -> Tensor:
        found: Tensor = beneath(self.adapter, self.name, self.tensor[rows], rows)
        return found


def _files(path: str) -> list[str]:
    from transformers.utils import cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    for name in ("model.safetensors", "pytorch_model.bin"):
        if file := cached_file(path, name, _raise_exceptions_for_missing_entries=False):
            return [str(file)]
        if index := cached_file(path, f"{name}.index.json", _raise_exceptions_for_missing_entries=False):
            files, _ = get_checkpoint_shard_files(path, index)
            return [str(file) for file in files]
    raise OSError("it has neither model.safetensors nor pytorch_model.bin, and no .index.json that lists their parts")


def _opened(file: str) -> Iterator[tuple[str, Any]]:
    if not file.endswith(".safetensors"):
        yield from torch.load(file, map_location="cpu", mmap=True, weights_only=True).items()
        return
    from safetensors import safe_open

    opened: Any = safe_open(file, framework="pt", device="cpu")
    for name in opened.keys():  # noqa: SIM118 - it is no mapping
        yield name, opened.get_slice(name)


def load_pretrained(causal_lm: Any, model: ModelSection) -> WeightFiles:
    """Fill this rank's part of every parameter except adapters, and all persistent buffers. Of a tied pair in the files
    the embedding's is used, as in vLLM."""
    path, files, targets = model.path, WeightFiles(model), tensors_of(causal_lm)
    num_read, filled = 0, set[int]()
    for first, source in sources_of(causal_lm, files, targets).items():
        for name, rows in _read(causal_lm, first, source, files, targets):
            num_read += rows.numel()
            filled.add(id(targets[name]))
            _fill(local_part(targets[name]), rows)
    missing = [name for name, p in targets.items() if isinstance(p, nn.Parameter) and id(p) not in filled]
    if missing:
        raise InputError(
            f"model.path {path!r} lacks {len(missing)} of the model's tensors, such as {missing[0]}: the download is "
            "incomplete, or config.json belongs to another model."
        )
    num_weights = sum(shape_of(tensor).numel() for tensor in causal_lm.parameters())
    log.info("read %.1f million weights, of %.1f million", num_read / 1e6, num_weights / 1e6)
    return files


def _fill(target: Tensor, rows: Tensor) -> None:
    """Copy this rank's rows of a weight, packed on the target's device if the target is packed."""
    is_packed = target.dtype == torch.uint8 and len(target) > 0
    target.copy_(pack(rows.to(target.device)) if is_packed else rows)


def tensors_of(causal_lm: Any) -> dict[str, Tensor]:
    """Return the tensors that the files should hold, without adapters; tied ones under each name."""
    named = dict(causal_lm.named_parameters(remove_duplicate=False)) | persistent_buffers(causal_lm)
    return {name.replace(BASE, ""): tensor for name, tensor in named.items() if ADAPTER not in name}


def read_whole(
    causal_lm: Any, sources: Mapping[str, TensorOrigin], files: WeightFiles, names: set[str]
) -> dict[str, Tensor]:
    """Read the full tensors of one group of `groups_of`, in the files' dtype."""
    targets = tensors_of(causal_lm)
    firsts = [name for name in names if name in sources]
    return {name: t for first in firsts for name, t in _read(causal_lm, first, sources[first], files, targets)}


def _read(
    causal_lm: Any, first: str, source: TensorOrigin, files: Mapping[str, Any], targets: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    rows, converter = own_rows(targets[first]), source.converter
    if converter is None:
        [[name]] = source.names.values()
        _check_shape(first, list(_shape(files[name])), targets[first])
        yield first, files[name][rows]
        return
    stacked = _is_stack(converter)
    if stacked and rows is not ... and rows.start == rows.stop:
        yield first, local_part(targets[first])
        return
    for pattern, names in source.names.items():
        if stacked and len(names) != len(targets[first]):
            raise InputError(
                f"model.path has only {len(names)} of the {len(targets[first])} tensors {pattern} that form {first}: "
                "the download is incomplete, or config.json belongs to another model."
            )
        for name in names[rows] if stacked and rows is not ... else names:
            converter.add_tensor(first, name, pattern, files[name][...])
    for target, found in converter.convert(first, model=causal_lm, config=causal_lm.config).items():
        tensor = found[0] if isinstance(found, list) else found
        if stacked:
            yield target, tensor
        elif target in targets:
            _check_shape(target, list(tensor.shape), targets[target])
            yield target, tensor[own_rows(targets[target])]


def _is_stack(converter: Any) -> bool:
    """Return True if row k of the result depends only on the k-th tensors, as for fused experts."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    first, *others = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and len(converter.target_patterns) == 1
        and all(
            (isinstance(op, Concatenate) and op.dim > 0) or (isinstance(op, Transpose) and 0 not in (op.dim0, op.dim1))
            for op in others
        )
    )


def own_rows(tensor: Tensor) -> Any:
    """Return the rows that this rank holds: a slice of the first dimension, or `...`."""
    if not isinstance(tensor, DTensor):
        return ...
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return slice(offset[0], offset[0] + shape[0])


def start_adapters(causal_lm: nn.Module, seed: int, lora: LoraSection, earlier: Mapping[str, Tensor]) -> None:
    """Initialize adapters as an `earlier` run left them; without one, as peft does, with the same values for any number
    of ranks.

    Raises:
        InputError: the earlier adapters are those of other layers or have another rank.
    """
    mine = {peft_name(name): tuple(p.shape) for name, p in causal_lm.named_parameters() if ADAPTER in name}
    if earlier and mine != {name: tuple(tensor.shape) for name, tensor in earlier.items()}:
        rank = min(next(iter(earlier.values())).shape)
        raise InputError(
            f"the model's folder `adapter` has {len(earlier)} tensors of rank {rank}, but learner.lora asks for "
            f"{len(mine)} of rank {lora.rank}. In 4 bits these adapters are trained on: set learner.lora.rank and "
            "target_modules as the earlier run had them. Or move the folder away, to round the merged weights, "
            "which lose most of what the adapters learned."
        )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in causal_lm.named_parameters():
        if earlier and ADAPTER in name:
            scale = lora.alpha / lora.rank if ".lora_B." in name else 1.0  # as `adapter_weights` multiplied it in
            local_part(parameter).copy_(earlier[peft_name(name)][own_rows(parameter)] / scale)
        elif ".lora_A." in name:
            whole = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            local_part(parameter).copy_(whole[own_rows(parameter)])
        elif ADAPTER in name:
            local_part(parameter).zero_()


def generation_config(path: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def _shape(tensor: Any) -> Any:
    return tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape


def _check_shape(name: str, found: list[int], target: Tensor) -> None:
    if found != list(shape_of(target)):
        raise InputError(
            f"model.path: tensor {name} has the shape {tuple(found)} in the files, but {tuple(shape_of(target))} by "
            "config.json: the files belong to different models."
        )

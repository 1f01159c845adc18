"""Defines the Hugging Face folder of the policy: the layout of its weight files, and its other files.

Transformers makes several of the hub's tensors out of one of the model (fused experts), or the reverse. A file holds
whole groups of such tensors, so that any process can write any file with only its tensors in memory.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from rayapp.config.config import Config, with_number_formats
from rayapp.config.learner import LoraSection
from rayapp.config.sections import ModelSection
from rayapp.core.errors import CheckpointError
from rayapp.core.files import readable_as_its_folder
from rayapp.learner.families.pictures import freeze_tower, frozen_tower
from rayapp.learner.family import persistent_buffers
from rayapp.learner.policy import DTYPES, build_causal_lm
from rayapp.learner.state.lora import ADAPTER, BASE, add_adapters, merged_weight
from rayapp.learner.state.pretrained import WeightFiles, groups_of, hub_tensors, read_whole, sources_of, tensors_of
from rayapp.storage.models.adapters import PEFT_PREFIX
from rayapp.storage.models.nf4 import is_packed, rounded, shape_of

FILE_BYTES = 5 * 10**9  # only a single larger group of tensors exceeds it
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFile:
    name: str
    # Tensors of the model without adapters, in groups that are converted by themselves.
    groups: tuple[tuple[str, ...], ...]
    hub: Mapping[str, Tensor]  # on the meta device, by the hub's names


@dataclass(frozen=True, slots=True, kw_only=True)
class HfLayout:
    """Weight files of a folder, and the model from which the other files are written."""

    files: tuple[HfFile, ...]
    causal_lm: Any  # only its class and configs are read
    dtype: torch.dtype  # of the parameters; persistent buffers keep their own
    tokenizer_path: str
    trust_remote_code: bool

    def describe(self, folder: Path) -> None:
        """Write index, config, generation config, tokenizer, and code that is not in transformers."""
        from transformers import AutoTokenizer
        from transformers.dynamic_module_utils import custom_object_save

        folder.mkdir(parents=True, exist_ok=True)
        if len(self.files) > 1:
            (folder / "model.safetensors.index.json").write_text(json.dumps(self._index(), indent=2, sort_keys=True))
        # Change a copy: the learner's config must keep the name of packed attention, which other programs don't have.
        config = copy.deepcopy(self.causal_lm.config)
        config._attn_implementation = "sdpa"  # noqa: SLF001 - transformers offers no public name for it
        config.dtype, config.architectures = self.dtype, [type(self.causal_lm).__name__]
        if getattr(self.causal_lm, "_auto_class", None) is not None:
            custom_object_save(self.causal_lm, folder, config=config)
        config.save_pretrained(folder)
        if self.causal_lm.can_generate():
            self.causal_lm.generation_config.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_path, trust_remote_code=self.trust_remote_code)
        tokenizer.save_pretrained(folder)
        if hasattr(config, "vision_config"):
            _copy_processor(self.tokenizer_path, folder)

    def _index(self) -> dict[str, Any]:
        total = sum(_bytes(file.hub) for file in self.files)
        return {
            "metadata": {"total_size": total},
            "weight_map": {n: file.name for file in self.files for n in file.hub},
        }


def hf_layout(model: ModelSection, causal_lm: Any, dtype: torch.dtype, file_bytes: int = FILE_BYTES) -> HfLayout:
    shapes = {name: _outline(tensor, dtype) for name, tensor in _exported(causal_lm)}
    groups = groups_of(causal_lm, shapes)
    hubs = [hub_tensors(causal_lm, {name: shapes[name] for name in group}) for group in groups]
    chosen: list[list[int]] = []
    filled = 0
    for number, hub in enumerate(hubs):
        if not chosen or filled + _bytes(hub) > file_bytes:
            chosen.append([])
            filled = 0
        chosen[-1].append(number)
        filled += _bytes(hub)
    names = [f"model-{number:05d}-of-{len(chosen):05d}.safetensors" for number in range(1, len(chosen) + 1)]
    files = tuple(
        HfFile(
            name=name if len(chosen) > 1 else "model.safetensors",
            groups=tuple(groups[number] for number in numbers),
            hub={key: tensor for number in numbers for key, tensor in hubs[number].items()},
        )
        for name, numbers in zip(names, chosen, strict=True)
    )
    return HfLayout(
        files=files,
        causal_lm=causal_lm,
        dtype=dtype,
        tokenizer_path=model.path,
        trust_remote_code=model.trust_remote_code,
    )


def _copy_processor(path: str, folder: Path) -> None:
    """Copy the files without which vLLM does not start a model with an image tower."""
    from transformers.utils import cached_file

    for name in PROCESSOR_FILES:
        missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        if (file := cached_file(path, name, **missing)) is not None:
            shutil.copyfile(file, folder / name)


def _exported(causal_lm: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, tied ones under their first name, and persistent buffers."""
    left_out, seen = set(causal_lm._keys_to_ignore_on_save or ()), set[int]()  # noqa: SLF001
    for name, tensor in tensors_of(causal_lm).items():
        if id(tensor) not in seen and name not in left_out:
            seen.add(id(tensor))
            yield name, tensor


def _outline(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    own = dtype if isinstance(tensor, torch.nn.Parameter) else tensor.dtype
    return torch.empty(shape_of(tensor), dtype=own, device="meta")


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file of weights; else CheckpointError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"format": "pt"})
        readable_as_its_folder(path)
    except (SafetensorError, OSError) as error:  # SafetensorError covers any disk error, such as a full disk
        raise CheckpointError(f"the model can't be written to {path.parent}: {error}") from error


def write_adapter(folder: Path, tensors: dict[str, Tensor], *, rank: int, base: str) -> None:
    """Write an adapter, as `adapter_weights` yields it, in peft's form; else CheckpointError."""
    from peft import LoraConfig

    write_file(folder / "adapter_model.safetensors", tensors)
    LoraConfig(
        r=rank,
        lora_alpha=rank,  # the scale is multiplied into the tensors
        target_modules=sorted({name.removeprefix(PEFT_PREFIX).partition(ADAPTER)[0] for name in tensors}),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    ).save_pretrained(str(folder))


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


_WEIGHTS = "model."


def checkpoint_to_hf(config: Config, learner_folder: Path, out: Path) -> None:
    """Write the checkpoint's weights in float32 as a Hugging Face folder. `config` is of the run that saved it."""
    config = with_number_formats(config, on_gpu=config.cluster.device != "cpu" and torch.cuda.is_available())
    causal_lm = build_causal_lm(config.model, config.learner, config.max_model_tokens, is_checked=False)
    if config.learner.lora.rank > 0:
        with torch.device("meta"):
            add_adapters(causal_lm, config.learner.lora)
    if config.model.freeze_vision:
        freeze_tower(causal_lm)
    kept = {name for name, _ in causal_lm.named_parameters() if config.learner.lora.rank == 0 or ADAPTER in name}
    trained = kept - frozen_tower(causal_lm)
    files = WeightFiles(config.model)
    sources = sources_of(causal_lm, files, tensors_of(causal_lm))
    layout = hf_layout(config.model, causal_lm, torch.float32)
    try:
        _check_names({f"{_WEIGHTS}{name}" for name in trained}, learner_folder)
        for file in layout.files:
            tensors: dict[str, Tensor] = {}
            for group in file.groups:
                held = _from_checkpoint(causal_lm, trained, set(group), learner_folder)
                frozen = read_whole(causal_lm, sources, files, {name for name in group if name not in held})
                held |= _as_held(causal_lm, frozen, config)
                tensors |= hub_tensors(causal_lm, _exported_group(causal_lm, held, group, config.learner.lora))
            write_file(out / file.name, tensors)
    except (CheckpointException, OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the weights in {learner_folder} can't be read into {config.model.path}: {error}. The checkpoint is "
            "incomplete, was saved without `model` (checkpoint.save_contents), or belongs to another model."
        ) from error
    layout.describe(out)


def _as_held(causal_lm: Any, frozen: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Round weights that don't learn as the learners did, which keep them in 4 bits or in `learner.compute_dtype`."""
    buffers, held_in = persistent_buffers(causal_lm), DTYPES[config.learner.compute_dtype]
    in_4_bits = config.model.quantization == "nf4"

    def held(name: str, weight: Tensor) -> Tensor:
        if name in buffers:
            return weight
        return rounded(name, weight) if in_4_bits and is_packed(name, weight.shape) else weight.to(held_in)

    return {name: held(name, weight) for name, weight in frozen.items()}


def _from_checkpoint(causal_lm: Any, trained: set[str], group: set[str], folder: Path) -> dict[str, Tensor]:
    """Read `group` and its adapters, float32 by parameter name."""
    named = {name: p.shape for name, p in causal_lm.named_parameters() if name in trained and _weight_of(name) in group}
    held = {f"{_WEIGHTS}{name}": torch.empty(shape) for name, shape in named.items()}
    if held:
        load(held, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(_WEIGHTS): tensor for name, tensor in held.items()}


def _weight_of(name: str) -> str:
    module, is_adapter, _ = name.partition(ADAPTER)
    return f"{module}.weight" if is_adapter else name


def _exported_group(
    causal_lm: Any, held: dict[str, Tensor], group: Iterable[str], lora: LoraSection
) -> dict[str, Tensor]:
    """Return the group with adapters merged in, parameters in float32."""
    buffers = persistent_buffers(causal_lm)
    adapted = {name.partition(ADAPTER)[0] for name in held if ADAPTER in name}
    whole: dict[str, Tensor] = {}
    for name in group:
        if name in buffers:
            whole[name] = held[name].to(buffers[name].dtype)
            continue
        module, _, kind = name.rpartition(".")
        if module not in adapted:
            whole[name] = held[name].float()
            continue
        own = f"{module}{BASE}.{kind}"
        whole[name] = merged_weight(held | {own: held[name].float()}, own, lora)
    return whole


def _check_names(expected: set[str], folder: Path) -> None:
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    stored = {name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    found = {name for name in stored if name.startswith(_WEIGHTS)}
    if found != expected:
        odd = min(found ^ expected)
        raise ValueError(
            f"the checkpoint has {len(found)} tensors and the model has {len(expected)}; {odd} is missing in the "
            f"{'checkpoint' if odd in expected else 'model'}"
        )

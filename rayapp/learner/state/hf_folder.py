"""A Hugging Face folder of the policy: which file holds which tensors under which names, and all that is no weight.

A file holds whole groups of tensors: transformers makes several of the hub's out of one of the model's (fused experts),
or one of several. So any process can write any file with no more than that in memory.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayapp.config.config import Config
from rayapp.core.errors import CheckpointError
from rayapp.learner.families.hub_names import groups_of, hub_tensors
from rayapp.learner.state.pretrained import tensors_of

EXPORT_DTYPE = torch.bfloat16
FILE_BYTES = 5 * 10**9
"""Of a file, unless one group of tensors alone has more."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFile:
    """One file of weights."""

    name: str
    groups: tuple[tuple[str, ...], ...]
    """Names of the model's tensors (without adapters): a group becomes the hub's tensors by itself."""
    hub: Mapping[str, Tensor]
    """The hub's names, with tensors on the meta device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfLayout:
    """A folder: its files of weights, and what the others are made from."""

    files: tuple[HfFile, ...]
    causal_lm: Any
    """A transformers model of which only the class and the configs are read."""
    tokenizer_path: str
    trust_remote_code: bool

    def describe(self, folder: Path) -> None:
        """Write everything but weights: index, config, generation config, tokenizer, and code that is not in
        transformers."""
        from transformers import AutoTokenizer
        from transformers.dynamic_module_utils import custom_object_save

        folder.mkdir(parents=True, exist_ok=True)
        if len(self.files) > 1:
            (folder / "model.safetensors.index.json").write_text(json.dumps(self._index(), indent=2, sort_keys=True))
        # A copy, to change it: the learner's must keep naming our attention, which only this process knows.
        config = copy.deepcopy(self.causal_lm.config)
        config._attn_implementation = "sdpa"  # noqa: SLF001 - transformers offers no public name for it
        config.dtype, config.architectures = EXPORT_DTYPE, [type(self.causal_lm).__name__]
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


def hf_layout(config: Config, causal_lm: Any, file_bytes: int = FILE_BYTES) -> HfLayout:
    """The folder of this model; nothing is gathered or read."""
    shapes = {name: _outline(tensor) for name, tensor in _exported(causal_lm)}
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
        tokenizer_path=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
    )


def _copy_processor(path: str, folder: Path) -> None:
    """What prepares pictures for a model that keeps its image tower: without it vLLM does not start."""
    from transformers.utils import cached_file

    for name in PROCESSOR_FILES:
        missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        if (file := cached_file(path, name, **missing)) is not None:
            shutil.copyfile(file, folder / name)


def _exported(causal_lm: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones under their first name, and persistent buffers: what is saved though not trained."""
    left_out, seen = set(causal_lm._keys_to_ignore_on_save or ()), set[int]()  # noqa: SLF001
    for name, tensor in tensors_of(causal_lm).items():
        if id(tensor) not in seen and name not in left_out:
            seen.add(id(tensor))
            yield name, tensor


def _outline(tensor: Tensor) -> Tensor:
    dtype = EXPORT_DTYPE if isinstance(tensor, torch.nn.Parameter) else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file of weights.

    Raises:
        CheckpointError: it can't be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:  # the first for any error of the disk, a full one too
        raise CheckpointError(f"the model can't be written to {path.parent}: {error}") from error


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

"""A loader of vLLM that rounds a model's weights to NF4 and back, so that servers sample from the weights under the
learners' adapters (`model.quantization: nf4`). vLLM 0.30 has no kernels for NF4: it computes in `server.dtype`, or
rounds once more with `server.quantization`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from rayapp.engine.vllm_arguments import NF4
from rayapp.engine.vllm_worker import WeightUpdateExtension
from rayapp.storage.models.adapters import beneath, merged_adapter
from rayapp.storage.models.nf4 import rounded


@register_model_loader(NF4)
class Nf4Loader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's default loader, with rounded matrices."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the files' tensors by the hub's names, rounded on the device that computes."""
        adapter = merged_adapter(model_config.model)
        for name, tensor in super().get_all_weights(model_config, model):
            weight = beneath(adapter, name, tensor.to(current_platform.device_type))
            yield name, rounded(name, weight).to(tensor)


class RoundedWeightsExtension(WeightUpdateExtension):
    """The workers' extension; every worker imports this module for it, which registers the loader."""

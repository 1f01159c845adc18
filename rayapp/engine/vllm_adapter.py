"""LoRA adapters in vLLM's workers: a sync replaces the adapter, the model's weights stay as the server loaded them.

`adapter_args` and `adapter_request` are for `VllmEngine`, `load_adapter` runs in the engine's processes. Tensors come
the way all weights do, in shared memory; vLLM's own loader reads adapters from folders only. One adapter at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rayapp.config.config import Config
from rayapp.engine.weights.buckets import TensorEntry

ADAPTER_ID, ADAPTER_NAME = 1, "policy"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has buffers for; a smaller adapter uses a part of the next larger one."""


def adapter_args(config: Config) -> dict[str, Any]:
    """vLLM's engine arguments for LoRA; none where the learner sends whole weights."""
    if not config.learner.lora.sends_adapter:
        return {}
    rank = next(size for size in RANKS if size >= config.learner.lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


def is_adapter(entries: Sequence[TensorEntry]) -> bool:
    """True if these tensors are an adapter's, and not a whole model's."""
    return bool(entries) and all(".lora_A." in name or ".lora_B." in name for name, *_ in entries)


def adapter_request() -> Any:
    """The LoRARequest that makes a request use the adapter. Its path is never read, as the adapter is in memory."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=ADAPTER_NAME, lora_int_id=ADAPTER_ID, lora_path="in-memory")


def load_adapter(model_runner: Any, tensors: Iterable[tuple[str, Any]]) -> int:
    """Put this adapter in the place of the last one. Returns the number of its tensors.

    Args:
        tensors: by peft's names, with the scale multiplied in; copied, as their memory goes away.
    Raises:
        ValueError: vLLM has no place for some of them, and would have left them out without a word.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    own = {name: tensor.clone() for name, tensor in tensors}
    workers = model_runner.lora_manager
    manager = workers._adapter_manager  # noqa: SLF001 - vLLM has no public way to adapters that are in memory
    rank = max(tensor.shape[0] for name, tensor in own.items() if ".lora_A." in name)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        own,
        # Alpha equal to the rank: the scale is in the tensors already.
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=workers.lora_config.lora_dtype,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    check_places(adapter.loras, manager.modules, manager.packed_modules)
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)
    return len(own)


def check_places(loras: Mapping[str, Any], modules: Mapping[str, Any], packed: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError when the engine lacks a module, e.g. one of another model."""
    places = {part for name in modules for part in packed.get(name, [name])}
    lost = sorted(set(loras) - places)
    if lost:
        raise ValueError(
            f"vLLM has no place for the adapters of {len(lost)} modules: {', '.join(lost[:3])}. Leave them out of "
            "learner.lora.target_modules, or set learner.lora.send: merged."
        )

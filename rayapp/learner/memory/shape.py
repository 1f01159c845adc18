"""Shape of a model, from its config.json without weights, and a table of GPUs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayapp.config.config import Config, frozen_models, with_values
from rayapp.config.learner import LearnerSection, LoraSection
from rayapp.core.errors import InputError
from rayapp.storage.models.check import check_hub_answers
from rayapp.storage.models.fetch import with_local_model

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    room: int  # bytes that a process can use
    tflops: float  # dense bfloat16 products with float32 sums
    memory_gb_s: float
    link_gb_s: float  # to the other GPUs of its node in one direction: NVLink or PCIe

    @property
    def gib(self) -> float:
        return self.room / GIB


# A name that contains another name comes before it.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="h200", room=139 * GIB, tflops=989, memory_gb_s=4800, link_gb_s=450),
        Gpu(name="h100", room=79 * GIB, tflops=989, memory_gb_s=3350, link_gb_s=450),
        Gpu(name="a100", room=79 * GIB, tflops=312, memory_gb_s=2039, link_gb_s=300),
        Gpu(name="l40s", room=44 * GIB, tflops=362, memory_gb_s=864, link_gb_s=32),
        Gpu(name="rtx4090", room=23 * GIB, tflops=165, memory_gb_s=1008, link_gb_s=32),
        Gpu(name="rtx5090", room=30 * GIB, tflops=209, memory_gb_s=1792, link_gb_s=64),
        Gpu(name="gb200", room=184 * GIB, tflops=2500, memory_gb_s=8000, link_gb_s=900),
        Gpu(name="b200", room=178 * GIB, tflops=2250, memory_gb_s=8000, link_gb_s=900),
        Gpu(name="mi300x", room=190 * GIB, tflops=1307, memory_gb_s=5300, link_gb_s=448),
    )
}
# Keys by which a user describes a GPU -> fields of `Gpu`.
FIGURES = {"memory_gib": "room", "memory_gb_s": "memory_gb_s", "tflops": "tflops", "link_gb_s": "link_gb_s"}
NODE_GPUS, NODE_LINK_GB_S, PCIE_GB_S = 8, 50.0, 32.0  # GPUs; GB/s of each to other nodes (400 Gbit/s); over PCIe 4


def gpu_called(name: str) -> Gpu:
    """Return the kind of GPU of this name or description, such as `memory_gib=96,memory_gb_s=1790,tflops=250`."""
    plain = re.sub(r"[\s_-]", "", name.lower())
    if plain in GPUS:
        return GPUS[plain]
    figures = dict(part.strip().partition("=")[::2] for part in name.split(","))
    try:
        known = {FIGURES[key]: float(value) for key, value in figures.items()}
        if min(known.values()) <= 0 or max(known.values()) == math.inf:
            raise ValueError(name)
        room = int(known.pop("room") * GIB)
        return Gpu(name="GPU", room=room, **({"link_gb_s": PCIE_GB_S} | known))
    except (KeyError, ValueError, TypeError):
        raise InputError(
            f"--gpu {name!r} is unknown: use one of {', '.join(GPUS)}. Or describe another GPU: --gpu "
            "memory_gib=94,memory_gb_s=3900,tflops=835,link_gb_s=300. Give the memory that programs can use and the "
            f"TFLOPS of dense bfloat16; link_gb_s is {PCIE_GB_S:g} if you omit it."
        ) from None


def gpu_here() -> Gpu | None:
    """Return the kind of this machine's first GPU; None without one. InputError: the table has no such GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_name(0)
    plain = found.lower().replace(" ", "")
    for name, gpu in GPUS.items():
        if name in plain:
            return replace(gpu, room=min(gpu.room, room_here()))  # GPUs of a name may have different memory sizes
    raise InputError(
        f"this machine's GPU {found} is unknown to rayapp. To plan for a similar GPU, use `rayapp plan --gpu "
        f"{'|'.join(GPUS)}`"
    )


def room_here() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory - GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    num_parameters: int  # tied ones once
    num_layer_parameters: int  # of the largest decoder layer
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_key_heads: int
    head_size: int
    vocabulary: int
    norms_heads: bool = False  # queries and keys are normed, as in Qwen3
    num_idle_parameters: int = 0  # experts to which a token is not sent, over all layers
    num_elsewhere: int = 0  # experts that a learner never gathers (`learner.expert_parallel_size`), over all layers
    rows_elsewhere: float = 0.0  # sent away in a forward for each token, one for each expert elsewhere, over all layers
    num_adapter_parameters: int = 0  # 0 if all weights are trained
    adapter_rank_sum: int = 0  # values that one layer's adapters keep for each token
    num_packed: int = 0  # in 4 bits, over all layers (`model.quantization`)
    num_frozen_in_tower: int = 0  # of a frozen vision tower, whole on each learner; not among `num_parameters`
    num_picture_layers: int = 0  # vectors that each token of a picture gets from the tower; 0 in a model for text
    # values that a trained tower keeps for each token of a picture: without and with recomputed layers
    tower_values: tuple[int, int] = (0, 0)
    tower_flops: int = 0  # of the tower's products for each token of a picture, with backward if it is trained
    teacher: ModelShape | None = None

    @property
    def num_trained(self) -> int:
        """Parameters with a gradient and an optimizer state."""
        return self.num_adapter_parameters or self.num_parameters

    @property
    def num_computed(self) -> int:
        """Parameters of layers that compute one token."""
        return self.num_layers * self.num_layer_parameters - self.num_idle_parameters

    @property
    def num_in_head(self) -> int:
        """Parameters of the matrix that makes logits."""
        return self.vocabulary * self.hidden

    @property
    def num_gathered_in_layer(self) -> int:
        """Parameters of the largest layer that FSDP gathers on a learner."""
        return self.num_layer_parameters - self.num_elsewhere // self.num_layers

    @property
    def num_root_parameters(self) -> int:
        """Parameters outside the layers: embeddings, head and the last norm."""
        return self.num_parameters - self.num_layers * self.num_layer_parameters


def model_shape(config: Config) -> ModelShape:
    """Return the shape of the model at `config.model.path` (a config.json is enough), built on the meta device."""
    import torch
    from transformers import AutoConfig

    from rayapp.learner.families.experts import check_expert_parallel
    from rayapp.learner.families.pictures import build_model, tower_parameters
    from rayapp.learner.state.packed import packed_linears

    config = with_local_model(config)
    path, trusted = config.model.path, config.model.trust_remote_code
    if not Path(path).is_dir():
        check_hub_answers(path)
    try:
        read: Any = AutoConfig.from_pretrained(path, trust_remote_code=trusted, local_files_only=Path(path).is_dir())
    except (OSError, ValueError) as error:
        raise InputError(f"model.path {path!r} can't be read: {error}") from error
    with torch.device("meta"):
        model = build_model(read, "sdpa", trust_remote_code=trusted)
    modules = getattr(model.get_decoder(), "layers", None)
    if modules is None:
        raise InputError(f"model.path {path!r} is a {read.model_type}, a family that the learner does not support")
    tower, read = sum(p.numel() for p in tower_parameters(model).values()), read.get_text_config()
    layers = [sum(p.numel() for p in layer.parameters()) for layer in modules]
    heads = read.num_attention_heads
    num_parameters = sum(p.numel() for p in model.parameters()) - (tower if config.model.freeze_vision else 0)
    check_expert_parallel(model, config.learner)
    packed = packed_linears(model) if config.model.quantization == "nf4" else {}
    adapters = _adapters(model, config.learner)
    teacher = frozen_models(config).get("teacher")
    if teacher is not None:
        teacher = with_values(teacher, distillation={"teacher": ""}, learner={"lora": LoraSection()})
    return ModelShape(
        num_parameters=num_parameters,
        num_layer_parameters=max(layers),
        num_layers=len(layers),
        hidden=read.hidden_size,
        intermediate=read.intermediate_size,
        num_heads=heads,
        num_key_heads=getattr(read, "num_key_value_heads", None) or heads,
        head_size=getattr(read, "head_dim", None) or read.hidden_size // heads,
        vocabulary=read.vocab_size,
        norms_heads=any(".q_norm." in name for name, _ in model.named_parameters()),
        num_adapter_parameters=sum(p.numel() for p in adapters),
        adapter_rank_sum=len(adapters) // 2 * config.learner.lora.rank // len(layers),
        num_packed=sum(linear.weight.numel() for linear in packed.values()),
        **(_tower(model.config.vision_config, tower, is_frozen=config.model.freeze_vision) if tower else {}),
        teacher=None if teacher is None else model_shape(teacher),
        **_experts(model, config.learner.expert_parallel_size),
    )


def _tower(vision: Any, num_parameters: int, *, is_frozen: bool) -> dict[str, Any]:
    # Each layer keeps for each patch of a token what a decoder's layer keeps.
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    patches = layers * getattr(vision, "spatial_merge_size", 2) ** 2
    kept = patches * (10 * vision.hidden_size + 3 * vision.intermediate_size), patches * vision.hidden_size
    forward = 2 * num_parameters * patches // layers  # each parameter computes each patch of the token
    return {
        "tower_flops": forward if is_frozen else 3 * forward,
        "num_frozen_in_tower": num_parameters if is_frozen else 0,
        "num_picture_layers": 1 + len(getattr(vision, "deepstack_visual_indexes", ())),
        "tower_values": (0, 0) if is_frozen else kept,
    }


def _experts(model: Any, size: int) -> dict[str, Any]:
    """Return the fields about experts, of which each learner has 1 / size."""
    from rayapp.learner.families.router_replay import num_experts_of

    if not (num_experts := num_experts_of(model.config)):
        return {}
    layers = [list(layer.named_parameters()) for layer in model.get_decoder().layers]
    sizes = [sum(p.numel() for name, p in layer if ".experts." in f".{name}") for layer in layers]
    k, elsewhere = model.config.num_experts_per_tok, 1 - 1 / size
    return {
        "num_idle_parameters": int(sum(sizes) * (1 - k / num_experts)),
        "num_elsewhere": int(sum(sizes) * elsewhere),
        "rows_elsewhere": k * sum(map(bool, sizes)) * elsewhere,
    }


def _adapters(model: Any, learner: LearnerSection) -> list[Any]:
    from rayapp.learner.state.lora import ADAPTER, add_adapters

    if learner.lora.rank == 0:
        return []
    add_adapters(model, learner.lora)
    return [parameter for name, parameter in model.named_parameters() if ADAPTER in name]

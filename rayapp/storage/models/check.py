"""Whether `model.path` can be used, found out before any actor starts: a message now instead of vLLM's traceback."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, InputError, first_line
from rayapp.core.names.near import did_you_mean
from rayapp.storage.models.families import FAMILIES, text_type, unserved

MAX_HEADER_BYTES = 100 << 20
HUB_TIMEOUT_S = 5.0
_ROPE_OF_COMPANY = "dynamic"
"""Rotary positions whose frequencies depend on the longest sequence computed together, and on another one in vLLM."""


def check_model(config: Config) -> None:
    """Check a local folder fully, and a hub id as far as its configuration.

    Raises:
        InputError: there is no such model, or a part of it is missing or broken.
        ConfigError: the model is fine but other keys don't fit it.
    """
    path = Path(config.model.path)
    if path.is_dir():
        architecture = _read_config(path, config.model.trust_remote_code)
        _check_weights(path)
        _check_tokenizer(path)
    elif path.is_absolute() or config.model.path.startswith((".", "models/")) or config.model.path.count("/") != 1:
        hint = " Make it with `rayapp model fetch smollm2-135m`." if path.name == "smollm2-135m" else ""
        raise InputError(f"model.path {config.model.path!r}: there is no such folder.{hint}")
    else:
        architecture = _hub_config(config.model.path)
    _check_family(architecture, config)
    _check_fits(architecture, config)


def check_architecture(config: Config) -> None:
    """Check a folder's config.json alone. Raises as `check_model`."""
    architecture = _read_config(Path(config.model.path), config.model.trust_remote_code)
    _check_family(architecture, config)
    _check_fits(architecture, config)


def _check_family(architecture: dict[str, Any], config: Config) -> None:
    kind = text_type(architecture)
    if (family := FAMILIES.get(kind)) is not None and family.refused:
        raise InputError(f"model.path {config.model.path!r} is a {kind}, which can't be trained: {family.refused}.")
    if why := unserved(kind, device=config.cluster.device, adapter=config.learner.lora.sends_adapter):
        raise InputError(f"model.path {config.model.path!r} is a {kind}, which servers here can't serve: {why}")
    if architecture.get("quantization_config"):
        method = architecture["quantization_config"].get("quant_method", "unknown")
        raise InputError(
            f"model.path {config.model.path!r} has quantized weights ({method}): the learner trains, and sends, "
            "bfloat16. Use a bfloat16 release, or write one: load it with transformers and a quantization_config that "
            "says dequantize=True (Mxfp4Config, FineGrainedFP8Config), then save_pretrained."
        )


def _read_config(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        architecture = json.loads(file.read_text())
    except FileNotFoundError:
        raise InputError(f"model.path {str(folder)!r} has no config.json: it is no Hugging Face model folder") from None
    except ValueError as error:
        raise InputError(f"{file} is no JSON: {error}") from None
    if not isinstance(architecture, dict) or not architecture.get("architectures"):
        raise InputError(f"{file} names no architecture, so vLLM and transformers can't tell what the model is")
    if not trust_remote_code:
        _check_architecture(file, str(architecture.get("model_type")))
    return architecture


def _check_architecture(file: Path, model_type: str) -> None:
    import transformers

    # The plain table and not AutoConfig, which loads torch: seconds before every start, for one word.
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        raise InputError(
            f"{file}: model_type {model_type!r} is not one that transformers {transformers.__version__} "
            f"knows{did_you_mean(model_type, CONFIG_MAPPING_NAMES)} "
            "A model that brings its own code needs model.trust_remote_code=true."
        )


def _check_weights(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index} is no index of weights: {error}") from None
        missing = sorted(file.name for file in named if not file.is_file())
        if missing:
            raise InputError(
                f"model.path {str(folder)!r}: {index.name} names files that are not there: {', '.join(missing)}"
            )
    if not files:
        raise InputError(
            f"model.path {str(folder)!r} has no *.safetensors file. Convert the model to safetensors first."
        )
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """The header, and that the file is as long as the header says: a copy that broke off is the usual fault."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(MAX_HEADER_BYTES, size):
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is no safetensors file: {error}") from None
    if size != 8 + length + end:
        raise InputError(
            f"{file} is torn: {size} bytes, its header says {8 + length + end}. Copy or download it again."
        )


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise InputError(f"model.path {str(folder)!r} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    file = folder / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # boundary: the library raises bare Exceptions
            raise InputError(f"{file} is no tokenizer: {error}") from None


def check_hub_answers(name: str) -> None:
    """Ask the hub once. Where it is silent, this process and those that it starts take what is on this disk.

    The hub's own client asks for half a minute, before each of the files of a model, and says nothing.

    Raises:
        InputError: the model is not on this disk, and the hub does not answer.
    """
    import httpx
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE:
        return
    try:
        httpx.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except httpx.HTTPError as error:
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise InputError(
                f"model.path {name!r} is not on this disk, and {constants.ENDPOINT} does not answer: {error}. Give a "
                "folder of this machine; `rayapp plan` and `rayapp doctor` take its config.json: --model-config FILE."
            ) from None


def _hub_config(name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    check_hub_answers(name)
    try:
        found: dict[str, Any] = AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise InputError(
            f"model.path {name!r} is neither a local folder nor a model that the hub gives us: {first_line(error)}"
        ) from None
    return found


def _check_fits(architecture: dict[str, Any], config: Config) -> None:
    # Models that read pictures too have the language model's numbers in a section of their own.
    text = architecture.get("text_config") or architecture
    heads, tp = text.get("num_attention_heads"), config.server.tensor_parallel_size
    if heads is not None and heads % tp:
        raise ConfigError(
            f"server.tensor_parallel_size {tp} does not divide the {heads} attention heads of {config.model.path}. "
            f"Use one of {', '.join(str(n) for n in range(1, min(heads, 16) + 1) if heads % n == 0)}."
        )
    longest = text.get("max_position_embeddings")
    _check_length(longest, config, "reads at most {}")
    for rope in _ropes(text):
        if rope.get("rope_type", rope.get("type")) == _ROPE_OF_COMPANY:
            name = "original_max_position_embeddings"
            why = "turns positions by the longest sequence of the batch as soon as one has more than {}"
            _check_length(rope.get(name) or text.get(name) or longest, config, why)


def _check_length(limit: int | None, config: Config, why: str) -> None:
    rollout, needed = config.rollout, config.max_model_tokens
    if limit is not None and needed > limit:
        raise ConfigError(
            f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.max_completion_tokens "
            f"{rollout.max_completion_tokens} = {needed} tokens, but {config.model.path} {why.format(limit)}."
        )


def _ropes(text: dict[str, Any]) -> list[dict[str, Any]]:
    """How positions are turned: one way, or one for each type of layer."""
    found = text.get("rope_scaling") or text.get("rope_parameters") or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]

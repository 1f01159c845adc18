"""Checks that `model.path` can be trained and that `distillation.teacher` can score the policy, before any actor
starts: later the user would get a traceback of vLLM.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from rayapp.config.config import Config, frozen_models, with_values
from rayapp.config.sections import ModelSection
from rayapp.core.errors import ConfigError, InputError, first_line
from rayapp.core.names import did_you_mean
from rayapp.storage.models.families import family_of, text_type, unserved
from rayapp.storage.models.fetch import with_local_model
from rayapp.storage.models.tokenizer import load_tokenizer

MAX_HEADER_BYTES = 100 << 20
HUB_TIMEOUT_S = 5.0
# Rotary positions whose frequencies depend on the longest sequence of the batch: vLLM forms other batches.
_ROPE_OF_COMPANY = "dynamic"


def check_model(config: Config) -> None:
    """Check the model: of a local folder all files, of a hub id only the configuration. InputError: it can't be used.
    ConfigError: other config keys don't fit it."""
    path = Path(config.model.path)
    if path.is_dir():
        _refuse_shards(path)
        architecture = _read_config(path, config.model.trust_remote_code)
        _check_weights(path)
        _check_tokenizer(path)
    else:
        architecture = _hub_config(config.model.path)
    _check_config(architecture, config)


def _refuse_shards(folder: Path) -> None:
    """Refuse a checkpoint of verl, which verl's merger must first turn into a model folder."""
    for place in (folder, folder / "actor"):
        if shards := sorted(place.glob("model_world_size_*_rank_*.pt")):
            merged = f"{folder}-merged"
            raise InputError(
                f"model.path {str(folder)!r} holds {len(shards)} FSDP shards of verl, not a model. Merge them once "
                f"where verl is installed: `python -m verl.model_merger merge --backend fsdp --local_dir {place} "
                f"--target_dir {merged}`, then set model.path={merged}."
            )


def check_architecture(config: Config) -> None:
    """Check only the config.json of a model folder."""
    _check_config(_read_config(Path(config.model.path), config.model.trust_remote_code), config)


def _check_config(architecture: dict[str, Any], config: Config) -> None:
    """Check a model's config.json: its family, and whether other keys fit it."""
    kind = text_type(architecture)
    if (family := family_of(architecture)) is not None and family.refused:
        raise InputError(f"model.path {config.model.path!r} is a {kind}, which can't be trained: {family.refused}.")
    if why := unserved(kind, device=config.cluster.device, adapter=config.learner.lora.sends_adapter):
        raise InputError(f"model.path {config.model.path!r} is a {kind}, which vLLM can't serve: {why}")
    if architecture.get("quantization_config"):
        method = architecture["quantization_config"].get("quant_method", "unknown")
        raise InputError(
            f"model.path {config.model.path!r} has quantized weights ({method}): the learner trains and sends bfloat16 "
            "weights. Use a bfloat16 release, or write one: load it with transformers and a quantization_config that "
            "says dequantize=True (Mxfp4Config, FineGrainedFP8Config), then save_pretrained."
        )
    # In a model that also reads images, the settings of the language model are in a section of their own.
    text = architecture.get("text_config") or architecture
    heads, tp = text.get("num_attention_heads"), config.server.tensor_parallel_size
    if heads is not None and heads % tp:
        raise ConfigError(
            f"server.tensor_parallel_size {tp} does not divide the {heads} attention heads of {config.model.path}. "
            f"Use one of {', '.join(str(n) for n in range(1, min(heads, 16) + 1) if heads % n == 0)}."
        )
    longest = config.model.max_position_embeddings or text.get("max_position_embeddings")
    lengths = config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens
    _check_length(longest, lengths, f"{config.model.path} reads at most {longest}")
    for rope in _ropes(text):
        if rope.get("rope_type", rope.get("type")) == _ROPE_OF_COMPANY:
            name = "original_max_position_embeddings"
            limit = rope.get(name) or text.get(name) or longest
            why = "scales its rotary positions by the longest sequence of the batch if a sequence has more than"
            _check_length(limit, lengths, f"{config.model.path} {why} {limit}")


def _read_config(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        architecture = json.loads(file.read_text())
    except FileNotFoundError:
        raise InputError(
            f"model.path {str(folder)!r} has no config.json: it is not a Hugging Face model folder"
        ) from None
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}") from None
    if not isinstance(architecture, dict) or not architecture.get("architectures"):
        raise InputError(f"{file} has no field `architectures`, so vLLM and transformers can't load the model")
    if not trust_remote_code:
        _check_architecture(file, str(architecture.get("model_type")))
    return architecture


def _check_architecture(file: Path, model_type: str) -> None:
    import transformers

    # AutoConfig is not used, because it loads torch, which would take seconds before every start.
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        raise InputError(
            f"{file}: model_type {model_type!r} is unknown to transformers {transformers.__version__}"
            f"{did_you_mean(model_type, CONFIG_MAPPING_NAMES)} "
            "A model that brings its own code needs model.trust_remote_code=true."
        )


def _check_weights(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index} is not an index of weights: {error}. Download the model again.") from None
        missing = sorted(file.name for file in named if not file.is_file())
        if missing:
            raise InputError(
                f"model.path {str(folder)!r}: {index.name} names files that are missing: {', '.join(missing)}"
            )
    if not files:
        raise InputError(
            f"model.path {str(folder)!r} has no *.safetensors file. Convert the model to safetensors first."
        )
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    # The file must be as long as its header says: most broken files are interrupted copies.
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > (limit := min(MAX_HEADER_BYTES, size)):
                raise ValueError(f"its header claims {length} bytes, but at most {limit} are possible")
            header = json.loads(stream.read(length))
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not a safetensors file: {error}. Copy or download the file again.") from None
    if size != 8 + length + end:
        raise InputError(
            f"{file} is damaged: it has {size} bytes, but its header describes {8 + length + end}. Copy or download "
            "the file again."
        )


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise InputError(f"model.path {str(folder)!r} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    file = folder / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # boundary: the library raises plain Exceptions
            raise InputError(f"{file} is not a tokenizer: {error}. Copy or download the model again.") from None


def check_hub_answers(name: str) -> None:
    """Send the Hugging Face hub one request. If it does not answer, make this process and its children use only files
    on this disk: the hub's client would try for half a minute, silently, for each file. InputError: the model is not on
    this disk, or its name is a folder's."""
    import httpx
    from huggingface_hub import constants, try_to_load_from_cache

    if name.startswith(("/", ".", "~", "models/")) or name.count("/") != 1:
        is_shipped = Path(name).name == "smollm2-135m"
        hint = (
            "Fetch it with `rayapp model fetch smollm2-135m`"
            if is_shipped
            else "Give a folder, or OWNER/NAME of the hub"
        )
        raise InputError(f"model.path {name!r}: there is no such folder. {hint}.")
    if constants.HF_HUB_OFFLINE:
        return
    try:
        httpx.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except httpx.HTTPError as error:
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise InputError(
                f"model.path {name!r} is not on this disk, and {constants.ENDPOINT} does not answer: {error}. Set "
                "model.path to a folder of this machine. `rayapp plan` and `rayapp doctor` need only the model's "
                "config.json: --model-config FILE."
            ) from None


def _hub_config(name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    check_hub_answers(name)
    try:
        found: dict[str, Any] = AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise InputError(
            f"model.path {name!r} is neither a local folder nor a model that the hub provides: {first_line(error)}"
        ) from None
    return found


def _check_length(limit: int | None, lengths: tuple[int, int], why: str) -> None:
    if limit is not None and sum(lengths) > limit:
        raise ConfigError(
            f"rollout.max_prompt_tokens {lengths[0]} + rollout.max_completion_tokens {lengths[1]} = {sum(lengths)} "
            f"tokens, but {why}. Lower one of these two keys."
        )


def _ropes(text: dict[str, Any]) -> list[dict[str, Any]]:
    found = text.get("rope_scaling") or text.get("rope_parameters") or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def check_teacher(config: Config) -> None:
    """Check that the teacher is a valid model with the policy's tokens (`model.path` is a folder here, or a hub id)."""
    own = frozen_models(config).get("teacher")
    if own is None:
        return
    try:
        # No server loads the teacher, so tensor parallelism does not apply.
        local = with_local_model(with_values(own, server={"tensor_parallel_size": 1}))
        check_model(local)
    except (InputError, ConfigError) as error:
        raise InputError(f"distillation.teacher {own.model.path!r} can't be used: {error}") from error
    policy, teacher = _tokens(config.model), _tokens(local.model)
    ordered = sorted(policy.items(), key=lambda entry: entry[1])
    if others := [token for token, number in ordered if teacher.get(token) != number]:
        there = f"id {teacher[others[0]]}" if others[0] in teacher else "no id"
        raise InputError(
            f"distillation.teacher {own.model.path!r} has another tokenizer than model.path {config.model.path!r}: "
            f"{len(others)} of {len(policy)} tokens differ, e.g. {others[0]!r}, which has id {policy[others[0]]} in "
            f"the policy's and {there} in the teacher's. A teacher scores the policy's own tokens: choose a teacher "
            "of the policy's model family."
        )


def _tokens(model: ModelSection) -> dict[str, int]:
    file = Path(model.path) / "tokenizer.json"
    if not file.is_file():
        tokenizer: Any = load_tokenizer(model)
        return dict(tokenizer.get_vocab())
    from tokenizers import Tokenizer

    return dict(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True))

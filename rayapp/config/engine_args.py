"""Checks `server.engine_args`: arguments of vLLM's engine by vLLM's own names, which the run passes on.

An argument that has a key of rayapp, or that contradicts what a run relies on (log-probs, seeds, weight syncs, sleep),
is refused with the key or the reason. Names and types come from the source of the installed vLLM's `EngineArgs`, which
is parsed and not imported, because importing vLLM takes ten seconds. On a machine without vLLM they are checked when a
server starts. docs/scale.md has the table of arguments that affect weight syncs and log-probs.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Optional, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rayapp.core import syntax
from rayapp.core.errors import ConfigError
from rayapp.core.names import did_you_mean

HAS_KEY: Mapping[str, str] = {
    "block_size": "server.kv_block_tokens",
    "data_parallel_size": "server.num_servers, which are placed, weighed and replaced one by one",
    "dtype": "server.dtype",
    "enable_lora": "learner.lora.rank",
    "enable_return_routed_experts": "learner.router_replay",
    "enable_sleep_mode": "cluster.placement: colocated",
    "enforce_eager": "server.enforce_eager",
    "gpu_memory_utilization": "server.gpu_memory_utilization",
    "hf_overrides": "model.max_position_embeddings",
    "kv_cache_dtype": "server.kv_cache_dtype",
    "kv_cache_memory_bytes": "server.kv_cache_gib",
    "lora_target_modules": "learner.lora.target_modules",
    "max_lora_rank": "learner.lora.rank",
    "max_loras": "learner.lora.rank",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_completion_tokens",
    "max_num_batched_tokens": "server.max_num_batched_tokens",
    "max_num_seqs": "server.max_num_seqs",
    "model": "model.path",
    "profiler_config": "train.profile_steps",
    "quantization": "server.quantization",
    "seed": "run.seed",
    "tensor_parallel_size": "server.tensor_parallel_size",
    "trust_remote_code": "model.trust_remote_code",
    "weight_transfer_config": "server.weight_transport",
}
"""Argument of vLLM -> key of rayapp that sets it."""

_PLACES = "Ray places the processes, and each server is on one node"
_OFFLOAD = "vLLM's layer-wise reload, which loads new weights, does not work with weights in host memory"
_MOVES = "experts would move between GPUs, but a weight sync loads each expert on the GPU where it was at the start"
_SAMPLING = "it would change the sampled distribution, whose log-probs the learner computes"
_OWN = "rayapp's own class or setting is there, which weight syncs, cohorts and the detection of stalls rely on"
_FILES = "tokenizer, config and weights are the files of model.path. Fetch the revision into a folder"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("distributed_executor_backend", "worker_cls", "worker_extension_cls", "scheduler_cls", "disable_log_stats"),
        _OWN,
    ),
    **dict.fromkeys(
        (
            "data_parallel_address", "data_parallel_backend", "data_parallel_external_lb", "data_parallel_hybrid_lb",
            "data_parallel_multi_port_external_lb", "data_parallel_rank", "data_parallel_rpc_port",
            "data_parallel_size_local", "data_parallel_start_rank", "device_ids", "enable_elastic_ep", "master_addr",
            "master_port", "nnodes", "node_rank", "pipeline_parallel_size", "prefill_context_parallel_size",
        ),
        _PLACES,
    ),
    **dict.fromkeys(
        ("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size", "offload_num_in_group",
         "offload_params", "offload_prefetch_step"),
        _OFFLOAD,
    ),
    **dict.fromkeys(("enable_eplb", "eplb_config"), _MOVES),
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logits_processors", "watermark_config",
         "diffusion_config"),
        _SAMPLING,
    ),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "write it into speculative_config"),
    **dict.fromkeys(
        ("config_format", "code_revision", "hf_config_path", "hf_token", "model_weights", "revision", "tokenizer",
         "tokenizer_mode", "tokenizer_revision", "model_class_overrides"),
        _FILES,
    ),
    **dict.fromkeys(("runner", "convert", "pooler_config"), "the engine must generate text"),
    "ec_transfer_config": "each server computes its own prompts",
    "kv_events_config": "each server computes its own prompts",
    "kv_transfer_config": "each server computes its own prompts: keys and values of older weights must not come back",
    "load_format": "with dummy, tensors that weight syncs don't send would keep random values",
    "logprobs_mode": "log-probs must be those of the sampled distribution (processed_logprobs), after the temperature",
    "quantization_config": "server.quantization chooses how all linear layers are rounded after each sync",
    "skip_tokenizer_init": "stop texts need the tokenizer",
}  # fmt: skip
"""Argument of vLLM -> why a run can't have it."""


def check_engine_args(args: Mapping[str, Any]) -> None:
    """Check names, reasons and, where vLLM is installed, types. Raises ValueError, which names every wrong argument."""
    fields = engine_fields() if args else None
    wrong = [fault for name, value in args.items() if (fault := _fault(name, value, fields))]
    if wrong:
        raise ValueError("; ".join(wrong) + ".")


def check_installed_engine_args(args: Mapping[str, Any]) -> None:
    """Check the arguments where a server starts, as the machine that read the configuration may have no vLLM.

    Raises:
        ConfigError: an argument can't be passed on.
    """
    try:
        check_engine_args(args)
    except ValueError as error:
        raise ConfigError(f"server.engine_args: {error}") from error


def _fault(name: str, value: Any, fields: Mapping[str, Any] | None) -> str:
    if name in HAS_KEY:
        return f"{name} has a key of its own: set {HAS_KEY[name]}"
    if name in REFUSED:
        return f"{name} can't be set: {REFUSED[name]}. Leave it out"
    if fields is None:
        return ""
    if name not in fields or name.startswith("_"):
        return f"the installed vLLM has no argument {name}{did_you_mean(name, sorted(fields)).rstrip('.?')}"
    try:
        TypeAdapter(fields[name], config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        return f"{name} is {value!r}, which vLLM does not take: {error.errors()[0]['msg']}"
    if name == "structured_outputs_config" and not (isinstance(value, dict) and "backend" not in value):
        return f"{name} is {value!r:.200}: it must be a mapping without backend, which is always xgrammar"
    if name == "speculative_config" and value and value.get("rejection_sample_method") == "synthetic":
        return "rejection_sample_method is synthetic, which accepts tokens that the policy did not sample. Leave it out"
    return ""


@functools.cache
def engine_fields() -> Mapping[str, Any] | None:
    """Return the type of each argument of the installed vLLM; None without vLLM. Types that are classes of vLLM are
    Any: vLLM checks them."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = _source(Path(next(iter(spec.submodule_search_locations))).parent, "vllm.engine.arg_utils")
    classes = [node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    own = [node for node in classes if node.name in ("EngineArgs", "AsyncEngineArgs")]
    return {
        field.target.id: source.type_of(field.annotation)
        for node in own
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


_PLAIN: Mapping[str, Any] = {
    "Any": Any, "bool": bool, "dict": dict, "float": float, "int": int, "list": list, "str": str, "set": list,
    "tuple": tuple,
}  # fmt: skip
"""Types that YAML can hold; a set is written as a list."""


class _Source:
    """A module's source, in which annotations are resolved without importing it.

    Args:
        site: folder that holds the package.
        module: name of the module, such as vllm.config.cache.
    """

    def __init__(self, site: Path, module: str) -> None:
        place = site.joinpath(*module.split("."))
        self._site = site
        self.tree = syntax.module((place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text())

    def type_of(self, annotation: ast.expr) -> Any:
        """Return the type that an annotation names; Any for what is not plain data."""
        match annotation:
            case ast.Constant(value=None):
                return None
            case ast.Constant(value=str(text)):
                return self.type_of(syntax.expression(text))
            case ast.Name(id=name):
                return _PLAIN[name] if name in _PLAIN else self.named(name)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return Union[self.type_of(left), self.type_of(right)]  # noqa: UP007 - of values
            case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
                return Optional[self.type_of(inner)]  # noqa: UP045 - of a value
            case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
                values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                plain = tuple(value.value for value in values if isinstance(value, ast.Constant))
                return Literal.__getitem__(plain) if len(plain) == len(values) else Any
            case ast.Subscript(value=ast.Name(id="list" | "set"), slice=inner):
                return list[self.type_of(inner)]  # type: ignore[misc]
            case ast.Subscript(value=ast.Name(id="dict")):
                return dict
        return Any

    def named(self, name: str) -> Any:
        """Return the type of a name that this module assigns or imports from vLLM."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    return self.type_of(value)
                case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                    return self.type_of(value)
                case ast.ImportFrom(module=str(module), names=names) if module.startswith("vllm."):
                    found = next((each.name for each in names if (each.asname or each.name) == name), None)
                    if found is not None:
                        return _source(self._site, module).named(found)
        return Any


_source = functools.cache(_Source)

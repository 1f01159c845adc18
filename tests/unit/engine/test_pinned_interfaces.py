"""The functions of vLLM and Ray that our code calls exist in the pinned versions, with these arguments.

mypy checks those of torch. Without a GPU no other test would notice a renamed one. vLLM's source is read and not
imported, which would take longer than all tests of this folder.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import ray
import torch
from ray.experimental import internal_kv

from actors.own_ray import START_LIMITS
from actors.spawn import ROLES, role_env
from rayapp.config.agreement import INVARIANT_BACKENDS
from rayapp.config.config import Config
from rayapp.config.engine_args import HAS_KEY, REFUSED
from rayapp.engine import vllm_arguments
from rayapp.learner.distributed import NCCL_OF_BATCH_INVARIANCE

TRANSFER = "distributed/weight_transfer"
CALLS = {
    "v1/engine/async_llm.py": {
        "AsyncLLM.from_engine_args": "engine_args stat_loggers",
        "AsyncLLM.add_request": "request_id prompt params lora_request",
        "AsyncLLM.abort": "request_id internal",
        "AsyncLLM.generate": "prompt sampling_params request_id lora_request",
        "AsyncLLM.collective_rpc": "method timeout args kwargs",
        "AsyncLLM.pause_generation": "mode clear_cache",
        "AsyncLLM.resume_generation": "",
        "AsyncLLM.sleep": "level mode",
        "AsyncLLM.wake_up": "tags",
        "AsyncLLM.check_health": "",
        "AsyncLLM.start_profile": "",
        "AsyncLLM.stop_profile": "",
        "AsyncLLM.shutdown": "",
        "AsyncLLM.errored": "",
        "AsyncLLM.init_weight_transfer_engine": "request",
        "AsyncLLM.start_weight_update": "",
        "AsyncLLM.update_weights": "request",
        "AsyncLLM.finish_weight_update": "",
        "AsyncLLM.reset_encoder_cache": "",
    },
    "v1/worker/gpu_worker.py": {
        "Worker.reload_weights": "",
        "Worker.init_weight_transfer_engine": "init_info",
        "Worker.start_weight_update": "",
        "Worker.update_weights": "update_info",
        "Worker.finish_weight_update": "",
    },
    "v1/structured_output/backend_xgrammar.py": {
        "XgrammarBackend": "",
        "XgrammarBackend.compile_grammar": "stop_token_ids",
        "XgrammarBackend.allocate_token_bitmask": "max_num_seqs",
        "XgrammarGrammar.fill_bitmask": "bitmask idx",
        "XgrammarGrammar.accept_tokens": "request_id tokens",
        "XgrammarGrammar.is_terminated": "",
        "validate_xgrammar_grammar": "sampling_params",
    },
    "v1/structured_output/request.py": {"get_structured_output_key": "params"},
    "config/structured_outputs.py": {"StructuredOutputsConfig": "backend"},
    "config/profiler.py": {
        "ProfilerConfig": "profiler torch_profiler_dir torch_profiler_with_stack torch_profiler_dump_cuda_time_total "
        "ignore_frontend max_iterations",
    },
    "config/vllm.py": {"VllmConfig.use_v2_model_runner": ""},
    "config/model.py": {
        "ModelConfig": "enable_sleep_mode enable_return_routed_experts quantization",
        "ModelConfig.get_num_experts": "",
        "ModelConfig.is_hybrid": "",
        "ModelConfig.is_multimodal_model": "",
    },
    "outputs.py": {"CompletionOutput": "token_ids logprobs finish_reason routed_experts"},
    f"{TRANSFER}/base.py": {
        "ParamMeta": "name dtype shape",
        "TrainerInitInfo": "rank",
        "WeightTransferInitRequest": "init_info",
        "WeightTransferUpdateRequest": "update_info",
        "VLLMWeightSyncClient.init_weight_transfer_engine": "init_info",
        "VLLMWeightSyncClient.start_weight_update": "",
        "VLLMWeightSyncClient.update_weights": "update_info",
        "VLLMWeightSyncClient.finish_weight_update": "weight_version",
        "TrainerWeightTransferEngine.send_weights": "",
        "TrainerWeightTransferEngine.shutdown": "",
    },
    f"{TRANSFER}/factory.py": {
        "WeightTransferTrainerFactory.trainer_init": "init_info client source",
    },
    f"{TRANSFER}/ipc_engine.py": {"IPCTrainerInitInfo": "packed packed_buffer_size_bytes"},
    f"{TRANSFER}/nccl_engine.py": {
        "NCCLTrainerInitInfo": "master_address master_port world_size packed packed_buffer_size_bytes",
        "NCCLTrainerWeightTransferEngine._broadcast": "source meta",
        "NCCLTrainerWeightTransferEngine._checked_iter": "source meta",
    },
    "distributed/device_communicators/pynccl.py": {
        "PyNcclCommunicator.broadcast": "tensor src",
        "PyNcclCommunicator.destroy": "",
    },
    "utils/system_utils.py": {"get_mp_context": ""},
    "sampling_params.py": {
        "SamplingParams": "max_tokens temperature top_p top_k seed stop logprobs flat_logprobs output_kind "
        "routed_experts_prompt_start",
        "RequestOutputKind": "FINAL_ONLY",
    },
    "model_executor/layers/vocab_parallel_embedding.py": {
        "VocabParallelEmbedding": "",
        "ParallelLMHead.tie_weights": "embed_tokens",
    },
    "lora/request.py": {"LoRARequest": "lora_name lora_int_id lora_path"},
    "lora/peft_helper.py": {"PEFTHelper": "r lora_alpha target_modules"},
    "lora/lora_model.py": {
        "LoRAModel.from_lora_tensors": "lora_model_id tensors peft_helper device dtype weights_mapper",
    },
    "entrypoints/pooling/base/protocol.py": {
        "ChatRequestMixin": "messages",
        "ClassifyRequestMixin": "use_activation",
        "PoolingBasicRequestMixin": "model",
    },
    "entrypoints/pooling/classify/protocol.py": {
        "ClassificationChatRequest": "",
        "ClassificationData": "probs",
        "ClassificationResponse": "data usage",
    },
    "config/weight_transfer.py": {"WeightTransferConfig": "backend"},
    "model_executor/layers/quantization/online/fp8.py": {"OnlineLinearBase": ""},
}
"""By file of vLLM: functions with the arguments that we give, and classes with the fields that we set or read."""


def root(package: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0])


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((root("vllm") / file).read_text())


def names_of(file: str, path: str) -> set[str]:
    """Arguments of a function, or fields of a class, those of its bases in the same file included.

    Raises:
        KeyError: there is none of this name.
    """
    scope: ast.AST = tree(file)
    for part in path.split("."):
        scope = {n.name: n for n in ast.iter_child_nodes(scope) if isinstance(n, Named)}[part]
    if isinstance(scope, ast.ClassDef):
        fields = {n.target.id for n in scope.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        fields |= {t.id for n in scope.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        bases = [base.id for base in scope.bases if isinstance(base, ast.Name)]
        known = {n.name for n in ast.iter_child_nodes(tree(file)) if isinstance(n, ast.ClassDef)}
        return fields.union(*(names_of(file, base) for base in bases if base in known))
    assert isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
    return {argument.arg for argument in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)}


Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@pytest.mark.parametrize("file", CALLS)
def test_vllm_takes_what_it_is_given(file: str) -> None:
    for path, wanted in CALLS[file].items():
        assert set(wanted.split()) <= names_of(file, path), path


def test_every_argument_that_an_engine_is_started_with_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments, "_transfer_args", lambda config: {"weight_transfer_config": None})
    config = Config.model_validate({"learner": {"lora": {"rank": 16}}})
    given = vllm_arguments.vllm_args(config) | {"seed": 1}
    assert given.keys() <= names_of("engine/arg_utils.py", "AsyncEngineArgs")
    assert {"enable_lora", "max_lora_rank"} <= given.keys()


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (internal_kv._internal_kv_put, "key value overwrite"),
        (internal_kv._internal_kv_get, "key"),
        (ray.wait, "num_returns timeout fetch_local"),
        (ray.get, "timeout"),
        (ray.kill, "no_restart"),
        (ray.get_actor, "name"),
        (ray.util.placement_group, "bundles strategy name"),
        (ray.util.remove_placement_group, "placement_group"),
    ],
)
def test_ray_takes_what_it_is_given(call: object, arguments: str) -> None:
    assert set(arguments.split()) <= inspect.signature(call).parameters.keys()  # type: ignore[arg-type]


def test_torch_has_the_switch_of_its_allocator() -> None:
    # Testing its effect needs a GPU; without one torch accepts the setting silently.
    assert callable(torch._C._accelerator_setAllocatorSettings)  # type: ignore[attr-defined]


def variables(pattern: str) -> set[str]:
    """Return the environment variables with this prefix that our code sets."""
    folder = Path(__file__).parents[3]
    texts = [path.read_text() for name in ("rayapp/engine", "actors/setup") for path in (folder / name).rglob("*.py")]
    found = {name for text in texts for name in re.findall(rf'"({pattern}_\w+)"', text)}
    return found | {name for role in ROLES for name in role_env(role) if re.match(pattern, name)}


def test_every_environment_variable_that_we_set_is_read() -> None:
    read = (root("vllm") / "envs.py").read_text()
    assert {name for name in variables("VLLM") if f'"{name}"' not in read} == set()
    libraries = root("torch") / "lib"
    assert b"PYTORCH_CUDA_ALLOC_CONF" in (libraries / "libc10.so").read_bytes()
    header = root("torch") / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    assert {name for name in variables("TORCH_NCCL") if name not in header.read_text()} == set()
    core = (root("ray") / "_raylet.so").read_bytes()
    folders = (root("ray") / name for name in ("_private", "_common", "dag", "dashboard"))
    python = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    named = variables("RAY") | {f"RAY_{limit}" for limit in START_LIMITS}
    unread = {n for n in named if n not in python and n.removeprefix("RAY_").encode() not in core}
    assert unread == set()


def test_learners_and_servers_run_nccl_alike() -> None:
    # vLLM 0.30 sets no NCCL variables in its workers: setting them on one side only would hang the first broadcast.
    nccl = [
        {name: value for name, value in role_env(role).items() if name.startswith("NCCL_")}
        for role in ("learner", "vllm-server")
    ]
    assert nccl[0] == nccl[1]


def test_with_batch_invariance_vllm_and_the_learners_run_nccl_alike_too() -> None:
    body = next(
        node
        for node in tree("model_executor/determinism/batch_invariant.py").body
        if isinstance(node, ast.FunctionDef) and node.name == "override_envs_for_invariance"
    )
    set_by_vllm = dict(re.findall(r"os\.environ\['(NCCL_\w+)'\] = '(.*)'", ast.unparse(body)))
    assert set_by_vllm == NCCL_OF_BATCH_INVARIANCE


def test_every_rule_is_about_an_argument_of_vllms_class() -> None:
    assert {*HAS_KEY, *REFUSED} - names_of("engine/arg_utils.py", "AsyncEngineArgs") == set()
    assert not {*HAS_KEY} & {*REFUSED}


def test_the_backends_that_vllm_calls_batch_invariant_are_those_that_a_run_may_choose() -> None:
    folder = root("vllm") / "v1/attention/backends"
    files = {path.stem for path in folder.rglob("*.py") if "def supports_batch_invariance" in path.read_text()}
    names = {"flash_attn": "FLASH_ATTN", "flex_attention": "FLEX_ATTENTION", "triton_attn": "TRITON_ATTN",
             "flashattn_mla": "FLASH_ATTN_MLA", "triton_mla": "TRITON_MLA"}  # fmt: skip
    assert {names[file] for file in files} == set(INVARIANT_BACKENDS)

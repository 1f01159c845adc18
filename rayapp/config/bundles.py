"""The GPUs that a run requests: bundles of processes that share GPUs, the model servers among them, and what kinds of
GPUs can't compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayapp.config.keys import Keys
from rayapp.config.other_models import ModelServerSection
from rayapp.core.http import server_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Processes that share GPUs of one node."""

    num_gpus: int
    server: int | None = None
    learners: tuple[int, ...] = ()  # ranks
    model_server: str = ""  # its name


def bundles_of(
    config: Keys, *, on_gpu: bool = True, with_servers: bool = True, with_learners: bool = True
) -> list[Bundle]:
    """Return the bundles of a run: servers first, then learners, then model servers. A colocated server is in one
    bundle with the learners whose GPUs it uses. Without GPUs, no processes share a bundle."""
    tp = config.server.tensor_parallel_size
    servers = range(config.server.num_servers if with_servers else 0)
    learners = tuple(range(config.learner.num_learners if with_learners else 0))
    is_shared = on_gpu and with_servers and config.cluster.placement == "colocated"
    bundles = [
        Bundle(
            num_gpus=tp * on_gpu, server=server, learners=learners[server * tp : (server + 1) * tp] if is_shared else ()
        )
        for server in servers
    ]
    own = () if is_shared else learners
    bundles += [Bundle(num_gpus=int(on_gpu), learners=(rank,)) for rank in own]
    others = asked_servers(config) if with_servers else []
    return bundles + [Bundle(num_gpus=each.tensor_parallel_size * on_gpu, model_server=each.name) for each in others]


def num_gpus_of(bundles: Sequence[Bundle]) -> int:
    return sum(bundle.num_gpus for bundle in bundles)


def gpu_arithmetic(bundles: Sequence[Bundle]) -> str:
    """Return `4 servers x TP 2 + 8 learners = 16`, for messages."""
    servers = [bundle for bundle in bundles if bundle.server is not None]
    num_learners = sum(len(bundle.learners) for bundle in bundles)
    parts = [f"{len(servers)} servers x TP {servers[0].num_gpus}"] if servers else []
    parts += [f"{num_learners} learners"] if num_learners else []
    joint = " on those of " if any(server.learners for server in servers) else " + "
    others = [f"{each.model_server} x TP {each.num_gpus}" for each in bundles if each.model_server]
    return f"{' + '.join([joint.join(parts), *others])} = {num_gpus_of(bundles)}"


def fewer_gpus(config: Keys, have: int) -> str:
    """Return advice for messages: settings with which the config runs on this number of GPUs."""
    server, learners = config.server, config.learner.num_learners
    takes_turns = config.train.takes_turns and server.num_servers * server.tensor_parallel_size == learners
    if config.cluster.placement == "split" and takes_turns and learners <= have:
        return "Let servers and learners take turns on the same GPUs: cluster.placement=colocated."
    return "Lower server.num_servers, a tensor_parallel_size or learner.num_learners."


def asked_servers(config: Keys) -> list[ModelServerSection]:
    """Return the model servers that judges and agents of rollout workers call."""
    used = {name for _, own in config.by_source() for name in own.reward.judges}
    urls = [judge.base_url for judge in config.judges if judge.name in used]
    urls += [own.agent.external.endpoint.base_url for _, own in config.by_source()]
    names = {server_named(url) for url in urls}
    return [server for server in config.model_servers if server.name in names]


CAPABILITIES: Mapping[str, tuple[int, int]] = {
    "a100": (8, 0), "l40s": (8, 9), "rtx4090": (8, 9), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0),
    "gb200": (10, 0), "rtx5090": (12, 0),
}  # fmt: skip
"""CUDA's compute capability by kind of GPU, as `rayapp plan --gpu` names it."""
_FP8, _AMPERE = (8, 9), (8, 0)


def gpu_problems(config: Keys, capability: tuple[int, int]) -> list[str]:
    """Return an error text for each setting that vLLM 0.30 can't compute on GPUs of this compute capability."""
    server, shown = config.server, ".".join(map(str, capability))
    problems = []
    if server.kv_cache_dtype == "fp8" and capability < _FP8:
        problems.append(
            f"server.kv_cache_dtype is fp8, which needs compute capability 8.9 in vLLM, but this GPU has {shown}: use "
            "auto"
        )
    if server.quantization == "fp8_per_channel" and capability < _FP8:
        problems.append(
            "server.quantization is fp8_per_channel, whose kernels need compute capability 8.9, but this GPU has "
            f"{shown}: use fp8_per_tensor, which is slower there, or none"
        )
    if config.run.deterministic and capability < _AMPERE:
        problems.append(
            f"run.deterministic needs compute capability 8.0 for vLLM's batch-invariant kernels, but this GPU has "
            f"{shown}: leave run.deterministic out"
        )
    if config.run.deterministic and server.quantization != "none" and capability < _FP8:
        problems.append(
            "run.deterministic together with server.quantization needs compute capability 8.9, because results of "
            f"Marlin's kernels depend on the batch, but this GPU has {shown}: use only one of the two keys"
        )
    return problems

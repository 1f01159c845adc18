"""The transport, ranks and buckets that are chosen; impossible choices are refused with an alternative."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.handles import VllmServerHandle
from actors.learner import ServersClient
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError
from rayapp.engine.weights.sync import choose_transport, transfer_plan


def config(transport: str = "auto", placement: str = "split", **server: Any) -> Config:
    sections: dict[str, Any] = {
        "cluster": {"placement": placement},
        "server": {"weight_transport": transport, **server},
    }
    if placement == "colocated":
        sections["learner"] = {"num_learners": server.get("num_servers", 1) * server.get("tensor_parallel_size", 1)}
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("placement", "on_gpu", "expected"),
    [
        ("split", False, "object_store"),
        ("colocated", False, "object_store"),
        ("split", True, "nccl"),
        ("colocated", True, "ipc"),
    ],
)
def test_auto_takes_what_the_placement_allows(placement: str, on_gpu: bool, expected: str) -> None:
    assert choose_transport(config(placement=placement), on_gpu=on_gpu) == expected
    assert choose_transport(config("object_store", placement), on_gpu=on_gpu) == "object_store"  # works everywhere


def test_an_adapter_goes_through_the_object_store() -> None:
    def with_adapter(transport: str, send: str = "adapter") -> Config:
        lora = {"rank": 8, "send": send}
        return Config.model_validate({"server": {"weight_transport": transport}, "learner": {"lora": lora}})

    assert choose_transport(with_adapter("auto"), on_gpu=True) == "object_store"
    assert choose_transport(with_adapter("auto", "merged"), on_gpu=True) == "nccl"
    with pytest.raises(ConfigError, match=r"weight_transport is nccl, but learner.lora.send is adapter.*send: merged"):
        choose_transport(with_adapter("nccl"), on_gpu=True)


@pytest.mark.parametrize(
    ("transport", "placement", "on_gpu", "message"),
    [
        ("nccl", "split", False, "moves weights between GPUs, but this run has no GPUs"),
        ("ipc", "colocated", False, "moves weights between GPUs, but this run has no GPUs"),
        ("ipc", "split", True, "Use nccl, or set cluster.placement: colocated"),
        ("nccl", "colocated", True, "Use ipc, or set cluster.placement: split"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_with_one_that_can(
    transport: str, placement: str, on_gpu: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_transport(config(transport, placement), on_gpu=on_gpu)


@given(num_servers=st.integers(1, 8), tp=st.sampled_from([1, 2, 4, 8]))
def test_every_worker_of_every_server_has_a_rank_of_its_own(num_servers: int, tp: int) -> None:
    plan = transfer_plan(config(num_servers=num_servers, tensor_parallel_size=tp).server, "nccl")

    ranks = [0, *(offset + rank for offset in plan.rank_offsets for rank in range(tp))]
    assert sorted(ranks) == list(range(plan.world_size))


def test_the_client_gives_each_engine_its_ranks_where_vllm_offers_all_the_same() -> None:
    plan = transfer_plan(config(num_servers=4, tensor_parallel_size=2).server, "nccl")
    servers = [VllmServerHandle(None, f"vllm-server-{i}", 1.0, 1.0) for i in range(4)]
    client = ServersClient(servers, plan, timeout_s=1.0)

    offered = {"master_address": "10.0.0.1", "master_port": 4711, "rank_offset": 1, "world_size": 9}
    infos = client.init_infos(offered)

    assert [(server.name, info["rank_offset"]) for server, info in infos] == [
        ("vllm-server-0", 1),
        ("vllm-server-1", 3),
        ("vllm-server-2", 5),
        ("vllm-server-3", 7),
    ]
    assert all(info["world_size"] == 9 for _, info in infos)
    # CUDA IPC has no ranks.
    assert [info for _, info in client.init_infos({"packed": True})] == [{"packed": True}] * 4

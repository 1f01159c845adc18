"""The device of a learner, and the interface through which ranks on several nodes find each other."""

from __future__ import annotations

import os

import pytest
import torch

from actors.placement import by_node, in_order
from rayapp.config.bundles import bundles_of
from rayapp.config.config import Config
from rayapp.core.errors import LearnerError
from rayapp.core.machine import use_interface_towards
from rayapp.learner.distributed import learner_device


def config(device: str) -> Config:
    return Config.model_validate({"cluster": {"device": device}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_learner_that_was_given_a_gpu_does_not_compute_on_the_cpu_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"this learner needs a GPU, but torch .* can use none: .*CUDA 13 needs 580"
    for device, visible in (("gpu", ""), ("auto", "0"), ("auto", "MIG-6a5c")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(LearnerError, match=told):
            learner_device(config(device).cluster)
    for device, visible in (("auto", ""), ("auto", "-1"), ("cpu", "0")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert learner_device(config(device).cluster).type == "cpu"


def test_gloo_listens_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "before")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_interface_towards("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # a user's choice is kept
    use_interface_towards("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_gpus_are_in_the_order_of_their_numbers_and_parts_of_them_have_names() -> None:
    assert in_order(["10", "9", "0"]) == "0,9,10"
    assert in_order(["MIG-b", "MIG-a"]) == "MIG-a,MIG-b"


def test_neighbouring_ranks_are_on_one_node_and_nobody_takes_the_place_of_another_kind() -> None:
    split = Config.model_validate({"server": {"num_servers": 2}, "learner": {"num_learners": 4}})
    assert by_node(bundles_of(split), ["a", "b", "a", "b", "a", "b"]) == [0, 1, 2, 4, 3, 5]
    colocated = {"server": {"num_servers": 4}, "learner": {"num_learners": 4}, "cluster": {"placement": "colocated"}}
    assert by_node(bundles_of(Config.model_validate(colocated)), ["b", "a", "b", "a"]) == [0, 2, 1, 3]

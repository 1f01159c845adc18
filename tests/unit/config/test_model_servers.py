"""Models that a run serves beside its policy: their clients, their memory, and configurations that can't work."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from actors.placement import resources_of
from rayapp.config.bundles import asked_servers, bundles_of, gpu_arithmetic
from rayapp.config.config import Config, sources_of, with_addresses, with_values
from rayapp.config.loading import to_yaml

RUBRIC = {"clear": "It is clear."}


def config(**changes: Any) -> Config:
    given = {
        "model_servers": [
            {"name": "critic", "path": "models/critic", "tensor_parallel_size": 2},
            {"name": "large", "path": "models/large", "tensor_parallel_size": 4},
        ],
        "judges": [
            {"name": "quality", "base_url": "run://critic", "model": "critic", "rubric": RUBRIC},
            {"name": "taste", "base_url": "run://large", "model": "large", "rubric": RUBRIC},
        ],
        "reward": {"judges": {"quality": 1.0, "taste": 1.0}},
    }
    return Config.model_validate(given | changes)


def test_each_model_has_gpus_of_its_own_where_somebody_asks_it() -> None:
    run = config()

    assert gpu_arithmetic(bundles_of(run)) == "1 servers x TP 1 + 1 learners + critic x TP 2 + large x TP 4 = 8"
    # An evaluation has judges, supervised steps have none.
    evaluated, supervised = bundles_of(run, with_learners=False), bundles_of(run, with_servers=False)
    assert [each.model_server for each in evaluated if each.model_server] == ["critic", "large"]
    assert [each.model_server for each in supervised if each.model_server] == []
    assert [resources_of(each)["GPU"] for each in bundles_of(run) if each.model_server] == [2.0, 4.0]


def test_who_asks_gets_the_addresses_of_servers_that_are_up() -> None:
    urls = {"critic": "http://10.0.0.1:7000/v1", "large": "http://10.0.0.2:7001/v1"}
    asking = with_values(pickle.loads(pickle.dumps(with_addresses(config(), urls, "secret"))), model={"path": "copied"})

    assert asking.judges[0].base_url == "http://10.0.0.1:7000/v1"
    assert asking.judges[1].base_url == "http://10.0.0.2:7001/v1"
    assert {judge.endpoint.key for judge in asking.judges} == {"secret"}
    assert "secret" not in f"{to_yaml(asking)} {asking!r}"


def with_agent(**external: Any) -> Config:
    agent = {"name": "external_agent", "external": {"command": ["a"], "models": "endpoint", **external}}
    return config(agent=agent, model_servers=[{"name": "helper", "path": "a"}], judges=[], reward={})


def test_an_agents_endpoint_may_be_a_server_of_the_run() -> None:
    run = with_agent(endpoint={"base_url": "run://helper"})
    assert [each.name for each in asked_servers(run)] == ["helper"]

    for asking in (
        with_addresses(run, {"helper": "http://10.0.0.1:7000/v1"}, "secret"),
        next(iter(sources_of(with_addresses(run, {"helper": "http://10.0.0.1:7000/v1"}, "secret")))).config,
    ):
        endpoint = asking.agent.external.endpoint
        assert (endpoint.base_url, endpoint.model) == ("http://10.0.0.1:7000/v1", "helper")
        assert endpoint.key == "secret"


def test_an_agents_endpoint_that_can_not_work_is_refused() -> None:
    for external, message in (
        ({}, "models is endpoint, and agent.external.endpoint.base_url is ''"),
        ({"models": "train", "endpoint": {"base_url": "http://a/v1"}}, "models is train, and .* is 'http://a/v1'"),
        ({"endpoint": {"base_url": "run://other"}}, "base_url is run://other, but `model_servers` has helper"),
        ({"endpoint": {"base_url": "run://helper", "model": "b"}}, "calls its model 'helper'"),
        ({"endpoint": {"base_url": "http://user:secret@host/v1"}}, "given with a username and a password"),
    ):
        with pytest.raises(ValidationError, match=message):
            with_agent(**external)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_servers": []}, r"judges \(quality\): base_url is run://critic, but `model_servers` has no server"),
        # A judge that no source names needs no server.
        ({"reward": {}}, r"model_servers \(critic\): no judge or agent uses this server"),
        (
            {"model_servers": [{"name": "critic", "path": "a"}, {"name": "critic", "path": "b"}]},
            "two servers have the name 'critic'",
        ),
        (
            {"model_servers": [{"name": "critic", "path": "a", "options": {"--port": 1}}]},
            "'--port' can't be set here, because the run sets it",
        ),
    ],
)
def test_what_can_not_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)

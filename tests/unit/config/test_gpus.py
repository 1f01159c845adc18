"""How many GPUs a config needs, for whom, and in what words."""

from __future__ import annotations

import pytest

from actors.setup.placement import resources_of
from rayapp.config.config import Config, bundles_of, gpu_arithmetic, num_gpus_of


def config(placement: str, *, num_servers: int, tp: int, num_learners: int) -> Config:
    return Config.model_validate(
        {
            "cluster": {"placement": placement},
            "server": {"num_servers": num_servers, "tensor_parallel_size": tp},
            "learner": {"num_learners": num_learners},
        }
    )


SPLIT = config("split", num_servers=2, tp=2, num_learners=3)
COLOCATED = config("colocated", num_servers=4, tp=2, num_learners=8)


def test_each_process_of_its_own_gpus_has_them_on_one_node() -> None:
    # Two servers that need two GPUs on the same node, three learners that need one anywhere.
    assert [bundle.num_gpus for bundle in bundles_of(SPLIT)] == [2, 2, 1, 1, 1]


def test_colocated_servers_are_with_the_learners_whose_gpus_they_use() -> None:
    bundles = bundles_of(COLOCATED)

    assert [(bundle.server, bundle.learners) for bundle in bundles] == [
        (0, (0, 1)),
        (1, (2, 3)),
        (2, (4, 5)),
        (3, (6, 7)),
    ]
    assert [bundle.num_gpus for bundle in bundles] == [2] * 4


def test_without_gpus_the_same_processes_hold_cpu_shares_only() -> None:
    bundles = bundles_of(COLOCATED, on_gpu=False)

    assert [bundle.server for bundle in bundles] == [0, 1, 2, 3, *[None] * 8]
    assert {tuple(resources_of(bundle)) for bundle in bundles} == {("CPU",)}


@pytest.mark.parametrize("run", [SPLIT, COLOCATED], ids=["split", "colocated"])
def test_an_evaluation_has_no_learners_and_a_replay_no_servers(run: Config) -> None:
    servers = bundles_of(run, with_learners=False)
    learners = bundles_of(run, with_servers=False)

    assert num_gpus_of(servers) == run.server.num_servers * run.server.tensor_parallel_size
    assert [bundle.learners for bundle in learners] == [(rank,) for rank in range(run.learner.num_learners)]
    assert num_gpus_of(learners) == run.learner.num_learners


@pytest.mark.parametrize(
    ("run", "processes", "words"),
    [
        (SPLIT, {}, "2 servers x TP 2 + 3 learners = 7"),
        (COLOCATED, {}, "4 servers x TP 2 on those of 8 learners = 8"),
        (COLOCATED, {"with_learners": False}, "4 servers x TP 2 = 8"),
        (SPLIT, {"with_servers": False}, "3 learners = 3"),
    ],
)
def test_the_sum_is_shown_with_its_parts(run: Config, processes: dict[str, bool], words: str) -> None:
    assert gpu_arithmetic(bundles_of(run, **processes)) == words

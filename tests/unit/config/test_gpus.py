"""Number of GPUs that a config needs, for which processes, and the message."""

from __future__ import annotations

import pytest

from actors.placement import resources_of
from rayapp.config.bundles import bundles_of, gpu_arithmetic, num_gpus_of
from rayapp.config.config import Config


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
def test_an_evaluation_has_no_learners_and_supervised_steps_have_no_servers(run: Config) -> None:
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


def test_one_gpu_for_a_server_and_a_learner_is_shared_by_taking_turns() -> None:
    with pytest.raises(ValueError, match=r"1 servers x TP 1 \+ 1 learners = 2 GPUs, .*: cluster.placement=colocated"):
        Config.model_validate({"cluster": {"num_gpus": 1}})
    with pytest.raises(ValueError, match=r"Lower server\.num_servers"):
        Config.model_validate({"cluster": {"num_gpus": 1}, "train": {"max_staleness": 1}})


def test_another_tensor_parallelism_of_colocated_servers_needs_fewer_of_them() -> None:
    with pytest.raises(ValueError, match=r"Set server\.num_servers to 2, or learner\.num_learners to 16, or use"):
        config("colocated", num_servers=4, tp=4, num_learners=8)
    with pytest.raises(ValueError, match=r"= 6\. Set learner\.num_learners to 6, or use placement split"):
        config("colocated", num_servers=2, tp=3, num_learners=8)


def test_a_group_has_as_long_as_its_completions_need() -> None:
    def deadline_s(tokens: int, **rollout: float) -> float:
        sections = {
            "learner": {"max_tokens_per_microbatch": 16384},
            "rollout": {"group_size": 16, "max_completion_tokens": tokens, **rollout},
        }
        return Config.model_validate(sections | {"train": {"groups_per_step": 32}}).group_deadline_s

    assert deadline_s(100) == 300.0
    assert deadline_s(8192) == 0.25 * 8192 * 32 * 16 / 64  # one server, which decodes 64 at once
    assert deadline_s(8192, group_deadline_s=77.0) == 77.0

"""What a run asks a cluster for that scales itself."""

from __future__ import annotations

from actors.setup.gpus import gpu_bundles
from rayapp.config.config import Config


def test_each_process_asks_for_its_gpus_on_one_node() -> None:
    config = Config.model_validate(
        {"server": {"num_servers": 2, "tensor_parallel_size": 2}, "learner": {"num_learners": 3}}
    )

    # Two servers that need two GPUs on the same node, three learners that need one anywhere.
    assert gpu_bundles(config) == [{"GPU": 2.0}, {"GPU": 2.0}, {"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]

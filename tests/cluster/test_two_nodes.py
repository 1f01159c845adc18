"""A whole run on two nodes with addresses of their own: four learners, of which no node has room for
all, in two replicas of two that share micro-batches. Real vLLM, real FSDP, weights from node to node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.ports import free_port
from support.whole_runs import records

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
DEADLINE_S = 800.0
FREE_CPUS = 0.35
"""Of each node: room for three of the five processes that take 0.1 of a CPU each in the run's placement group."""

FILL = """
import json, sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False, namespace="two-nodes")
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

class Filler:
    def there(self):
        return True

for node in ray.nodes():
    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    options = {"num_cpus": 1 - float(sys.argv[2]), "lifetime": "detached", "scheduling_strategy": strategy}
    filler = ray.remote(Filler).options(name="filler " + node["NodeManagerAddress"], **options).remote()
    assert ray.get(filler.there.remote(), timeout=300)
print(json.dumps(sorted(node["NodeManagerAddress"] for node in ray.nodes())))
"""

LOOK = """
import json, sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False, namespace="two-nodes")
address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
groups = ray.util.placement_group_table().values()
print(json.dumps({g["name"]: sorted({address[node] for node in g["bundles_to_node_id"].values()}) for g in groups}))
"""


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    own = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    return kept | own | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "PYTHONPATH": path} | changes


def python(code: str, *arguments: str) -> str:
    """What a script prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def started(folder: str, name: str, *options: str) -> subprocess.Popen[bytes]:
    """A node that is up. On a busy machine it takes several tries: Ray gives it 30 s, which nothing changes."""
    log = Path(folder, f"{name}.log")
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--num-gpus=0",
        "--object-store-memory=200000000", "--disable-usage-stats", *options,
    ]  # fmt: skip
    while True:
        with log.open("w") as sink:
            node = subprocess.Popen(command, env=environment(), stdout=sink, stderr=sink, start_new_session=True)
        while "--block" not in log.read_text() and node.poll() is None:
            time.sleep(0.05)
        if node.poll() is None:
            return node
        assert "timed out during startup" in log.read_text(), log.read_text()


def stop(node: subprocess.Popen[bytes]) -> None:
    node.send_signal(signal.SIGTERM)
    try:
        node.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)


@pytest.fixture
def two_nodes() -> Iterator[tuple[str, list[str]]]:
    """Address of a Ray, and those of its two nodes, almost all of whose CPUs are taken."""
    # Short: a Unix socket's path has to fit in 107 bytes.
    with tempfile.TemporaryDirectory(prefix="r2", dir="/tmp", ignore_cleanup_errors=True) as folder:
        address = f"127.0.0.1:{free_port()}"
        own = (f"--temp-dir={folder}/h", "--include-dashboard=false", f"--ray-client-server-port={free_port()}")
        head = started(folder, "head", "--head", f"--port={address[10:]}", "--node-ip-address=127.0.0.1", *own)
        try:
            second = started(folder, "second", f"--address={address}", "--node-ip-address=127.0.0.2")
            try:
                nodes = json.loads(python(FILL, address, str(FREE_CPUS)))  # Ray calls 127.0.0.1 by another name
                assert len(set(nodes)) == 2
                yield address, nodes
            finally:
                stop(second)
        finally:
            stop(head)


def rayapp(address: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rayapp", *arguments],
        env=environment(RAY_ADDRESS=address), cwd=ROOT, text=True, timeout=DEADLINE_S, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_run_on_two_nodes(
    two_nodes: tuple[str, list[str]], tiny_run: Callable[[str, Path], dict[str, Any]], tmp_path: Path
) -> None:
    address, nodes = two_nodes
    config = tiny_run("two_nodes", tmp_path)
    config["train"] |= {"num_steps": 2}
    config["learner"] |= {"num_learners": 4, "replicas": 2, "sequence_parallel": 2, "max_tokens_per_microbatch": 32}
    config["checkpoint"] |= {"every_steps": 1}
    file, run = tmp_path / "config.yaml", tmp_path / "two_nodes"
    file.write_text(yaml.safe_dump(config))

    rayapp(address, "train", str(file))

    assert json.loads(python(LOOK, address)) == {"two_nodes: servers and learners": nodes}
    steps = records(run)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["weight_sync/servers_failed"] == 0 for step in steps)
    trained = [step for step in steps if "rollout_probs_diff/mean" in step]  # a group of equal rewards trains nothing
    assert all(step["rollout_probs_diff/mean"] < 0.02 for step in trained)  # the server holds the learners' weights
    assert (run / "final" / "model.safetensors").is_file()

"""configs/slurm/train.sh joins the nodes of a job by the network between them, and not by an address that each node
has.

The script runs in a network namespace of its own whose first address is docker0's; Slurm's programs only answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NODE = r"""
set -eu
ip link set lo up
for each in docker0:172.17.0.1/16 eth0:10.77.0.11/24 ib0:10.99.0.11/24; do
    ip link add "${each%%:*}" type bridge
    ip addr add "${each#*:}" dev "${each%%:*}"
    ip link set "${each%%:*}" up
done
mount --bind "$1/hosts" /etc/hosts
hostname node1
exec bash "$2" run.yaml
"""
PROGRAMS = {
    "scontrol": 'if [ "$2" = hostnames ]; then printf "%s\\n" $NODES; else echo "NodeAddr=10.77.0.12 Port=1"; fi',
    "srun": f"""echo "head $RAY_ADDRESS"
([ "$SLURM_NODEID" = 0 ] || exec {sys.executable} -m http.server -b "${{RAY_ADDRESS%:*}}" "${{RAY_ADDRESS##*:}}") &
until [ "$1" = bash ]; do shift; done
"$@" || true
kill %1
exit 1""",
    "python": f"""case "$*" in
*get-auth-token*) echo t ;;
*" start "*) echo "started $*" ;;
*ray.init*) exit 1 ;;
*) exec {sys.executable} "$@" ;;
esac""",
    "sleep": "exec /bin/sleep 0.1",
}


def started(folder: Path, **environment: str) -> str:
    """Return what a node prints that starts its part of a job's Ray."""
    (folder / "hosts").write_text("127.0.0.1 localhost\n172.17.0.1 node1\n10.77.0.12 node2\n")
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "2"}
    node = {"SLURMD_NODENAME": "node1", "SLURM_NODEID": "0", "NODES": "node1 node2", "RAYAPP_PYTHON": "python"}
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "bash", "-c", NODE, "-", str(folder), ROOT / "configs/slurm/train.sh"],
        env={**os.environ, **job, **node, "PATH": f"{folder}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("a network of its own needs root")
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "10.77.0.11"),
        ({"RAYAPP_INTERFACE": "ib0"}, "10.99.0.11"),
        ({"NODES": "node1", "SLURM_NNODES": "1"}, "127.0.0.1"),
    ],
)
def test_the_head_listens_where_the_other_nodes_reach_it(
    environment: dict[str, str], address: str, tmp_path: Path
) -> None:
    said = started(tmp_path, **environment)

    assert f"head {address}:20070" in said
    assert f"--node-ip-address={address}" in said


def test_a_second_node_joins_with_its_address_towards_the_head(tmp_path: Path) -> None:
    said = started(tmp_path, SLURM_NODEID="1", SLURMD_NODENAME="node2", NODES="node1 node2")

    assert "--node-ip-address=10.77.0.11" in said
    assert "172.17" not in said


def test_an_interface_that_is_not_there_is_named_with_those_there_are(tmp_path: Path) -> None:
    said = started(tmp_path, RAYAPP_INTERFACE="ib9")

    assert "RAYAPP_INTERFACE is ib9, but the interfaces with an IPv4 address are lo, docker0, eth0, ib0" in said
    assert "Traceback" not in said

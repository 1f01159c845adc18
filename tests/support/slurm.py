"""A Slurm of the test's own: a controller and two nodes, each with its own network, host name and processes.

All of it lives in namespaces, in one process tree: the nodes need no ports of this machine, a job can't reach other
processes, and everything ends with the first process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.timing import wait_until

DEADLINE_S = 900.0
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "nsenter")
HOSTS = "127.0.0.1 localhost\n10.77.0.1 login\n10.77.0.11 node1\n10.77.0.12 node2\n"
CONF = """
ClusterName=test
SlurmctldHost=login
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=7200
SlurmdTimeout=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName=node[1-2] CPUs=2 CoresPerSocket=2 RealMemory=1000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=3600 OverSubscribe=NO
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
CLUSTER = r"""
set -eu
hostname login
ip link set lo up
mount --bind "$1/hosts" /etc/hosts
mkdir -p /run/netns "$1/state" "$1/spool-node1" "$1/spool-node2"
mount -t tmpfs netns /run/netns
ip link add br0 type bridge
ip addr add 10.77.0.1/24 dev br0
ip link set br0 up
head -c 128 /dev/urandom > "$1/munge.key"
chmod 600 "$1/munge.key"
munged --foreground --force --socket="$1/munge.socket" --key-file="$1/munge.key" --pid-file="$1/munge.pid" \
    --seed-file="$1/munge.seed" --log-file="$1/munge.log" &
export SLURM_CONF="$1/slurm.conf"
slurmctld -D &
mkdir -p /tmp/ray
for n in 1 2; do
    ip netns add node$n
    ip link add v$n type veth peer name eth0 netns node$n
    ip link set v$n master br0 up
    ip -n node$n link set lo up
    ip -n node$n link set eth0 up
    ip -n node$n addr add 10.77.0.1$n/24 dev eth0
    ip -n node$n route add default via 10.77.0.1
    ip netns exec node$n unshare --mount --uts --ipc --pid --fork --kill-child --mount-proc bash -c \
        'hostname "$1"; mount -t tmpfs -o size=1g own /dev/shm; mount -t tmpfs own /tmp/ray; slurmd -D & wait' \
        bash node$n &
done
wait
"""


class SlurmMissingError(Exception):
    """Slurm can't run on this machine; the message is the reason."""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm."""

    folder: Path
    pid: int
    """First process of its namespaces."""

    def run(
        self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node."""
        return subprocess.run(
            ["nsenter", "--all", f"--target={self.pid}", *_in_folder(cwd or self.folder), *command],
            env={**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf", **(env or {})},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def job(self, job_id: str) -> dict[str, str]:
        """Return a job's fields as scontrol prints them."""
        done = self.run("scontrol", "--oneliner", "show", "job", job_id)
        assert done.returncode == 0, done.stderr
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.log")))


def _in_folder(folder: Path) -> list[str]:
    return ["sh", "-c", 'cd "$0" && exec "$@"', str(folder)]


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """Yield a Slurm whose nodes are idle.

    Raises:
        SlurmMissingError: its programs or the permission to make namespaces are missing.
    """
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise SlurmMissingError(f"{', '.join(missing)} missing: apt-get install slurm-wlm munge iproute2")
    unshare = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    trial = [*unshare, "ip", "link", "add", "x", "type", "bridge"]
    tried = subprocess.run(trial, capture_output=True, text=True, check=False)
    if os.geteuid() != 0 or tried.returncode != 0:
        raise SlurmMissingError(f"namespaces with a network of their own need root and CAP_SYS_ADMIN: {tried.stderr}")
    # Short: the path of munge's socket has to fit in 107 bytes.
    with tempfile.TemporaryDirectory(prefix="sl", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "hosts").write_text(HOSTS)
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # none is used, but slurmd wants to know which
        with (folder / "cluster.log").open("w") as log:
            process = subprocess.Popen([*unshare, "bash", "-c", CLUSTER, "bash", name], stdout=log, stderr=log)
        try:
            slurm = Slurm(folder, _first_child(process))
            _wait_for_nodes(slurm, process)
            yield slurm
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60)


def _first_child(process: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: children.read_text() != "", process=process, timeout_s=DEADLINE_S)
    return int(children.read_text().split()[0])


def _wait_for_nodes(slurm: Slurm, process: subprocess.Popen[bytes]) -> None:
    command = ("sinfo", "--noheader", "--partition=low", "--format=%D %t")
    wait_until(
        lambda: slurm.run(*command).stdout.strip() == "2 idle", slurm.logs, process=process, timeout_s=DEADLINE_S
    )

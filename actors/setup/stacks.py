"""Where every actor of a run is right now: a stack dump that needs nothing from a process that may hang.

Used by `rayapp.driver.cluster` when a run has stalled. py-spy reads the stacks from outside, in a task on each actor's
node; it comes with ray[default]. Where the kernel forbids that (containers without SYS_PTRACE), the dump says so.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.calls import answer
from rayapp.core.errors import RayappError

DUMP_TIMEOUT_S = 60.0
ONE_DUMP_TIMEOUT_S = 10.0


async def dump_stacks() -> str:
    """Stacks of all living actors of this driver, by name. Never raises: a node that does not answer is named."""
    nodes: dict[str, dict[str, int]] = defaultdict(dict)
    job = ray.get_runtime_context().get_job_id()
    for actor in ray._private.state.actors().values():  # noqa: SLF001 - the public API needs a dashboard
        if actor["State"] == "ALIVE" and actor["JobID"] == job:
            nodes[actor["Address"]["NodeID"]][actor["Name"] or actor["ActorID"]] = int(actor["Pid"])
    parts = await asyncio.gather(*(_dump_node(node, pids) for node, pids in nodes.items()))
    return "\n".join(parts)


async def _dump_node(node: str, pids: dict[str, int]) -> str:
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    task = ray.remote(stacks_of).options(num_cpus=0, scheduling_strategy=strategy, name="dump stacks")
    try:
        text: str = await answer(task.remote(pids), timeout_s=DUMP_TIMEOUT_S, what=f"dump stacks on node {node[:8]}")
    except RayappError as error:
        return f"=== node {node}: {error}\n"
    return text


def stacks_of(pids: dict[str, int]) -> str:
    """Stacks of these processes of this machine, by name."""
    return "\n".join(f"=== {name} (pid {pid})\n{_stack(pid)}" for name, pid in sorted(pids.items()))


def _stack(pid: int) -> str:
    py_spy = Path(sys.executable).parent / "py-spy"
    # Blocking: py-spy stops the process while it reads, and a process in the kernel (D) can't be stopped otherwise.
    command = [str(py_spy), "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ONE_DUMP_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stack: {error}\n"
    return done.stdout or f"no stack: {done.stderr.strip()}\n"

"""The one table of Ray actors, and the only place that calls `ray.remote`.

role             class           name in the dashboard    restarts by Ray
sandbox pool     SandboxPool     sandbox-pool             any: the driver counts them, and makes each ready again
rollout worker   RolloutWorker   rollout-worker-N         any: the same; its groups are issued again
vLLM server      VllmServer      vllm-server-N            any: the same; it must be synced before it serves
model server     ModelServer     model-server-NAME        any: the same; it listens where it did
learner          Learner         learner-N                0: its process group is gone with it
sandbox reaper   SandboxReaper   sandbox-reaper-RUN       3: detached, and nobody else would start it again
(scripted server, instant learner: `actors.stand_ins`, under the names of the real ones)

Classes stay plain, so that tests construct them without Ray. What a role's process needs in its environment is in
`environments/<role>.yaml`, each line with its reason.
"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml

from rayapp.core.errors import ConfigError

ENVIRONMENTS = Path(__file__).parent / "environments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """How the processes of one kind run."""

    class_path: str
    """`module:Class`, imported only when one is spawned: the driver has no use for torch or vLLM."""
    num_cpus: float
    """CPUs that Ray reserves. Below what the role uses: on a small machine the roles take turns on the same cores, and
    what Ray can't place waits for ever."""
    max_concurrency: int | None = None
    """Calls that run at once in an async actor; None for a threaded one, which runs one."""
    is_detached: bool = False
    """True if it outlives the driver. It has to end itself."""
    env_of: str = ""
    """Role whose environment it has; empty: its own."""
    max_restarts: int = 0
    """By Ray, of a process that died. -1: as often as it takes; the driver counts, and ends the run."""


ROLES: dict[str, Role] = {
    "sandbox-pool": Role(
        class_path="actors.sandbox_pool:SandboxPool", num_cpus=0.01, max_concurrency=10_000, max_restarts=-1
    ),
    "rollout-worker": Role(
        class_path="actors.rollout_worker:RolloutWorker", num_cpus=0.1, max_concurrency=1_000, max_restarts=-1
    ),
    "vllm-server": Role(
        class_path="actors.vllm_server:VllmServer", num_cpus=0.1, max_concurrency=10_000, max_restarts=-1
    ),
    "model-server": Role(
        class_path="actors.model_server:ModelServer", num_cpus=0.1, max_concurrency=100, max_restarts=-1
    ),
    "learner": Role(class_path="actors.learner:Learner", num_cpus=0.1),
    "scripted-server": Role(
        class_path="actors.stand_ins:ScriptedServer",
        num_cpus=0.1,
        max_concurrency=100_000,
        max_restarts=-1,
        env_of="rollout-worker",
    ),
    "instant-learner": Role(class_path="actors.stand_ins:InstantLearner", num_cpus=0.1, env_of="rollout-worker"),
    "sandbox-reaper": Role(
        class_path="actors.sandbox_reaper:SandboxReaper",
        num_cpus=0.01,
        max_concurrency=100,
        is_detached=True,
        max_restarts=3,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where an actor runs, and what it sees there; by default anywhere, and no GPU."""

    strategy: Any = None
    """A Ray scheduling strategy."""
    num_gpus: float = 0.0
    """Reserved for this actor alone."""
    visible_devices: str = ""
    """Ids of GPUs that it shares with their owners; only without num_gpus."""


ANYWHERE = Seat()


def spawn(role: str, name: str, *args: object, seat: Seat = ANYWHERE) -> Any:
    """Start one actor and return its Ray handle at once; the constructor runs over there.

    Args:
        role: a key of ROLES.
        name: its name in the dashboard, unique in the namespace.
        args: for the constructor.
        seat: see `actors.setup.placement`.
    Raises:
        ConfigError: another run of this name goes on.
    """
    spec = ROLES[role]
    options: dict[str, Any] = {
        "name": name,
        "num_cpus": spec.num_cpus,
        "num_gpus": seat.num_gpus,
        "max_restarts": spec.max_restarts,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": role_env(role, seat)},
    }
    if seat.strategy is not None:
        options["scheduling_strategy"] = seat.strategy
    if spec.is_detached:
        options["lifetime"] = "detached"
    if spec.max_concurrency is not None:
        options["max_concurrency"] = spec.max_concurrency
    try:
        return ray.remote(_load(spec.class_path)).options(**options).remote(*args)
    except ray.exceptions.ActorAlreadyExistsError:
        namespace = ray.get_runtime_context().namespace
        raise ConfigError(
            f"an actor {name} runs in namespace {namespace} of this Ray already: another run has the same run.name. "
            "Stop that one (rayapp stop, ray job stop), or choose another run.name."
        ) from None


def role_env(role: str, seat: Seat = ANYWHERE) -> dict[str, str]:
    """Environment variables of a role's process, from `environments/<role>.yaml`."""
    owner = ROLES[role].env_of or role
    text = (ENVIRONMENTS / f"{owner.replace('-', '_')}.yaml").read_text()
    env = {key: str(value) for key, value in (yaml.safe_load(text) or {}).items()}
    if seat.num_gpus == 0:
        # Since Ray 2.58 an actor with num_gpus=0 sees every GPU; CUDA must not start there by accident.
        env["CUDA_VISIBLE_DEVICES"] = seat.visible_devices
    return env


def _load(class_path: str) -> type:
    module_name, class_name = class_path.split(":")
    module = __import__(module_name, fromlist=[class_name])
    loaded: type = getattr(module, class_name)
    return loaded


def kill(actor: Any) -> None:
    """End an actor's process now. Nothing happens if it is gone."""
    try:
        ray.kill(actor, no_restart=True)
    except (ValueError, RuntimeError):
        # The connection to Ray ended first, and our actors with it.
        return


async def restart(actor: Any) -> None:
    """End an actor's process, so that Ray starts it again. One that hangs ends too. Nothing happens if it is gone."""
    try:
        await asyncio.to_thread(ray.kill, actor, no_restart=False)
    except (ValueError, RuntimeError):
        return


async def name_is_free(name: str, timeout_s: float = 30.0) -> None:
    """Wait for an actor of this name that has been killed to be gone; Ray takes a moment. Returns anyway after that."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            ray.get_actor(name)
        except ValueError:
            return
        await asyncio.sleep(0.05)


def kill_named(name: str) -> bool:
    """End a detached actor that an earlier run left. False if there is none."""
    try:
        kill(ray.get_actor(name))
    except ValueError:
        return False
    return True


def free_address() -> tuple[str, int]:
    """This node's address and a port that is free now: for learner rank 0, and for model servers."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

"""The table of all Ray actors. Only this module calls `ray.remote`.

role             class           name in the dashboard    restarts by Ray
sandbox pool     PoolActor       sandbox-pool             any, counted by the driver, which makes the pool ready again
rollout worker   RolloutWorker   rollout-worker-N         any, counted by the driver; its groups are issued again
vLLM server      VllmServer      vllm-server-N            any, counted by the driver; it must be synced before it serves
model server     ModelServer     model-server-NAME        any, counted by the driver; it listens at the same address
learner          Learner         learner-N                0: its process group is gone with it

Classes stay plain, so that tests construct them without Ray. `environments/<role>.yaml` has the environment variables
of a role's process, each line with its reason.
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
    """Settings of all processes of one kind."""

    class_path: str  # `module:Class`, imported only when an actor is spawned: the driver needs neither torch nor vLLM
    # Fewer than the role uses: on a small machine the roles share the cores, and an actor that Ray can't place would
    # wait forever.
    num_cpus: float
    max_concurrency: int | None = None  # calls of an async actor; None for a threaded one, which runs one at a time
    env_of: str = ""  # key of ROLES whose variables the process gets, for a role that is not in ROLES
    max_restarts: int = 0  # by Ray; -1: no limit, the driver counts and ends the run after too many


ROLES: dict[str, Role] = {
    "sandbox-pool": Role(
        class_path="actors.sandbox_pool:PoolActor", num_cpus=0.01, max_concurrency=10_000, max_restarts=-1
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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """Placement of an actor, and the GPUs that it sees; by default any node and no GPU."""

    strategy: Any = None  # a Ray scheduling strategy
    num_gpus: float = 0.0  # reserved for this actor alone
    visible_devices: str = ""  # ids of GPUs reserved for other actors that this one uses too, if num_gpus is 0


ANYWHERE = GpuShare()


def spawn(role: str | Role, name: str, *args: object, share: GpuShare = ANYWHERE) -> Any:
    """Start one actor and return its Ray handle at once; the constructor runs in the actor's process with `args`.

    `name` is that in the dashboard, unique in the namespace. ConfigError: another run of this name is in progress.
    """
    spec = ROLES[role] if isinstance(role, str) else role
    options: dict[str, Any] = {
        "name": name,
        "num_cpus": spec.num_cpus,
        "num_gpus": share.num_gpus,
        "max_restarts": spec.max_restarts,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": role_env(role, share)},
    }
    if share.strategy is not None:
        options["scheduling_strategy"] = share.strategy
    if spec.max_concurrency is not None:
        options["max_concurrency"] = spec.max_concurrency
    try:
        return ray.remote(_load(spec.class_path)).options(**options).remote(*args)
    except ray.exceptions.ActorAlreadyExistsError:
        namespace = ray.get_runtime_context().namespace
        raise ConfigError(
            f"Ray actor {name} already runs in namespace {namespace} of this Ray: another run has the same run.name. "
            "Stop that run (Ctrl-C, ray job stop), or choose another run.name."
        ) from None


def role_env(role: str | Role, share: GpuShare = ANYWHERE) -> dict[str, str]:
    owner = role if isinstance(role, str) else role.env_of
    text = (ENVIRONMENTS / f"{owner.replace('-', '_')}.yaml").read_text()
    env = {key: str(value) for key, value in (yaml.safe_load(text) or {}).items()}
    if share.num_gpus == 0:
        # Since Ray 2.58 an actor with num_gpus=0 sees every GPU; CUDA must not start there by accident.
        env["CUDA_VISIBLE_DEVICES"] = share.visible_devices
    return env


def _load(class_path: str) -> type:
    module_name, class_name = class_path.split(":")
    module = __import__(module_name, fromlist=[class_name])
    loaded: type = getattr(module, class_name)
    return loaded


def kill(actor: Any) -> None:
    try:
        ray.kill(actor, no_restart=True)
    except (ValueError, RuntimeError):
        # The connection to Ray has already ended, and the actors with it.
        return


async def restart(actor: Any) -> None:
    """End an actor's process, even if it hangs, so that Ray starts it again. Do nothing if the actor is gone."""
    try:
        await asyncio.to_thread(ray.kill, actor, no_restart=False)
    except (ValueError, RuntimeError):
        return


async def name_is_free(name: str, timeout_s: float = 30.0) -> None:
    """Wait, for at most `timeout_s`, until a killed actor of this name is gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            ray.get_actor(name)
        except ValueError:
            return
        await asyncio.sleep(0.05)


def free_address() -> tuple[str, int]:
    """Return this node's address and a port that is free now, for learner rank 0 and for model servers."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

"""Connects to Ray: attaches to the configured or a running Ray, otherwise starts one; stops only a Ray that it
started.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rayapp.config.config import Config
from rayapp.core.errors import WRONG_TOKEN, ConfigError, RayappError, first_line
from rayapp.core.logs import hand_over, label_logs

log = logging.getLogger(__name__)
MIB = 1 << 20
CONNECT_TIMEOUT_S = 5.0
DASHBOARD_TIMEOUT_S = 10.0
START_TIMEOUT_S = 300.0  # Ray's own limit of 30 s is too short for a busy machine
START_LIMITS = {
    "gcs_server_port_wait_time_s": 1,
    "gcs_rpc_server_connect_timeout_s": 1,
    "raylet_start_wait_time_s": 1,
    "raylet_client_num_connect_attempts": 1,
    "agent_register_timeout_ms": 1000,
    "worker_register_timeout_seconds": 1,
    "health_check_timeout_ms": 1000,
}  # limits of Ray's processes for each other, from 5 to 60 s by default -> number of their units in a second
START_TRIES = 3
PROGRESS_S = 10.0
AGENT_PORTS = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
FIRST_DASHBOARD_PORT = 8266  # of the dashboard of a Ray of ours; `ray start` expects 8265
NO_PROMETHEUS = "no Prometheus answers at RAY_PROMETHEUS_HOST: the dashboard's Metrics page stays empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConnection:
    dashboard_url: str  # empty without a dashboard
    is_own: bool  # this process started Ray, which then ends with it

    def dashboard_line(self) -> str:
        """Return a line with the dashboard's URL, how to log in, and a warning if a configured Prometheus does not
        answer. Takes up to 10 s; never raises."""
        if not self.dashboard_url:
            return "Ray has no dashboard"
        line = f"Ray dashboard: http://{self.dashboard_url}{_how_to_enter()}"
        is_wanted = "RAY_PROMETHEUS_HOST" in os.environ
        return f"{line} ({NO_PROMETHEUS})" if is_wanted and not _prometheus_answers(self.dashboard_url) else line


@dataclass(slots=True)
class _Kept:
    """State of a `one_connection` block: its exit stack, and its connection once it is open."""

    exits: ExitStack
    session: RayConnection | None = None


_kept: _Kept | None = None


@contextmanager
def one_connection() -> Iterator[None]:
    """Let every `ray_session` in the block share one connection, as each start of Ray takes ten seconds."""
    global _kept
    with ExitStack() as exits:
        _kept = _Kept(exits)
        try:
            yield
        finally:
            _kept = None


@contextmanager
def ray_session(config: Config, report: Callable[[str], None] = lambda text: None) -> Iterator[RayConnection]:
    """Connect to Ray until the end of the block, or of the `one_connection` around it.

    The run's actors end with the connection, and so does a Ray that this process started. `ray stop` is never called,
    because it would end every Ray on the machine. ConfigError: the named Ray can't be reached.
    """
    if _kept is None:
        with _connection(config, report) as session:
            yield session
        return
    if _kept.session is None:
        _kept.session = _kept.exits.enter_context(_connection(config, report))
    yield _kept.session


@contextmanager
def _connection(config: Config, report: Callable[[str], None]) -> Iterator[RayConnection]:
    report("connecting to Ray")
    # Under `uv run`, Ray would build a new environment for every worker; ours is installed already.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray starts its workers at nice 15: on a shared machine servers and learners would come last.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray pre-starts a worker per core for tasks; actors with environments of their own can't use these workers.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    import ray

    with _messages_of_raylets_logged():
        with _own_sigterm():
            context, is_own = _connect(config, report)
        hand_over()
        label_logs(config.run.name)
        try:
            session = RayConnection(dashboard_url=context.dashboard_url or "", is_own=is_own)
            report(session.dashboard_line())
            yield session
        finally:
            ray.shutdown()


def _connect(config: Config, report: Callable[[str], None]) -> tuple[Any, bool]:
    """Return Ray's context, and whether this process started Ray."""
    import ray

    common = _options(config)
    address = config.cluster.address or os.environ.get("RAY_ADDRESS", "")
    if address and address != "local":
        try:
            _check_reachable(address)
            return ray.init(address=address, **common), False
        except (OSError, ValueError, RuntimeError) as error:
            # Ray reports a refused token only in its log: the error is the same as without any Ray.
            raise ConfigError(
                f"no Ray answers at {address!r} ({first_line(error)}). If no Ray runs there, start one with `ray start "
                "--head`, correct cluster.address or RAY_ADDRESS, or leave both empty to start a local Ray. If "
                "`ray start` failed there, another program may use Ray's metrics port: run rayapp doctor there. If Ray "
                f"runs there, Ray may refuse the token. {WRONG_TOKEN}"
            ) from None
    started_here = "" if address else _address_of_ray_start()
    if started_here:
        return ray.init(address=started_here, **common), False
    _make_token_folder()
    own = {
        "object_store_memory": config.cluster.object_store_mib * MIB,
        # None: start the dashboard if its packages are installed.
        "include_dashboard": None if config.cluster.dashboard else False,
    }
    return _started(report, own | common), True


def _started(report: Callable[[str], None], options: Mapping[str, Any]) -> Any:
    """Start a Ray and return its context. If its raylet ends meanwhile, start Ray again, at most START_TRIES times.

    A raylet ends if an agent's port was taken meanwhile, or if one of its own limits was too short for a busy machine.
    """
    import ray

    for limit, per_s in START_LIMITS.items():
        os.environ.setdefault(f"RAY_{limit}", f"{per_s * START_TIMEOUT_S:.0f}")
    began = time.monotonic()
    for tries_left in reversed(range(START_TRIES)):
        with _ports_that_ray_start_does_not_use(), _own_session_and_time_to_start(report) as processes:
            try:
                return ray.init(address="local", **options)
            except _RayletEndedError:
                pass
            except Exception as error:  # Ray has no narrower class for this error
                if "timed out during startup" not in str(error):
                    raise
        why = _why_a_raylet_ended(processes)
        for process in processes:
            process.kill()
        if not (why and tries_left):
            load = f"the load of this machine is {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
            raise RayappError(
                f"Ray did not start in {time.monotonic() - began:.0f} s{why}; {load}. Run this again when the machine "
                "is less busy, or start Ray first with `ray start --head`. Ray's logs are in "
                "/tmp/ray/session_latest/logs"
            )
        report(f"Ray did not start{why}; starting it again")
    raise AssertionError("the last try returns or raises")


class _RayletEndedError(Exception):
    """The raylet ended before its node was registered."""


def _why_a_raylet_ended(processes: Sequence[subprocess.Popen[bytes]]) -> str:
    """Return the exit status of a raylet that has ended, and the last error in its log; empty if none has."""
    for process in processes:
        words = [str(word) for word in process.args] if isinstance(process.args, list) else []
        if words and Path(words[0]).name == "raylet" and (status := process.poll()) is not None:
            (folder,) = (word.partition("=")[2] for word in words if word.startswith("--session_dir="))
            told = Path(folder, "logs", "raylet.out")
            lines = told.read_text(errors="replace").splitlines() if told.exists() else []
            errors = [line for line in lines if re.match(r"\[\S+ \S+ [EFC] ", line)]
            return f": its raylet ended with status {status}: {errors[-1][-300:] if errors else 'no error in its log'}"
    return ""


def _options(config: Config) -> dict[str, Any]:
    import ray

    options: dict[str, Any] = {
        "namespace": f"rayapp-{config.run.name}",
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    if config.tracking.log_format == "json":
        options["logging_config"] = ray.LoggingConfig(encoding="JSON", additional_log_standard_attrs=["name"])
    return options


def server_names(config: Config) -> list[str]:
    return [f"vllm-server-{index}" for index in range(config.server.num_servers)]


@contextmanager
def _ports_that_ray_start_does_not_use() -> Iterator[None]:
    """Let a Ray take other ports than `ray start --head` and `ray job submit` expect by default.

    With ports that an agent chooses itself, the raylet waits only 15 s for them, and an agent on a busy machine imports
    for longer. `ray.init` has no options for these, and tries a single port for the dashboard.
    """
    from ray._private import parameter, ray_constants

    class OwnPorts(parameter.RayParams):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options | dict(zip(AGENT_PORTS, _free_ports(len(AGENT_PORTS)), strict=True)))

    params, port = parameter.RayParams, ray_constants.DEFAULT_DASHBOARD_PORT
    parameter.RayParams, ray_constants.DEFAULT_DASHBOARD_PORT = OwnPorts, FIRST_DASHBOARD_PORT
    try:
        yield
    finally:
        parameter.RayParams, ray_constants.DEFAULT_DASHBOARD_PORT = params, port


def _free_ports(number: int) -> list[int]:
    with ExitStack() as open_sockets:
        found = [open_sockets.enter_context(socket.socket()) for _ in range(number)]
        for each in found:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in found]


@contextmanager
def _own_session_and_time_to_start(report: Callable[[str], None]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Let Ray's processes, which it yields, start in a separate session, with START_TIMEOUT_S to start.

    `timeout`, `kill -- -GROUP` and closing a terminal signal the whole group: Ray would end learners and servers before
    the driver has saved. They still end with this process (PR_SET_PDEATHSIG). `ray.init` has no option for either.
    """
    from ray._private import services

    processes: list[subprocess.Popen[bytes]] = []

    class OwnSession(services.ConsolePopen):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, start_new_session=True)
            processes.append(self)

    def node_once_started(*args: Any) -> Any:
        said = began = time.monotonic()
        while True:
            try:
                return get_node(*args)
            except RuntimeError:  # the node is not registered yet
                now = time.monotonic()
                if _why_a_raylet_ended(processes):
                    raise _RayletEndedError from None
                if now - began > START_TIMEOUT_S:
                    raise
                if now - said >= PROGRESS_S:
                    said = now
                    report(f"Ray has not started in {now - began:.0f} s; waiting for at most {START_TIMEOUT_S:.0f} s")
                time.sleep(0.1)

    popen, get_node = services.ConsolePopen, services.get_node
    services.ConsolePopen, services.get_node = OwnSession, node_once_started
    try:
        yield processes
    finally:
        services.ConsolePopen, services.get_node = popen, get_node


def _make_token_folder() -> None:
    """Make the folder of the token of a Ray that we start; only its owner can read it."""
    is_asked_for = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"
    if not is_asked_for or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    try:
        folder = Path.home() / ".ray"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / "auth_token").exists() and not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} can't be written to")
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"Ray can't store the token of its dashboard and API in ~/.ray/auth_token: {error}. Set HOME to a folder "
            "of your own, or RAY_AUTH_TOKEN to a token (`openssl rand -hex 32`)"
        ) from error


def _address_of_ray_start() -> str:
    # If it is alive, else empty. `ray.init(address="auto")` would take any Ray, even another run's own, which ends with
    # that run.
    from ray._private.services import find_bootstrap_address

    address = find_bootstrap_address(None) or ""
    try:
        _check_reachable(address)
    except (OSError, ValueError):
        return ""
    return address


@contextmanager
def _messages_of_raylets_logged() -> Iterator[None]:
    # Ray prints them in colour on the driver's stdout, several lines for each process, even with log_to_driver=False.
    from ray._private import worker

    def log_or_print(data: dict[str, Any], *args: Any, **options: Any) -> None:
        # Messages with a node's address are lines of log files, which log_to_driver requests.
        if data["pid"] == "raylet" and "ip" not in data:
            worker.logger.error("%s", "\n".join(data["lines"]))
        else:
            theirs(data, *args, **options)

    theirs, worker.print_to_stdstream = worker.print_to_stdstream, log_or_print
    try:
        yield
    finally:
        worker.print_to_stdstream = theirs


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the SIGTERM handler: `ray.init` sets one that prints stacks and exits with 15. Ray's native one goes,
    too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
            # Restart interrupted system calls, as asyncio does; otherwise they would fail with EINTR.
            signal.siginterrupt(signal.SIGTERM, False)


def _check_reachable(address: str) -> None:
    # Ray itself would retry for minutes.
    host, separator, port = address.rpartition("://")[2].rpartition(":")
    if separator and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _how_to_enter() -> str:
    from ray._private.authentication.authentication_utils import is_token_auth_enabled  # Ray has no public API

    return " (its token: ray get-auth-token)" if is_token_auth_enabled() else ""


def _prometheus_answers(dashboard_url: str) -> bool:
    """Return whether the dashboard reaches its Prometheus (RAY_PROMETHEUS_HOST); True if that is unknown."""
    from ray._private.authentication.http_token_authentication import (  # Ray has no public function for its own token
        get_auth_headers_if_auth_enabled,
    )

    request = urllib.request.Request(
        f"http://{dashboard_url}/api/prometheus_health", headers=get_auth_headers_if_auth_enabled({})
    )
    try:
        with urllib.request.urlopen(request, timeout=DASHBOARD_TIMEOUT_S) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except urllib.error.HTTPError as error:
        return error.code != HTTPStatus.INTERNAL_SERVER_ERROR
    except OSError:
        return True

"""Connecting to Ray: attach to the one that is named or running, else start our own, and stop only what we started."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rayapp.config.config import Config
from rayapp.core.errors import WRONG_TOKEN, ConfigError, first_line
from rayapp.core.logs import hand_over, label_logs

log = logging.getLogger(__name__)
MIB = 1 << 20
CONNECT_TIMEOUT_S = 5.0
DASHBOARD_TIMEOUT_S = 10.0
NO_PROMETHEUS = "no Prometheus answers at RAY_PROMETHEUS_HOST: its Metrics page stays empty, the run needs none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession:
    """A connection to Ray."""

    dashboard_url: str
    """Empty where there is none."""
    is_own: bool
    """True if this process started Ray, which then ends with it."""

    def dashboard_line(self) -> str:
        """Where a person looks, and what the page asks for; where a Prometheus is named, also that it does not answer.

        Takes up to 10 s; never raises.
        """
        if not self.dashboard_url:
            return "Ray has no dashboard"
        line = f"Ray dashboard: http://{self.dashboard_url}{_how_to_enter()}"
        is_wanted = "RAY_PROMETHEUS_HOST" in os.environ
        return f"{line} ({NO_PROMETHEUS})" if is_wanted and not _prometheus_answers(self.dashboard_url) else line


@dataclass(slots=True)
class _Kept:
    """The connection of a block of `one_connection`, once there is one, and what ends it."""

    exits: ExitStack
    session: RaySession | None = None


_kept: _Kept | None = None


@contextmanager
def one_connection() -> Iterator[None]:
    """Every `ray_session` within the block is the first one's, which ends with the block.

    A training connects for its first evaluation, its warm-up and its steps: each start of a Ray takes ten seconds.
    """
    global _kept
    with ExitStack() as exits:
        _kept = _Kept(exits)
        try:
            yield
        finally:
            _kept = None


@contextmanager
def ray_session(config: Config, report: Callable[[str], None] = lambda text: None) -> Iterator[RaySession]:
    """A connection to Ray for the length of the block, or of the `one_connection` around it.

    At its end our actors end with the connection, and a Ray that we started ends too. `ray stop` is never called: it
    would end every Ray on the machine.

    Args:
        report: told that it connects, and where the dashboard is.
    Raises:
        ConfigError: the named Ray can't be reached.
    """
    if _kept is None:
        with _connection(config, report) as session:
            yield session
        return
    if _kept.session is None:
        _kept.session = _kept.exits.enter_context(_connection(config, report))
    yield _kept.session


@contextmanager
def _connection(config: Config, report: Callable[[str], None]) -> Iterator[RaySession]:
    report("connecting to Ray")
    # Under `uv run`, Ray would build the environment anew for every worker; ours is installed already.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray starts its workers at nice 15: on a machine that does anything else, servers and learners would come last.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray starts a worker per core ahead, for tasks: our actors have environments of their own, and can't take these.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    import ray

    with _own_sigterm():
        context, is_own = _connect(config)
    hand_over()
    label_logs(config.run.name)
    try:
        session = RaySession(dashboard_url=context.dashboard_url or "", is_own=is_own)
        report(session.dashboard_line())
        yield session
    finally:
        ray.shutdown()


def _connect(config: Config) -> tuple[Any, bool]:
    """Ray's context, and whether this process started Ray."""
    import ray

    common = _options(config)
    address = config.cluster.address or os.environ.get("RAY_ADDRESS", "")
    if address and address != "local":
        try:
            _check_reachable(address)
            return ray.init(address=address, **common), False
        except (OSError, ValueError, RuntimeError) as error:
            # Ray tells of a token that it refuses in its log only: the error is the same as for no Ray at all.
            raise ConfigError(
                f"no Ray answers at {address!r} ({first_line(error)}). Start one there with `ray start --head`, "
                "correct cluster.address or RAY_ADDRESS, or leave both empty to start a local one. If something "
                "listens there, its `ray start` may have failed (rayapp doctor: is the metrics port taken?), or "
                f"it may refuse the token. {WRONG_TOKEN}"
            ) from None
    started_here = "" if address else _address_of_ray_start()
    if started_here:
        return ray.init(address=started_here, **common), False
    _make_token_folder()
    with _processes_in_a_session_of_their_own():
        cluster = config.cluster
        own = {
            "object_store_memory": cluster.object_store_mib * MIB,
            "include_dashboard": None if cluster.dashboard else False,  # None: where what it needs is installed
        }
        return ray.init(address="local", **own, **common), True


def _options(config: Config) -> dict[str, Any]:
    import ray

    options: dict[str, Any] = {
        "namespace": f"rayapp-{config.run.name}",
        "logging_level": logging.ERROR,
        "log_to_driver": config.cluster.log_to_driver,
    }
    if config.tracking.log_format == "json":
        options["logging_config"] = ray.LoggingConfig(encoding="JSON", additional_log_standard_attrs=["name"])
    return options


@contextmanager
def session_of_run(config: Config, report: Callable[[str], None]) -> Iterator[None]:
    """A connection to the Ray in which the run of this configuration goes on, for the length of the block: the named
    one, else whichever of this machine has it. The run does not notice.

    Raises:
        ConfigError: it goes on in none of them.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray._private.services import find_gcs_addresses

    named = config.cluster.address or os.environ.get("RAY_ADDRESS", "")
    addresses = [named] if named not in ("", "local", "auto") else sorted(find_gcs_addresses())
    for address in addresses:
        report(f"looking for run {config.run.name} in the Ray at {address}")
        try:
            _check_reachable(address)
            with _own_sigterm():
                ray.init(address=address, **_options(config))
            ray.get_actor(server_names(config)[0])
        except (OSError, ValueError, RuntimeError) as error:
            log.info("no run %s in the Ray at %s: %s", config.run.name, address, first_line(error))
            ray.shutdown()
            continue
        hand_over()
        try:
            yield
        finally:
            ray.shutdown()
        return
    raise ConfigError(
        f"no run {config.run.name} goes on in {' or '.join(addresses) or 'any Ray of this machine'}. Give its own "
        "config.yaml (in its folder), and cluster.address where its Ray is on another machine; or leave --running out "
        "to serve a model or a checkpoint."
    )


def server_names(config: Config) -> list[str]:
    """Of a run's servers, in its namespace."""
    return [f"vllm-server-{index}" for index in range(config.server.num_servers)]


@contextmanager
def _processes_in_a_session_of_their_own() -> Iterator[None]:
    """Start Ray's processes where a signal to this process's group does not reach them, and all that they start.

    `timeout`, `kill -- -GROUP` and a terminal that is closed signal the whole group at once. A Ray that ends then takes
    learners and servers with it before the driver has saved. They end with this process whatever ends it, as Ray has
    the kernel kill them (PR_SET_PDEATHSIG). `ray.init` has no option for it.
    """
    from ray._private import services

    class OwnSession(services.ConsolePopen):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, start_new_session=True)

    theirs, services.ConsolePopen = services.ConsolePopen, OwnSession
    try:
        yield
    finally:
        services.ConsolePopen = theirs


def _make_token_folder() -> None:
    """Where Ray, from 2.60 on, keeps the token of the Ray that we start. All may read that file, so the folder is ours.

    Raises:
        ConfigError: Ray could not keep one.
    """
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
            f"Ray keeps the token of its dashboard and its API in ~/.ray/auth_token: {error}. Set HOME to a folder of "
            "your own, or RAY_AUTH_TOKEN to a token (`openssl rand -hex 32`)"
        ) from error


def _address_of_ray_start() -> str:
    """Address of the Ray that `ray start` made on this machine last, if it is alive; else empty.

    Not `ray.init(address="auto")`: that takes any Ray it finds, another run's own too, which ends with that run.
    """
    from ray._private.services import find_bootstrap_address

    address = find_bootstrap_address(None) or ""
    try:
        _check_reachable(address)
    except (OSError, ValueError):
        return ""
    return address


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's answer to SIGTERM. `ray.init` replaces it by an exit at once with code 15, and prints stacks.

    Restoring Python's handler removes Ray's native one too, as there is one per signal and process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
            # As asyncio had it: system calls go on instead of failing with EINTR.
            signal.siginterrupt(signal.SIGTERM, False)


def _check_reachable(address: str) -> None:
    """Ray itself tries an address that does not answer for minutes.

    Raises:
        OSError: nothing listens there.
    """
    host, separator, port = address.rpartition("://")[2].rpartition(":")
    if separator and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _how_to_enter() -> str:
    """The way to the token that the dashboard asks for; empty where it asks for none."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled  # Ray has no public way

    return " (its token: ray get-auth-token)" if is_token_auth_enabled() else ""


def _prometheus_answers(dashboard_url: str) -> bool:
    """Whether the dashboard reaches its Prometheus (RAY_PROMETHEUS_HOST). True when that can't be told."""
    from ray._private.authentication.http_token_authentication import (  # Ray has no public way to its own token
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

"""OpenStack Swift with its S3 interface, on loopback: a real store on disk, with signatures that are checked.

One replica, one device, a process each for proxy, accounts, containers and objects. Needs a file system with extended
attributes, which Swift keeps its metadata in. Swift lives in a Python environment of its own inside the running
interpreter's, made once: its pins conflict with ours.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from support.ports import free_port

VERSION = "2.38.3"
_REQUIREMENTS = (f"swift=={VERSION}", "setuptools<81")
"""Swift finds its middleware through pkg_resources, which setuptools 81 no longer has."""
_INSTALL_TIMEOUT_S = 600.0
KEY, SECRET, REGION = "test:tester", "testing", "us-east-1"
_KINDS = ("account", "container", "object")
_START_TIMEOUT_S = 120.0
_PIPELINE = "catch_errors cache listing_formats bulk s3api tempauth copy slo dlo versioned_writes symlink proxy-server"
_FILTERS = {
    "catch_errors": "catch_errors", "cache": "memcache", "listing_formats": "listing_formats", "bulk": "bulk",
    "s3api": "s3api", "tempauth": "tempauth", "copy": "copy", "slo": "slo", "dlo": "dlo",
    "versioned_writes": "versioned_writes", "symlink": "symlink",
}  # fmt: skip


class SwiftNotInstalledError(Exception):
    """The environment can't be made; the message says why."""


def swift_environment() -> Path:
    """Return the environment's folder of programs.

    Raises:
        SwiftNotInstalledError: there is neither uv nor pip, or the packages can't be installed.
    """
    home = Path(sys.prefix) / "rayapp-servers" / f"swift-{VERSION}"
    programs, whole = home / "bin", home / ".whole"
    if whole.exists():
        return programs
    shutil.rmtree(home, ignore_errors=True)
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.prefix) / "bin"))
    if uv is not None:
        _run([uv, "venv", "--python", sys.executable, str(home)])
        _run([uv, "pip", "install", "--python", str(programs / "python"), *_REQUIREMENTS])
    else:
        _run([sys.executable, "-m", "venv", str(home)])
        _run([str(programs / "python"), "-m", "pip", "install", "--quiet", *_REQUIREMENTS])
    whole.touch()
    return programs


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SwiftNotInstalledError(f"{' '.join(command[:3])}: {error}") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SwiftNotInstalledError(f"{' '.join(command[:3])} failed: {reason}")


class SwiftServer:
    """One Swift below `home`; `start` and `kill` may be called in turns.

    Args:
        home: an empty folder.
    Raises:
        SwiftNotInstalledError: Swift can't be installed, or this file system can't hold its metadata.
    """

    def __init__(self, home: Path) -> None:
        self._programs, self._home = swift_environment(), home
        self._ports = {kind: free_port() for kind in ("proxy", *_KINDS)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._devices = home / "devices"
        (self._devices / "d1").mkdir(parents=True)
        self._check_attributes()
        self._write_configuration()
        self._build_rings()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports['proxy']}"

    def start(self) -> None:
        """Start it; return when it answers.

        Raises:
            RuntimeError: it does not; the message has the end of its log.
        """
        self._processes = [self._spawn(kind) for kind in (*_KINDS, "proxy")]
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                self.kill()
                raise RuntimeError(f"Swift did not start: {(self._home / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End all of it at once, as a crash would. Idempotent."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes = []

    def _spawn(self, kind: str) -> subprocess.Popen[bytes]:
        program = self._programs / f"swift-{kind}-server"
        log = (self._home / "log").open("ab")
        with log:
            return subprocess.Popen(
                [str(self._programs / "python"), str(program), str(self._home / f"{kind}.conf")],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _answers(self) -> bool:
        try:
            # The whole pipeline answers a request without a signature with S3's 403.
            urllib.request.urlopen(f"{self.url}/healthcheck-of-rayapp", timeout=1.0)
        except urllib.error.HTTPError as error:
            return error.code < 500 and all(self._listens(kind) for kind in _KINDS)
        except OSError:
            return False
        return True

    def _listens(self, kind: str) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(("127.0.0.1", self._ports[kind])) == 0

    def _check_attributes(self) -> None:
        probe = self._devices / "probe"
        probe.touch()
        try:
            os.setxattr(probe, "user.rayapp", b"1")
        except OSError as error:
            raise SwiftNotInstalledError(f"{probe}: no extended attributes here ({error.strerror})") from None
        probe.unlink()

    def _build_rings(self) -> None:
        builder = [str(self._programs / "python"), str(self._programs / "swift-ring-builder")]
        for kind in _KINDS:
            file = str(self._home / f"{kind}.builder")
            device = f"r1z1-127.0.0.1:{self._ports[kind]}/d1"
            for arguments in (["create", "4", "1", "0"], ["add", device, "1"], ["rebalance"]):
                done = subprocess.run([*builder, file, *arguments], capture_output=True, text=True, check=False)
                if done.returncode == 2:
                    raise SwiftNotInstalledError(f"swift-ring-builder {arguments[0]}: {done.stdout}{done.stderr}")

    def _write_configuration(self) -> None:
        (self._home / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = rayapp-tests\n")
        for kind in _KINDS:
            text = f"{self._defaults(kind)}fallocate_reserve = 0\n[pipeline:main]\npipeline = {kind}-server\n"
            text += f"[app:{kind}-server]\nuse = egg:swift#{kind}\n"
            (self._home / f"{kind}.conf").write_text(text)
        filters = "".join(f"[filter:{name}]\nuse = egg:swift#{egg}\n{_options(name)}" for name, egg in _FILTERS.items())
        text = f"{self._defaults('proxy')}[pipeline:main]\npipeline = {_PIPELINE}\n{filters}"
        text += (
            "[app:proxy-server]\nuse = egg:swift#proxy\nallow_account_management = true\naccount_autocreate = true\n"
        )
        (self._home / "proxy.conf").write_text(text)

    def _defaults(self, kind: str) -> str:
        # Workers 0: one process, which ends with the process we started.
        user = pwd.getpwuid(os.getuid()).pw_name
        return (
            f"[DEFAULT]\nbind_ip = 127.0.0.1\nbind_port = {self._ports[kind]}\nworkers = 0\nswift_dir = {self._home}\n"
            f"devices = {self._devices}\nmount_check = false\nuser = {user}\nlog_level = WARNING\n"
        )


def _options(name: str) -> str:
    if name == "tempauth":
        account, _, user = KEY.partition(":")
        return f"user_{account}_{user} = {SECRET} .admin\n"
    if name == "s3api":
        return f"location = {REGION}\ns3_acl = false\nmin_segment_size = 5242880\n"
    return ""

"""A real HTTP server with S3's interface for tests (moto, in memory), as a process of its own that can be killed.

Needs the development package `moto[server]`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

from support.ports import free_port

KEY, SECRET, REGION = "test-key", "test-secret", "us-east-1"
_START_TIMEOUT_S = 300.0
"""A busy machine takes minutes to import moto."""


class MotoServer:
    """One server on the loopback interface; `start` and `kill` may be called in turns, on one port.

    It keeps objects in memory: what was stored before a `kill` is gone after it.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a process finds it."""
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION}
        return {"AWS_ENDPOINT_URL": self.url, **keys}

    def make_bucket(self, name: str) -> None:
        from botocore.session import get_session

        keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
        get_session().create_client("s3", endpoint_url=self.url, region_name=REGION, **keys).create_bucket(Bucket=name)

    def start(self) -> None:
        """Start it; return when it answers."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "no_proxy": "127.0.0.1"}
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"moto server did not start: {' '.join(command)}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it at once, as a crash would. Idempotent."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=1.0):
                return True
        except (urllib.error.URLError, OSError):
            return False

"""Runs TRL for `grpo_step.py`: makes an environment with TRL, runs `trl_worker.py` in it, and answers its requests for
rewards.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE / ".envs" / "trl"
TRL_VERSION = "1.16.0"
STEP_TIMEOUT_S = 600.0

Scorer = Callable[[list[dict[str, Any]]], Awaitable[list[float]]]


def make_environment(torch_version: str, transformers_version: str) -> Path:
    """Make a virtual environment, once, with TRL and with the torch and transformers that rayapp uses.

    Returns:
        Its interpreter.
    """
    python = ENVIRONMENT / "bin" / "python"
    wanted = [f"trl=={TRL_VERSION}", f"torch=={torch_version}", f"transformers=={transformers_version}", "datasets"]
    stamp = ENVIRONMENT / ".installed"
    if stamp.is_file() and stamp.read_text() == " ".join(wanted):
        return python
    print(f"making {ENVIRONMENT} with {' '.join(wanted)}", file=sys.stderr, flush=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(ENVIRONMENT)
    subprocess.run([*_installer(python, torch_version), *wanted], check=True, stdout=sys.stderr)
    stamp.write_text(" ".join(wanted))
    return python


def _installer(python: Path, torch_version: str) -> list[str]:
    """Return an installation command: of uv if it is beside this interpreter or on PATH, else of pip."""
    beside = Path(sys.executable).with_name("uv")
    uv = shutil.which("uv") or (str(beside) if beside.exists() else None)
    if uv is None:
        return [str(python), "-m", "pip", "install"]
    links = [word for link in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", link)]
    # uv ignores pip's settings. With --torch-backend cpu it finds CPU builds of torch, unless a folder has the wheels.
    backend = ["--torch-backend", "cpu"] if torch_version.endswith("+cpu") and not links else []
    return [uv, "pip", "install", "--python", str(python), *links, *backend]


@dataclass(slots=True)
class TrlPeer:
    """A running process of `trl_worker.py`."""

    process: asyncio.subprocess.Process
    scorer: Scorer
    log: list[str] = field(default_factory=list)

    @classmethod
    async def start(cls, python: Path, work: dict[str, Any], scorer: Scorer, log_path: Path) -> TrlPeer:
        """Start the worker and wait until its model is loaded."""
        with log_path.open("w") as log:
            process = await asyncio.create_subprocess_exec(
                str(python),
                str(HERE / "trl_worker.py"),
                json.dumps(work),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=2**26,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(work["threads"])},
            )
        peer = cls(process, scorer)
        async with asyncio.timeout(STEP_TIMEOUT_S):
            ready = await peer._read()
        assert ready.get("ready"), f"TRL did not start: see {log_path}"
        return peer

    async def step(self) -> dict[str, Any]:
        """Run one GRPO step. Return its seconds, its number of completion tokens, and the seconds of its parts."""
        self._write("step")
        async with asyncio.timeout(STEP_TIMEOUT_S):
            message = await self._read()
            while "score" in message:
                self._write(json.dumps(await self.scorer(message["score"])))
                message = await self._read()
        return message

    async def close(self) -> None:
        """End the worker. Idempotent."""
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    async def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"TRL ended with exit code {await self.process.wait()}; see its log")
        message: dict[str, Any] = json.loads(line)
        return message

"""`model-server-NAME`: runs `vllm serve` for a model that the run does not train. Its clients use HTTP.

All of its processes end with the actor, even on SIGKILL. After a restart it listens at the same address.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from actors.handles import Restartable
from actors.spawn import free_address
from rayapp.config.config import Config, alone
from rayapp.config.other_models import MODEL_SERVER_SHARE, ModelServerSection
from rayapp.core.errors import EngineDeadError, EngineError
from rayapp.core.http import KEY_VARIABLE, KeyGuard
from rayapp.core.logs import label_logs
from rayapp.core.programs import supervised
from rayapp.engine.vllm_arguments import WHOLE_GIB_OF_CACHE, set_process_environment
from rayapp.engine.vllm_output import EngineOutput

log = logging.getLogger(__name__)
POLL_S = 0.5
HEALTH_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 10.0
Command = Callable[[ModelServerSection, str, str, int], Sequence[str]]


def vllm_serve(section: ModelServerSection, model: str, host: str, port: int) -> list[str]:
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "served-model-name": section.name,
        "tensor-parallel-size": section.tensor_parallel_size,
        "gpu-memory-utilization": MODEL_SERVER_SHARE,
        "middleware": f"{KeyGuard.__module__}.{KeyGuard.__name__}",
    } | {name.strip("-").replace("_", "-"): value for name, value in section.options.items()}
    # Don't call `vllm serve`, which runs the same module: it needs a package named `vllm`, and vLLM's CPU build has
    # another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    for name, value in options.items():
        # vLLM's flags come in pairs: --enforce-eager and --no-enforce-eager.
        command += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return command


class ModelServer(Restartable):
    """Actor of one model server. Clients send `key` with every request but GET /health; tests replace `command`."""

    def __init__(self, config: Config, section: ModelServerSection, key: str, command: Command = vllm_serve) -> None:
        label_logs(config.run.name)
        self._config, self._section, self._key, self._command = config, section, key, command
        self._process: subprocess.Popen[bytes] | None = None
        self._output, self._errors = EngineOutput(), EngineOutput(descriptor=2)
        self._url = ""

    def __repr__(self) -> str:
        return f"model-server-{self._section.name}"

    async def start(self, address: tuple[str, int] | None = None) -> tuple[str, int]:
        """Start the server, and return its address when it answers; `address` is that of an earlier start."""
        from rayapp.storage.models.fetch import with_local_model

        here = free_address()
        host, port = address or here
        if host != here[0]:
            raise EngineError(
                f"{self!r} can't restart: its address {host} belongs to a node that is gone. Start the run again: it "
                "continues from its last checkpoint."
            )
        local = await asyncio.to_thread(with_local_model, alone(self._config, self._section))
        set_process_environment(local)
        cache_bytes = self._config.server.kv_cache_bytes(on_gpu=False) or 0
        os.environ[WHOLE_GIB_OF_CACHE] = str(-(-cache_bytes // 2**30))
        await self.close()
        self._output, self._errors = EngineOutput(), EngineOutput(descriptor=2)
        command = self._command(self._section, local.model.path, host, port)
        self._process = await asyncio.to_thread(_kept, command, self._key)
        self._url = f"http://{host}:{port}"
        started = time.monotonic()
        while not await asyncio.to_thread(_answers, self._url, HEALTH_TIMEOUT_S):
            self._check_runs()
            await asyncio.sleep(POLL_S)
        log.info("%r serves %s at %s after %.0f s", self, local.model.path, self._url, time.monotonic() - started)
        return host, port

    async def ping(self) -> str:
        self._check_runs()
        if not await asyncio.to_thread(_answers, self._url, HEALTH_TIMEOUT_S):
            raise EngineDeadError(f"{self!r} does not answer at {self._url}{self._output.cause()}")
        return await self.incarnation()

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.to_thread(process.wait, CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # kills supervisor and server

    def _check_runs(self) -> None:
        if self._process is None or (status := self._process.poll()) is not None:
            ended = "has not started vLLM" if self._process is None else f"ended with status {status}"
            cause = self._output.cause() or self._errors.last_line()
            raise EngineDeadError(
                f"{self!r} ({self._section.path}) {ended}{cause}. Its output is in Ray's log of this actor, process "
                f"{os.getpid()}."
            )


def _kept(command: Sequence[str], key: str) -> subprocess.Popen[bytes]:
    # Ended by a supervisor at the latest when this process ends. All users of the machine can read a command line, so
    # the key goes into the environment.
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"} | {KEY_VARIABLE: key}
    return subprocess.Popen(supervised(command), stdin=subprocess.PIPE, start_new_session=True, env=environment)


def _answers(url: str, timeout_s: float) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/health", timeout=timeout_s, trust_env=False).is_success
    except httpx.HTTPError:
        return False

"""Plays an environment of the package verifiers. This script runs in the virtual environment that has the package.

The script imports no module of rayapp. Its interface:

    argv: JSON of the environment; with `plays` false the script ends after the rows
    stdout, a line of JSON each: {"rows": […]}, or {"error": "…"} and exit
    stdin, a line of JSON each: {"call", "row", "url", "key", "model"} -> {"call", "reward", "metrics"}, or "error"
                                {"cancel": call}

Rows are played concurrently. Up to verifiers 0.3, an environment is a module with `load_environment`; from 0.4 on, it
is a taskset.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TextIO


class Classic:
    """An environment that `load_environment` returns (up to verifiers 0.3)."""

    def __init__(self, given: dict[str, Any]) -> None:
        import verifiers

        self.environment = verifiers.load_environment(given["id"], **given["options"])
        data = self.environment.get_dataset() if given["split"] == "train" else self.environment.get_eval_dataset()
        self.rows = [dict(row) for row in data.select(range(min(given["size"] or len(data), len(data))))]

    def prompts(self) -> list[Any]:
        return [row.get("prompt") for row in self.rows]

    def serving(self) -> AbstractAsyncContextManager[Any]:
        return nullcontext()

    async def play(self, row: int, url: str, variable: str, model: str) -> tuple[float, dict[str, Any]]:
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig

        client = resolve_client(ClientConfig(api_base_url=url, api_key_var=variable, max_retries=2))
        try:
            played = await self.environment.run_rollout(self.rows[row], client, model, {})
        finally:
            await client.close()
        if played.get("error"):
            raise RuntimeError(str(played["error"])[:400])
        return played["reward"], dict(played.get("metrics") or {})


class Taskset:
    """An environment that plays a taskset (from verifiers 0.4 on)."""

    def __init__(self, given: dict[str, Any]) -> None:
        from itertools import islice

        from verifiers.v1.configs.env import EnvConfig
        from verifiers.v1.envs.single_agent import SingleAgentEnv
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import environment_class, load_environment

        options = dict(given["options"])
        kind = environment_class(given["id"], options.get("id", ""))
        config = concrete_type(kind, EnvConfig) or EnvConfig
        if kind is SingleAgentEnv:
            # Run the agent on this machine: the package's default runtime is a rented remote machine.
            options.setdefault("agent", {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}})
        options["taskset"] = {**options.get("taskset", {}), "id": given["id"]}
        self.environment = load_environment(config.model_validate(options))
        taskset = self.environment.taskset
        if not given["size"] and not taskset.bounded:
            raise ValueError("this taskset has no end: set size to the number of rows to use")
        self.tasks = list(islice(taskset, given["size"] or None))

    def prompts(self) -> list[Any]:
        return [task.data.model_dump(mode="json").get("prompt") for task in self.tasks]

    def serving(self) -> AbstractAsyncContextManager[Any]:
        return self.environment.serving()  # type: ignore[no-any-return]

    async def play(self, row: int, url: str, variable: str, model: str) -> tuple[float, dict[str, Any]]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        context = ModelContext(model=model, client=EvalClientConfig(base_url=url, api_key_var=variable))
        [slot] = self.environment.slots(self.tasks[row])
        episode = await self.environment.run_slot(slot, context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors)[:400] or "it failed")
        trace = episode.traces[-1]
        return trace.reward, {name: value for name, value in trace.metrics.items() if value is not None}


def load(given: dict[str, Any]) -> Classic | Taskset:
    """Return the environment, with the interface of the installed version of verifiers."""
    # Replace this script's folder on the path: it also has a verifiers.py, which would hide the package.
    sys.path[0] = given["folder"]
    try:
        from verifiers import load_environment  # noqa: F401
    except ImportError:
        return Taskset(given)
    return Classic(given)


class Serving:
    def __init__(self, environment: Classic | Taskset, out: TextIO) -> None:
        self.environment = environment
        self.out = out
        self.playing: dict[int, asyncio.Task[None]] = {}

    def tell(self, **said: object) -> None:
        self.out.write(json.dumps(said) + "\n")
        self.out.flush()

    async def serve(self) -> None:
        reader = asyncio.StreamReader(limit=1 << 20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with self.environment.serving():
            while line := await reader.readline():
                asked = json.loads(line)
                if "cancel" in asked:
                    task = self.playing.get(asked["cancel"])
                    if task is not None:
                        task.cancel()
                    continue
                self.playing[asked["call"]] = asyncio.ensure_future(self.answer(**asked))

    async def answer(self, call: int, row: int, url: str, key: str, model: str) -> None:
        variable = f"RAYAPP_SESSION_KEY_{call}"
        os.environ[variable] = key
        try:
            reward, metrics = await self.environment.play(row, url, variable, model)
            numbers = {str(name): float(value) for name, value in metrics.items() if math.isfinite(float(value))}
            self.tell(call=call, reward=float(reward), metrics=numbers)
        except Exception as error:
            self.tell(call=call, error=f"{type(error).__name__}: {error}"[:500])
        finally:
            del os.environ[variable]
            self.playing.pop(call, None)


def main() -> None:
    # Redirect an environment's prints to stderr: stdout carries the answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    given = json.loads(sys.argv[1])
    try:
        environment = load(given)
        rows = json.dumps({"rows": environment.prompts()}, default=lambda thing: thing.model_dump())
    except Exception as error:
        out.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}) + "\n")
        out.flush()
        sys.exit(1)
    out.write(rows + "\n")
    out.flush()
    if given["plays"]:
        asyncio.run(Serving(environment, out).serve())


if __name__ == "__main__":
    main()

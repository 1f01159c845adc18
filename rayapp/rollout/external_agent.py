"""External agents: a user's program or async function plays each trajectory, through the gateway.

If a limit (tokens, turns or time) ends a trajectory, its answer is scored. A program that fails before fails the
trajectory, unless `on_failure: score`; one that never calls the policy always does.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rayapp.config.agent import ExternalSection
from rayapp.config.config import Config
from rayapp.core.aio import guarded
from rayapp.core.errors import ConfigError, InputError, RayappError, SandboxConfigError, SandboxError
from rayapp.core.protocols import RolloutEngine, SandboxSource
from rayapp.core.types import Prompt, RequestId, SamplingParams, SandboxSpec, Trajectory
from rayapp.rollout import external_program
from rayapp.rollout.agent.text import readable
from rayapp.rollout.external_program import AgentCall, Playing, Tail, environment, remove_folder, run_program
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.limits import SessionLimits
from rayapp.rollout.gateway.session import Session
from rayapp.rollout.problem import Problem
from rayapp.tasks.custom_rewards import load_function
from rayapp.tasks.data.pictures import with_data_uris

MAX_ANSWER_BYTES = 1 << 20
_OUTPUT_CHARS = 16384
Entry = Callable[[AgentCall], Awaitable[Any]]


class ExternalAgent:
    """Agent that runs `entry`, or the user's command, for each trajectory. `files` are relative path -> text of the
    agent's own files. Make it with `open`, and call `close` at the end."""

    def __init__(
        self,
        settings: ExternalSection,
        limits: SessionLimits,
        formats: Formats,
        entry: Entry | None,
        *,
        sandboxes: SandboxSource | None = None,
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        from rayapp.rollout.gateway.forwarding import Forwarder  # imports aiohttp, which other runs don't need
        from rayapp.rollout.gateway.server import Gateway

        self._settings = settings
        self._forwarder = Forwarder(settings.endpoint) if settings.models == "endpoint" else None
        self._limits = limits
        self._formats = formats
        self._entry = entry
        self._sandboxes, self._files = sandboxes, files
        self._gateway = Gateway(formats)

    @classmethod
    async def open(cls, config: Config, sandboxes: SandboxSource | None = None) -> ExternalAgent:
        """Make an agent for the run's model and the section `agent`, and start its gateway. ConfigError: the program,
        the function or a file can't be found."""
        entry, files = check_agent(config.agent.external), _own_files(config.agent.external.files)
        formats = await asyncio.to_thread(Formats.of, config.model, config.agent)
        limits = SessionLimits(max_tokens=config.max_model_tokens, max_turns=config.agent.max_assistant_turns)
        agent = cls(config.agent.external, limits, formats, entry, sandboxes=sandboxes, files=files)
        return await agent.started()

    async def started(self) -> ExternalAgent:
        await self._gateway.start()
        return self

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], agent_name: str = "") -> list[int]:
        """Return the ids of the rendered messages. Only their number counts."""
        return self._formats.plain.chat.prompt_ids(messages)

    async def prompt(self, problem: Problem) -> Prompt:
        """Return the problem's prompt without token ids: the agent itself writes what the policy reads."""
        bare, messages = problem.prompt, problem.start.messages
        if not all(isinstance(message.get("content"), str) for message in messages):
            raise InputError(f"task {bare.task}: an external agent can't get a message whose `content` is not a string")
        text = self._formats.plain.chat.render(messages)
        return replace(bare, text=text, token_ids=np.empty(0, np.int32), media=(), messages=tuple(messages))

    async def close(self) -> None:
        await self._gateway.close()
        if self._forwarder is not None:
            await self._forwarder.close()

    async def play(
        self,
        problem: Problem,
        *,
        engine: RolloutEngine,
        sampling: SamplingParams,
        request_id: RequestId,
        entry: Entry | None = None,
    ) -> Trajectory:
        """Play one trajectory; `entry` plays instead of the source's own program or function."""
        start, entry = problem.start, entry or self._entry
        playing = Playing(output=Tail(_OUTPUT_CHARS))
        told = [{"role": str(each["role"]), "content": str(each["content"])} for each in start.messages]
        with self._session(engine, sampling, request_id) as session:
            call = AgentCall(
                task=problem.prompt.task,
                messages=with_data_uris(told, [problem.pictures[sha256] for sha256 in problem.shown]),
                files={**self._files, **start.files},
                folder=Path(),
                url=f"/{session.id}",
                api_key=session.key,
            )
            if self._settings.inside and entry is None:
                await self._played(self._act_inside(call, start.spec, session, playing), None, session, playing)
            else:
                await self._on_the_host(replace(call, url=self._gateway.url_of(session)), entry, session, playing)
        failure = playing.failure or ("" if self._settings.on_failure == "score" else playing.fault)
        if not session.tree.turns and not failure:
            failure = playing.fault or "the agent ended without calling the policy"
        output = readable(playing.output.text)
        return session.trajectory(failure=failure, answer=playing.answer, ran_out=playing.ran_out, output=output)

    def _session(
        self, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
    ) -> AbstractContextManager[Session]:
        return self._gateway.session(
            engine=engine,
            sampling=sampling,
            limits=self._limits,
            request_id=request_id,
            other_models="refuse" if self._settings.models == "endpoint" else self._settings.models,
            forwarder=self._forwarder,
            structured=self._settings.structured,
        )

    async def _on_the_host(self, call: AgentCall, entry: Entry | None, session: Session, playing: Playing) -> None:
        call = replace(call, folder=Path(tempfile.mkdtemp(prefix="rayapp-agent-")))
        try:
            await self._played(self._act(call, entry, playing), self._settings.timeout_s, session, playing)
            if playing.answer is None and self._settings.answer_file:
                playing.answer = await asyncio.to_thread(_answer_in, call.folder / self._settings.answer_file)
        finally:
            await asyncio.shield(asyncio.to_thread(remove_folder, call.folder))

    async def _played(
        self, act: Coroutine[Any, Any, None], timeout_s: float | None, session: Session, playing: Playing
    ) -> None:
        """Wait until the agent ends, its time is up, or the engine fails."""
        acting = asyncio.create_task(act)
        try:
            await asyncio.wait({acting, session.trouble}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            playing.ran_out |= not acting.done() and not session.trouble.done()
        finally:
            session.end()
            acting.cancel()
            await asyncio.gather(acting, return_exceptions=True)
        error = session.trouble.exception() if session.trouble.done() else None
        if isinstance(error, RayappError):
            raise error
        if error is not None:
            playing.failure = f"the gateway failed: {type(error).__name__}: {error}"[:500]
        if not acting.cancelled():
            acting.result()  # raise errors that must end the run, such as missing isolation

    async def _act_inside(self, call: AgentCall, spec: SandboxSpec | None, session: Session, playing: Playing) -> None:
        assert self._sandboxes is not None, "agent.external.inside without sandboxes"
        try:
            await external_program.play(
                call, self._settings, playing,
                sandboxes=self._sandboxes, spec=spec, admit=partial(self._gateway.admitting, session),
            )  # fmt: skip
        except SandboxConfigError:
            raise
        except (SandboxError, OSError) as error:
            playing.failure = f"the agent's sandbox failed: {type(error).__name__}: {error}"[:500]

    async def _act(self, call: AgentCall, entry: Entry | None, playing: Playing) -> None:
        try:
            await asyncio.to_thread(call.write)
            if entry is not None:
                playing.answer = _as_answer(await guarded(lambda: entry(call)))
                return
            code = await run_program(
                [call.filled_in(argument) for argument in self._settings.command],
                folder=call.folder,
                env=environment(call.folder, call.environment | dict(self._settings.env)),
                output=playing.output,
            )
        except Exception as error:  # boundary: the user's agent may raise anything
            playing.fault = f"the agent failed: {type(error).__name__}: {error}"[:500]
            playing.output.add(f"{playing.fault}\n".encode("utf-8", "replace"))
            return
        if code != 0:
            playing.fault = f"the agent's program ended with exit code {code}: {playing.output.last_line}"


def check_agent(settings: ExternalSection) -> Entry | None:
    """Return the function named by `agent.external.entry`; None for a command. ConfigError: it can't be found."""
    if settings.entry:
        return load_function(settings.entry, what="agent.external.entry")
    if not settings.inside and shutil.which(settings.command[0]) is None:
        raise ConfigError(
            f"agent.external.command: there is no program {settings.command[0]!r} on this machine. Install it on every "
            "machine with rollout workers, or give its absolute path"
        )
    return None


def _own_files(paths: Mapping[str, Path]) -> dict[str, str]:
    files = dict[str, str]()
    for name, path in paths.items():
        try:
            files[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"agent.external.files: {path} can't be read as text: {error}") from error
    return files


def _as_answer(found: Any) -> str | None:
    if found is None or isinstance(found, str):
        return found
    raise TypeError(
        f"the agent's function returned a {type(found).__name__}, but must return a str (the answer) or None"
    )


def _answer_in(path: Path) -> str:
    """Return the answer; empty if there is no such regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            return file.read(MAX_ANSWER_BYTES).decode("utf-8", "replace") if is_file else ""
    except OSError:
        return ""

"""Environments that are Python classes in the form of TRL's `environment_factory`: with `reset(**row)`, and public
methods that are the policy's tools.

The user's class runs in this process. As in TRL, an object is reset for each trajectory, and a new object is made only
if all objects are in use. An object that raised an unexpected error, or did not answer in time, is never used again.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rayapp.core.aio import as_exception, guarded
from rayapp.core.errors import ConfigError, ToolUnavailableError
from rayapp.core.own_thread import in_thread
from rayapp.core.trajectories import storable
from rayapp.core.types import Trajectory
from rayapp.extras.environments.files import Columns, EnvironmentTask, TrlEnvironment
from rayapp.rollout.problem import VERDICT
from rayapp.storage.media import as_png
from rayapp.tasks.custom_rewards import load_function
from rayapp.tools.base import ToolFailedError, ToolOutput, ToolSchema
from rayapp.tools.toolset import read_arguments

# Part of the names of connection errors, as in httpx, websockets and aiohttp.
_GONE = re.compile("Connect|Disconnect|Timeout")
_NO_TOOLS = frozenset({"reset", "get_reward"})


@dataclass(slots=True)
class TrlEpisodes:
    """`Episodes` of a TRL environment."""

    environment: TrlEnvironment
    _factory: Callable[[], Any] = field(init=False)
    _reward: Callable[..., Any] | None = field(default=None, init=False)
    _free: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        given, where = self.environment, f"task {self.environment.name}"
        self._factory = load_function(_place(given, given.factory), what=f"{where}: factory")
        if given.reward:
            self._reward = load_function(_place(given, given.reward), what=f"{where}: reward")

    async def open(self) -> Sequence[ToolSchema]:
        try:
            made = await self._made()
        except ToolUnavailableError as error:
            raise ConfigError(f"task {self.environment.name}: {error}") from error
        self._free.append(made)
        if not callable(getattr(made, "reset", None)):
            raise ConfigError(
                f"task {self.environment.name}: {self.environment.factory} returns an object without a method reset()"
            )
        if self._reward is None and not hasattr(made, "get_reward") and not hasattr(made, "reward"):
            raise ConfigError(
                f"task {self.environment.name}: {self.environment.factory} gives no reward: it has neither a method "
                "get_reward() nor an attribute reward. Add one, or set `reward` in the task to a function"
            )
        return [_schema(self.environment, name, method) for name, method in _tools(made).items()]

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[TrlEpisode]:
        episode = TrlEpisode(self._free.pop() if self._free else await self._made(), self.environment, self._reward)
        yield episode
        if not episode.is_lost:
            self._free.append(episode.made)

    async def _made(self) -> Any:
        return await _call(self._factory, timeout_s=self.environment.timeout_s, what=self.environment.factory)


@dataclass(slots=True)
class TrlEpisode:
    """`Episode` in one object of the user's class."""

    made: Any
    environment: TrlEnvironment
    score: Callable[..., Any] | None
    is_lost: bool = False
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def reset(self, columns: Columns) -> ToolOutput:
        said = await self._call("reset", **columns)
        if not isinstance(said, str | list | None):
            raise self._lost(
                f"its reset() returned a {type(said).__name__}: it must return a str, a list of texts and pictures, or "
                "None"
            )
        return _output("" if said is None else said)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        try:
            async with self._one_at_a_time:
                return _output(await self._call(name, **arguments))
        except ToolUnavailableError as error:
            # As in TRL, the policy reads a tool's exception, such as `ValueError("game over")`. Only a lost connection
            # is a failure of the environment.
            if not _is_lost(error.__cause__):
                self.is_lost = False
                raise ToolFailedError(f"{error.__cause__}") from error
            raise

    async def reward(self, task: EnvironmentTask, played: Trajectory) -> Mapping[str, float]:
        found = await self._rewards(task, played)
        try:
            return {name: storable(value) for name, value in found.items()}
        except (TypeError, ValueError, OverflowError) as error:
            raise self._lost(f"its reward {found[VERDICT]!r:.80} is not a finite number") from error

    async def _rewards(self, task: EnvironmentTask, played: Trajectory) -> dict[str, Any]:
        if self.score is not None:
            # Several functions of TRL (`trl_config`) also return their terms.
            has_terms = hasattr(self.score, "terms")
            found = await _call(
                self.score.terms if has_terms else self.score,  # type: ignore[attr-defined]
                prompts=[list(task.messages)],
                completions=[list(_messages(played))],
                environments=[self.made],
                **{name: [value] for name, value in task.columns.items() if name != "prompt"},
                timeout_s=self.environment.timeout_s,
                what=self.environment.reward,
            )
            if has_terms:
                return {**found, VERDICT: self.score.total(found)}  # type: ignore[attr-defined]
            [value] = found
            return {VERDICT: value}
        return {VERDICT: await self._call("get_reward") if hasattr(self.made, "get_reward") else self.made.reward}

    async def _call(self, name: str, **arguments: Any) -> Any:
        what = f"{self.environment.factory}.{name}()"
        try:
            return await _call(getattr(self.made, name), **arguments, timeout_s=self.environment.timeout_s, what=what)
        except BaseException:
            self.is_lost = True
            raise

    def _lost(self, why: str) -> ToolUnavailableError:
        self.is_lost = True
        return ToolUnavailableError(f"{self.environment.factory}: {why}")


def _is_lost(error: BaseException | None) -> bool:
    """Return whether an error or its cause is a lost connection; clients have no common class for it."""
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError | EOFError) or _GONE.search(type(error).__name__):
            return True
        error = error.__cause__ or error.__context__
    return False


def _place(environment: TrlEnvironment, path: str) -> str:
    file, colon, name = path.rpartition(":")
    return f"{environment.beside(file)}{colon}{name}"


def _tools(made: Any) -> dict[str, Callable[..., Any]]:
    """Return the public methods, as TRL does; or the functions that `trl_config` got as `tools`."""
    if (names := getattr(made, "rayapp_tools", None)) is not None:
        return {name: getattr(made, name) for name in names}
    methods = inspect.getmembers(made, predicate=inspect.ismethod)
    return {name: method for name, method in methods if name not in _NO_TOOLS and not name.startswith("_")}


def _messages(played: Trajectory) -> Iterator[dict[str, Any]]:
    """Yield a trajectory's messages as TRL passes them to reward functions: tool calls and their results too."""
    for turn in played.turns:
        calls = [{"name": call.name, "arguments": _parsed(call.arguments)} for call in turn.calls if call.name]
        called = {"tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else {}
        yield {"role": "assistant", "content": turn.text, **called}
        for call in turn.calls:
            yield {"role": "tool", "name": call.name, "content": call.output}


def _parsed(arguments: str) -> Any:
    try:
        return read_arguments(arguments)
    except ToolFailedError:
        return arguments


def _schema(environment: TrlEnvironment, name: str, method: Callable[..., Any]) -> ToolSchema:
    from transformers.utils import get_json_schema  # TRL reads docstrings with it; the import takes seconds

    where = f"task {environment.name}: {environment.factory}.{name}()"
    try:
        return ToolSchema.from_openai(get_json_schema(method), where=where)
    except Exception as error:  # boundary: the user's docstring may be anything
        raise ConfigError(
            f"{where} can't be a tool: {error}. Annotate its arguments with types and describe each in its docstring "
            "under Args:; if it is not meant as a tool, begin its name with an underscore"
        ) from error


def _output(said: Any) -> ToolOutput:
    """Return what a method returned; pictures, alone or in a list with texts, are read after the texts.

    Pictures are bytes or Pillow's, also as TRL's parts: `{"type": "image", "image": …}`.
    """
    parts = [_value_of(part) for part in (said if isinstance(said, list) else [said])]
    pictures = [part for part in parts if isinstance(part, bytes) or hasattr(part, "save")]
    if not pictures:
        return ToolOutput(text=str(said))
    texts = [str(part) for part in parts if not any(part is picture for picture in pictures)]
    return ToolOutput(text="\n".join(texts), pictures=tuple(p if isinstance(p, bytes) else as_png(p) for p in pictures))


def _value_of(part: Any) -> Any:
    match part:
        case {"type": "image", "image": value} | {"type": "text", "text": value}:
            return value
    return part


async def _call(function: Callable[..., Any], *, timeout_s: float, what: str, **arguments: Any) -> Any:
    """Call a method of the user's class, in a thread unless it is a coroutine. A thread can't be stopped: at the
    deadline it is left running.

    Raises ToolUnavailableError: it took too long, or raised an error, which is then the `__cause__`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if inspect.iscoroutinefunction(function):
                return await guarded(lambda: function(**arguments))
            found = await asyncio.wrap_future(in_thread(lambda: function(**arguments), as_exception))
            return await guarded(lambda: found) if inspect.isawaitable(found) else found
    except TimeoutError as error:
        raise ToolUnavailableError(f"{what} did not answer within {timeout_s:g} s") from error
    except Exception as error:  # boundary: the user's code may raise anything
        raise ToolUnavailableError(f"{what} raised {type(error).__name__}: {error}"[:500]) from error

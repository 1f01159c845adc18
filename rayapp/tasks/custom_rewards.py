"""Reward functions of the user, named by import path, sync or async, with a deadline. Called by `answers.py`.

The function has verl's signature, so those written for verl work unchanged:

    def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict

It is the user's own code and trusted: code that the model wrote belongs into a sandbox.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayapp.core.errors import ConfigError, KindError
from rayapp.core.imports import module_of
from rayapp.core.names.given import given, is_given
from rayapp.core.names.plugins import is_plugin, load_plugin
from rayapp.core.own_thread import in_thread

_MOST = 3.4028234e38
"""The largest 32-bit float."""


class RewardFailedError(KindError):
    """A custom function raised, took too long, or returned nonsense: no verdict on the policy.

    Its kind is reward_error, reward_timeout or reward_nonsense.
    """


@dataclass(slots=True, kw_only=True)
class CustomReward:
    """A function by name. Picklable: what it names is imported where it is first called.

    Example: `CustomReward(path="my_rewards.py:compute_score")` or `CustomReward(path="package.module:function")`.
    """

    path: str
    timeout_s: float = 30.0
    _function: Callable[..., Any] | None = field(default=None, init=False, repr=False, compare=False)

    def load(self) -> Callable[..., Any]:
        """Import it; call this when the run starts.

        Raises:
            ConfigError: it can't be found, or is no function.
        """
        if self._function is None:
            self._function = load_function(self.path)
        return self._function

    async def __call__(self, **arguments: Any) -> dict[str, float]:
        """`{"score": …}` and any further terms.

        Raises:
            RewardFailedError: no usable answer in time.
        """
        function = self.load()
        try:
            async with asyncio.timeout(self.timeout_s):
                if inspect.iscoroutinefunction(function):
                    found = await self._awaited(lambda: function(**arguments))
                else:
                    found = await asyncio.wrap_future(in_thread(lambda: function(**arguments), self._failed))
                    if inspect.isawaitable(found):
                        found = await self._awaited(lambda: found)
        except TimeoutError as error:
            raise RewardFailedError(f"{self.path} took over {self.timeout_s:g} s", "reward_timeout") from error
        try:
            return _terms(found)
        except Exception as error:  # boundary: what was returned may be an object of the user's own
            raise RewardFailedError(f"{self.path} returned {_told(error)}", "reward_nonsense") from error

    async def _awaited(self, begin: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await begin()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._failed(error) from error
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # boundary: the user's code raises what it likes, SystemExit too
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> RewardFailedError:
        return RewardFailedError(f"{self.path} raised {type(error).__name__}: {_told(error)}", "reward_error")

    def __getstate__(self) -> tuple[str, float]:
        return self.path, self.timeout_s

    def __setstate__(self, state: tuple[str, float]) -> None:
        self.path, self.timeout_s = state
        self._function = None


def load_function(path: str, *, what: str = "reward function", is_reward: bool = True) -> Callable[..., Any]:
    """The function that `module:name` or `file.py:name` names.

    Args:
        what: it is for, in messages.
        is_reward: the name of a plug-in that is a reward will do as well.
    Raises:
        ConfigError: it can't be imported, isn't there, or is no function.
    """
    if is_given(path):
        return given(path)  # type: ignore[return-value]
    place, _, name = path.rpartition(":")
    if is_reward and not place and is_plugin("rewards", path):
        return load_plugin("rewards", path)  # type: ignore[no-any-return]
    if not place or not name:
        plugins = ", or the name of a plug-in" if is_reward else ""
        raise ConfigError(f"{what} {path!r}: write package.module:function or file.py:function{plugins}")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # boundary: the module is the user's and raises what it likes
        raise ConfigError(f"{what} {path!r} can't be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{what} {path!r}: {place} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return module_of(path, f"rayapp_user_reward_{path.stem}")


def is_storable(value: float) -> bool:
    """True if the value is finite, also as the 32-bit float that metrics and learners hold."""
    return abs(value) <= _MOST


def _terms(found: object) -> dict[str, float]:
    """The terms that the function returned. Raises ValueError, or what the user's objects raise when they are read."""
    raw = found if isinstance(found, Mapping) else {"score": found}
    if "score" not in raw:
        raise ValueError(f"a dict without score: {sorted(map(str, raw))}")
    terms = {str(name): number for name, value in raw.items() if (number := _number(str(name), value)) is not None}
    if "score" not in terms:
        raise ValueError(f"{raw['score']!r}, which is no finite number")
    return terms


def _number(name: str, value: object) -> float | None:
    """One term; None for nan and for text such as the parsed answer, which verl's functions may add."""
    if isinstance(value, str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):  # an array of several numbers has the method, too
        return None
    if math.isnan(number):
        return None
    if not is_storable(number):
        raise ValueError(f"a {name} that is no finite number of 32 bits")
    return number


def _told(error: BaseException) -> str:
    """An error's message in one line. Its class may be the user's, and its text what the policy wrote."""
    try:
        return " ".join(str(error).split())[:300]
    except Exception:  # boundary: a __str__ of the user's
        return "(its message can't be read)"

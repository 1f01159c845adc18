"""Calls the user's reward function, sync or async, with a deadline. It has verl's signature:

    def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict

Functions for verl's batch reward manager (`solution_strs`, …) get lists of one element. The function is trusted: if it
runs code that the model wrote, it must do so in a sandbox.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayapp.core.aio import guarded
from rayapp.core.errors import ConfigError, RewardFailedError, readable_error
from rayapp.core.names import given, is_given, module_of
from rayapp.core.own_thread import in_thread
from rayapp.core.trajectories import storable_terms


@dataclass(slots=True, kw_only=True)
class CustomReward:
    """A reward function by name, e.g. `my_rewards.py:compute_score` or `package.module:function`."""

    path: str
    timeout_s: float = 30.0
    _function: Callable[..., Any] | None = field(default=None, init=False, repr=False, compare=False)

    def load(self) -> Callable[..., Any]:
        """Import the function, at the start of a run, so that a ConfigError is reported there."""
        if self._function is None:
            function = load_function(self.path)
            self._function = _for_one_answer(function) if _takes_lists(function) else function
        return self._function

    async def __call__(self, **arguments: Any) -> dict[str, float]:
        """Return the function's terms: `score`, and any others. RewardFailedError: no usable value in time."""
        function = self.load()
        try:
            async with asyncio.timeout(self.timeout_s):
                if inspect.iscoroutinefunction(function):
                    found = await guarded(lambda: function(**arguments), self._failed)
                else:
                    found = await asyncio.wrap_future(in_thread(lambda: function(**arguments), self._failed))
                    if inspect.isawaitable(found):
                        found = await guarded(lambda: found, self._failed)
        except TimeoutError as error:
            raise RewardFailedError(
                f"reward function {self.path} took more than {self.timeout_s:g} s", "reward_timeout"
            ) from error
        try:
            return _terms(found)
        except Exception as error:  # boundary: the result may be an object of a user's class
            raise RewardFailedError(
                f"reward function {self.path} returned an unusable value: {readable_error(error)}", "reward_nonsense"
            ) from error

    def _failed(self, error: BaseException) -> RewardFailedError:
        return RewardFailedError(
            f"reward function {self.path} raised {type(error).__name__}: {readable_error(error)}", "reward_error"
        )

    def __getstate__(self) -> tuple[str, float]:
        return self.path, self.timeout_s

    def __setstate__(self, state: tuple[str, float]) -> None:
        self.path, self.timeout_s = state
        self._function = None


def _takes_lists(function: Callable[..., Any]) -> bool:
    try:
        return "solution_strs" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def _for_one_answer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of verl's batch form, which takes lists, here of one element."""

    def first(scores: Any) -> Any:
        (score,) = scores
        return score

    def call(**arguments: Any) -> Any:
        found = function(**{f"{name}s": [value] for name, value in arguments.items()})
        return _awaited(found) if inspect.isawaitable(found) else first(found)

    async def _awaited(found: Any) -> Any:
        return first(await found)

    return call


def load_function(path: str, *, what: str = "reward function") -> Callable[..., Any]:
    """Return the function `module:name` or `file.py:name`."""
    if is_given(path):
        return given(path)  # type: ignore[return-value]
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{what} {path!r}: write package.module:function or file.py:function")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # boundary: the user's module may raise anything
        raise ConfigError(f"{what} {path!r} can't be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{what} {path!r}: {place} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return module_of(path, f"rayapp_user_reward_{path.stem}")


def _terms(found: object) -> dict[str, float]:
    raw = found if isinstance(found, Mapping) else {"score": found}
    if "score" not in raw:
        raise ValueError(f"a dict without the key `score`; its keys are {sorted(map(str, raw))}")
    terms = storable_terms(raw)
    if "score" not in terms:
        raise ValueError(f"{raw['score']!r}, which is not a finite number")
    return terms

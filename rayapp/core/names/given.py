"""Objects of a program that a configuration names: tasks and reward functions that are no files.

    rayapp.train(tasks=[task], reward=fn)     config.tasks = ("python:add",)   config.reward.custom = "python:fn"
             |                                            | looked up here, by whoever loads a task or a reward
             '-- with giving({...}) --> this registry ----'--> sent along to each rollout worker, which adds them

A registry of the process, as an import is: the same name is the same object everywhere. They are pickled by
cloudpickle, so a class of a notebook or of the program itself travels whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rayapp.core.errors import InputError

PREFIX = "python:"
_OBJECTS: dict[str, object] = {}


def is_given(name: str) -> bool:
    """True for a name of this registry."""
    return name.startswith(PREFIX)


def given(name: str) -> object:
    """The object.

    Raises:
        InputError: this process was not given it.
    """
    try:
        return _OBJECTS[name]
    except KeyError:
        raise InputError(
            f"{name} is an object of the Python program that started this run, and not here: start it from there "
            "(rayapp.train), or write a file and name that"
        ) from None


def all_given() -> dict[str, object]:
    """All objects of this process, to be sent along."""
    return dict(_OBJECTS)


def add_given(objects: Mapping[str, object]) -> None:
    """In a process that was sent them."""
    _OBJECTS.update(objects)


@contextmanager
def giving(objects: Mapping[str, object]) -> Iterator[None]:
    """In the program that has them, for the length of the block."""
    before = dict(_OBJECTS)
    _OBJECTS.update(objects)
    try:
        yield
    finally:
        _OBJECTS.clear()
        _OBJECTS.update(before)

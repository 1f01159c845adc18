"""Awaits calls of Ray actors, always with a deadline, and with errors that name the actor and the call.

The handles and the rollout worker use it. Only this module uses Ray's exception types.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from functools import cached_property
from typing import TypeVar

from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from rayapp.core.errors import DeadlineError, ObjectsLostError, ProcessDiedError, ProcessUnavailableError, RayappError

T = TypeVar("T")


async def answer(ref: Awaitable[T], *, timeout_s: float, what: str) -> T:
    """Await the result of a remote call.

    Args:
        ref: result of `.remote()`.
        timeout_s: deadline of the call.
        what: name of the call for messages, such as `vllm-server-0.load_weights`.
    Raises:
        DeadlineError: no answer in time.
        ProcessDiedError: the actor's process is gone or can't be reached.
        ObjectsLostError: an argument or the result was in a process or on a node that is gone.
        RayappError: the error that our own code raised in the actor, unchanged.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except RayTaskError as error:
        # Check RayTaskError first: it also subclasses its cause, so a remote RayActorError would look like this
        # actor's death.
        raise _remote_error(error, what) from error
    except RayActorError as error:
        raise _died(error, what) from None
    except OutOfMemoryError as error:
        raise _out_of_memory(error, what) from None
    except ObjectLostError as error:
        raise _lost(error, what) from None
    except TimeoutError:
        raise DeadlineError(f"{what} did not answer within {timeout_s:g} s") from None


def _died(error: RayActorError, what: str) -> ProcessDiedError:
    if isinstance(error, ActorUnavailableError):
        return ProcessUnavailableError(f"{what}: can't be reached. {_first_lines(error)}")
    if error.actor_init_failed:
        return ProcessDiedError(f"{what}: its process could not start. {_last_line(error)}")
    return ProcessDiedError(f"{what}: its process is gone. {_first_lines(error)}")


def _lost(error: ObjectLostError | RayActorError, what: str) -> ObjectsLostError:
    return ObjectsLostError(
        f"{what}: an object that it needs was in a process or on a node that is gone. {_first_lines(error)}"
    )


def _remote_error(error: RayTaskError, what: str) -> BaseException:
    cause = error.cause
    if isinstance(cause, RayappError | TimeoutError):
        return cause
    # A full store spills to files; Ray raises this only when the disk is full too, and names the disk.
    if isinstance(cause, ObjectStoreFullError | OutOfDiskError):
        return RayappError(
            f"{what}: Ray's object store is full. Raise cluster.object_store_mib (or --object-store-memory, if you ran "
            f"`ray start`), or free space on the disk to which Ray spills. {_first_lines(cause)}"
        )
    if isinstance(cause, OutOfMemoryError):
        return _out_of_memory(cause, what)
    if isinstance(cause, ObjectLostError | RayActorError):
        return _lost(cause, what)
    return RayappError(f"{what} failed: {type(cause).__name__}: {cause}")


def _out_of_memory(error: OutOfMemoryError, what: str) -> ProcessDiedError:
    return ProcessDiedError(
        f"{what}: Ray ended its process because the node ran out of memory. Lower learner.max_tokens_per_microbatch or "
        f"server.kv_cache_gib, or end other programs on that node. {_first_lines(error)}"
    )


def _last_line(error: BaseException) -> str:
    """Return a traceback's last line, which has the error."""
    return str(error).strip().rpartition("\n")[2].strip()


def _first_lines(error: BaseException, num_lines: int = 3) -> str:
    """Return the first lines of one of Ray's long messages, which have the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:num_lines])


class Restartable:
    """Base of actors whose process Ray restarts; `incarnation` identifies each start."""

    @cached_property
    def _start(self) -> str:
        return uuid.uuid4().hex

    async def incarnation(self) -> str:
        return self._start

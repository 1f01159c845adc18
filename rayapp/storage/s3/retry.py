"""Tries a request again with full jitter. The only place that retries: botocore's own retries are switched off."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rayapp.core.location import Location
from rayapp.storage.s3.errors import is_transient, translate
from rayapp.storage.settings import S3Settings

T = TypeVar("T")
_log = logging.getLogger(__name__)


async def with_retries(request: Callable[[], Awaitable[T]], location: Location, settings: S3Settings) -> T:
    """The answer to `request`, asked until it succeeds, fails for good, or `max_attempts` is reached.

    Raises:
        StorageError: translated from the last error.
    """
    transfer = settings.transfer
    endpoint = settings.endpoint_url or "AWS"
    for attempt in range(1, transfer.max_attempts + 1):
        try:
            return await request()
        except Exception as error:  # boundary: whatever the client library raises becomes a StorageError
            if attempt == transfer.max_attempts or not is_transient(error):
                raise translate(error, location, endpoint, attempts=attempt) from error
            wait_s = backoff_s(attempt, base_s=transfer.backoff_base_s, max_s=transfer.backoff_max_s)
            _log.info("%s: try %d failed (%s), next in %.1f s", location, attempt, type(error).__name__, wait_s)
        await asyncio.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def backoff_s(attempt: int, *, base_s: float, max_s: float, draw: Callable[[], float] = random.random) -> float:
    """Seconds to wait after the `attempt`-th failure (1, 2, …): uniform in [0, min(max, base * 2^attempt)]."""
    return draw() * min(max_s, base_s * 2.0**attempt)

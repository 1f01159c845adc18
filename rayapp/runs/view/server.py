"""The web server of `rayapp view`: JSON about runs, and the static page that draws it. GET only.

    browser --poll /api/runs every 2 s--> Starlette --threads--> ViewedRun --> files of the run
                                              '-- one background thread updates every index from its files

It writes nothing, so viewers have no effect on a run.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from rayapp.core.errors import InputError, StorageError
from rayapp.runs.view.run import ViewedRun
from rayapp.runs.view.security import Guard

STATIC = Path(__file__).parent / "static"
REFRESH_EVERY_S = 2.0


def make_app(runs: Sequence[ViewedRun], *, token: str = "", refresh_every_s: float = REFRESH_EVERY_S) -> ASGIApp:
    """Build the whole application.

    Args:
        runs: the runs to show, refreshed once, so that no page says of a run with steps that it has none; addresses
            name a run by its position.
        token: required unless empty.
    """
    routes = [
        Route("/", _page),
        Route("/api/runs", lambda request: answer([run.summary() for run in request.app.state.runs])),
        Route("/api/runs/{run:int}/config", _of_run(lambda run, _: run.config())),
        Route("/api/runs/{run:int}/panels", _of_run(lambda run, _: run.panels())),
        Route("/api/runs/{run:int}/profiles", _of_run(lambda run, _: run.profiles())),
        Route("/api/runs/{run:int}/facets", _of_run(lambda run, _: run.facets())),
        Route("/api/runs/{run:int}/groups", _of_run(lambda run, query: run.groups(query))),
        Route("/api/runs/{run:int}/group", _of_run(lambda run, query: run.group(*_numbers(query, "step", "group")))),
        Route(
            "/api/runs/{run:int}/trajectory",
            _of_run(lambda run, query: run.trajectory(*_numbers(query, "step", "group", "index"))),
        ),
        Route("/api/runs/{run:int}/diff", _of_run(_diff)),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lambda _: _refreshing(runs, refresh_every_s),
        exception_handlers={InputError: partial(_refusal, 404), StorageError: partial(_refusal, 502)},
    )
    app.state.runs = list(runs)
    return Guard(app, token)


def answer(content: Any, status: int = 200) -> Response:
    """Make a JSON response: NaN and infinity become null, and caching is off."""
    body = json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))
    return Response(body, status, headers={"cache-control": "no-store"}, media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _of_run(read: Callable[[ViewedRun, Any], Any]) -> Callable[[Request], Response]:
    """Make an endpoint for the run in the address. Not a coroutine, so Starlette runs it in a thread."""

    def endpoint(request: Request) -> Response:
        runs: list[ViewedRun] = request.app.state.runs
        number = request.path_params["run"]
        if number >= len(runs):
            raise InputError(f"there is no run {number}: this page shows {len(runs)} runs, numbered from 0")
        return answer(read(runs[number], request.query_params))

    return endpoint


def _diff(run: ViewedRun, query: Any) -> dict[str, Any]:
    left = _numbers(query, "step", "group", "index")
    right = _numbers(query, "other_step", "other_group", "other_index")
    return run.diff(left, right)


def _numbers(query: Any, *names: str) -> list[int]:
    try:
        return [int(query[name]) for name in names]
    except (KeyError, ValueError):
        raise InputError(f"the address needs whole numbers for {', '.join(names)}") from None


def _page(_: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


def _refusal(status: int, _: Request, error: Exception) -> Response:
    return answer({"error": str(error)}, status)


@asynccontextmanager
async def _refreshing(runs: Sequence[ViewedRun], every_s: float) -> AsyncIterator[None]:
    task = asyncio.create_task(_refresh_forever(runs, every_s))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _refresh_forever(runs: Sequence[ViewedRun], every_s: float) -> None:
    """Refresh one batch of each run in turn, so that a huge run doesn't delay a small one."""
    while True:
        waiting = [await asyncio.to_thread(run.refresh) for run in runs]
        await asyncio.sleep(0 if any(waiting) else every_s)

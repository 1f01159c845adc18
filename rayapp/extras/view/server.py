"""The web server of `rayapp view`: JSON about runs, and the static page that draws it. GET only.

    browser --poll /api/runs every 2 s--> Starlette --threads--> ViewedRun --> files of the run

It writes nothing, so viewers have no effect on a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
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
from rayapp.extras.view.run import ViewedRun
from rayapp.extras.view.security import Guard

STATIC = Path(__file__).parent / "static"


def make_app(runs: Sequence[ViewedRun], *, token: str = "") -> ASGIApp:
    """Build the whole application. Addresses name a run by its position; an empty token is not required."""
    routes = [
        Route("/", _page),
        Route("/api/runs", lambda request: answer([run.summary() for run in request.app.state.runs])),
        Route("/api/runs/{run:int}/config", _of_run(lambda run, _: run.config())),
        Route("/api/runs/{run:int}/panels", _of_run(lambda run, _: run.panels())),
        Route("/api/runs/{run:int}/facets", _of_run(lambda run, _: run.facets())),
        Route("/api/runs/{run:int}/groups", _of_run(lambda run, query: run.groups(query))),
        Route("/api/runs/{run:int}/group", _of_run(lambda run, query: run.group(*_numbers(query, "step", "group")))),
        Route(
            "/api/runs/{run:int}/trajectory",
            _of_run(lambda run, query: run.trajectory(*_numbers(query, "step", "group", "index"))),
        ),
        Route(
            "/api/runs/{run:int}/picture", _of_run(lambda run, query: run.picture(query.get("sha256", "")), _picture)
        ),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={InputError: partial(_refusal, 404), StorageError: partial(_refusal, 502)},
    )
    app.state.runs = list(runs)
    return Guard(app, token)


def answer(content: Any, status: int = 200) -> Response:
    """Make a JSON response without caching, in which NaN and infinity are null."""
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


def _picture(found: tuple[bytes, str]) -> Response:
    return Response(found[0], headers={"cache-control": "private, max-age=86400"}, media_type=found[1])


def _of_run(
    read: Callable[[ViewedRun, Any], Any], sent: Callable[[Any], Response] = answer
) -> Callable[[Request], Response]:
    """Make an endpoint for the run in the address, which Starlette runs in a thread."""

    def endpoint(request: Request) -> Response:
        runs: list[ViewedRun] = request.app.state.runs
        number = request.path_params["run"]
        if number >= len(runs):
            raise InputError(f"there is no run {number}: this page shows {len(runs)} runs, numbered from 0")
        return sent(read(runs[number], request.query_params))

    return endpoint


def _numbers(query: Any, *names: str) -> list[int]:
    try:
        return [int(query[name]) for name in names]
    except (KeyError, ValueError):
        raise InputError(f"the address needs whole numbers for {', '.join(names)}") from None


def _page(_: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


def _refusal(status: int, _: Request, error: Exception) -> Response:
    return answer({"error": str(error)}, status)

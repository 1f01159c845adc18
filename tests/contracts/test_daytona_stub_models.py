"""Daytona's stub server says only what Daytona's own client knows: its routes, its models, its success statuses.

Daytona publishes no specification of its current API; the client that it publishes is generated from one, so its routes
and pydantic models are what there is to check against. The interpreter's messages over a websocket are hand-written in
the SDK and have no model there: the SDK itself, which reads them in the contract, is their check.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import pytest

from rayapp.config.sandbox import DaytonaConfig
from rayapp.core.errors import SandboxError
from rayapp.core.types import SandboxSpec
from rayapp.extras.providers.daytona import DaytonaProvider
from rayapp.testing.sandbox_contract import CHECKS
from support.stubs.daytona_stub import API_KEY, DaytonaStub
from support.stubs.recording import Exchange, record

control = pytest.importorskip("daytona_api_client_async", reason="the package daytona-sdk is not installed")
toolbox = pytest.importorskip("daytona_toolbox_api_client_async", reason="the package daytona-sdk is not installed")
WEBSOCKET = "/process/interpreter/execute"
ASKED = {("POST", "/sandbox"): "CreateSandbox", ("POST", "/process/execute"): "ExecuteRequest"}
"""Which model each request body is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What the generated client says of one call."""

    method: str
    path: str
    answers: dict[str, str | None]
    """Status -> name of the answer's model; None where there is no body."""


async def everything() -> list[Exchange]:
    """The whole contract through the real SDK, and what goes wrong: key, snapshot, quota, no such sandbox; an image."""
    stub = DaytonaStub(max_alive=6)
    seen = record(stub, r"^/api|^/toolbox/[^/]+")
    async with stub.running() as host:
        url = f"{host}/api"
        provider = DaytonaProvider(DaytonaConfig(api_url=url), api_key=API_KEY)
        for check in CHECKS:
            await check(provider)
        await attempt(DaytonaProvider(DaytonaConfig(api_url=url), api_key="dtn_wrong"))
        await attempt(provider, template="no such snapshot")
        for _ in range(7):
            await attempt(provider)
        assert len([found async for found in provider.list({"a": "ä"})]) == 6, "three pages of two"
        await provider.kill("nothere")
        await provider.close()
        image = DaytonaProvider(DaytonaConfig(api_url=url, template="python:3.12-slim"), api_key=API_KEY)
        await attempt(image)
        await image.close()
    return seen


async def attempt(provider: DaytonaProvider, template: str = "") -> None:
    with suppress(SandboxError):
        await provider.create(SandboxSpec(template=template), labels={"a": "ä"}, ttl_s=300, timeout_s=20)


async def test_every_exchange_is_one_that_the_published_client_knows_and_every_sandbox_ends_by_itself() -> None:
    problems: list[str] = []
    seen = await everything()
    for exchange in seen:
        if exchange.path != WEBSOCKET:
            what = f"{exchange.method} {exchange.path} {exchange.status}"
            problems += [f"{what}: {text}" for text in violations(exchange)]
    assert not problems, "\n".join(sorted(set(problems)))
    bodies = [exchange.asked for exchange in seen if exchange.method == "POST" and exchange.path == "/sandbox"]
    assert any("buildInfo" in body for body in bodies), "an image was asked for"
    assert {200, 401, 403, 404} <= {exchange.status for exchange in seen}
    for body in bodies:
        facts = {key: body[key] for key in ("ttlMinutes", "autoDeleteInterval", "networkBlockAll")}
        assert facts == {"ttlMinutes": 5, "autoDeleteInterval": 0, "networkBlockAll": True}


def violations(exchange: Exchange) -> list[str]:
    """What the client's own description has against an exchange."""
    client = control if exchange.full_path.startswith("/api") else toolbox
    route = next((route for route in routes(client) if fits(route, exchange)), None)
    if route is None:
        return ["the client knows no such route"]
    problems = []
    if (asked := ASKED.get((exchange.method, route.path))) is not None:
        problems += unread(client, asked, exchange.asked)
    if exchange.status >= 400:
        return problems if isinstance(exchange.answer, dict) else [*problems, "an error is an object"]
    if (model := route.answers.get(str(exchange.status), "unknown")) == "unknown":
        return [*problems, f"success is {', '.join(route.answers)}"]
    return problems + (unread(client, model, exchange.answer) if model else [])


def fits(route: Route, exchange: Exchange) -> bool:
    return route.method == exchange.method and bool(
        re.fullmatch(re.sub(r"\{\w+\}", r"[^/]+", route.path), exchange.path)
    )


def unread(client: ModuleType, model: str, body: object) -> list[str]:
    """Fields of a body that the model does not have; what it lacks or holds wrongly, pydantic says by raising."""
    if not hasattr(client.models, model):
        return []  # `object`: the client takes anything
    parsed = getattr(client.models, model).from_dict(body)
    return [f"{model} has no field {name}" for name in parsed.additional_properties]


@cache
def routes(client: ModuleType) -> tuple[Route, ...]:
    """The calls of a generated client, read from its source: each states its route and, above it, its answers."""
    found = []
    package = importlib.import_module(f"{client.__name__}.api")
    for name in (module.name for module in pkgutil.iter_modules(package.__path__)):
        found += _routes_of(inspect.getsource(importlib.import_module(f"{package.__name__}.{name}")))
    assert len(found) > 20, "the generated code has another form now: read it again"
    return tuple(found)


def _routes_of(source: str) -> list[Route]:
    """Each call states its answers three times over, and after the last of them its route."""
    made, answers = [], dict[str, str | None]()
    for block in re.split(r"(?=_response_types_map: )", source):
        told = re.match(r"_response_types_map: [^{]*\{(.*?)\}", block, re.DOTALL)
        if told is not None:
            answers = {
                status: model or None
                for status, model in re.findall(r"'(\d+)': (?:\"([^\"]+)\"|None)", told[1])
                if int(status) < 400
            }
        made += [
            Route(method=method, path=path, answers=answers)
            for method, path in re.findall(r"method='(\w+)',\s+resource_path='([^']+)'", block)
        ]
    return made

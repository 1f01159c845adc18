"""Daytona's sandboxes end by themselves and reach no network, whatever was asked for and whatever went wrong.

The contract checks the stub itself: the real SDK makes each request there, and reads each answer into its own models.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from rayapp.config.sandbox import DaytonaConfig
from rayapp.core.errors import SandboxError
from rayapp.core.types import SandboxSpec
from rayapp.extras.providers.daytona import DaytonaProvider
from rayapp.testing.sandbox_contract import CHECKS
from support.stubs.daytona_stub import API_KEY, DaytonaStub
from support.stubs.recording import Exchange, record

pytest.importorskip("daytona_api_client_async", reason="the package daytona-sdk is not installed")


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


async def test_every_sandbox_ends_by_itself_and_reaches_no_network() -> None:
    seen = await everything()

    assert {200, 401, 403, 404} <= {exchange.status for exchange in seen}
    bodies = [exchange.asked for exchange in seen if exchange.method == "POST" and exchange.path == "/sandbox"]
    assert any("buildInfo" in body for body in bodies), "an image was asked for"
    for body in bodies:
        facts = {key: body[key] for key in ("ttlMinutes", "autoDeleteInterval", "networkBlockAll")}
        assert facts == {"ttlMinutes": 5, "autoDeleteInterval": 0, "networkBlockAll": True}

"""E2B's stub server says only what E2B says: every exchange is held against the SDK's models."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, Literal

import pytest

from rayapp.config.sandbox import E2BConfig
from rayapp.core.errors import SandboxError
from rayapp.core.protocols import SandboxProvider
from rayapp.core.types import SandboxSpec
from rayapp.extras.providers.e2b import E2BProvider
from rayapp.testing.sandbox_contract import CHECKS
from support.stubs.e2b_stub import API_KEY, E2BStub
from support.stubs.recording import Exchange, record

DIALECTS = pytest.mark.parametrize("dialect", ["e2b", "kruise"])


def provider_of(dialect: str, url: str, api_key: str = API_KEY) -> E2BProvider:
    if dialect == "kruise":
        return E2BProvider(E2BConfig(api_url=f"{url}/kruise/api"), api_key=api_key)
    return E2BProvider(E2BConfig(api_url=url, sandbox_url=url), api_key=api_key)


async def everything(dialect: Literal["e2b", "kruise"]) -> list[Exchange]:
    """Exchanges of the whole contract, and of what goes wrong: key, template, quota, a sandbox that is not there."""
    stub = E2BStub(dialect=dialect, max_alive=6, page=2)
    seen = record(stub, r"^/kruise/(api|[0-9a-f]+/\d+)(?=/)")
    async with stub.running() as url:
        provider, stranger = provider_of(dialect, url), provider_of(dialect, url, "e2b_wrong")
        for check in CHECKS:
            await check(provider)
        await failures(provider, stranger)
        await provider.close()
        await stranger.close()
    return seen


async def failures(provider: SandboxProvider, stranger: SandboxProvider) -> None:
    async def create(maker: SandboxProvider, template: str = "") -> None:
        with suppress(SandboxError):
            await maker.create(SandboxSpec(template=template), labels={"a": "ä &=b"}, ttl_s=300, timeout_s=20)

    await create(stranger)
    await create(provider, "nothing like it")
    for _ in range(7):
        await create(provider)
    found = [sandbox_id async for sandbox_id in provider.list({"a": "ä &=b"})]
    assert len(found) == 6, "three pages of two"
    await provider.kill("nothere")
    with suppress(SandboxError):
        await stranger.kill(found[0])


@DIALECTS
async def test_every_exchange_is_what_the_sdks_models_hold_and_no_more(dialect: Literal["e2b", "kruise"]) -> None:
    from e2b.api.client import models

    kinds: set[str] = set()
    for exchange in await everything(dialect):
        for name, body in shapes(exchange):
            parsed = getattr(models, name).from_dict(dict(body))
            assert not parsed.additional_properties, (name, parsed.additional_properties)
            kinds.add(name)
    creation = "NewSandboxV2" if dialect == "e2b" else "NewSandbox"
    assert kinds >= {creation, "Sandbox", "ListedSandbox", "Error"}, kinds


def shapes(exchange: Exchange) -> list[tuple[str, dict[str, Any]]]:
    """Which of the SDK's models each body should be."""
    found: list[tuple[str, Any]] = []
    if exchange.path in ("/sandboxes", "/v2/sandboxes") and exchange.method == "POST":
        found.append(("NewSandboxV2" if exchange.path.startswith("/v2") else "NewSandbox", exchange.asked))
        if exchange.status == 201:
            found.append(("Sandbox", exchange.answer))
    if exchange.path == "/v2/sandboxes" and isinstance(exchange.answer, list):
        found += [("ListedSandbox", item) for item in exchange.answer]
    if re.fullmatch(r"/sandboxes/\w+", exchange.path) and exchange.method == "GET" and exchange.status == 200:
        found.append(("SandboxDetail", exchange.answer))
    if exchange.path.startswith(("/sandboxes", "/v2")) and exchange.status >= 400:
        found.append(("Error", exchange.answer))
    return found

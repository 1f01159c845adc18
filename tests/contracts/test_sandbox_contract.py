"""Every provider keeps the same contract: the local one, and the real SDKs against servers on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from rayapp.config.sandbox import DaytonaConfig, E2BConfig, McpConfig
from rayapp.core.errors import IsolationUnavailableError
from rayapp.core.protocols import SandboxProvider
from rayapp.sandbox.local.provider import LocalProvider
from rayapp.testing.sandbox_contract import CHECKS, Check
from support.images import MachineImages, OnImage


@asynccontextmanager
async def local() -> AsyncIterator[SandboxProvider]:
    provider = LocalProvider()
    try:
        yield provider
    finally:
        await provider.close()


@asynccontextmanager
async def e2b() -> AsyncIterator[SandboxProvider]:
    from rayapp.extras.providers.e2b import E2BProvider
    from support.stubs.e2b_stub import API_KEY, E2BStub

    stub = E2BStub()
    async with stub.running() as url:
        provider = E2BProvider(E2BConfig(api_url=url, sandbox_url=url), api_key=API_KEY)
        try:
            yield provider
        finally:
            await provider.close()
            assert not stub.boxes.living, "a sandbox was left behind"


@asynccontextmanager
async def kruise() -> AsyncIterator[SandboxProvider]:
    from rayapp.extras.providers.e2b import E2BProvider
    from support.stubs.e2b_stub import API_KEY, E2BStub

    stub = E2BStub(dialect="kruise")
    async with stub.running() as url:
        config = E2BConfig(api_url=f"{url}/kruise/api", template="code-interpreter")
        provider = E2BProvider(config, api_key=API_KEY)
        try:
            yield provider
        finally:
            await provider.close()
            assert not stub.boxes.living, "a sandbox was left behind"


@asynccontextmanager
async def daytona() -> AsyncIterator[SandboxProvider]:
    from rayapp.extras.providers.daytona import DaytonaProvider
    from support.stubs.daytona_stub import API_KEY, DaytonaStub

    stub = DaytonaStub()
    async with stub.running() as url:
        provider = DaytonaProvider(DaytonaConfig(api_url=f"{url}/api"), api_key=API_KEY)
        try:
            yield provider
        finally:
            await provider.close()
            assert not stub.boxes.living, "a sandbox was left behind"


@asynccontextmanager
async def mcp() -> AsyncIterator[SandboxProvider]:
    from rayapp.extras.providers.mcp import McpProvider
    from support.stubs.mcp_stub import API_KEY, McpStub

    async with McpStub().running() as url:
        provider = McpProvider(McpConfig(url=url), api_key=API_KEY)
        try:
            yield provider
        finally:
            await provider.close()


Opened = Callable[[], AbstractAsyncContextManager[SandboxProvider]]


@pytest.fixture(params=["python", "plain"])
def on_image(request: pytest.FixtureRequest, images: MachineImages) -> OnImage:
    """Of an image with Python, whose code it runs, and of one without, where our own does."""
    return images.provider(getattr(images, request.param))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_local_on_an_image(on_image: OnImage, check: Check) -> None:
    if on_image.template.endswith("plain") and "loopback" in check.__name__:
        pytest.skip("its program is a python3 of the sandbox")
    try:
        await check(on_image)
    except IsolationUnavailableError as error:
        pytest.skip(str(error))
    finally:
        await on_image.close()


@pytest.mark.parametrize("opened", [local, e2b, kruise, daytona, mcp], ids=lambda opened: opened.__name__)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test(opened: Opened, check: Check) -> None:
    async with opened() as provider:
        try:
            await check(provider)
        except IsolationUnavailableError as error:
            pytest.skip(str(error))  # a loopback needs a network namespace, which ordinary containers don't have

"""Every provider keeps the same contract: the local one, and the real SDKs against servers on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rayapp.core.errors import IsolationUnavailableError
from rayapp.core.protocols import SandboxProvider
from rayapp.sandbox.local.provider import LocalProvider
from rayapp.testing.sandbox_contract import CHECKS, Check
from support.images import MachineImages, OnImage
from support.providers import KEYS, opened


@asynccontextmanager
async def local() -> AsyncIterator[tuple[SandboxProvider, None]]:
    provider = LocalProvider()
    try:
        yield provider, None
    finally:
        await provider.close()


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


@pytest.mark.parametrize("kind", ["local", *KEYS])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test(kind: str, check: Check) -> None:
    async with local() if kind == "local" else opened(kind) as (provider, _):
        try:
            await check(provider)
        except IsolationUnavailableError as error:
            pytest.skip(str(error))  # a loopback needs a network namespace, which ordinary containers don't have

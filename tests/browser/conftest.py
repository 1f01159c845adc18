"""A Chromium to open the page in, and a server to open. Skips, with the reason, where there is no browser."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rayapp.extras.view.command import bind
from rayapp.extras.view.run import ViewedRun
from rayapp.extras.view.server import make_app
from rayapp.runs.source import open_source


def chromium_path() -> str | None:
    """RAYAPP_CHROMIUM, or a Chromium of the system."""
    names = (os.environ.get("RAYAPP_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    playwright = pytest.importorskip("playwright.async_api", reason="needs playwright: pip install playwright")
    path = chromium_path()
    if path is None:
        pytest.skip("needs a Chromium: apt-get install chromium, or RAYAPP_CHROMIUM=/path/to/one")
    async with playwright.async_playwright() as started:
        # Chromium's own sandbox refuses to run as root.
        launched = await started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield launched
        finally:
            await launched.close()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts a page over run folders, for the length of the test; returns its address."""
    async with AsyncExitStack() as stack:

        async def start(*folders: Path, tokenizer: Path | None = None) -> str:
            runs = [ViewedRun(open_source(str(folder)), tokenizer) for folder in folders]
            return await stack.enter_async_context(_serving(runs))

        yield start


@asynccontextmanager
async def _serving(runs: list[ViewedRun]) -> AsyncIterator[str]:
    import uvicorn

    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app(runs), log_level="error", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server._serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listening.close()

"""The remote providers of sandboxes, made from a configuration as in a run, each behind its stub server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from rayapp.config.sandbox import SandboxConfig
from rayapp.sandbox.providers import remote_provider
from support.stubs import daytona_stub, e2b_stub, mcp_stub

KEY_ENV = "RAYAPP_TEST_KEY"
KEYS = {"e2b": e2b_stub.API_KEY, "kruise": e2b_stub.API_KEY, "daytona": daytona_stub.API_KEY, "mcp": mcp_stub.API_KEY}
"""Kind of a service -> the key that its stub takes. `kruise` is E2B's protocol as OpenKruise speaks it."""


def stub_of(kind: str, **options: Any) -> Any:
    """Return the stub of a service, not running yet."""
    if kind == "kruise":
        return e2b_stub.E2BStub(dialect="kruise", **options)
    makes = {"e2b": e2b_stub.E2BStub, "daytona": daytona_stub.DaytonaStub, "mcp": mcp_stub.McpStub}
    return makes[kind](**options)


def section_of(kind: str, url: str, **fields: Any) -> dict[str, Any]:
    """Return the section of a configuration that names a service at this address."""
    addresses: dict[str, dict[str, Any]] = {
        "e2b": {"type": "e2b", "api_url": url, "sandbox_url": url},
        "kruise": {"type": "e2b", "api_url": f"{url}/kruise/api"},
        "daytona": {"type": "daytona", "api_url": f"{url}/api"},
        "mcp": {"type": "mcp", "url": url},
    }
    return {"api_key_env": KEY_ENV, **addresses[kind], **fields}


def provider_of(kind: str, url: str, **fields: Any) -> Any:
    """Return the provider of a service at this address; its key is in the environment."""
    (section,) = SandboxConfig.model_validate({"providers": [section_of(kind, url, **fields)]}).providers
    return remote_provider(section)


@contextmanager
def key_in_environment(kind: str, key: str = "") -> Iterator[None]:
    """Put the key of a service into the environment, or this one in its place."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(KEY_ENV, key or KEYS[kind])
        yield


@asynccontextmanager
async def opened(kind: str, *, key: str = "", **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Yield a provider and its stub, made with these options."""
    stub = stub_of(kind, **options)
    with key_in_environment(kind, key):
        async with stub.running() as url:
            provider = provider_of(kind, url)
            try:
                yield provider, stub
            finally:
                await provider.close()

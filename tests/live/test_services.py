"""The provider contract against the services themselves. A service without a key in the environment is skipped.

    E2B_API_KEY                        E2B; E2B_DOMAIN, E2B_API_URL and E2B_SANDBOX_URL for one that is self-hosted
    RAYAPP_KRUISE_URL, _KEY            OpenKruise's sandbox-manager, http://…/kruise/api; RAYAPP_KRUISE_TEMPLATE
    DAYTONA_API_KEY                    Daytona; DAYTONA_API_URL and DAYTONA_TARGET as the SDK knows them
    RAYAPP_MCP_URL                     an MCP server; RAYAPP_MCP_KEY, RAYAPP_MCP_TEMPLATE

Every sandbox is short-lived, labelled `rayapp-contract`, and counted at the end: a whole run makes about 25 of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from rayapp.config.sandbox import DaytonaConfig, E2BConfig, McpConfig, ProviderConfig
from rayapp.sandbox.providers import remote_provider
from rayapp.testing.sandbox_contract import CHECKS, LABELS, Check

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def env(name: str, otherwise: str = "") -> str:
    return os.environ.get(name, otherwise)


def e2b() -> ProviderConfig:
    return E2BConfig(
        domain=env("E2B_DOMAIN"), api_url=env("E2B_API_URL"), sandbox_url=env("E2B_SANDBOX_URL"), creations_per_s=1.0
    )


def kruise() -> ProviderConfig:
    return E2BConfig(
        dialect="kruise",
        api_url=env("RAYAPP_KRUISE_URL"),
        api_key_env="RAYAPP_KRUISE_KEY",
        template=env("RAYAPP_KRUISE_TEMPLATE", "code-interpreter"),
    )


def daytona() -> ProviderConfig:
    return DaytonaConfig(api_url=env("DAYTONA_API_URL"), target=env("DAYTONA_TARGET"))


def mcp() -> ProviderConfig:
    return McpConfig(
        url=env("RAYAPP_MCP_URL"),
        api_key_env="RAYAPP_MCP_KEY" if env("RAYAPP_MCP_KEY") else "",
        template=env("RAYAPP_MCP_TEMPLATE", "code-interpreter"),
    )


def service(make: Callable[[], ProviderConfig], variable: str) -> object:
    """A parameter that is skipped, with the reason, where its variable is not set."""
    skip = pytest.mark.skipif(not env(variable), reason=f"set {variable} to run the contract against this service")
    return pytest.param(make, id=make.__name__, marks=skip)


SERVICES = pytest.mark.parametrize(
    "make",
    [
        service(e2b, "E2B_API_KEY"),
        service(kruise, "RAYAPP_KRUISE_URL"),
        service(daytona, "DAYTONA_API_KEY"),
        service(mcp, "RAYAPP_MCP_URL"),
    ],
)


@SERVICES
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test(make: Callable[[], ProviderConfig], check: Check) -> None:
    provider = remote_provider(make())
    try:
        await check(provider)
    finally:
        await provider.close()


@SERVICES
async def test_nothing_of_the_contract_is_left_at_the_service(make: Callable[[], ProviderConfig]) -> None:
    """Last in the file, so it runs after the others. Another run at the same time would be counted too."""
    provider = remote_provider(make())
    try:
        assert [sandbox_id async for sandbox_id in provider.list(LABELS)] == []
    finally:
        await provider.close()

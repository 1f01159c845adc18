"""`rayapp sandbox serve` in the test's process, as an MCP client sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rayapp.config.sandbox import SandboxConfig
from rayapp.extras.service.app import PATH, serving


@asynccontextmanager
async def mcp_serving(
    config: SandboxConfig, *, api_key: str, port: int = 0, lease_timeout_s: float = 120.0
) -> AsyncIterator[str]:
    """Serve to one client with this key. Yields the endpoint of MCP."""
    async with serving(config, key=api_key, port=port, lease_timeout_s=lease_timeout_s) as address:
        yield address + PATH

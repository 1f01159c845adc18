"""`rayapp sandbox run`: one program in a sandbox of any provider. Called by `rayapp.cli.sandbox.command` only.

Which provider object: `local` is made here; the others from a run's config, or from their defaults and the environment.
The sandbox is labelled like a run's, so `rayapp sandbox reap` finds it should this process be killed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rayapp.config.loading import load_config
from rayapp.config.sandbox import DaytonaConfig, E2BConfig, McpConfig, ProviderConfig
from rayapp.core.errors import InputError, SandboxConfigError
from rayapp.core.protocols import SandboxProvider
from rayapp.core.types import ExecResult, SandboxSpec
from rayapp.sandbox.local.provider import LEVELS, LocalProvider
from rayapp.sandbox.pool.build import labels_of
from rayapp.sandbox.providers.table import remote_provider

PROVIDERS = ("local", "e2b", "daytona", "mcp")
RUN_NAME = "sandbox-run"
"""Run name in the sandbox's labels."""
_READY_TIMEOUT_S = 60.0
_ENDS_AFTER_S = 120.0
"""Seconds past its program's end after which a sandbox ends by itself, should nobody end it."""


def choose_provider(
    kind: str, *, config: Path | None, url: str, levels: tuple[str, ...], packages: tuple[str, ...]
) -> SandboxProvider:
    """The provider of this name.

    Args:
        config: a run's config whose section of this kind to take.
        url: of an MCP server, in place of a config.
    Raises:
        SandboxConfigError: there is no such provider, or its key, package or endpoint is not there.
        InputError: an option that this provider has no use for.
    """
    if kind not in PROVIDERS:
        raise SandboxConfigError(f"unknown provider {kind!r}; there are: {', '.join(PROVIDERS)}")
    if url and kind != "mcp":
        raise InputError(f"--url is the endpoint of an MCP server; for {kind} name it in a --config")
    if kind == "local":
        return LocalProvider(levels=levels)
    if levels != LEVELS or packages:
        raise InputError(f"--level and --package are the local provider's; a sandbox of {kind} is what its template is")
    return remote_provider(_section(kind, config, url))


def _section(kind: str, config: Path | None, url: str) -> ProviderConfig:
    if config is not None:
        for section in load_config(config).sandbox.providers:
            if section.type == kind:
                return section
        raise SandboxConfigError(f"{config} has no provider {kind}: add one to sandbox.providers")
    match kind:
        case "e2b":
            return E2BConfig()
        case "daytona":
            return DaytonaConfig()
    if not url:
        raise SandboxConfigError("provider mcp needs its server's endpoint: --url URL, or a --config that names it")
    return McpConfig(url=url)


async def run_once(
    provider: SandboxProvider, code: str, *, stdin: str, timeout_s: float, packages: tuple[str, ...]
) -> ExecResult:
    """Run a program in a sandbox of its own; the provider is closed.

    Raises:
        SandboxError: there was no sandbox, or it failed.
    """
    ttl_s = timeout_s + _ENDS_AFTER_S
    try:
        spec = SandboxSpec(packages=packages)
        labels = labels_of(RUN_NAME)
        sandbox = await provider.create(spec, labels=labels, ttl_s=ttl_s, timeout_s=_READY_TIMEOUT_S)
        return await sandbox.run_code(code, timeout_s=timeout_s, stdin=stdin)
    finally:
        await asyncio.shield(provider.close())

"""`rayapp sandbox`: serve sandboxes, end those left at a provider.

serve    offer sandboxes over MCP and as SandboxFusion     until Ctrl-C or SIGTERM
reap     end sandboxes that runs left at a provider        exit 0 nothing left, 1 something is, 2 wrong key
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rayapp.cli.arguments import OptionalConfigFile, Overrides, loaded_config
from rayapp.config.loading import load_config
from rayapp.config.sandbox import DaytonaConfig, E2BConfig, SandboxConfig
from rayapp.core.errors import ConfigError, InputError, SandboxConfigError
from rayapp.core.logs import visible
from rayapp.core.names import load_extra
from rayapp.sandbox.leases import RemoteProvider
from rayapp.sandbox.pool.reap import Reaped, labels_to_reap
from rayapp.sandbox.pool.reap import reap as reap_all
from rayapp.sandbox.providers import remote_provider

app = typer.Typer(no_args_is_help=True, help="Serve sandboxes, and end those that runs left.")

KEY_VARIABLE = "RAYAPP_SANDBOX_API_KEY"


@app.command(
    epilog="Examples:\n\n"
    f"  {KEY_VARIABLE}=secret rayapp sandbox serve\n\n"
    "  rayapp sandbox serve configs/coding_cpu.yaml sandbox.max_leases=8 --host 0.0.0.0\n\n"
    "  rayapp sandbox serve --no-key          (for verl's reward.sandbox_fusion.url, which sends no key)"
)
def serve(
    config: OptionalConfigFile = None,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port")] = 8082,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable with the key that clients send")
    ] = KEY_VARIABLE,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="Serve without a key: any client that reaches the address may use it")
    ] = False,
    lease_timeout_s: Annotated[float, typer.Option(min=0.1, help="Longest wait for a free sandbox")] = 120.0,
) -> None:
    """Serve sandboxes to other programs: MCP tools at /mcp, SandboxFusion's at /run_code."""
    sandboxes = loaded_config(config, overrides).sandbox
    key = "" if no_key else os.environ.get(api_key_env, "")
    if not key and not no_key:
        raise ConfigError(f"clients need a key, but {api_key_env} is not set: set it to a key, or pass --no-key")
    serving = partial(
        load_extra("service.app:serving"),
        sandboxes,
        key=key,
        host=host,
        port=port,
        lease_timeout_s=lease_timeout_s,
    )
    asyncio.run(_serve(serving))


_ENDPOINTS = """\
serving at {address}    (Ctrl-C ends it)
MCP            {address}/mcp
SandboxFusion  {address}/run_code
counts         {address}/health"""


async def _serve(serving: Callable[[], AbstractAsyncContextManager[str]]) -> None:
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, is_over.set)
    async with serving() as address:
        print(_ENDPOINTS.format(address=address), flush=True)
        await is_over.wait()
    print("stopped; every sandbox is ended")


@app.command(
    epilog="Examples:\n\n"
    "  rayapp sandbox reap --dry-run\n\n"
    "  rayapp sandbox reap --run coding_cpu\n\n"
    "  rayapp sandbox reap --config configs/my_run.yaml --provider e2b --run my_run"
)
def reap(
    run: Annotated[
        str | None, typer.Option(help="Name of the run (run.name); default: all runs, including those in progress")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the sandboxes that would be ended")] = False,
    provider: Annotated[
        list[str] | None,
        typer.Option(help="e2b or daytona; may be repeated. Default: the config's, or those with a key"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Take endpoints and key variables from this config")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask before ending the sandboxes of every run")] = False,
) -> None:
    """End sandboxes that runs left at a provider, found by their labels; one line each."""

    loaded = load_config(config).sandbox if config is not None else None
    if run is None and not dry_run and not yes and sys.stdin.isatty():
        typer.confirm(
            "This ends the sandboxes of all runs that use this key, including runs in progress. Continue?", abort=True
        )
    raise typer.Exit(reap_command(run=run, kinds=provider or (), config=loaded, dry_run=dry_run))


LISTED: Mapping[str, type[E2BConfig | DaytonaConfig]] = {"e2b": E2BConfig, "daytona": DaytonaConfig}
"""Providers that list the sandboxes of other processes."""
EXIT_LEFT, EXIT_CONFIG = 1, 2


def reap_command(*, run: str | None, kinds: Sequence[str], config: SandboxConfig | None, dry_run: bool) -> int:
    """End sandboxes: one line each on stdout, failures on stderr. 0: none is left; 1: some may be; 2: wrong key."""
    providers = {str(section.type): remote_provider(section) for section in _sections(kinds, config)}
    return asyncio.run(_reap(providers, labels_to_reap(run), dry_run=dry_run))


def _sections(kinds: Sequence[str], config: SandboxConfig | None) -> list[E2BConfig | DaytonaConfig]:
    if unknown := [kind for kind in kinds if kind not in LISTED]:
        why = "can't list the sandboxes of other processes" if unknown[0] in ("local", "mcp") else "is unknown"
        raise InputError(f"provider {unknown[0]!r} {why}: use one of {', '.join(LISTED)}")
    found = config.providers if config is not None else _defaults(kinds)
    listed = [section for section in found if isinstance(section, E2BConfig | DaytonaConfig)]
    chosen = [section for section in listed if not kinds or section.type in kinds]
    if not chosen:
        raise SandboxConfigError(_nothing_to_ask(kinds, config))
    return chosen


def _defaults(kinds: Sequence[str]) -> list[E2BConfig | DaytonaConfig]:
    """Return the named providers, or else those whose key is set."""
    sections = [make() for make in LISTED.values()]
    return [section for section in sections if section.type in kinds or os.environ.get(section.api_key_env)]


def _nothing_to_ask(kinds: Sequence[str], config: SandboxConfig | None) -> str:
    if config is None:
        return (
            "no provider is configured: set E2B_API_KEY or DAYTONA_API_KEY, name one with --provider, or name the "
            "run's config with --config. Local sandboxes end with the process that made them."
        )
    wanted = " or ".join(kinds or LISTED)
    return f"the config has no {wanted} provider: sandboxes of other providers end with the run that made them"


async def _reap(providers: Mapping[str, RemoteProvider], labels: Mapping[str, str], *, dry_run: bool) -> int:
    found = []
    try:
        async for each in reap_all(providers, labels, dry_run=dry_run):
            print(
                visible(_line(each, dry_run=dry_run)), file=sys.stdout if each.error is None else sys.stderr, flush=True
            )
            found.append(each)
    finally:
        await asyncio.gather(*(provider.close() for provider in providers.values()))
    if not found:
        print(f"no sandbox to end at {', '.join(providers)}", file=sys.stderr)
    errors = [each.error for each in found if each.error is not None]
    if any(isinstance(error, SandboxConfigError) for error in errors):
        return EXIT_CONFIG
    return EXIT_LEFT if errors else 0


def _line(each: Reaped, *, dry_run: bool) -> str:
    if not each.sandbox_id:
        return f"{each.provider}: can't be listed: {each.error}"
    if each.error is not None:
        return f"{each.provider} {each.sandbox_id} could not be ended: {each.error}"
    return f"{each.provider} {each.sandbox_id} {'would be ended' if dry_run else 'ended'}"

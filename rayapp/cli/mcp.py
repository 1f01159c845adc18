"""`rayapp mcp serve`: sandboxes for any MCP client, from this application's pool."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from rayapp.cli.arguments import Overrides
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Offer sandboxes to MCP clients.")
KEY_VARIABLE = "RAYAPP_MCP_API_KEY"


@app.callback()
def _group() -> None:
    """Keeps `serve` a command of its own while it is the only one."""


@app.command(
    epilog="Examples:\n\n"
    f"  {KEY_VARIABLE}=secret rayapp mcp serve\n\n"
    f"  {KEY_VARIABLE}=secret rayapp mcp serve configs/coding_cpu.yaml sandbox.max_leases=8 --host 0.0.0.0"
)
def serve(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="Take the sandbox settings of this config")
    ] = None,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8082,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable with the key that clients send")
    ] = KEY_VARIABLE,
    no_key: Annotated[bool, typer.Option("--no-key", help="Let everybody in who reaches the address")] = False,
    lease_timeout_s: Annotated[float, typer.Option(min=0.1, help="Longest wait for a free sandbox")] = 120.0,
) -> None:
    """Serve run_code, run_code_once and run_command over streamable HTTP, in this application's sandboxes."""
    from rayapp.config.loading import load_config

    sandboxes = load_config(config, overrides or ()).sandbox
    key = "" if no_key else os.environ.get(api_key_env, "")
    if not key and not no_key:
        raise ConfigError(f"set {api_key_env} to the key that clients must send, or pass --no-key")
    asyncio.run(_serve(sandboxes, key, host, port, lease_timeout_s))


async def _serve(config: SandboxConfig, key: str, host: str, port: int, lease_timeout_s: float) -> None:
    from rayapp.sandbox.mcp_server.app import serving

    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, is_over.set)
    async with serving(config, api_key=key, host=host, port=port, lease_timeout_s=lease_timeout_s) as url:
        typer.echo(f"serving at {url}")
        await is_over.wait()
    typer.echo("stopped; every sandbox is ended")

"""`rayapp serve`: a model, a checkpoint or the policy of a run behind OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
import os
import secrets
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.cli.arguments import ConfigFile, Overrides
from rayapp.core.errors import InputError

if TYPE_CHECKING:
    from rayapp.config.config import Config

app = typer.Typer()
KEY_VARIABLE = "RAYAPP_SERVE_API_KEY"


@app.command(
    epilog="Examples:\n\n"
    "  rayapp serve configs/coding_cpu.yaml --model outputs/coding_cpu/final\n\n"
    "  rayapp serve configs/coding_cpu.yaml --model outputs/coding_cpu/checkpoints/step=000010 server.num_servers=2\n\n"
    "  rayapp serve outputs/coding_cpu/config.yaml --running         (the policy that is being trained)\n\n"
    f"  {KEY_VARIABLE}=secret rayapp serve configs/coding_cpu.yaml --host 0.0.0.0 --port 8000"
)
def serve(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Serve this model or checkpoint (checkpoints/step=…) instead of the config's")
    ] = None,
    running: Annotated[
        bool, typer.Option("--running", help="Serve the policy of this config's run, which goes on now")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a call, prompt and answer; default: what a run's may have")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable with the key that clients send; where it is empty, one is made")
    ] = KEY_VARIABLE,
) -> None:
    """Serve chat completions, responses and messages for evaluation by other harnesses. Nothing of it is trained on."""
    import json

    from rayapp.api.checkpoint_model import with_checkpoint_as_model
    from rayapp.config.config import with_values
    from rayapp.config.loading import load_config
    from rayapp.core.aio import run_until_done

    if running and (model or max_tokens):
        raise InputError("--running serves a run's policy as the run has it: leave --model and --max-tokens out.")
    asked = load_config(config, [*(overrides or ()), *([f"model.path={json.dumps(model)}"] if model else [])])
    name = asked.run.name if running else asked.model.path
    if not running:
        asked = with_values(asked, run={"name": f"{asked.run.name}-serve"})  # a run of that name may go on
    if max_tokens:
        asked = with_values(asked, rollout={"max_prompt_tokens": max_tokens - 1, "max_completion_tokens": 1})
    is_serving = asyncio.Event()
    try:
        with with_checkpoint_as_model(asked) as ready:
            run_until_done(_serve(ready, name, running, host, port, os.environ.get(api_key_env, ""), is_serving))
    except KeyboardInterrupt:
        if not is_serving.is_set():
            raise
    typer.echo("stopped")


async def _serve(
    config: Config, name: str, running: bool, host: str, port: int, given_key: str, is_serving: asyncio.Event
) -> None:
    from rayapp.driver.cluster import open_running_servers, open_servers
    from rayapp.rollout.gateway.formats import Formats
    from rayapp.rollout.gateway.open_server import open_to_all

    new_key = "" if given_key else secrets.token_urlsafe(24)
    # First, as it takes a second and says what is wrong with a model.
    formats = await asyncio.to_thread(Formats.of, config)
    async with (open_running_servers if running else open_servers)(
        config, report=partial(typer.echo, err=True)
    ) as engine:
        serving = open_to_all(
            formats,
            engine,
            model=name,
            max_tokens=config.max_model_tokens,
            temperature=config.eval.temperature,
            key=given_key or new_key,
            host=host,
            port=port,
        )
        async with serving as url:
            is_serving.set()
            typer.echo(_told(name, url, new_key))
            await asyncio.Event().wait()


def _told(name: str, url: str, new_key: str) -> str:
    own = f"key     {new_key}    (made for this server; {KEY_VARIABLE} sets one)\n" if new_key else ""
    return (
        f"serving {name}    (Ctrl-C ends it)\n"
        f"OpenAI  {url}/v1\nAnthropic  {url}\n{own}"
        f"try     curl {url}/v1/chat/completions -H 'Authorization: Bearer {new_key or 'KEY'}' "
        "-H 'Content-Type: application/json' "
        """-d '{"model": "policy", "messages": [{"role": "user", "content": "hello"}]}'"""
    )

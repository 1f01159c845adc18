"""`rayapp serve` serves a model, a checkpoint or a running policy over OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.cli.arguments import ConfigFile, Overrides
from rayapp.core.errors import InputError

if TYPE_CHECKING:
    from rayapp.config.config import Config


app = typer.Typer()
KEY_VARIABLE = "RAYAPP_SERVE_API_KEY"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@app.command(
    epilog="Examples:\n\n"
    "  rayapp serve configs/coding_cpu.yaml --model outputs/coding_cpu/final\n\n"
    "  rayapp serve configs/coding_cpu.yaml --model outputs/coding_cpu/checkpoints/step=000010 server.num_servers=2\n\n"
    "  rayapp serve configs/lora.yaml --adapter early=outputs/lora/checkpoints/step=000010 --adapter "
    "late=outputs/lora/checkpoints/step=000020\n\n"
    "  rayapp serve outputs/coding_cpu/config.yaml --running         (the policy that is being trained)\n\n"
    f"  {KEY_VARIABLE}=secret rayapp serve configs/coding_cpu.yaml --host 0.0.0.0 --port 8000"
)
def serve(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Serve this model or checkpoint (checkpoints/step=…) instead of the config's")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="Also serve a LoRA adapter under this model name: a checkpoint (checkpoints/step=…) of a run that "
            "trains adapters of the same model, or a folder of peft's; may be given several times",
        ),
    ] = None,
    running: Annotated[
        bool, typer.Option("--running", help="Serve the policy of this config's run, which must be in progress")
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help="Maximum number of tokens of a call, prompt and answer together; default: the config's"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port")] = 8000,
    api_key_env: Annotated[
        str,
        typer.Option(
            help="Environment variable with the key that clients send, or several keys separated by commas; if it "
            "is empty, a key is made"
        ),
    ] = KEY_VARIABLE,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Maximum calls of one key at once; further calls get status 429")
    ] = 1024,
) -> None:
    """Serve chat completions, completions, responses and messages, e.g. for other evaluation harnesses. Requests never
    become training data."""
    import json

    from rayapp.api.running import with_adapter_folders, with_checkpoint_as_model
    from rayapp.config.config import with_values
    from rayapp.config.loading import load_config
    from rayapp.core.aio import run_until_done
    from rayapp.rollout.gateway.listening import bound

    if running and (model or max_tokens or adapter):
        raise InputError(
            "--running serves the policy with its run's settings: leave --model, --adapter and --max-tokens out."
        )
    asked = load_config(config, [*(overrides or ()), *([f"model.path={json.dumps(model)}"] if model else [])])
    name = asked.run.name if running else asked.model.path
    adapters = _adapters(adapter or (), name)
    if not running:
        asked = with_values(
            asked, run={"name": f"{asked.run.name}-serve"}
        )  # another name, because a run of that name may be in progress
    if max_tokens:
        asked = with_values(asked, rollout={"max_prompt_tokens": max_tokens - 1, "max_completion_tokens": 1})
    sockets = bound(host, port)  # Bind first: if the port is taken, nothing is started.
    keys, is_serving = _keys(os.environ.get(api_key_env, "")), asyncio.Event()
    try:
        with with_checkpoint_as_model(asked) as ready, with_adapter_folders(asked, adapters) as folders:
            run_until_done(_serve(ready, name, folders, running, sockets, keys, max_requests, is_serving))
    except KeyboardInterrupt:
        if not is_serving.is_set():
            raise
    finally:
        for each in sockets:
            each.close()
    typer.echo("stopped")


def _keys(given: str) -> list[str]:
    return [key for each in given.split(",") if (key := each.strip())]


def _adapters(given: Sequence[str], model: str) -> dict[str, Path]:
    """Return the folders of adapters by name. Raises InputError: an option is not NAME=FOLDER, or a name is taken."""
    from rayapp.rollout.gateway.session import MODEL

    found = dict[str, Path]()
    for each in given:
        name, _, folder = each.partition("=")
        if not NAME.fullmatch(name) or not folder:
            raise InputError(
                f"--adapter {each!r} is not NAME=FOLDER, with a name of letters, digits, '.', '_' and '-': e.g. "
                "late=outputs/mine/checkpoints/step=000020"
            )
        if name in (*found, model, MODEL):
            raise InputError(f"--adapter {each!r}: another model is called {name!r} already; choose another name")
        found[name] = Path(folder)
    return found


async def _serve(
    config: Config,
    name: str,
    adapters: Mapping[str, str],
    running: bool,
    sockets: Sequence[socket.socket],
    keys: Sequence[str],
    max_requests: int,
    is_serving: asyncio.Event,
) -> None:
    from rayapp.core.types import SamplingParams
    from rayapp.driver.cluster import open_running_servers, open_servers
    from rayapp.rollout.gateway.formats import Formats
    from rayapp.rollout.gateway.open_server import open_to_all
    from rayapp.storage.models.check import check_model

    new_key = "" if keys else secrets.token_urlsafe(24)
    # Check the model before starting the engine: the check takes a second and explains problems.
    if not running:
        await asyncio.to_thread(check_model, config)
    formats = await asyncio.to_thread(Formats.of, config)
    report = partial(typer.echo, err=True)
    servers = (
        open_running_servers(config, report=report)
        if running
        else open_servers(config, adapters=adapters, report=report)
    )
    async with servers as engine:
        serving = open_to_all(
            formats,
            engine,
            model=name,
            sampling=SamplingParams(
                max_tokens=config.max_model_tokens,
                temperature=config.eval.temperature,
                top_p=config.eval.top_p,
                top_k=config.eval.top_k,
            ),
            keys=keys or [new_key],
            max_requests=max_requests,
            sockets=sockets,
            adapters=[*adapters],
        )
        async with serving as url:
            is_serving.set()
            typer.echo(_told(", ".join([name, *adapters]), url, new_key, config.max_model_tokens))
            await asyncio.Event().wait()


def _told(names: str, url: str, new_key: str, max_tokens: int) -> str:
    own = f"key     {new_key}    (made for this server; {KEY_VARIABLE} sets one)\n" if new_key else ""
    return (
        f"serving {names}    (Ctrl-C ends it)\n"
        f"length  {max_tokens} tokens a call, prompt and answer together (--max-tokens changes it)\n"
        f"OpenAI  {url}/v1\nAnthropic  {url}\n{own}"
        f"try     curl {url}/v1/chat/completions -H 'Authorization: Bearer {new_key or 'KEY'}' "
        "-H 'Content-Type: application/json' "
        """-d '{"model": "policy", "messages": [{"role": "user", "content": "hello"}]}'"""
    )

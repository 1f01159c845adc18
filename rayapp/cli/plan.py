"""`rayapp plan`: print the GPU memory and time that a config needs, by phase, from the model's config.json alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Annotated

import typer

from rayapp.cli.arguments import ConfigFile, ModelConfig, Overrides, told_while_silent, with_model_config
from rayapp.config.bundles import CAPABILITIES, bundles_of, gpu_arithmetic, gpu_problems, num_gpus_of
from rayapp.config.config import Config, explain_number_formats
from rayapp.core.errors import EXIT_FAILED, InputError
from rayapp.core.machine import available_memory
from rayapp.learner.memory.host import plan_host, plan_node
from rayapp.learner.memory.plan import GpuPlan, plan_gpu, plan_model_servers, without_autos
from rayapp.learner.memory.shape import GIB, GPUS, NODE_GPUS, Gpu, ModelShape, gpu_called, gpu_here, model_shape
from rayapp.learner.memory.speed import ASSUMPTIONS, HOLDERS, PhaseRow, late_generation, seconds_on_cpu, step_timeline

app = typer.Typer()

CALIBRATION = (
    "A learner's memory and seconds, and a decoding step's overhead, are those of an H100 (docs/results.md). Memory of "
    "CUDA and vLLM, and other times, are assumptions: rayapp train CONFIG --smoke compares them with measurements."
)
AUTOS = (("server", "gpu_memory_utilization"), ("learner", "activation_checkpointing"),
         ("learner", "max_tokens_per_microbatch"))  # fmt: skip


def plan_command(config: Config, gpu: Gpu) -> bool:
    """Print the plan for GPUs of this kind. Return True if the config fits."""
    shape, given = model_shape(config), config
    config = without_autos(shape, config, gpu)
    for part, key in AUTOS:
        if getattr(getattr(given, part), key) == "auto":
            of_layers = f" of {shape.num_layers} layers" if key == "activation_checkpointing" else ""
            print(f"{part}.{key} is auto: planned with {getattr(getattr(config, part), key)}{of_layers}")
    plan = plan_gpu(shape, config, gpu)
    for line in (*plan_lines(shape, config, gpu, plan), *refusal_lines(config, gpu, plan)):
        print(line)
    others = list(plan_model_servers(config, gpu.room))
    for section, server in others:
        refusal = "" if server.kv_tokens else "DOES NOT FIT "
        print(
            f"{refusal}model-server-{section.name}: {_gib(server.weights)} GiB weights + {_gib(server.runtime)} "
            f"working, {server.kv_tokens} tokens of KV cache, on {section.tensor_parallel_size} GPU(s)"
        )
    wrong = gpu_problems(config, CAPABILITIES[gpu.name]) if gpu.name in CAPABILITIES else []
    missed = list(late_generation(shape, config, gpu, plan.server))
    for line in (*(f"CAN'T RUN {problem}" for problem in wrong), *(f"TOO LATE {each}" for each in missed)):
        print(line)
    print(*filter(None, [config.profile_note, config.rounding_note]), CALIBRATION, sep="\n")
    return plan.fits and not wrong and not missed and all(server.kv_tokens for _, server in others)


def plan_lines(shape: ModelShape, config: Config, gpu: Gpu, plan: GpuPlan) -> Iterator[str]:
    yield f"{shape.num_parameters / 1e9:.2f}B parameters in {shape.num_layers} layers"
    if shape.num_adapter_parameters:
        yield f"adapters: {shape.num_adapter_parameters / 1e6:.1f}M parameters; all others are frozen"
    yield f"{gpu_arithmetic(bundles_of(config))} x {gpu.name}, {gpu.gib:.0f} GiB each"
    yield ""
    rows = list(step_timeline(shape, config, gpu, plan))
    yield from table(rows, gpu)
    yield ""
    learner, server = plan.learner, plan.server
    yield f"the learner's peak: {learner.peak.name}: {_sum_of_learner(plan)}"
    if learner.host:
        yield f"in host memory, each learner: {_gib(learner.host)} GiB (learner.cpu_offload)"
    yield f"in host memory, each node: {plan_node(shape, config).described()}"
    yield f"the KV cache holds {server.kv_tokens} tokens: {server.num_sequences} sequences of maximum length"
    step_s = step_seconds(config, rows)
    yield f"a step: about {step_s:.0f} s, if"
    yield from (f"  {assumption}" for assumption in ASSUMPTIONS)
    yield from cost_lines(config, step_s)


def cost_lines(config: Config, step_s: float) -> Iterator[str]:
    """Yield the price of all steps by the prices in `budget`; nothing without prices of GPUs or nodes."""
    prices, (num_gpus, num_nodes, hourly) = config.budget, hourly_price(config)
    if not hourly:
        return
    hours = config.train.num_steps * step_s / 3600
    yield (
        f"{config.train.num_steps} steps: about {hours:.1f} h on {num_gpus} GPUs in {num_nodes} node(s), "
        f"{hours * hourly:.2f} at {hourly:.2f} an hour, not counting the start, evaluations, remote "
        "sandboxes and judges behind a URL"
    )
    if prices.cap and hours * hourly > prices.cap:
        yield f"  more than budget.cap ({prices.cap:g}): the run would end after about {prices.cap / hourly:.1f} h"


def hourly_price(config: Config) -> tuple[int, int, float]:
    """Return the number of GPUs and of nodes that a run takes, and their price per hour by the prices in `budget`."""
    num_gpus = num_gpus_of(bundles_of(config))
    num_nodes = ceil(num_gpus / NODE_GPUS)
    return num_gpus, num_nodes, num_gpus * config.budget.gpu_hour + num_nodes * config.budget.node_hour


def step_seconds(config: Config, rows: list[PhaseRow]) -> float:
    """Return the seconds of a step. In asynchronous runs the slower of servers and learners counts."""
    servers = sum(row.speed.seconds for row in rows if row.phase == "generate")
    learners = sum(row.speed.seconds for row in rows) - servers
    return servers + learners if config.train.takes_turns else max(servers, learners)


COLUMNS = ("stays", "works", "vLLM", "KV cache", "graphs", "buffer", "sum", "seconds", "MFU")


def table(rows: list[PhaseRow], gpu: Gpu) -> Iterator[str]:
    """Yield a table of the GiB on one GPU, by phase (rows) and holder (columns)."""
    yield f"{'GiB on a GPU':<24}" + "".join(f"{name:>10}" for name in COLUMNS)
    for row in rows:
        cells = [_gib(getattr(row, holder)) if getattr(row, holder) else "-" for holder in HOLDERS]
        mfu = f"{row.speed.mfu(gpu):.1%}" if row.speed.flops else "-"
        cells += [_gib(row.total), f"{row.speed.seconds:.1f}", mfu]
        yield f"{row.phase + ' (' + row.gpu + ')':<24}" + "".join(f"{cell:>10}" for cell in cells)
    yield (
        "stays: the learner's memory between steps; works: further memory at its peak; "
        "buffer: weights being sent to the servers"
    )


def refusal_lines(config: Config, gpu: Gpu, plan: GpuPlan) -> Iterator[str]:
    """Yield the moments that need more memory than a GPU has."""
    needs = {"training": plan.training, "sending weights": plan.sending, "generating": plan.generating}
    for moment, need in needs.items():
        if need > plan.room:
            yield f"DOES NOT FIT {moment}: {_gib(need)} GiB, {_gib(need - plan.room)} more than a {gpu.name} has"
    if plan.server.num_sequences == 0:
        one = _gib(config.max_model_tokens * plan.server.kv_token_bytes)
        yield f"DOES NOT FIT a server: {_gib(plan.server.kv_cache)} GiB of KV cache are left; one sequence takes {one}"
    if not plan.fits:
        yield "what to lower, in this order: docs/learner.md#memory"


def _sum_of_learner(plan: GpuPlan) -> str:
    learner, peak = plan.learner, plan.learner.peak
    kinds = {"weights": learner.weights} | learner.frozen
    kinds |= {"gradients": learner.gradients, "optimizer": learner.optimizer}
    kinds |= {name: getattr(peak, name) for name in ("gathered", "activations", "head", "unreduced")}
    kinds |= {"CUDA": learner.runtime}
    return " + ".join(f"{_gib(size)} {name}" for name, size in kinds.items() if size)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if abs(num_bytes) < 10 * GIB else f"{num_bytes / GIB:.1f}"


def plan_on_cpu(config: Config) -> bool:
    """Print the memory and the seconds of a step that a run on this machine's CPU takes. Return True if it fits."""
    shape, have = model_shape(config), available_memory()
    plan = plan_host(shape, config, have)
    print(f"{shape.num_parameters / 1e6:.1f}M parameters in {shape.num_layers} layers, on this machine's CPU")
    print(f"  {config.learner.num_learners} learners        {_gib(plan.learners):>8} GiB, at the peak of a step")
    cache = f"{(config.server.kv_cache_bytes(on_gpu=False) or 0) / GIB:g} each of KV cache"
    print(f"  {config.server.num_servers} servers         {_gib(plan.servers):>8} GiB, {cache}")
    print(f"  object store      {_gib(plan.object_store):>8} GiB")
    print(f"  together          {_gib(plan.total):>8} GiB of {_gib(have)} that are available")
    generate_s, train_s = seconds_on_cpu(shape, config)
    print(f"  {explain_number_formats(config)}: a step takes about {generate_s + train_s:.0f} s (generate")
    print(f"  {generate_s:.0f}, train {train_s:.0f}), with every completion at its full length")
    if plan.total > have:
        print(f"DOES NOT FIT: {_gib(plan.total - have)} GiB too much: lower server.kv_cache_gib,")
        print("  cluster.object_store_mib or learner.max_tokens_per_microbatch, or recompute activations:")
        print("  learner.activation_checkpointing=true")
    print(*filter(None, [config.profile_note]), "On GPUs: rayapp plan CONFIG --gpu " + "|".join(GPUS), sep="\n")
    return plan.total <= have


@app.command(
    epilog="Examples:\n\n"
    "  rayapp plan configs/coding_8gpu.yaml --gpu h100\n\n"
    "  rayapp plan configs/coding_8gpu.yaml --gpu h100 --model-config qwen3-8b/config.json      (without a network)"
)
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(GPUS)}, or its figures, memory_gib=94,memory_gb_s=3900,tflops=835; default: this "
            "machine's GPUs. A config for CPU needs no GPU."
        ),
    ] = "",
    model_config: ModelConfig = None,
) -> None:
    """Print a step's GPU memory by phase, its time and cost. Exits with 1 if the config does not fit."""
    from rayapp.config.loading import load_config

    with with_model_config(load_config(config, overrides or []), model_config) as loaded, told_while_silent():
        kind = gpu_called(gpu) if gpu else None if loaded.cluster.device == "cpu" else gpu_here()
        if kind is None and loaded.cluster.device == "gpu":
            raise InputError(f"this machine has no GPU to plan for: name a kind of GPU with --gpu {'|'.join(GPUS)}")
        fits = plan_on_cpu(loaded) if kind is None else plan_command(loaded, kind)

    raise typer.Exit(0 if fits else EXIT_FAILED)

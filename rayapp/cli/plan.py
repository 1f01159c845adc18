"""`rayapp plan`: print the GPU memory and time that a config needs, by phase, from the model's config.json alone.

The arithmetic is in `rayapp/learner/memory/`; this file prints it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.cli.arguments import EXIT_FAILED, ConfigFile, ModelConfig, Overrides, with_model_config
from rayapp.config.agreement import CAPABILITIES, gpu_problems
from rayapp.config.bundles import bundles_of, gpu_arithmetic, num_gpus_of
from rayapp.config.config import Config, with_values
from rayapp.config.other_models import ModelServerSection
from rayapp.core.errors import InputError, UserError
from rayapp.core.machine import available_memory
from rayapp.learner.memory.nearest import (
    largest_micro_batch,
    largest_server_share,
    nearest_that_fits,
    overrides_between,
    without_autos,
)
from rayapp.learner.memory.plan import (
    GpuPlan,
    HostPlan,
    ServerPlan,
    plan_gpu,
    plan_host,
    plan_model_servers,
    plan_node,
    plan_server,
)
from rayapp.learner.memory.shape import GIB, GPUS, NODE_GPUS, Gpu, ModelShape, gpu_called, gpu_here, model_shape
from rayapp.learner.memory.speed import ASSUMPTIONS, HOLDERS, PhaseRow, generate, late, step_timeline
from rayapp.rollout.images import each_once, images_of_prompts
from rayapp.sandbox.providers import image_source

if TYPE_CHECKING:
    from rayapp.driver.forecast import Forecast, Plays

app = typer.Typer()

CALIBRATION = (
    "Compared with the learner's own step on fake tensors: within 10% (docs/learner.md). A learner's time and "
    "the overhead of a decoding step are those of an H100 (docs/results.md). The memory of CUDA and vLLM, and the "
    "other times, are assumptions; `rayapp gpu-check` compares them with measurements."
)


def plan_command(config: Config, gpu: Gpu, *, fake_tensors: bool = False) -> bool:
    """Print the plan for GPUs of this kind. Returns True if the config fits.

    Raises:
        InputError: the model is unknown.
    """
    shape, given = model_shape(config), config
    config = without_autos(shape, config, gpu)
    for override in overrides_between(given, config):
        key, _, value = override.partition("=")
        print(f"{key} is auto: planned with {value}")
    plan = plan_gpu(shape, config, gpu)
    for line in plan_lines(shape, config, gpu, plan):
        print(line)
    if fake_tensors:
        print(fake_tensors_line(config, plan))
    for line in () if plan.fits else refusal_lines(shape, config, gpu, plan):
        print(line)
    others = list(plan_model_servers(config, gpu.room))
    for section, server in others:
        print(model_server_line(section, server))
    wrong = gpu_problems(config, CAPABILITIES[gpu.name]) if gpu.name in CAPABILITIES else []
    for problem in wrong:
        print(f"CAN'T RUN {problem}")
    missed = list(late(config, generate(shape, config, gpu, plan.server).seconds))
    for line in missed:
        print(f"TOO LATE {line}")
    for line in (*image_lines(config), *filter(None, [config.profile_note])):
        print(line)
    print(CALIBRATION)
    return plan.fits and not wrong and not missed and all(server.kv_tokens for _, server in others)


COLUMNS_SIMULATED = ("s/step", "tokens/s", "servers idle", "learners idle", "staleness", "late", "cost/step")
LEGEND = """
tokens/s: sampled tokens that were trained. idle: share of the time without work; GPUs that servers and learners share
are idle in turns. staleness: versions, mean over groups; below the table, the share of groups of each. late:
trajectories dropped at the group's deadline. cost/step: GPUs and nodes by `budget`. Servers, store and groups run as in
a run; the seconds are the plan's (docs/scale.md)."""


def compare_variants(
    variants: Mapping[str, Config], gpu: Gpu, plays: Callable[[Config], Plays], num_steps: int
) -> bool:
    """Simulate each variant of the config, and print a table of their speeds. Returns True if all fit into memory."""
    for number, overrides in enumerate(variants):
        print(f"{number}: {overrides or 'as configured'}")
    print(f"\n{'':<3}" + "".join(f"{name:>15}" for name in COLUMNS_SIMULATED))
    fits, shares = True, list[str]()
    for number, given in enumerate(variants.values()):
        shape = model_shape(given)
        config = without_autos(shape, given, gpu)
        if plan_gpu(shape, config, gpu).fits:
            found = _simulated(shape, config, gpu, plays, num_steps)
            print(f"{number:<3}" + "".join(f"{cell:>15}" for cell in _cells(config, found)))
            shares.append(f"{number:<3}" + "   ".join(f"{age}: {share:.0%}" for age, share in found.staleness.items()))
        else:
            fits = False
            print(f"{number:<3} DOES NOT FIT: rayapp plan without --simulate shows why")
    print("\ngroups by staleness", *shares, LEGEND, sep="\n")
    return fits


def _simulated(
    shape: ModelShape, config: Config, gpu: Gpu, plays: Callable[[Config], Plays], num_steps: int
) -> Forecast:
    from rayapp.driver.forecast import Seconds, forecast

    return forecast(config, Seconds.planned(shape, config, gpu), plays(config), num_steps=num_steps)


def _cells(config: Config, found: Forecast) -> Iterator[str]:
    """Yield the cells of a variant's row in the table."""
    yield from (f"{found.step_s:.1f}", f"{found.tokens_per_s:.0f}", f"{found.servers_idle:.0%}")
    yield from (f"{found.learners_idle:.0%}", f"{found.mean_staleness:.2f}", str(found.num_late))
    *_, hourly = hourly_price(config)
    yield f"{hourly / 3600 * found.step_s:.3f}" if hourly else "-"


def model_server_line(section: ModelServerSection, server: ServerPlan) -> str:
    """Return a line with the memory that a model server takes on each of its GPUs."""
    refusal = "" if server.kv_tokens else "DOES NOT FIT "
    return (
        f"{refusal}model-server-{section.name}: {_gib(server.weights)} GiB weights + {_gib(server.runtime)} working, "
        f"room for {server.kv_tokens} tokens of KV cache, on {section.tensor_parallel_size} GPU(s) of its own"
    )


def plan_lines(shape: ModelShape, config: Config, gpu: Gpu, plan: GpuPlan) -> Iterator[str]:
    """Yield the plan as lines: memory and time of each phase, and the largest settings that fit."""
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
    most = largest_micro_batch(shape, config, gpu)
    yield (
        f"largest micro-batch that fits: {most} tokens"
        if most
        else "a micro-batch of the longest sequence does not fit"
    ) + f" (learner.max_tokens_per_microbatch is {config.learner.token_budget})"
    yield from share_lines(shape, config, gpu, plan)
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
        f"{hours * hourly:.2f} {prices.currency} at {hourly:.2f} an hour, not counting the start, evaluations, remote "
        "sandboxes, judges and a teacher behind a URL"
    )
    if prices.cap and hours * hourly > prices.cap:
        yield f"  more than budget.cap ({prices.cap:g}): the run would end after about {prices.cap / hourly:.1f} h"


def hourly_price(config: Config) -> tuple[int, int, float]:
    """Return the number of GPUs and of nodes that a run takes, and their price per hour by the prices in `budget`."""
    num_gpus = num_gpus_of(bundles_of(config))
    num_nodes = ceil(num_gpus / NODE_GPUS)
    return num_gpus, num_nodes, num_gpus * config.budget.gpu_hour + num_nodes * config.budget.node_hour


def step_seconds(config: Config, rows: list[PhaseRow]) -> float:
    """Return the seconds of a step. In asynchronous runs servers sample while the learners train, so the slower side
    counts."""
    servers = sum(row.speed.seconds for row in rows if row.phase == "generate")
    learners = sum(row.speed.seconds for row in rows) - servers
    return servers + learners if config.train.takes_turns else max(servers, learners)


def share_lines(shape: ModelShape, config: Config, gpu: Gpu, plan: GpuPlan) -> Iterator[str]:
    """Yield a line if servers could have a larger share of the GPU, with the time that generation would save."""
    now, most = config.server.gpu_share, largest_server_share(shape, config, gpu)
    if not plan.fits or most <= now:
        return
    larger = with_values(config, server={"gpu_memory_utilization": most})
    faster, slower = (generate(shape, each, gpu, plan_server(shape, each, gpu.room)) for each in (larger, config))
    yield (
        f"largest server.gpu_memory_utilization that fits: {most:g} (it is {now:g}): generating takes "
        f"{faster.seconds:.1f} s instead of {slower.seconds:.1f} s"
    )


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


def fake_tensors_line(config: Config, plan: GpuPlan) -> str:
    """Run the learner's own step on fake tensors and return its memory beside the plan's."""
    from rayapp.learner.memory.simulation import simulate_learner

    found, planned = simulate_learner(config), plan.learner.total - plan.learner.runtime
    return (
        f"on fake tensors, without CUDA: {_gib(found.peak)} GiB at the peak, {_gib(found.resident)} between steps; "
        f"planned: {_gib(planned)} and {_gib(plan.learner.resident - plan.learner.runtime)}"
    )


def refusal_lines(shape: ModelShape, config: Config, gpu: Gpu, plan: GpuPlan) -> Iterator[str]:
    """Yield the reasons why the config does not fit, and the nearest config that fits."""
    yield ""
    for what, need, terms in _needs(config, plan):
        if need > plan.room:
            excess = f"{_gib(need - plan.room)} more than a {gpu.name} has"
            yield f"DOES NOT FIT {what}: {terms} = {_gib(need)} GiB, {excess}"
    if plan.server.num_sequences == 0:
        server = plan.server
        yield (
            f"DOES NOT FIT a server: {_gib(plan.server_share)} GiB (server.gpu_memory_utilization) - "
            f"{_gib(server.weights)} weights - {_gib(server.runtime)} working leaves {_gib(server.kv_cache)} GiB of KV "
            f"cache; one sequence takes {_gib(config.max_model_tokens * server.kv_token_bytes)}"
        )
    nearest = nearest_that_fits(shape, config, gpu)
    if nearest is None:
        yield f"no combination of keys makes it fit on {gpu.name}: use larger GPUs, a smaller model, or adapters"
    else:
        yield f"the nearest that fits: {' '.join(overrides_between(config, nearest))}"


def _needs(config: Config, plan: GpuPlan) -> Iterator[tuple[str, int, str]]:
    """Yield phase, bytes needed, and the terms of their sum."""
    learner, server = plan.learner, plan.server
    asleep = f" + {_gib(server.asleep)} sleeping server" if plan.is_shared else ""
    yield "while training", plan.training, _sum_of_learner(plan) + asleep
    awake = f" + {_gib(server.asleep + server.weights)} server without its KV cache" if plan.is_shared else ""
    buffers = f"{_gib(learner.giving)} learner + {_gib(plan.transfer)} buffers"
    yield "while weights are sent", plan.sending, buffers + awake
    beside = plan.beside_server - server.graphs
    stays = f" + {_gib(beside)} learner while a replaced server gets its weights" if plan.is_shared else ""
    share = f"{_gib(plan.server_share)} server.gpu_memory_utilization {config.server.gpu_share:g}"
    yield "while generating", plan.generating, f"{share} + {_gib(server.graphs)} graphs{stays}"


def _sum_of_learner(plan: GpuPlan) -> str:
    learner, peak = plan.learner, plan.learner.peak
    kinds = {"weights": learner.weights} | learner.frozen
    kinds |= {"gradients": learner.gradients, "optimizer": learner.optimizer}
    kinds |= {name: getattr(peak, name) for name in ("gathered", "activations", "head", "unreduced")}
    kinds |= {"CUDA": learner.runtime}
    return " + ".join(f"{_gib(size)} {name}" for name, size in kinds.items() if size)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if abs(num_bytes) < 10 * GIB else f"{num_bytes / GIB:.1f}"


def image_lines(config: Config) -> Iterator[str]:
    """Yield lines with the number of images that the tasks need, and their size compared with the cache's limit; no
    lines without images."""
    section = config.sandbox.local
    try:
        names = each_once((*images_of_prompts(config), *images_of_prompts(config, held_out=True)))
    except UserError as error:
        yield f"images: not counted, because a task can't be used: {error}"
        return
    if not names or section is None:
        return
    cache = image_source(section)
    known = {image.digest: image.num_bytes for name in names if (image := cache.find(name)) is not None}
    num_bytes, limit = sum(known.values()), round(section.image_cache_gib * GIB)
    yield (
        f"images: the tasks need {len(names)}; {len(known)} are unpacked on this machine, with {_gib(num_bytes)} GiB. "
        f"Each node keeps at most {section.image_cache_gib:g} GiB (sandbox.providers[].image_cache_gib)"
    )
    expected = num_bytes // len(known) * len(names) if known else 0
    if expected > limit:
        yield (
            f"  all together about {_gib(expected)} GiB, more than the cache holds: nodes will pull images again and "
            f"again. Raise image_cache_gib, or spread the run over {ceil(expected / limit)} or more nodes"
        )


def plan_on_cpu(config: Config) -> bool:
    """Print the memory that a run on this machine's CPU takes. Returns True if it fits."""
    shape, have = model_shape(config), available_memory()
    plan = plan_host(shape, config, have)
    for line in (*host_lines(shape, config, plan, have), *image_lines(config), *filter(None, [config.profile_note])):
        print(line)
    return plan.total <= have


def host_lines(shape: ModelShape, config: Config, plan: HostPlan, have: int) -> Iterator[str]:
    """Yield the lines that describe a run on CPU."""
    yield f"{shape.num_parameters / 1e6:.1f}M parameters in {shape.num_layers} layers, on this machine's CPU"
    section, server = config.learner, config.server
    yield f"  {section.num_learners} learners        {_gib(plan.learners):>8} GiB, at the peak of a step"
    cache = f"{server.kv_cache_gib:g} each of KV cache"
    yield f"  {server.num_servers} servers         {_gib(plan.servers):>8} GiB, {cache}"
    yield f"  object store      {_gib(plan.object_store):>8} GiB"
    yield f"  together          {_gib(plan.total):>8} GiB of {_gib(have)} that are available"
    if plan.total > have:
        yield f"DOES NOT FIT: {_gib(plan.total - have)} GiB too much: lower server.kv_cache_gib,"
        yield "  cluster.object_store_mib or learner.max_tokens_per_microbatch, or recompute activations:"
        yield "  learner.activation_checkpointing=true"
    yield "On GPUs: rayapp plan CONFIG --gpu " + "|".join(GPUS)


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
    fake_tensors: Annotated[
        bool,
        typer.Option(
            "--fake-tensors", help="Also run the learner's own step on fake tensors: up to minutes, for any model"
        ),
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Simulate a run with the plan's seconds, and print its speed instead"),
    ] = False,
    against: Annotated[
        list[str] | None,
        typer.Option(help="With --simulate: overrides of a variant to compare, 'key=value key=value'. Repeatable."),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            help="With --simulate: completion tokens, from a run folder's trajectories, or MEDIAN or MEDIAN,SIGMA of a "
            "log-normal; default: a quarter of rollout.max_completion_tokens, 0.8"
        ),
    ] = "",
    tool_s: Annotated[
        float,
        typer.Option(min=0.0, help="With --simulate: mean seconds of tools and verdict, log-normal"),
    ] = 0.0,
    steps: Annotated[int, typer.Option(min=2, help="With --simulate: steps to count")] = 8,
) -> None:
    """Print a step's GPU memory by phase, its time, and the largest settings that fit. If the config does not fit,
    print the nearest config that fits, and exit with 1. Allocates nothing."""
    from rayapp.config.loading import load_config

    variants = ["", *(against or [])] if simulate else [""]
    with ExitStack() as opened:
        loaded, *others = (
            opened.enter_context(
                with_model_config(load_config(config, [*(overrides or ()), *shlex.split(variant)]), model_config)
            )
            for variant in variants
        )
        kind = gpu_called(gpu) if gpu else None if loaded.cluster.device == "cpu" else gpu_here()
        if kind is None and loaded.cluster.device == "gpu":
            raise InputError(f"this machine has no GPU to plan for: name a kind of GPU with --gpu {'|'.join(GPUS)}")
        if simulate:
            if kind is None:
                raise InputError("--simulate needs the figures of a GPU: add --gpu h100 and cluster.device=gpu")
            from rayapp.driver.forecast import plays_of

            of_variants = dict(zip(variants, [loaded, *others], strict=True))
            fits = compare_variants(of_variants, kind, partial(plays_of, lengths=lengths, tool_s=tool_s), steps)
        else:
            fits = plan_on_cpu(loaded) if kind is None else plan_command(loaded, kind, fake_tensors=fake_tensors)

    raise typer.Exit(0 if fits else EXIT_FAILED)

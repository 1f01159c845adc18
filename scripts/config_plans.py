"""Writes the plan of each config for GPUs into the head of the config: `python -m scripts.config_plans`. A test finds
stale plans.

The models' shapes come from `tests/data/architectures`, so that no model is downloaded.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rayapp.cli.plan import step_seconds
from rayapp.config.bundles import bundles_of, gpu_arithmetic
from rayapp.config.config import Config
from rayapp.config.loading import load_config
from rayapp.learner.memory.host import plan_node
from rayapp.learner.memory.plan import plan_gpu, without_autos
from rayapp.learner.memory.shape import GIB, Gpu, ModelShape, gpu_called, model_shape
from rayapp.learner.memory.speed import step_timeline

ROOT = Path(__file__).parents[1]
ARCHITECTURES = ROOT / "tests" / "data" / "architectures"
PLANNED = {
    "coding_1gpu": ("qwen2.5-1.5b", "rtx4090"),
    "coding_24gb": ("qwen2.5-7b", "rtx4090"),
    "coding_warmup_gpu": ("smollm2-135m", "h100"),
    "coding_8gpu": ("qwen2.5-3b", "h100"),
    "coding_8gpu_async": ("qwen2.5-3b", "h100"),
    "coding_2x8gpu": ("qwen2.5-3b", "h100"),
    "geometry3k_8gpu": ("qwen2.5-vl-7b", "h100"),
    "gsm8k_tool_8gpu": ("qwen2.5-3b", "h100"),
    "long_8gpu": ("qwen3-8b", "h100"),
    "moe_8gpu": ("qwen3-30b-a3b", "h200"),
    "swe_8gpu": ("qwen2.5-7b", "h100"),
}
"""Config -> shape of its model, and its GPU."""
FIRST, LAST = "# -- rayapp plan", "# --\n"
WITHOUT_DATA = ("tasks=[sort_numbers]", "eval.tasks=[]", "agent.tool_file=''", "reward.custom=''")


def planned(name: str) -> tuple[ModelShape, Config, Gpu]:
    """Return the shape of the config's model, the config with all `auto` replaced by numbers, and its GPU."""
    architecture, kind = PLANNED[name]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ARCHITECTURES / f"{architecture}.json", Path(folder) / "config.json")
        config = load_config(ROOT / "configs" / f"{name}.yaml", [f"model.path={folder}", *WITHOUT_DATA])
        shape, gpu = model_shape(config), gpu_called(kind)
        return shape, without_autos(shape, config, gpu), gpu


def plan_comment(name: str) -> str:
    """Return the plan of a config as the lines of a comment."""
    return (
        f"{FIRST} configs/{name}.yaml --gpu {PLANNED[name][1]}\n"
        + "".join(f"# {line}\n" for line in _lines(name))
        + LAST
    )


def _lines(name: str) -> Iterator[str]:
    shape, config, gpu = planned(name)
    plan = plan_gpu(shape, config, gpu)
    rows = list(step_timeline(shape, config, gpu, plan))
    yield f"{shape.num_parameters / 1e9:.2f}B parameters; {gpu_arithmetic(bundles_of(config))} x {gpu.name}"
    for row in rows:
        if row.speed.seconds >= 0.05:
            mfu = f", MFU {row.speed.mfu(gpu):.0%}" if row.speed.flops else ""
            yield f"{row.phase}: {row.total / GIB:.0f} of {gpu.gib:.0f} GiB, {row.speed.seconds:.1f} s{mfu}"
    yield (
        f"a step: {step_seconds(config, rows):.0f} s if every completion has its full length; each server's KV cache "
        f"holds {plan.server.num_sequences} of these sequences"
    )
    yield f"host memory of a node: {plan_node(shape, config).total / GIB:.0f} GiB"


def with_plan(name: str, text: str) -> str:
    """Return a config's text with its present plan. The plan replaces an older plan, or follows the first comment."""
    if FIRST in text:
        before, _, rest = text.partition(FIRST)
        return before + plan_comment(name) + rest.partition(LAST)[2]
    lines = text.splitlines(keepends=True)
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "".join([*lines[:end], plan_comment(name), *lines[end:]])


def main() -> None:
    for name in PLANNED:
        file = ROOT / "configs" / f"{name}.yaml"
        file.write_text(with_plan(name, file.read_text()))


if __name__ == "__main__":
    main()

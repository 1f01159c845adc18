"""A checkpoint where a model is wanted: `rayapp eval --model outputs/mine/checkpoints/step=000020`. Called by the CLI.

A checkpoint saved with `hf_model` holds such a folder; of any other one is made, beside nothing and for as long as it
is needed, from the base model that the run's own config.yaml names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rayapp.cli.arguments import ConfigFile, Overrides
from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.runs.checkpoints import Checkpoint, CheckpointFolder, damage
from rayapp.storage.folders import MANIFEST

app = typer.Typer()
_NO_DATA = (
    "data.train_files=[]",
    "data.eval_files=[]",
    "sources=[]",
    "eval.tasks=[]",
    "warmup.num_steps=0",
    'agent.tool_file=""',
)


@contextmanager
def with_checkpoint_as_model(config: Config) -> Iterator[Config]:
    """The configuration with `model.path` a model folder. Does nothing where it names no checkpoint.

    Raises:
        InputError: the checkpoint is torn or damaged, holds no weights, or its run's config.yaml is not there.
        CheckpointError: its weights can't be read.
    """
    path = Path(config.model.path)
    if not path.name.startswith("step=") or not path.is_dir():
        yield config
        return
    checkpoint = _whole(path, config)
    if (path / "hf_model").is_dir():
        yield _with_model(config, path / "hf_model")
        return
    if "model" not in checkpoint.contents:
        raise InputError(f"checkpoint {path} holds {', '.join(checkpoint.contents)} and no weights to evaluate")
    with tempfile.TemporaryDirectory(prefix="rayapp-eval-") as folder:
        _convert(path, Path(folder))
        yield _with_model(config, Path(folder))


def _whole(path: Path, config: Config) -> Checkpoint:
    found = {one.path.name: one for one in CheckpointFolder(path.parent, config.checkpoint).whole()}
    if path.name not in found:
        raise InputError(
            f"checkpoint {path} is not whole: its {MANIFEST} is missing or names files that are not there as written. "
            f"Whole ones there: {', '.join(found) or 'none'}."
        )
    if wrong := damage(path):
        raise InputError(f"checkpoint {path} can't be evaluated: {wrong}. Take another one.")
    return found[path.name]


def _convert(path: Path, out: Path) -> None:
    from rayapp.config.loading import load_config
    from rayapp.driver.offline.sft import after_warmup
    from rayapp.learner.state.convert import checkpoint_to_hf  # loads torch: seconds

    file = path.parent.parent / "config.yaml"
    if not file.is_file():
        raise InputError(f"checkpoint {path} was saved without hf_model, and its run's {file}, which names the base "
                         "model, is not there: evaluate it in its run folder")  # fmt: skip
    checkpoint_to_hf(after_warmup(load_config(file)), path / "learner", out)


def _with_model(config: Config, folder: Path) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


@app.command(
    name="eval",
    epilog="Examples:\n\n"
    "  rayapp eval configs/coding_cpu.yaml\n\n"
    "  rayapp eval configs/coding_cpu.yaml --model outputs/coding_cpu/final --samples 64\n\n"
    "  rayapp eval configs/coding_cpu.yaml --benchmark humaneval --samples 10\n\n"
    "  rayapp eval configs/coding_cpu.yaml --benchmark mbpp=mbpp.jsonl",
)
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Evaluate this model or checkpoint (checkpoints/step=…) instead of the config's")
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(help="Evaluate humaneval or mbpp=FILE instead of the config's tasks; NAME:completion for no chat"),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Completions per task or data row; default eval.samples_per_task")
    ] = None,
) -> None:
    """Sample completions of every task or evaluation row, score them, and print the metrics with pass@k as JSON."""
    import json

    from rayapp.config.loading import load_config

    options = [f"model.path={json.dumps(model)}"] if model else []
    options += [f"eval.samples_per_task={samples}"] if samples else []
    # The benchmark's prompts are asked once, without tools, whatever the run would do.
    options += [f"tasks=[{json.dumps(f'benchmark:{benchmark}')}]", *_NO_DATA] if benchmark else []
    loaded = load_config(config, [*(overrides or ()), *options])
    from rayapp.driver.evaluation import run_evaluation

    with with_checkpoint_as_model(loaded) as ready:
        metrics = run_evaluation(ready)
    typer.echo(json.dumps(metrics, indent=2))

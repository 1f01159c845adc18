"""`rayapp eval`: what a model or a checkpoint can do, as numbers, and as texts in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayapp.cli.arguments import ConfigFile, Overrides

app = typer.Typer()
_NO_DATA = (
    "data.train_files=[]",
    "data.eval_files=[]",
    "sources=[]",
    "eval.tasks=[]",
    "warmup.num_steps=0",
    'agent.tool_file=""',
)


@app.command(
    name="eval",
    epilog="Examples:\n\n"
    "  rayapp eval configs/coding_cpu.yaml\n\n"
    "  rayapp eval configs/coding_cpu.yaml --model outputs/coding_cpu/final --samples 64\n\n"
    "  rayapp eval configs/coding_cpu.yaml --out eval && rayapp view eval\n\n"
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
    out: Annotated[
        Path | None, typer.Option(help="Folder for what was sampled, with its verdicts: rayapp view FOLDER")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Completions per task or data row; default eval.samples_per_task")
    ] = None,
) -> None:
    """Sample completions of every task or evaluation row, score them, and print the metrics with pass@k as JSON."""
    import json

    from rayapp.api.checkpoint_model import with_checkpoint_as_model
    from rayapp.config.loading import load_config
    from rayapp.driver.evaluation import run_evaluation

    options = [f"model.path={json.dumps(model)}"] if model else []
    options += [f"eval.samples_per_task={samples}"] if samples else []
    # The benchmark's prompts are asked once, without tools, whatever the run would do.
    options += [f"tasks=[{json.dumps(f'benchmark:{benchmark}')}]", *_NO_DATA] if benchmark else []
    with with_checkpoint_as_model(load_config(config, [*(overrides or ()), *options])) as ready:
        metrics = run_evaluation(ready, out)
    typer.echo(json.dumps(metrics, indent=2))

"""`rayapp train` trains, `rayapp eval` evaluates a model or checkpoint, `rayapp sft` trains on demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayapp.cli.arguments import ConfigFile, Overrides, say_at_once
from rayapp.core.errors import EXIT_FAILED
from rayapp.core.names import load_extra

app = typer.Typer()


@app.command(
    epilog="Examples:\n\n"
    "  rayapp train configs/coding_cpu.yaml\n\n"
    "  rayapp train configs/coding_cpu.yaml run.name=seed1 run.seed=1 train.num_steps=50\n\n"
    "  RAY_ADDRESS=auto rayapp train configs/coding_cpu.yaml     (on a running Ray cluster)\n\n"
    "  rayapp train configs/coding_8gpu.yaml --smoke     (two steps, with their speed and memory; docs/scale.md)\n\n"
    "  rayapp train --verl gsm8k_multiturn_grpo.yaml data.train_batch_size=16\n\n"
    "  rayapp train --verl run_qwen3_8b.sh trainer.nnodes=1     (a launch script: it runs in a sandbox)\n\n"
    "  rayapp train --verl algorithm.adv_estimator=grpo data.train_files=train.parquet ...     (a launch script's)"
)
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Train two steps, and print their speed and memory beside the plan")
    ] = False,
    verl: Annotated[
        bool,
        typer.Option("--verl", help="CONFIG (optional) and the overrides are verl's: see rayapp config import-verl"),
    ] = False,
) -> None:
    """Train as CONFIG says. If the run has a checkpoint, continue from the last one (run.resume)."""
    from rayapp.config.loading import load_config

    given = overrides or []
    loaded = load_extra("verl.command:runnable")(config, given) if verl else load_config(config, given)
    if smoke:
        from rayapp.cli.smoke import smoke as run_smoke

        raise typer.Exit(0 if run_smoke(loaded) else EXIT_FAILED)
    say_at_once("importing torch and Ray, then checking model, data and packages")
    from rayapp.api.running import train as run

    run(loaded)


_NO_DATA = (
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
        Path | None, typer.Option(help="Folder for the completions and verdicts, to read with: rayapp view FOLDER")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Completions per task or data row; default eval.samples_per_task")
    ] = None,
) -> None:
    """Sample completions of every task or evaluation row, score them, and print the metrics with pass@k as JSON."""
    import json

    say_at_once("importing torch and Ray, then checking model and data")
    from rayapp.api.running import evaluation_of
    from rayapp.config.loading import load_config

    options = [f"model.path={json.dumps(model)}"] if model else []
    options += [f"eval.samples_per_task={samples}"] if samples else []
    # A benchmark's prompts are answered in a single turn without tools, whatever the config's agent is.
    options += [f"tasks=[{json.dumps(f'benchmark:{benchmark}')}]", *_NO_DATA] if benchmark else []
    metrics = evaluation_of(load_config(config, [*(overrides or ()), *options]), out)
    typer.echo(json.dumps(metrics, indent=2))


@app.command(
    epilog="Examples:\n\n"
    "  rayapp sft configs/coding_warmup_cpu.yaml      (the first phase of rayapp train with this config)\n\n"
    "  rayapp sft mine.yaml warmup.files='[chats.jsonl]' warmup.num_steps=500 warmup.rows_per_step=32"
)
def sft(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train on demonstrations as section `warmup` of CONFIG says. Writes the model to OUTPUT_DIR/NAME-sft/final.

    If the command is called again, it continues from the last checkpoint. `rayapp train` with the same CONFIG starts
    from that model.
    """
    say_at_once("importing torch and Ray, then checking model and data")
    from rayapp.api.running import sft as run

    run(config, overrides or [])

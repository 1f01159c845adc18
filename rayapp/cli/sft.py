"""`rayapp sft`: supervised steps on demonstrations, alone."""

from __future__ import annotations

import typer

from rayapp.cli.arguments import ConfigFile, Overrides

app = typer.Typer()


@app.command(
    epilog="Examples:\n\n"
    "  rayapp sft configs/coding_warmup_cpu.yaml      (what rayapp train does first with this config)\n\n"
    "  rayapp sft mine.yaml warmup.files='[chats.jsonl]' warmup.num_steps=500 warmup.rows_per_step=32\n\n"
    "  rayapp data from-run outputs/mine --min-reward 1 --out best.parquet      (rejection sampling: then\n\n"
    "  rayapp sft mine.yaml run.name=mine2 warmup.files='[best.parquet]' warmup.num_steps=100)"
)
def sft(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train on demonstrations as the section `warmup` of CONFIG says; the model is OUTPUT_DIR/NAME-sft/final.

    Called again it goes on from the last checkpoint. `rayapp train` with the same CONFIG starts from that model.
    """
    from rayapp.api.running import sft as run

    run(config, overrides or [])

"""`rayapp train`: a whole run, or the learner alone on recorded trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rayapp.config.config import Config
from rayapp.cli.arguments import ConfigFile, Overrides

app = typer.Typer()


@app.command(
    epilog="Examples:\n\n"
    "  rayapp train configs/coding_cpu.yaml\n\n"
    "  rayapp train configs/coding_cpu.yaml run.name=seed1 run.seed=1 train.num_steps=50\n\n"
    "  RAY_ADDRESS=auto rayapp train configs/coding_cpu.yaml     (on a Ray that runs already)\n\n"
    "  rayapp train configs/coding_cpu.yaml --replay outputs/coding_cpu     (only the learner, see docs/learner.md)\n\n"
    "  rayapp train --verl gsm8k_multiturn_grpo.yaml data.train_batch_size=16"
)
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Train on the recorded trajectories of this run folder: no server, no sandbox"
        ),
    ] = None,
    verl: Annotated[
        bool, typer.Option("--verl", help="CONFIG and overrides are verl's; see rayapp config import-verl")
    ] = False,
) -> None:
    """Train as CONFIG says. Called again it goes on from the last checkpoint of the run (run.resume)."""
    from rayapp.config.loading import load_config

    loaded = _load_verl(config, overrides or []) if verl else load_config(config, overrides or [])
    if replay is not None:
        from rayapp.driver.offline.replay import run_replay

        run_replay(loaded, replay)
        return
    from rayapp.api.running import train as run

    run(loaded)


def _load_verl(config: Path, overrides: list[str]) -> Config:
    from rayapp.cli.verl import print_table
    from rayapp.config.verl.importing import import_verl

    imported = import_verl(config, overrides)
    print_table(imported)
    return imported.config

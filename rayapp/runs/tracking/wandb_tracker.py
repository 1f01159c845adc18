"""Weights & Biases, offline unless the configuration says otherwise: files in `<run>/wandb`, sent with `wandb sync`."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import wandb

from rayapp.runs.tracking.resumable import remembered_id


class WandbTracker:
    """Logs to one W&B run, the same one when our run resumes.

    Args:
        folder: the run folder; its name is the run's.
        project: W&B project.
        mode: online needs WANDB_API_KEY.
        parameters: the flattened configuration.
    """

    def __init__(
        self, folder: Path, *, project: str, mode: Literal["offline", "online"], parameters: Mapping[str, str]
    ) -> None:
        run_id = remembered_id(folder, "wandb", lambda: secrets.token_hex(8))
        self._run = wandb.init(
            dir=str(folder),
            project=project,
            name=folder.name,
            id=run_id,
            resume="allow",
            mode=mode,
            config=dict(parameters),
            # What the process prints, its code and the machine's load are none of a tracker's business.
            settings=wandb.Settings(
                silent=True, console="off", save_code=False, disable_git=True, x_disable_stats=True, init_timeout=60.0
            ),
        )
        # Our steps as the axis: W&B's own counter only grows, and would drop the steps that a resumed run takes again.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({key: value for key, value in metrics.items() if math.isfinite(value)} | {"step": step})

    def close(self) -> None:
        self._run.finish()
        # W&B's own process writes the file, and may still be at it: this waits until it has ended.
        wandb.teardown()

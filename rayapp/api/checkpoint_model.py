"""A checkpoint where a model is wanted: `rayapp eval --model outputs/mine/checkpoints/step=000020`.

A checkpoint saved with `hf_model` holds such a folder; of any other one is made, beside nothing and for as long as it
is needed, from the base model that the run's own config.yaml names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayapp.config.config import Config, with_values
from rayapp.core.errors import InputError
from rayapp.runs.checkpoints import Checkpoint, CheckpointFolder, damage
from rayapp.storage.folders import MANIFEST


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
        yield with_values(config, model={"path": str(path / "hf_model")})
        return
    if "model" not in checkpoint.contents:
        raise InputError(f"checkpoint {path} holds {', '.join(checkpoint.contents)} and no weights to evaluate")
    with tempfile.TemporaryDirectory(prefix="rayapp-eval-") as folder:
        _convert(path, Path(folder))
        yield with_values(config, model={"path": folder})


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

"""A run of the real driver, store, workers and sandbox pool, with stand-ins for servers and learners. Several
benchmarks share it.

Nothing is learned and no model is loaded. The tokenizer has one token per character, and a trajectory's verdict takes
only the seconds of a simulated tool.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayapp.config.config import Config
from rayapp.driver.cluster import Cluster, StandIns, open_cluster
from rayapp.driver.loop import train
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking.trackers import make_trackers

TASK = '''
"""Pays for the letter a, after a simulated tool call: log-normal seconds, from the group's seed and the text."""

import asyncio
import random
from dataclasses import dataclass

import numpy as np

from rayapp.core.types import Prompt, Reward


@dataclass(frozen=True)
class Simulated:
    name: str
    mean_s: float
    sigma: float

    def render(self, tokenizer):
        text = "write the letter"
        return Prompt(task=self.name, text=text, token_ids=np.array(tokenizer.encode(text), np.int32))

    async def score(self, prompt, completion_text, sandboxes, *, seed):
        if self.mean_s:
            # A log-normal's mean is exp(mu + sigma^2 / 2).
            draw = random.Random(f"{seed} {completion_text}").gauss(-self.sigma**2 / 2, self.sigma)
            await asyncio.sleep(self.mean_s * float(np.exp(draw)))
        value = len(completion_text) / 4
        return Reward(value=value, terms={"pass_rate": min(1.0, value), "solved": float(value >= 1)})


TASK = Simulated(name="simulated", mean_s=MEAN_S, sigma=SIGMA)
'''


def write_tokenizer(folder: Path) -> None:
    """Write a Hugging Face folder that has a tokenizer of single characters, and no model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<eos>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def run(
    sections: dict[str, Any],
    stand_ins: StandIns,
    *,
    tool_mean_s: float = 0.0,
    tool_sigma: float = 0.6,
    on_step: Callable[[Cluster], None] = lambda cluster: None,
) -> list[dict[str, float]]:
    """Train on stand-ins in a new folder.

    Args:
        sections: sections of the configuration.
        on_step: function that is called after every step, e.g. to measure memory.
    Returns:
        The metrics of each step.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder) / "model")
        task = Path(folder) / "task.py"
        task.write_text(TASK.replace("MEAN_S", repr(tool_mean_s)).replace("SIGMA", repr(tool_sigma)))
        base = {
            "run": {"output_dir": folder, "name": "benchmark"},
            "model": {"path": str(Path(folder) / "model")},
            "tasks": [str(task)],
            # Never use a running Ray: it may be busy with another job, or end with that job.
            "cluster": {"device": "cpu", "address": "local"},
            "checkpoint": {"every_steps": 0},
            "tracking": {"trackers": ["jsonl"]},
        }
        config = Config.model_validate(base | {name: base.get(name, {}) | s for name, s in sections.items()})
        asyncio.run(_train(config, stand_ins, on_step))
        return [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]


class _Ticker:
    """A tracker that calls a function at every step."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def log(self, step: int, metrics: Any) -> None:
        self._call()

    def close(self) -> None:
        return


async def _train(config: Config, stand_ins: StandIns, on_step: Callable[[Cluster], None]) -> None:
    with RunFolder.open(config) as folder, make_trackers(config, folder) as tracker:
        async with open_cluster(config, stand_ins=stand_ins) as cluster:
            tracker.add("ticker", _Ticker(lambda: on_step(cluster)))
            await train(config, cluster, folder, tracker)

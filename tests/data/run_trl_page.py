"""Runs the script of docs/migrate-from-trl.md with TRL's GRPOConfig, and prints the run that it would train.

Called by tests/unit/extras/trl/test_trl.py with a file of TRL's lines and a file of rayapp's. No trainer starts.
"""

import sys
from functools import partial
from pathlib import Path

import trl

import rayapp


class Trainer:
    """Takes what GRPOTrainer takes."""

    def __init__(self, *, args, model, reward_funcs, train_dataset, **parts):
        assert isinstance(args, Config)
        assert parts.keys() <= {"eval_dataset", "peft_config"}

    def train(self):
        pass


Config = trl.GRPOConfig
trl.GRPOConfig = partial(Config, bf16=False)  # TRL refuses its own default, bfloat16, on a machine without a GPU
trl.GRPOTrainer = Trainer
rayapp.train = lambda run: print(run.config.model_dump_json())
sys.path.insert(0, "")
names = {}
before, after = (Path(file).read_text() for file in sys.argv[1:])
exec(before, names)
sys.stdout = sys.stderr  # its print shows the table of fields
exec(after.replace("rayapp.train(run)", ""), names)
sys.stdout = sys.__stdout__
rayapp.train(names["run"])

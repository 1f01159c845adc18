"""Runs the script of docs/migrate-from-trl.md with TRL's GRPOConfig, and prints the run that it would train.

Called by tests/unit/api/test_trl.py with the file of TRL's lines and the file of rayapp's. Neither trainer starts.
"""

import sys
from functools import partial
from pathlib import Path

import trl

import rayapp


class Trainer:
    """Takes what GRPOTrainer takes."""

    def __init__(self, *, args, model, reward_funcs, train_dataset, eval_dataset, peft_config):
        assert isinstance(args, Config)

    def train(self):
        pass


Config = trl.GRPOConfig
trl.GRPOConfig = partial(Config, bf16=False)  # TRL refuses its own default, bfloat16, on a machine without a GPU
trl.GRPOTrainer = Trainer
rayapp.train = lambda run: print(run.config.model_dump_json())
before, after = map(Path, sys.argv[1:])
names = {}
exec(before.read_text(), names)
sys.stdout = sys.stderr  # its print shows the table of fields
exec(after.read_text().replace("rayapp.train(run)", ""), names)
sys.stdout = sys.__stdout__
rayapp.train(names["run"])

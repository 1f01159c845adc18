"""examples/minimal.py trains."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import rayapp

MINIMAL = Path(__file__).parents[3] / "examples" / "minimal.py"
TASK = """
name: seven
prompt: "def seven(x):\\n    return "
func_name: seven
prompt_format: completion
tests: ["0", "rng.randint(1, 99)"]
reference: "7"
"""
"""One character answers it: each digit and `x` make a function, most other characters a syntax error."""


async def test_the_loop_on_one_screen_learns_which_characters_are_answers(tiny_model: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("minimal", MINIMAL)
    assert spec is not None
    assert spec.loader is not None
    minimal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimal)
    (tmp_path / "seven.yaml").write_text(TASK)
    settings = [f"model.path={tiny_model}", f"tasks=[{tmp_path}/seven.yaml]", "train.num_steps=8"]
    lengths = ["rollout.max_prompt_tokens=64", "rollout.max_completion_tokens=1", "rollout.group_size=32"]
    learner = ["learner.max_tokens_per_microbatch=4096", "learner.optimizer.lr=3.0e-3"]

    rewards = await minimal.train(rayapp.load_config(None, [*settings, *lengths, *learner]))

    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.5

"""What a notebook does, as a program: a task defined here, in a running event loop; stand-ins for servers and
learners: driver, workers, store, folder and the way out are the real ones.

Called by tests/e2e/test_python_api.py with a model and a folder. Prints what happened as JSON.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil

import rayapp
from rayapp.core.types import Prompt
from rayapp.driver import loop
from rayapp.driver.cluster import open_cluster

sys.path.append(str(Path(__file__).parents[1]))
from support.stand_ins import stand_ins

MODEL, FOLDER = sys.argv[1:]
loop.open_cluster = partial(open_cluster, stand_ins=stand_ins(completion_s=0.05, step_s=0.05))
SETTINGS = {
    "run": {"name": "mine", "output_dir": f"{FOLDER}/outputs"},
    "model": {"path": MODEL},
    "cluster": {"device": "cpu"},
    "rollout": {"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 16},
    "train": {"groups_per_step": 2, "num_steps": 6},
    "learner": {"max_tokens_per_microbatch": 256, "compute_dtype": "float32", "optimizer": {"lr": 3e-3}},
    "checkpoint": {"every_steps": 0},
}


@dataclass(frozen=True)
class Letters:
    """Pays for the length of the text: no other process can import it."""

    name: str = "letters"

    def render(self, tokenizer):
        return Prompt(task=self.name, text="write", token_ids=np.array(tokenizer.encode("write"), np.int32))

    async def score(self, prompt, completion_text, sandboxes, *, seed):
        return rayapp.Reward(value=float(len(completion_text)), terms={"solved": 0.0, "pass_rate": 0.0})


async def notebook() -> dict[str, object]:
    said: dict[str, object] = {}

    def stop_after_two(step, metrics):
        said["stopped_after"] = step
        if step == 2:
            raise rayapp.StopTraining

    run = rayapp.train(SETTINGS, tasks=[Letters()], on_step=stop_after_two)
    said["has_model"] = (Path(run.uri) / "final" / "rayapp.json").is_file() and len(run.metrics) == 2

    async def fail_at_three(step, metrics):
        raise ValueError("no more of this")

    try:
        await asyncio.to_thread(rayapp.train, SETTINGS, tasks=[Letters()], on_step=fail_at_three)
    except ValueError as error:
        said["failed_with"] = str(error)

    rayapp.train(SETTINGS, tasks=[Letters()])
    return said


said = asyncio.run(notebook())
psutil.wait_procs(psutil.Process().children(recursive=True), timeout=20)
said["left"] = [child.name() for child in psutil.Process().children(recursive=True)]
print(json.dumps(said))

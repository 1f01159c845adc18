"""Programs with known verdicts, and the tasks that score them: a fault run compares its verdicts with these."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from rayapp.core.types import Prompt, Reward
from rayapp.tasks.coding import CodingTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A completion and its true reward."""

    name: str
    code: str
    value: float
    statuses: tuple[str, ...] = ("scored",)
    is_endless: bool = False
    weight: int = 10
    """Weight with which it is drawn, relative to the others."""

    def agrees(self, reward: Reward) -> bool:
        """True if a valid reward is the one this program earns."""
        return reward.value == self.value and reward.status in self.statuses


_KILL_PARENTS = "import os, signal\ndef square(x):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return x * x"
_NOISE = (
    "import sys\ndef square(x):\n    print('{\"passed\": true}')\n    sys.stderr.write('e' * 2000)\n    return x * x"
)
PROGRAMS = (
    Program(name="right", code="def square(x):\n    return x * x", value=1.0, weight=40),
    Program(name="right but noisy", code=_NOISE, value=1.0),
    Program(name="half", code="def square(x):\n    return x * x if x > 2 else 0", value=0.5, weight=20),
    Program(name="another type", code="def square(x):\n    return float(x * x)", value=0.0),
    Program(name="raises", code="def square(x):\n    raise ValueError(x)", value=-1.0, statuses=("error",)),
    Program(name="exits", code="import os\ndef square(x):\n    os._exit(0)", value=-1.0, statuses=("error",)),
    Program(name="kills its watcher", code=_KILL_PARENTS, value=-1.0, statuses=("error",), weight=3),
    Program(
        name="never ends",
        code="def square(x):\n    while True:\n        pass",
        value=-1.0,
        statuses=("timeout",),
        is_endless=True,
        weight=1,
    ),
)


def draw_program(rng: random.Random) -> Program:
    """Draw one program."""
    return rng.choices(PROGRAMS, weights=[program.weight for program in PROGRAMS])[0]


def square_task(*, timeout_s: float) -> CodingTask:
    """Return the task that every program answers: four tests, of which `half` passes two."""
    return CodingTask(
        name="square",
        prompt="Write square(x).",
        func_name="square",
        signature="def square(x):",
        prompt_format="chat",
        tests=("1", "2", "3", "4"),
        reference="x * x",
        timeout_s=timeout_s,
    )


def square_prompt() -> Prompt:
    """Return the prompt of `square_task`: empty, as no model reads it."""
    return Prompt(task="square", text="", token_ids=np.zeros(0, np.int32))

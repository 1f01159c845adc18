"""A learner's step on a processor without AVX-512 and bfloat16, which two variables imitate anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
from actors.learner import Learner
from rayapp.config.config import Config
from rayapp.core.trajectories import summarize_group
from rayapp.learner.shares import Share
from support import make

learner = Learner(Config.model_validate({"model": {"path": sys.argv[1]}, "learner": {"cpu_threads": 1}}), 0, 1, "", 0)
group = make.group(*(make.trajectory([72, 75, 84, last], 2, reward=float(last == 85)) for last in (85, 86)))
metrics = learner.train_step(1, (summarize_group(group, time_total_s=0.0),), ((Share(0),),), group)
sent = {entry[1] for bucket in learner.export_weights(1, 1 << 20) for entry in bucket.entries}
print(json.dumps({"format": learner._learner.config.learner.compute_dtype, "sent": sorted(sent), **metrics}))
"""


def test_a_step_on_a_processor_without_bfloat16_computes_and_sends_float32(tiny_model: Path) -> None:
    narrow = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_model)],
        env=os.environ | narrow, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["format"], found["sent"]) == ("float32", ["float32"])
    assert found["learner/grad_norm"] > 0

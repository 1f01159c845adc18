"""`rayapp eval CONFIG --benchmark humaneval`, whole, of a policy whose odds are known: sandboxes, estimate, and with
-m long vLLM; on every run the servers say what a script says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.runs.tracking.metrics import pass_at_k

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
DEADLINE_S = 600.0
NUM_SAMPLES = 4
SUM, DIFFERENCE = "    return a + b", "    return a - b"
PROBLEMS = [
    {
        "task_id": f"HumanEval/{number}",
        "prompt": f'def {name}(a, b):\n    """The {name} of two integers."""\n',
        "entry_point": name,
        "canonical_solution": f"{body}\n",
        "test": f"def check(candidate):\n    assert candidate(5, 3) == {wanted}\n    assert candidate(0, 0) == 0\n",
    }
    for number, (name, body, wanted) in enumerate([("sum_of", SUM, 8), ("difference_of", DIFFERENCE, 2)])
]


def test_humaneval_of_a_policy_that_is_right_half_of_the_time(
    tmp_path: Path,
    policy_of: Callable[[Mapping[str, float]], Path],
    short_run: Callable[..., dict[str, Any]],
    running_ray: Any,
) -> None:
    problems, config, log = tmp_path / "HumanEval.jsonl", tmp_path / "config.yaml", tmp_path / "log"
    problems.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    rollout = {"max_prompt_tokens": 100, "max_completion_tokens": 8}
    config.write_text(yaml.safe_dump(short_run(tmp_path, rollout=rollout)))
    model = policy_of({SUM: 12.0, DIFFERENCE: 12.0})

    evaluating = running_ray.run(
        *(*running_ray.program[:-1], "eval", str(config), "--model", str(model)),
        *("--benchmark", f"humaneval={problems}", "--samples", str(NUM_SAMPLES)),
        log=log,
        SCRIPTS=json.dumps([[SUM], [DIFFERENCE]]),
    )

    assert evaluating.wait(timeout=DEADLINE_S) == 0, log.read_text()
    output = log.read_text()
    found, _ = json.JSONDecoder().raw_decode(output[output.index("{\n") :])
    assert found["pass_prompts/humaneval"] == len(PROBLEMS)
    estimates = [found[f"pass_at_{k}/humaneval"] for k in (1, 2, 4)]
    assert 0.0 < estimates[0] < 1.0, estimates
    assert estimates[0] == found["reward/mean"]
    # They are the estimates of some numbers of right samples, one for each problem.
    assert any(
        estimates == [pytest.approx(sum(pass_at_k(NUM_SAMPLES, c, k) for c in right) / 2) for k in (1, 2, 4)]
        for right in product(range(NUM_SAMPLES + 1), repeat=2)
    ), estimates

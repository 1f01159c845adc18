"""A whole run whose agents are programs: in sandboxes, and beside the rollout worker, which is killed meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rayapp.core.types import RolloutStatus
from support.whole_runs import groups_of, lives, records, wait_until, write_rows

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(3600)]
DEADLINE_S = 600.0
ROOT = Path(__file__).parents[2]
SCRIPTED = ROOT / "tests" / "data" / "with_scripted_servers.py"
NUM_STEPS = 3
ASK = """
import json, os, sys, time, urllib.request

def post(model, *messages, **more):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"model": model, "messages": messages, **more}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, body, headers), timeout=120) as answer:
        return json.load(answer)
"""
"""How the programs that are agents here ask for a turn."""
AGENT = f"""{ASK}
def ask(*messages):
    return post("any", *messages, max_tokens=6)["choices"][0]["message"]

asked = {{"role": "user", "content": "go"}}
first = ask(asked)
ask(asked, first, {{"role": "user", "content": "on"}})
ask({{"role": "user", "content": "a helper"}})
if len(sys.argv) > 1:
    try:  # the first of all stays until its worker dies
        with open(sys.argv[1], "x") as held:
            held.write(str(os.getpid()))
        time.sleep(600)
    except FileExistsError:
        pass
with open("answer", "w") as answer:
    answer.write("#### 42" if ord(first["content"][0]) % 2 else "#### 41")
print("played")
"""


def test_agents_in_and_beside_sandboxes_are_trained_and_a_killed_worker_costs_what_it_played_and_leaves_nothing(
    tmp_path: Path, chat_model: Path, short_run: Callable[..., dict[str, Any]], standing_ray: Any
) -> None:
    program, held, log, folder = (tmp_path / name for name in ("agent.py", "held", "log", "run"))
    program.write_text(AGENT)
    inside = {"command": ["python3", "agent.py"], "files": {"agent.py": str(program)}, "inside": True}
    beside = {"command": [sys.executable, str(program), str(held)]}
    config = short_run(
        tmp_path,
        model={"path": str(chat_model)},
        rollout={"max_prompt_tokens": 200, "max_completion_tokens": 60},
        learner={"max_tokens_per_microbatch": 2048},
        train={"num_steps": NUM_STEPS},
        sandbox={"max_leases": 4},
        agent={"name": "external_agent", "chat_template": "chatml_hermes"},
    )
    del config["tasks"]
    shared = {"timeout_s": 300.0, "answer_file": "answer"}
    config["sources"] = [
        {
            "name": name,
            "tasks": [write_rows(tmp_path / "rows.parquet", *["6 x 7?"] * 4)],
            "agent": {"external": shared | external},
        }
        for name, external in (("inside", inside), ("beside", beside))
    ]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    training = standing_ray.train(str(tmp_path / "config.yaml"), log=log)
    try:
        wait_until(lambda: held.exists() and held.read_text().isdigit(), training, log.read_text)
        supervisor = psutil.Process(int(held.read_text())).parent()
        assert supervisor is not None
        worker = supervisor.parent()
        assert worker is not None
        lost = [supervisor, *worker.children(recursive=True)]
        worker.kill()
        assert training.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        training.kill()
        training.wait()

    steps = records(folder)
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1))
    assert steps[-1]["recovery/restarts"] == 1.0
    assert all("learner/grad_norm" in record for record in steps)
    assert [process for process in lost if lives(process)] == [], "agents and sandboxes die with their worker"
    groups = groups_of(folder)
    assert {group.prompt.source for group in groups} == {"inside", "beside"}
    assert len(groups) == 2 * NUM_STEPS
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        assert trajectory.status is RolloutStatus.COMPLETED, trajectory.reward.detail
        assert (trajectory.num_turns, len(trajectory.forks)) == (3, 1)
        output, _, fork = trajectory.agent_output.partition("\n")
        assert output == "played"
        assert "turn 3 does not continue the conversation" in fork
        assert trajectory.num_response_tokens == 18


RATER = f"""{ASK}
schema = {{"type": "object", "properties": {{"score": {{"enum": [1, 2, 3, 4, 5, 6, 7]}}}}, "required": ["score"],
          "additionalProperties": False}}
form = {{"type": "json_schema", "json_schema": {{"name": "rating", "schema": schema}}}}
reply = post("any", {{"role": "user", "content": "rate"}}, response_format=form, max_tokens=60)
try:
    score = json.loads(reply["choices"][0]["message"]["content"])["score"]
except ValueError:
    score = "cut off"
with open("answer", "w") as answer:
    answer.write(f"#### {{score}}")
"""


@pytest.fixture
def rater(tmp_path: Path, chat_model: Path, short_run: Callable[..., dict[str, Any]]) -> Path:
    """A run of a tiny random model, whose agent wants a score from 1 to 7; 5 is right."""
    (tmp_path / "agent.py").write_text(RATER)
    command = [sys.executable, str(tmp_path / "agent.py")]
    external = {"command": command, "answer_file": "answer", "structured": "guide"}
    config = short_run(
        tmp_path,
        model={"path": str(chat_model)},
        rollout={"max_prompt_tokens": 100, "max_completion_tokens": 80, "group_size": 8},
        learner={"max_tokens_per_microbatch": 4096, "optimizer": {"lr": 1e-2}},
        train={"num_steps": 14, "groups_per_step": 2},
        agent={"name": "external_agent", "chat_template": "chatml_hermes", "external": external},
    )
    config["tasks"] = [write_rows(tmp_path / "rows.parquet", *["Rate it."] * 4, truth="5")]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "config.yaml"


def test_a_run_whose_agent_asks_for_structured_output_raises_its_reward(rater: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "rayapp", "train", str(rater), "cluster.address=local"]
    with log.open("w") as sink:
        done = subprocess.run(command, stdout=sink, stderr=sink, cwd=ROOT, timeout=3000, check=False)

    assert done.returncode == 0, log.read_text()
    steps = records(folder)
    rewards = [record["reward/mean"] for record in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15, rewards
    # Without the masks the learner's distribution would be over all tokens, and the difference near 1. A step whose
    # groups all have equal rewards trains on nothing, and has no difference.
    differences = [record["rollout_probs_diff/mean"] for record in steps if "rollout_probs_diff/mean" in record]
    assert len(differences) >= 5, steps
    assert max(differences) < 0.02
    for trajectory in (trajectory for group in groups_of(folder) for trajectory in group.trajectories):
        assert trajectory.allowed is not None
        assert (trajectory.allowed.mask_of[trajectory.response_mask] >= 0).all()

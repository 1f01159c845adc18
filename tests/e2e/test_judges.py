"""A run whose rewards come from two judges beside its tasks' verdicts: one that scores, and one that compares. The
servers of the policy are scripted; the judges are behind real HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from support.stubs.judge_stub import JudgeStub
from support.whole_runs import groups_of, records

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
NUM_STEPS = 3
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
JUDGE_KEY = "sk-of-the-judge-5678"


class FailsForOneText:
    """Grades by length, but for the first response, whose server fails. What the workers ask when they start is 42."""

    def __init__(self) -> None:
        self._failing = ""

    def __call__(self, text: str) -> float:
        if text != "42":
            self._failing = self._failing or text
        if text == self._failing:
            raise RuntimeError("the judge fails")
        return len(text) % 11


def test_two_judges_reward_a_run_and_a_failure_costs_its_trajectories(
    tmp_path: Path, short_run: Callable[..., dict[str, Any]], standing_ray: Any
) -> None:
    stub = JudgeStub(FailsForOneText(), key=JUDGE_KEY)
    rubric = {"long": "It is long."}
    with stub.running_in_thread() as url:
        shared = {"base_url": f"{url}/v1", "model": "m", "rubric": rubric, "api_key_env": "JUDGE_KEY"}
        # Several trajectories may have the one text for which the judge fails.
        rollout = {"num_workers": 2, "max_failed_ratio": 1.0}
        config = short_run(tmp_path, train={"num_steps": NUM_STEPS}, rollout=rollout) | {
            "judges": [
                shared | {"name": "quality", "input_price": 1.0},
                shared | {"name": "pairs", "kind": "pairwise"},
            ],
            "reward": {"verdict_weight": 0.5, "judges": {"quality": 1.0, "pairs": 2.0}},
        }
        file, log, folder = tmp_path / "config.yaml", tmp_path / "log", tmp_path / "run"
        file.write_text(yaml.safe_dump(config))
        assert standing_ray.train(str(file), log=log).wait(timeout=1200) == 0, log.read_text()

    steps = records(folder)
    rewards = [each.reward for group in groups_of(folder) for each in group.trajectories]
    lost = [reward for reward in rewards if not reward.valid]
    assert {(reward.failure_kind, reward.value) for reward in lost} == {("judge_unreachable", 0.0)}
    assert len(lost) < len(rewards)
    assert sum(record.get("failure/judge_unreachable", 0.0) for record in steps) == pytest.approx(len(lost) / 8)
    assert sum(record.get("status/error_reward", 0.0) for record in steps) == pytest.approx(len(lost) / 8)
    for reward in rewards:
        if reward.valid:
            scored, compared = reward.terms["judge/quality"], reward.terms["judge/pairs"]
            verdict = (reward.value - scored - 2.0 * compared) / 0.5
            assert verdict == pytest.approx(round(verdict, 3))
    assert sum(record["judged/dollars"] for record in steps) > 0.0
    assert any("learner/grad_norm" in record for record in steps)
    for path in (log, *(path for path in folder.rglob("*") if path.is_file())):
        assert JUDGE_KEY.encode() not in path.read_bytes(), path


def test_a_run_ends_at_the_cap_saved_and_goes_on_with_a_larger_one(
    tmp_path: Path, short_run: Callable[..., dict[str, Any]], standing_ray: Any
) -> None:
    stub = JudgeStub(lambda text: len(text) % 11, key=JUDGE_KEY)
    file, log, folder = tmp_path / "config.yaml", tmp_path / "log", tmp_path / "run"

    def train(*overrides: str) -> int:
        code: int = standing_ray.train(str(file), *overrides, log=log).wait(timeout=1200)
        return code

    with stub.running_in_thread() as url:
        judge = {"name": "quality", "base_url": f"{url}/v1", "model": "m", "api_key_env": "JUDGE_KEY"}
        # The first judged step costs more than the cap, so the run ends when the costs are counted next.
        judge |= {"rubric": {"long": "It is long."}, "input_price": 1e6}
        config = short_run(tmp_path, train={"num_steps": 100_000}, checkpoint={"every_steps": 100_000}) | {
            "judges": [judge],
            "reward": {"judges": {"quality": 1.0}},
            "budget": {"node_hour": 0.36, "cap": 1.0},
        }
        file.write_text(yaml.safe_dump(config))
        assert train() == 3, log.read_text()
        said, spent = log.read_text(), json.loads((folder / "costs.json").read_text())
        last = len((folder / "metrics.jsonl").read_text().splitlines())
        saved = [path.name for path in (folder / "checkpoints").glob("step=*")]
        assert train() == 3, log.read_text()
        assert json.loads((folder / "costs.json").read_text()) == spent
        assert train("budget.cap=1e12", f"train.num_steps={last + 2}") == 0, log.read_text()

    assert "which reaches budget.cap = 1. To continue, raise budget.cap" in said
    assert saved == [f"step={last:06d}"]
    costs = [record["cost/total"] for record in records(folder)]
    assert len(costs) == last + 2
    assert costs == sorted(costs)
    assert costs[last] > sum(spent.values()) >= costs[last - 1]
    assert spent["judges"] > 1.0
    assert spent["node"] > 0.0


@pytest.fixture
def reward_model(tiny_model: Path, tmp_path: Path) -> Path:
    """One number for a text, from random weights."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path / "reward_model"
    shape = LlamaConfig.from_pretrained(tiny_model)
    shape.num_labels = 1
    LlamaForSequenceClassification(shape).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.mark.long  # a server of vLLM; tests/unit/actors/test_model_server.py has what an actor does with them
def test_a_run_serves_its_reward_model_itself(
    tmp_path: Path, short_run: Callable[..., dict[str, Any]], reward_model: Path
) -> None:
    config = short_run(tmp_path, train={"num_steps": 2}, cluster={"address": "local"}) | {
        "model_servers": [
            {
                "name": "scorer",
                "path": str(reward_model),
                "options": {"runner": "pooling", "max-model-len": 128, "chat-template": TEMPLATE},
            },
        ],
        "judges": [{"name": "liked", "kind": "reward_model", "base_url": "run://scorer", "model": "scorer"}],
        "reward": {"judges": {"liked": 1.0}},
    }
    file, log = tmp_path / "config.yaml", tmp_path / "log"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, str(ROOT / "tests" / "data" / "with_scripted_servers.py"), "train", str(file)]
    with log.open("w") as sink:
        done = subprocess.run(command, stdout=sink, stderr=sink, cwd=ROOT, timeout=1200, check=False)

    assert done.returncode == 0, log.read_text()
    steps = records(tmp_path / "run")
    assert len({record["reward/judge/liked/mean"] for record in steps}) == 2
    assert "ready: model-server-scorer" in log.read_text()
    living = psutil.process_iter(["cmdline"])  # None of one that has ended meanwhile
    assert not [each for each in living if "vllm.entrypoints" in " ".join(each.info["cmdline"] or ())]

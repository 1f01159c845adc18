"""What can't work stops with one message and exit code 2 or 1, before or after the actors started; nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.cli import main
from rayapp.config.config import Config
from rayapp.runs.folder import RunFolder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
SCRIPTED = ROOT / "tests" / "data" / "with_scripted_servers.py"

Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """`refused(model, tasks, *overrides)`: what `rayapp train` says, in this process, of what it exits with code 2 for.

    Should it try to start an actor, the test fails.
    """
    monkeypatch.setattr("rayapp.driver.cluster.spawn_pool", lambda config: pytest.fail("actors are being started"))

    def train(model: Path, tasks: list[str], *overrides: str) -> str:
        code = main.run(["train", str(write_config(tmp_path, model, tasks)), *overrides])
        output = "".join(capsys.readouterr())
        assert code == 2, output
        return output

    return train


def write_config(tmp_path: Path, tiny_model: Path, tasks: list[str]) -> Path:
    config = {
        "run": {"output_dir": str(tmp_path / "outputs")},
        "model": {"path": str(tiny_model)},
        "tasks": tasks,
        "cluster": {"device": "cpu"},
        "rollout": {"group_size": 2, "max_prompt_tokens": 32, "max_completion_tokens": 8},
        "train": {"num_steps": 1, "groups_per_step": 1},
        "server": {"kv_cache_gib": 0.1},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def run(*command: str) -> tuple[int, str]:
    """Its exit code and all it printed."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        cwd=ROOT,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_ray_that_does_not_answer_is_named(
    refused: Refused, tiny_model: Path, letter_tasks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    output = refused(tiny_model, letter_tasks)
    assert "no Ray answers at '127.0.0.1:1'" in output
    assert "ray start --head" in output


DIVIDE = """
prompt: Write divide(a).
func_name: divide
signature: 'def divide(a):'
tests: ['rng.randint(1, 9)']
reference: a / 0
"""


def test_what_can_not_train_is_found_before_any_actor_starts(
    refused: Refused, tmp_path: Path, tiny_model: Path, letter_tasks: list[str]
) -> None:
    (tmp_path / "divide.yaml").write_text(DIVIDE)

    assert "there is no such folder" in refused(tmp_path / "nowhere", letter_tasks)
    assert "tasks is empty" in refused(tiny_model, [])
    assert "task 'first': its prompt has 12 tokens, but rollout.max_prompt_tokens is 4" in refused(
        tiny_model, letter_tasks, "rollout.max_prompt_tokens=4"
    )
    assert "task divide: the reference, `a / 0`, on test 1, raises ZeroDivisionError" in refused(
        tiny_model, [str(tmp_path / "divide.yaml")]
    )


# Mounts a disk of 6 MB for the run alone, and keeps what it left there.
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=6m none "$1" || exit 99
kept=$2; disk=$1; shift 2
"$@"; code=$?
cp -a "$disk/." "$kept"
exit $code
"""


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in_engines")
def test_a_full_disk_ends_the_run_with_the_last_checkpoint_whole_and_says_how_to_go_on(
    tmp_path: Path, tiny_model: Path, letter_tasks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    disk, kept = tmp_path / "outputs", tmp_path / "kept"
    disk.mkdir()
    kept.mkdir()
    # The model has 0.3 million parameters: with AdamW's moments a checkpoint takes 3.7 MB, and two don't fit.
    overrides = ("train.num_steps=5", "checkpoint.every_steps=1", "checkpoint.keep_last=1")
    file = write_config(tmp_path, tiny_model, letter_tasks)
    command = (sys.executable, str(SCRIPTED), "train", str(file), *overrides)

    code, output = run(*namespace, "sh", "-c", ON_A_SMALL_DISK, "sh", str(disk), str(kept), *command)

    # 1 where a learner could not write its part of a checkpoint, 2 where the driver could not write to the run folder.
    assert code in (1, 2), output
    assert "No space left on device" in output
    assert "the last complete checkpoint, step=000001, which is intact" in output
    assert "start the same command again" in output
    checkpoint = RunFolder(kept / "run", Config()).checkpoints.latest()
    assert checkpoint is not None
    assert checkpoint.version == 1


@pytest.mark.slow
def test_a_server_whose_engine_does_not_start_ends_the_run_with_its_reason(
    tmp_path: Path, tiny_model: Path, letter_tasks: list[str], standing_ray: Any
) -> None:
    # On a Ray where another module is found in place of vLLM. The real one: tests/cluster/test_vllm_server.py.
    file, log = write_config(tmp_path, tiny_model, letter_tasks), tmp_path / "log"

    code = standing_ray.run("-m", "rayapp", "train", str(file), "run.name=dies", log=log).wait(timeout=800)

    assert code == 1, log.read_text()
    assert f"vLLM did not start with {tiny_model}: RuntimeError: no room for the KV cache" in log.read_text()
    assert not list((tmp_path / "outputs" / "dies").glob("checkpoints/*"))

"""Jobs of a real Ray head that asks for a token, and with -m long of one that does not: what starts them, what is
refused, and the time they have to stop.

A run that trains as a job is in `test_live_run.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.cli.values import rendered
from rayapp.config.loading import load_config, to_yaml

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")


@pytest.fixture(scope="module", params=["token", pytest.param("disabled", marks=pytest.mark.long)])
def head(request: pytest.FixtureRequest, start_head: Any) -> Iterator[Any]:
    with start_head(request.param) as started:
        yield started


with_token = pytest.mark.parametrize("head", ["token"], indirect=True)
"""Of what a job does once it is there, which asks for the token at each of its calls. Without one: that jobs start,
and a wrong port."""


def test_plain_ray_job_submit_runs_the_main_program(head: Any) -> None:
    done = head.run(
        str(RAY), "job", "submit", "--address", head.address, "--working-dir", ".", "--runtime-env",
        "rayapp/cli/job.yaml", "--", "python", "-m", "rayapp", "config", "show", "configs/coding_cpu.yaml",
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert "models/smollm2-135m" in done.stdout


@with_token
def test_rendered_rayjob_runs_as_its_sidecar_would_run_it(head: Any, tmp_path: Path) -> None:
    # The entrypoint and runtimeEnvYAML of the manifest, with the config where the pod would have it, and a command
    # that stops before it needs GPUs: an unknown model is refused first.
    folder = ROOT / "configs" / "kuberay"
    values = yaml.safe_load((folder / "examples" / "single-node-ack.yaml").read_text())
    files = rendered(to_yaml(load_config(folder / "coding_8gpu_kruise.yaml")), values)
    spec = yaml.safe_load(files["rayjob.yaml"])["spec"]
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_load(files["configmap.yaml"])["data"]["run.yaml"])
    entrypoint = spec["entrypoint"].replace("/var/configs/run.yaml", str(config)).replace("/var/outputs", str(tmp_path))

    done = head.run(
        "bash", "-c", f"{RAY} job submit --address {head.address} --runtime-env-json "
        f"'{json.dumps(yaml.safe_load(spec['runtimeEnvYAML']))}' -- {entrypoint}",
    )  # fmt: skip

    assert "error: model.path '/var/models/Qwen2.5-Coder-3B-Instruct'" in done.stdout + done.stderr
    assert done.returncode == 1


ATTACH = """
import sys
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError
from actors.own_ray import ray_session

try:
    with ray_session(Config.model_validate({"cluster": {"address": sys.argv[1]}})):
        print("attached")
except ConfigError as error:
    print(error)
"""


def test_wrong_token_and_a_wrong_port_are_named(head: Any, tmp_path: Path) -> None:
    command = ["submit", "configs/coding_cpu.yaml", f"run.output_dir={tmp_path}", "model.path=hub/model"]

    if head.environment["RAY_AUTH_MODE"] == "token":
        assert head.rayapp(*command, RAY_AUTH_TOKEN="wrong").returncode != 0
        attached = head.run(sys.executable, "-c", ATTACH, head.gcs, RAY_AUTH_TOKEN="wrong")
        assert attached.stdout.startswith(f"no Ray answers at '{head.gcs}' "), attached.stdout + attached.stderr
        assert "Ray may refuse the token. Set RAY_AUTH_MODE=token and" in attached.stdout
        assert "InvalidAuthToken" in attached.stderr
    nowhere = head.run(sys.executable, "-m", "rayapp", *command, "--address", "http://127.0.0.1:1")
    assert nowhere.returncode != 0
    assert "http://127.0.0.1:1" in nowhere.stderr


@with_token
def test_job_that_can_not_start_fails_with_its_own_message(head: Any, tmp_path: Path) -> None:
    done = head.rayapp(
        "submit", "configs/coding_cpu.yaml", f"run.output_dir={tmp_path}", "model.path=/not/there", "--follow"
    )

    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: model.path '/not/there'" in done.stdout + done.stderr


@with_token
def test_stopped_job_has_the_time_to_save(head: Any, tmp_path: Path) -> None:
    program = ROOT / "tests" / "data" / "slow_save.py"
    submitted = head.run(
        str(RAY), "job", "submit", "--no-wait", "--submission-id", "slow", "--address", head.address, "--working-dir",
        ".", "--runtime-env", "rayapp/cli/job.yaml", "--", "python", str(program), str(tmp_path),
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    head.until(lambda: "training" in head.get("/api/jobs/slow/logs"), lambda: "the job does not start")

    stopped = head.run(str(RAY), "job", "stop", "--address", head.address, "slow")

    assert "stopped" in (stopped.stdout + stopped.stderr).lower()
    assert (tmp_path / "slow" / "checkpoints" / "step=000003" / "manifest.json").exists()

"""Runs that train to their end as jobs of a real Ray head: as a user submits one, and as KubeRay does."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.cli.values import rendered
from rayapp.config.config import Config
from rayapp.config.loading import to_yaml

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]

RAY = Path(sys.executable).with_name("ray")


def test_plain_ray_job_submit_trains_on_a_ray_without_tokens(
    tiny_run: Callable[..., dict[str, Any]], start_head: Any, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tiny_run("plain", tmp_path)))

    with start_head("disabled") as head:
        done = head.run(
            str(RAY), "job", "submit", "--address", head.address, "--working-dir", ".", "--runtime-env",
            "rayapp/cli/job.yaml", "--", "python", "-m", "rayapp", "train", str(file), "train.num_steps=1",
        )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^step 1/1  reward ", done.stdout, re.MULTILINE)
    assert list((tmp_path / "plain" / "final").glob("*.safetensors"))


def test_rendered_rayjob_trains_when_it_is_run_as_its_sidecar_would_run_it(
    tiny_run: Callable[..., dict[str, Any]], start_head: Any, tmp_path: Path
) -> None:
    # The chart's manifest of a small run: its entrypoint and runtimeEnvYAML, with the config where the pod has it.
    pytest.importorskip("helm_python", reason="needs Helm: pip install helm-python-sdk")
    config = Config.model_validate(tiny_run("rendered", tmp_path))
    values = {
        "run": {"overrides": ["train.num_steps=1", "cluster.device=cpu"]},
        "storage": {"models": {"kind": "none"}, "outputs": {"mountPath": str(tmp_path)}},
    }
    files = rendered(to_yaml(config), values, name="rendered", namespace="rl")
    spec = yaml.safe_load(files["rayjob.yaml"])["spec"]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_load(files["configmap.yaml"])["data"]["run.yaml"])
    env = json.dumps(yaml.safe_load(spec["runtimeEnvYAML"]))
    entrypoint = spec["entrypoint"].replace("/var/configs/run.yaml", str(file))

    with start_head("token") as head:
        # KubeRay pastes the entrypoint into a shell command as it is.
        submit = f"{RAY} job submit --address {head.address} --runtime-env-json '{env}' -- {entrypoint}"
        done = head.run("bash", "-c", submit)

    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "rendered" / "metrics.jsonl").read_text().splitlines()) == 1
    assert list((tmp_path / "rendered" / "final").glob("*.safetensors"))

"""configs/kuberay/examples/gsm8k-ack.yaml is a whole job: Helm alone renders it, and everything that the run's config
names is where the pods have it.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.config.loading import load_config
from rayapp.tools.config import read_mcp_servers, read_tool_file

helm = pytest.importorskip("helm_python")
ROOT = Path(__file__).parents[3]
KUBERAY = ROOT / "configs" / "kuberay"
IN_PODS = Path("/var/configs")


def rendered(*settings: str) -> dict[str, dict[str, Any]]:
    """Return the first document of each template, by file name."""
    values = yaml.safe_load((KUBERAY / "examples" / "gsm8k-ack.yaml").read_text())
    for setting in settings:
        section = helm.parse_set_string(setting)
        values |= {key: {**values.get(key, {}), **value} for key, value in section.items()}
    with helm.Chart.load(str(KUBERAY / "chart")) as chart:
        made = chart.render(values, name="gsm8k", namespace="default")
    return {Path(name).name: next(iter(yaml.safe_load_all(text))) for name, text in made.items() if text.strip()}


def written(documents: dict[str, dict[str, Any]], folder: Path) -> Path:
    """Write the ConfigMap's files as the pods see them, with `folder` in place of /var/configs."""
    for name, text in documents["configmap.yaml"]["data"].items():
        (folder / name).write_text(text.replace(str(IN_PODS), str(folder)))
    return folder / "run.yaml"


def test_the_job_is_the_config_of_the_same_name_with_the_paths_of_the_pods(tmp_path: Path) -> None:
    documents = rendered()
    words = shlex.split(documents["rayjob.yaml"]["spec"]["entrypoint"])
    job = load_config(written(documents, tmp_path), words[words.index(f"{IN_PODS}/run.yaml") + 1 :])
    ours = load_config(ROOT / "configs" / "gsm8k_tool_8gpu.yaml", ())

    for name in type(ours).model_fields:
        if name not in {"run", "model", "cluster", "tasks", "eval", "agent"}:
            assert getattr(job, name) == getattr(ours, name), name
    assert job.agent.model_copy(update={"tool_file": ours.agent.tool_file}) == ours.agent
    assert job.eval.model_copy(update={"tasks": ours.eval.tasks}) == ours.eval
    assert job.cluster.num_gpus == ours.cluster.num_gpus


def test_what_the_config_names_is_mounted_where_it_looks(tmp_path: Path) -> None:
    documents = rendered()
    config = load_config(written(documents, tmp_path), ["model.path=/var/models/Qwen2.5-3B-Instruct"])
    pod = documents["rayjob.yaml"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    mounts = {Path(mount["mountPath"]) for mount in pod["containers"][0]["volumeMounts"]}
    (job,) = documents["dataset.yaml"]["spec"]["template"]["spec"]["containers"]

    assert mounts >= {IN_PODS, Path("/var/data"), Path("/var/models")}
    assert {Path(task).parent for task in (*config.tasks, *config.eval.tasks)} == {Path("/var/data")}
    assert {Path(task).name for task in (*config.tasks, *config.eval.tasks)} == {"train.parquet", "test.parquet"}
    assert "s3://replace-me/gsm8k" in " ".join([*job.get("command", []), *job.get("args", [])])
    assert Path(str(config.agent.tool_file)).parent == tmp_path


@pytest.mark.parametrize("address", ["", "https://mcp.example.com/mcp"])
def test_the_address_of_the_tools_is_a_value_and_they_use_the_warm_pods(address: str, tmp_path: Path) -> None:
    documents = rendered(*([f"sandboxes.mcpUrl={address}"] if address else []))
    written(documents, tmp_path)
    (search, own) = read_tool_file(tmp_path / "tools.yaml")
    assert search.mcp is not None
    (server,) = read_mcp_servers(search.mcp, tmp_path).values()

    assert server.url == (address or "http://mcp-sandbox.sandbox-system.svc.cluster.local:8000/mcp")
    assert server.headers == {"X-Template": documents["sandboxes.yaml"]["metadata"]["name"]}
    assert documents["sandboxes.yaml"]["spec"]["replicas"] == 64
    assert own.class_name.endswith("Gsm8kTool")


@pytest.mark.parametrize("name", ["run.yaml", "../tools.yaml", "a/b"])
def test_a_file_of_a_name_that_no_configmap_can_have_is_refused(name: str) -> None:
    values = yaml.safe_load((KUBERAY / "examples" / "gsm8k-ack.yaml").read_text())
    values["run"]["files"] = {name: "x"}
    with helm.Chart.load(str(KUBERAY / "chart")) as chart, pytest.raises(helm.HelmError, match=re.escape(name)):
        chart.render(values, name="gsm8k", namespace="default")

"""The Helm chart: linted, rendered, and every document of it validated as an API server would, and stricter.

Custom resources are checked against their real CRDs with unknown fields refused, core kinds by kubernetes-validate, the
Prometheus operator's two kinds against short schemas of the fields that we use (tests/data/crds).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.cli.main import run
from rayapp.cli.values import CHART, merged, rendered
from rayapp.config.config import Config
from rayapp.config.loading import load_config, to_yaml
from rayapp.core.errors import ConfigError

helm_python = pytest.importorskip("helm_python")
jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[3]
CRDS = ROOT / "tests" / "data" / "crds"
KUBERNETES = "1.33"
FOLDER = ROOT / "configs" / "kuberay"
CONFIGS: dict[str, Path] = {
    "single-node-ack": FOLDER / "coding_8gpu_kruise.yaml",
    **dict.fromkeys(("head-worker-s3", "autoscaling", "kueue", "volcano"), FOLDER.parent / "coding_8gpu.yaml"),
}
"""Example (a file in the chart's examples/) -> config of its run."""
HEAD_WORKER: dict[str, Any] = {"layout": "head-worker", "head": {"gpus": 0}}
Manifest = dict[str, Any]


@cache
def crd(name: str, version: str) -> Any:
    """Return a validator for a CRD; its schema, several megabytes, is checked once."""
    made = yaml.load(gzip.decompress((CRDS / f"{name}.yaml.gz").read_bytes()), Loader=yaml.CSafeLoader)
    schema = hardened(next(v["schema"]["openAPIV3Schema"] for v in made["spec"]["versions"] if v["name"] == version))
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


def hardened(schema: Any) -> Any:
    """Return the schema with every object that lists its fields closed, and int-or-string as a real choice."""
    if isinstance(schema, list):
        return [hardened(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    result = {key: hardened(value) for key, value in schema.items()}
    # `properties` may itself be the name of a field: close the object only if `type` is beside it.
    if isinstance(result.get("properties"), dict) and "type" in result and "additionalProperties" not in result:
        result["additionalProperties"] = bool(result.get("x-kubernetes-preserve-unknown-fields"))
    return result


def validate(document: Manifest) -> None:
    """Raise unless an API server would accept the document and keep every field."""
    match document["apiVersion"], document["kind"]:
        case "ray.io/v1", "RayJob":
            crd("ray.io_rayjobs", "v1").validate(document)
        case "agents.kruise.io/v1alpha1", "SandboxSet":
            crd("agents.kruise.io_sandboxsets", "v1alpha1").validate(document)
            # Its template is free-form in the CRD: typos would pass.
            template = {"apiVersion": "v1", "kind": "PodTemplate", "template": document["spec"]["template"]}
            kubernetes_validate.validate(template, KUBERNETES, strict=True)
        case "monitoring.coreos.com/v1", kind:
            jsonschema.validate(document, yaml.safe_load((CRDS / "monitoring.coreos.com.yaml").read_text())[kind])
        case _:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@cache
def example(name: str) -> tuple[tuple[str, str], ...]:
    values = yaml.safe_load((FOLDER / "examples" / f"{name}.yaml").read_text())
    return tuple(rendered(to_yaml(load_config(CONFIGS[name])), values).items())


@cache
def config() -> Config:
    return load_config(FOLDER.parent / "coding_8gpu.yaml")


def render(values: Manifest) -> dict[str, str]:
    return rendered(to_yaml(config()), values, name="grpo", namespace="rl")


def documents(files: dict[str, str]) -> Iterator[Manifest]:
    for text in files.values():
        yield from yaml.load_all(text, yaml.CSafeLoader)


def only(kind: str, files: dict[str, str], name: str = "") -> Manifest:
    found = [d for d in documents(files) if d["kind"] == kind and d["metadata"]["name"].endswith(name)]
    assert len(found) == 1, [d["metadata"]["name"] for d in found]
    return found[0]


def rayjob(values: Manifest | None = None) -> Manifest:
    return only("RayJob", render(values or {}))


def pod_of(values: Manifest | None = None) -> Manifest:
    """Return what the head's pod is made of."""
    made: Manifest = rayjob(values)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    return made


# --- the chart


@pytest.mark.parametrize("name", CONFIGS)
def test_an_example_lints_without_warnings_and_every_document_of_it_passes_its_schema(name: str) -> None:
    given = yaml.safe_load((FOLDER / "examples" / f"{name}.yaml").read_text())
    values = merged({"run": {"config": "run: {}\n"}}, given)

    report = helm_python.lint(str(CHART), values, strict=True, namespace="rl")

    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []
    made = list(documents(dict(example(name))))
    assert len(made) >= 3
    for document in made:
        validate(document)


def test_a_field_that_no_crd_has_is_refused() -> None:
    job = rayjob()
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagee"] = "x"

    with pytest.raises(jsonschema.ValidationError):
        validate(job)


def test_every_value_is_documented_and_has_a_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(value: Any, part: dict[str, Any], path: str) -> None:
        if "properties" in part and path != "values.run.files":  # whose keys are names of files
            assert part["additionalProperties"] is False, path
            assert set(value) == set(part["properties"]) - {"global"}, path
            for key, child in value.items():
                compare(child, part["properties"][key], f"{path}.{key}")

    compare(values, schema, "values")


# --- values that can't work


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head": {"gpus": 99}}, "maximum: got 99, want 16"),
        ({"head": {"gpu": 8}}, "additional properties 'gpu' not allowed"),
        ({"run": {"stopGraceSeconds": 3}}, "minimum: got 3, want 10"),
        ({"run": {"overrides": ["run.seed=$(id)"]}}, "'run.seed=$(id)' does not match pattern"),
        ({"image": {"tag": "latest"}}, "name a version or a digest"),
        ({"head": {"tolerations": [{"key": "gpu"}]}}, "missing property 'operator'"),
        ({"layout": "head-worker"}, "head.gpus is 8, but layout head-worker has its GPUs in the workers"),
        ({"autoscaling": {"enabled": True}}, "autoscaling.enabled needs layout=head-worker"),
        ({"queue": {"kind": "kueue"}}, "queue.kind is kueue, but queue.name is empty"),
        ({"network": {"host": True}}, "network.host is for several nodes"),
        (HEAD_WORKER | {"network": {"host": True}}, "set networkPolicy.nodeCidrs to the nodes' addresses"),
        ({"network": {"nccl": {"PATH": "/tmp"}}}, "'PATH' does not match pattern '^NCCL_"),
        (
            HEAD_WORKER | {"autoscaling": {"enabled": True}, "queue": {"kind": "kueue", "name": "q"}},
            "Kueue admits a cluster of a fixed size",
        ),
        (HEAD_WORKER | {"workers": {"replicas": 3}}, "workers.replicas 3 is not between"),
        ({"dataset": {"enabled": True}}, "set storage.data.kind"),
        ({"storage": {"models": {"kind": "s3"}}}, "set storage.models.bucket and storage.models.endpoint"),
        ({"storage": {"outputs": {"create": False}}}, "run folders must outlive the pods"),
        ({"secrets": {"create": True}}, "secrets.data is empty"),
    ],
)
def test_impossible_values_are_refused_with_the_reason(values: Manifest, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        render(values)


# --- what the manifests say


def test_entrypoint_trains_the_config_of_the_config_map() -> None:
    files = render({"run": {"overrides": ["train.num_steps=7"], "model": "qwen"}})
    words = shlex.split(only("RayJob", files)["spec"]["entrypoint"])

    assert words[:5] == ["python", "-m", "rayapp", "train", "/var/configs/run.yaml"]
    assert {"train.num_steps=7", "model.path=/var/models/qwen", "run.output_dir=/var/outputs"} <= set(words)
    text = only("ConfigMap", files, "-config")["data"]["run.yaml"]
    assert Config.model_validate(yaml.safe_load(text)) == config()


def test_stop_grace_is_told_to_ray_and_fits_the_pods_own() -> None:
    job = rayjob({"run": {"stopGraceSeconds": 100}})
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]

    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "100"}
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] == "100"
    assert pod["terminationGracePeriodSeconds"] > 100


def test_pods_with_gpus_get_what_nccl_needs_between_nodes_and_the_head_does_not() -> None:
    rdma = "rdma/hca_shared_devices_a"
    network = {"host": True, "rdmaResource": rdma, "rdmaCount": 8, "nccl": {"NCCL_DEBUG": "INFO"}}
    allowed = {"networkPolicy": {"nodeCidrs": ["10.0.0.0/16"]}}
    spec = rayjob(HEAD_WORKER | {"network": network} | allowed)["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]

    assert [pod.get("hostNetwork") for pod in pods] == [None, True]
    assert [pod.get("dnsPolicy") for pod in pods] == [None, "ClusterFirstWithHostNet"]
    containers = [pod["containers"][0] for pod in pods]
    limits = [container["resources"]["limits"] for container in containers]
    assert [(each.get("nvidia.com/gpu"), each.get(rdma)) for each in limits] == [(None, None), ("8", "8")]
    assert [c.get("env") for c in containers] == [None, [{"name": "NCCL_DEBUG", "value": "INFO"}]]


def test_pods_may_get_what_sandboxes_on_images_need() -> None:
    """Another test runs a real sandbox in a process that has only what the profile permits."""
    plain, made = pod_of(), pod_of({"isolation": {"hostUsers": False, "seccompProfile": "sandboxes.json"}})

    assert "hostUsers" not in plain
    assert "seccompProfile" not in plain["securityContext"]
    assert made["hostUsers"] is False
    assert made["securityContext"]["seccompProfile"] == {"type": "Localhost", "localhostProfile": "sandboxes.json"}


@pytest.mark.skipif(os.geteuid() != 0, reason="imitating a container needs root")
def test_the_shipped_profile_is_enough_for_sandboxes_on_images(namespaces: None) -> None:
    program = "from rayapp.sandbox.local.provider import why_no_images_here; print(why_no_images_here())"
    like = [sys.executable, "-m", "scripts.like_docker"]
    profile = ["--profile", str(FOLDER / "seccomp/sandboxes.json")]
    said = [
        subprocess.run(
            [*like, *given, sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for given in (profile, [])
    ]

    assert said[0].stdout.strip() == ""
    assert "seccomp/sandboxes.json" in said[1].stdout, "the default profile is told with the way out"


def test_sandboxes_reach_nothing_and_only_the_manager_reaches_them() -> None:
    files = dict(example("single-node-ack"))
    template = only("SandboxSet", files)["spec"]["template"]
    denies, allows = only("NetworkPolicy", files, "-deny-all"), only("NetworkPolicy", files, "-from-manager")

    for policy in (denies, allows):
        selected = policy["spec"]["podSelector"]["matchLabels"]
        assert selected.items() <= template["metadata"]["labels"].items()
    assert denies["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert denies["spec"]["ingress"] == denies["spec"]["egress"] == []
    # Policies add up: this one may allow only the manager.
    assert allows["spec"]["policyTypes"] == ["Ingress"]
    assert "egress" not in allows["spec"]
    [peer] = allows["spec"]["ingress"][0]["from"]
    assert set(peer) == {"namespaceSelector", "podSelector"}
    assert template["spec"]["automountServiceAccountToken"] is False


def test_only_the_runs_own_pods_the_operator_and_prometheus_reach_its_pods() -> None:
    files = dict(example("head-worker-s3"))
    policy, cluster = only("NetworkPolicy", files, "-run")["spec"], only("RayJob", files)["spec"]["rayClusterSpec"]
    own, operator, prometheus = policy["ingress"]

    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert policy["podSelector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    assert own == {"from": [{"podSelector": policy["podSelector"]}]}, "every port, from this namespace"
    [container] = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [port["port"] for port in operator["ports"]] == [ports["dashboard"]]
    scraped = [port["port"] for port in prometheus["ports"]]
    assert scraped == [ports[name] for name in ("metrics", "as-metrics", "dash-metrics")]
    for rule in (operator, prometheus):
        assert all(set(peer) == {"namespaceSelector", "podSelector"} and peer["podSelector"] for peer in rule["from"])


def test_the_policys_peers_are_what_the_values_say() -> None:
    proxy = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}
    given = {"operatorNamespace": "kuberay", "dashboardClients": [proxy], "nodeCidrs": ["10.0.0.0/16"]}
    made = render({"networkPolicy": given})
    own, operator = only("NetworkPolicy", made, "-run")["spec"]["ingress"]

    assert own["from"][1:] == [{"ipBlock": {"cidr": "10.0.0.0/16"}}]
    assert operator["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "kuberay"}
    assert operator["from"][1:] == [proxy]
    assert "networkpolicy.yaml" not in render({"networkPolicy": {"enabled": False}})


def test_kueue_starts_the_job_suspended_and_volcano_labels_job_and_pods() -> None:
    kueue, volcano = only("RayJob", dict(example("kueue"))), only("RayJob", dict(example("volcano")))

    assert kueue["spec"]["suspend"] is True
    assert kueue["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"
    assert "suspend" not in volcano["spec"]
    pod = volcano["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert pod["metadata"]["labels"]["volcano.sh/queue-name"] == "gpu-queue"


def test_monitor_selects_the_pods_and_ports_that_exist() -> None:
    files = dict(example("single-node-ack"))
    head = only("RayJob", files)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    monitor = only("PodMonitor", files)["spec"]

    assert monitor["selector"]["matchLabels"].items() <= head["metadata"]["labels"].items()
    ports = {port["name"] for port in head["spec"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports


def test_volumes_made_here_are_bound_to_their_claims() -> None:
    for shape in ("single-node-ack", "head-worker-s3"):
        files = dict(example(shape))
        for name in ("models", "data"):
            volume, claim = only("PersistentVolume", files, name), only("PersistentVolumeClaim", files, name)
            reference = volume["spec"]["claimRef"]
            assert (reference["namespace"], reference["name"]) == (claim["metadata"]["namespace"], f"rayapp-{name}")
            assert claim["spec"]["volumeName"] == volume["metadata"]["name"] == volume["spec"]["csi"]["volumeHandle"]
            assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"]


def test_keys_stand_in_secrets_only() -> None:
    for document in documents(dict(example("single-node-ack"))):
        if document["kind"] != "Secret":
            text = yaml.safe_dump(document).replace("bucket: replace-me", "").replace("s3://replace-me", "")
            assert "replace-me" not in text


# --- the dataset Job


def dataset_job(values: Manifest) -> Manifest:
    files = render(merged({"dataset": {"enabled": True}}, values))
    container: Manifest = only("Job", files)["spec"]["template"]["spec"]["containers"][0]
    return container


def environment(container: Manifest) -> dict[str, str]:
    """Return plain values, and for values from the Secret their key."""
    return {e["name"]: e.get("value") or e["valueFrom"]["secretKeyRef"]["key"] for e in container["env"]}


def test_dataset_job_writes_a_bucket_by_its_own_api_with_the_secrets_keys() -> None:
    place = {"bucket": "rows", "path": "/raw/", "endpoint": "oss-x-internal.aliyuncs.com"}
    oss = dataset_job({"storage": {"data": {"kind": "ossfs"} | place}})
    s3 = dataset_job({"storage": {"data": {"kind": "s3"} | place | {"path": "/", "endpoint": "eu-central-1"}}})

    assert oss["command"][oss["command"].index("--out") + 1] == "s3://rows/raw"
    assert s3["command"][s3["command"].index("--out") + 1] == "s3://rows"
    assert (
        environment(oss).items()
        >= {
            "RAYAPP_S3_PRESET": "oss",
            "OSS_ENDPOINT": "https://s3.oss-x-internal.aliyuncs.com",
            "OSS_ACCESS_KEY_ID": "akId",
            "OSS_ACCESS_KEY_SECRET": "akSecret",
        }.items()
    )
    assert environment(s3).items() >= {"AWS_REGION": "eu-central-1", "AWS_ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID"}.items()
    assert "volumeMounts" not in oss
    assert "volumeMounts" not in s3


# --- what fits


FITTED = "gsm8k_tool_8gpu.yaml"


@pytest.mark.parametrize(
    ("values", "misfit"),
    [
        ("{}", ""),
        (FITTED, ""),
        ("head: {memory: 64Gi}", "head.memory is 64Gi, but a pod of 8 GPUs needs 150 GiB"),
        ("head: {gpus: 4}", "8 servers x TP 1 on those of 8 learners = 8 GPUs, but cluster.num_gpus is 4"),
        ("run: {config: 'tasks: [/rows/mine.parquet]'}", "tasks: /rows/mine.parquet is on no volume of the pods"),
        ("run: {config: 'tasks: [data/mine.parquet]'}", "tasks: data/mine.parquet is relative, and the image has no"),
        ("run: {config: 'agent: {name: tool_agent, tool_file: /var/configs/t.yaml}'}", "t.yaml is not among the files"),
    ],
)
def test_doctor_says_where_a_config_and_values_do_not_fit(
    values: str, misfit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayapp.cli.doctor.machine", lambda: iter(()))
    model = ROOT / "tests" / "data" / "architectures" / "qwen2.5-3b.json"
    config, file = FOLDER.parent / "coding_8gpu.yaml", tmp_path / "values.yaml"
    if values == FITTED:
        config, file = FOLDER.parent / FITTED, FOLDER / "examples" / "gsm8k-ack.yaml"
    else:
        file.write_text(values)

    assert run(["doctor", str(config), "--values", str(file), "--model-config", str(model)]) == (1 if misfit else 0)
    assert (misfit or "fits the values") in capsys.readouterr().out


def test_values_that_can_not_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.yaml").write_text("[a, b]")
    for file in ("list.yaml", "missing.yaml"):
        assert run(["doctor", str(FOLDER.parent / "coding_8gpu.yaml"), "--values", str(tmp_path / file)]) == 2
        assert f"{file} can't be read" in capsys.readouterr().err

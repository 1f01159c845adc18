"""Render a run's config and Helm values as plain Kubernetes YAML, without a cluster and without the helm program.

The chart in configs/kuberay/chart is the only source of the manifests: this module merges values and lets the Helm
library render. Then it checks the result: the config and overrides of the entrypoint load, the pods have the memory
that the run's processes need, and the RayJob passes those admission rules of KubeRay that no schema can express.

KubeRay 1.7 checks these rules in its webhook; without a webhook, the operator sets a bad job to ValidationFailed. Each
rule is a function that takes the manifest and yields its complaints; it yields none if the rule does not apply.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayapp.config.config import Config
from rayapp.config.loading import load_config, to_yaml
from rayapp.core.errors import ConfigError, InputError
from rayapp.learner.memory.plan import plan_node
from rayapp.learner.memory.shape import GIB, model_shape

Manifest = dict[str, Any]
MAX_NAME = 47
"""Longest RayJob name: KubeRay appends a suffix to it for its clusters, and a label holds 63 characters."""

_RESOURCES = {"num-cpus", "num-gpus", "memory", "resources"}


def check_rayjob(job: Manifest) -> list[str]:
    """Return all complaints about a RayJob; empty if KubeRay would accept it."""
    return [complaint for rule in _RULES for complaint in rule(job)]


def _name(job: Manifest) -> Iterator[str]:
    name = job["metadata"]["name"]
    if len(name) > MAX_NAME:
        yield f"metadata.name {name!r} has {len(name)} characters: at most {MAX_NAME} are allowed"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"metadata.name {name!r}: use only a-z, 0-9 and -; begin with a letter, and don't end with -"


def _one_cluster(job: Manifest) -> Iterator[str]:
    spec = job["spec"]
    if bool(spec.get("rayClusterSpec")) == bool(spec.get("clusterSelector")):
        has = "both rayClusterSpec and" if spec.get("rayClusterSpec") else "neither rayClusterSpec nor"
        yield f"the job has {has} clusterSelector: give exactly one of them"


def _shutdown(job: Manifest) -> Iterator[str]:
    spec = job["spec"]
    shuts_down = spec.get("shutdownAfterJobFinishes", False)
    ttl = spec.get("ttlSecondsAfterFinished", 0)
    if ttl < 0:
        yield f"ttlSecondsAfterFinished is {ttl}, but must be at least 0"
    if ttl > 0 and not shuts_down:
        yield f"ttlSecondsAfterFinished is {ttl}, which needs shutdownAfterJobFinishes: true"
    if spec.get("suspend") and not shuts_down:
        yield "suspend needs shutdownAfterJobFinishes: true"
    if spec.get("suspend") and spec.get("clusterSelector"):
        yield "suspend and clusterSelector exclude each other"
    if (spec.get("deletionStrategy") or {}).get("deletionRules") and shuts_down:
        yield "deletionStrategy.deletionRules and shutdownAfterJobFinishes exclude each other"


def _limits(job: Manifest) -> Iterator[str]:
    spec = job["spec"]
    if (backoff := spec.get("backoffLimit", 0)) < 0:
        yield f"backoffLimit is {backoff}, but must be at least 0"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if key in spec and spec[key] <= 0:
            yield f"{key} is {spec[key]}, but must be above 0"


def _sidecar(job: Manifest) -> Iterator[str]:
    spec = job["spec"]
    if spec.get("submissionMode") != "SidecarMode":
        return
    for key in ("clusterSelector", "submitterPodTemplate", "submitterConfig"):
        if spec.get(key):
            yield f"submissionMode SidecarMode and {key} exclude each other"
    policy = _head_pod(job).get("restartPolicy", "Never")
    if policy != "Never":
        yield f"submissionMode SidecarMode: restartPolicy of the head is {policy}, but must be Never"


def _interactive(job: Manifest) -> Iterator[str]:
    spec = job["spec"]
    if spec.get("submissionMode") == "InteractiveMode" and spec.get("backoffLimit", 0):
        yield f"submissionMode InteractiveMode: backoffLimit is {spec['backoffLimit']}, but must be 0"


def _entrypoint(job: Manifest) -> Iterator[str]:
    # Not a rule of KubeRay: it pastes this text into a shell command, so shell syntax in it would be executed.
    spec = job["spec"]
    if spec.get("submissionMode", "K8sJobMode") in ("K8sJobMode", "SidecarMode"):
        text = spec.get("entrypoint", "")
        if found := re.search(r"[^A-Za-z0-9_./:,= -]", text):
            yield f"entrypoint has {found.group()!r}, which a shell interprets: use plain words only"


def _groups(job: Manifest) -> Iterator[str]:
    for where, group in all_groups(job):
        started_with = group.get("rayStartParams") or {}
        if group.get("resources") and (both := _RESOURCES & started_with.keys()):
            yield f"{where}: resources are both in the group and in rayStartParams ({', '.join(sorted(both))})"
        if "labels" in started_with:
            yield f"{where}: labels belong in the group, not in rayStartParams"
        if not group["template"]["spec"].get("containers"):
            yield f"{where}: there is no container; the first one must be Ray's"


def _autoscaler(job: Manifest) -> Iterator[str]:
    cluster = job["spec"].get("rayClusterSpec") or {}
    is_kueue = "kueue.x-k8s.io/queue-name" in (job["metadata"].get("labels") or {})
    if not cluster.get("enableInTreeAutoscaling"):
        return
    if is_kueue:
        yield "enableInTreeAutoscaling: Kueue admits only clusters of a fixed size. Leave enableInTreeAutoscaling out"
    for where, group in all_groups(job):
        policy = group["template"]["spec"].get("restartPolicy", "Never")
        if policy != "Never":
            yield f"{where}: the autoscaler needs restartPolicy Never, not {policy}"


def _replicas(job: Manifest) -> Iterator[str]:
    for where, group in all_groups(job):
        low, high = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
        if low > high:
            yield f"{where}: minReplicas {low} is above maxReplicas {high}"


def _auth(job: Manifest) -> Iterator[str]:
    cluster = job["spec"].get("rayClusterSpec") or {}
    version = str(cluster.get("rayVersion") or "")
    if (cluster.get("authOptions") or {}).get("mode") != "token":
        return
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < (2, 52):
        yield f"authOptions.mode token needs rayVersion 2.52 or newer, but rayVersion is {version or 'not set'}"


def _head_pod(job: Manifest) -> dict[str, Any]:
    cluster = job["spec"].get("rayClusterSpec") or {}
    pod: dict[str, Any] = cluster["headGroupSpec"]["template"]["spec"] if cluster else {}
    return pod


def all_groups(job: Manifest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the pod groups of a RayJob, each with its place in the manifest."""
    cluster = job["spec"].get("rayClusterSpec") or {}
    if cluster:
        yield "headGroupSpec", cluster["headGroupSpec"]
        for group in cluster.get("workerGroupSpecs") or []:
            yield f"workerGroupSpecs {group['groupName']}", group


_RULES: tuple[Callable[[Manifest], Iterator[str]], ...] = (
    _name, _one_cluster, _shutdown, _limits, _sidecar, _interactive, _entrypoint, _groups, _autoscaler, _replicas,
    _auth,
)  # fmt: skip


CHART = Path(__file__).parents[3] / "configs" / "kuberay" / "chart"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""YAML loader: libyaml reads a RayJob (a thousand lines) in 0.1 s, Python's own loader in 1 s."""
CONFIG_IN_POD = "/var/configs/run.yaml"
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """An installation of the chart (Helm's term)."""

    name: str
    """Name of the RayJob and of the run, and prefix of the other objects' names."""
    namespace: str


def render(config: Config, release: Release, values: Values, *, chart: Path = CHART) -> dict[str, str]:
    """Return every manifest of a run.

    Args:
        config: written into the ConfigMap with every default filled in, so that a later release trains the same.
        values: values that override the chart's values.yaml.
    Returns:
        File name -> YAML, one or more documents each; templates with empty output are left out.
    Raises:
        ConfigError: a value is unknown, out of range or contradicts another, or KubeRay would refuse the result.
        InputError: there is no chart, or the Helm library is not installed.
    """
    helm = _helm()
    if not (chart / "Chart.yaml").is_file():
        raise InputError(f"there is no Helm chart in {chart}. Run this in a checkout of the project, or give --chart.")
    whole = merged({"run": {"config": to_yaml(config)}}, values)
    try:
        with helm.Chart.load(str(chart)) as loaded:
            made: dict[str, str] = loaded.render(whole, name=release.name, namespace=release.namespace)
    except helm.HelmError as error:
        raise ConfigError(_explain(str(error))) from None
    files = {Path(path).name: _tidy(text) for path, text in made.items() if any(yaml.load_all(text, LOADER))}
    _check(files)
    return files


def merged(below: Values, above: Values) -> dict[str, Any]:
    """Merge two sets of values as Helm does: maps key by key; any other value of `above` replaces that of `below`."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def read_values(files: Sequence[Path], settings: Sequence[str]) -> dict[str, Any]:
    """Read values from files and from `key.sub=value` settings in Helm's notation; later ones take precedence.

    Raises:
        ConfigError: a file can't be read or is not a YAML map, or a setting is malformed.
    """
    helm, values = _helm(), dict[str, Any]()
    for file in files:
        try:
            loaded = yaml.safe_load(file.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"values file {file} can't be read: {error}") from None
        if not isinstance(loaded, dict):
            raise ConfigError(f"values file {file} must hold sections such as `run:`, not a {type(loaded).__name__}")
        values = merged(values, loaded)
    for setting in settings:
        try:
            values = merged(values, helm.parse_set_string(setting))
        except helm.HelmError as error:
            raise ConfigError(f"--set {setting!r} is not of the form key.sub=value: {error}") from None
    return values


def _check(files: Mapping[str, str]) -> None:
    """Check rules that neither the values' schema nor the CRD can express.

    Raises:
        ConfigError: KubeRay would refuse the RayJob, or the run would refuse its own command line.
    """
    job = yaml.load(files["rayjob.yaml"], LOADER)
    if problems := check_rayjob(job):
        raise ConfigError("KubeRay would refuse this RayJob:\n" + "\n".join(f"  {problem}" for problem in problems))
    text = yaml.load(files["configmap.yaml"], LOADER)["data"]["run.yaml"]
    words = shlex.split(job["spec"]["entrypoint"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text)
        try:
            load_config(path, words[words.index(CONFIG_IN_POD) + 1 :])
        except ConfigError as error:
            why = str(error).removeprefix(f"{path}: ")
            raise ConfigError(f"the rendered config is not valid, so the job would fail at its start: {why}") from None


def _helm() -> Any:
    try:
        import helm_python
    except ImportError as error:
        raise InputError(
            f"the Helm library can't be imported ({error}). Install it with `pip install rayapp[k8s]`, or use the helm "
            "program: helm template NAME configs/kuberay/chart --set-file run.config=CONFIG"
        ) from None
    return helm_python


def _explain(message: str) -> str:
    """Return Helm's message without its file positions; the chart's `fail` texts say what to do."""
    if found := re.search(r"execution error at \([^)]*\): (.+)", message, re.DOTALL):
        return f"values: {found.group(1).strip()}"
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    wrong = [line for line in lines if line.startswith("at '")]
    named = [re.sub(r"^at '/?([^']*)': ", lambda m: f"{m.group(1).replace('/', '.')}: ", line) for line in wrong]
    if not named:
        return f"the chart can't be rendered: {message}"
    return (
        "wrong values:\n"
        + "\n".join(f"  {line}" for line in named)
        + "\nThe chart's values.yaml lists the allowed values."
    )


def _tidy(text: str) -> str:
    """Remove the blank lines that template actions leave at the edges of documents."""
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n+(---\n)", r"\n\1", text.strip()).removeprefix("---\n") + "\n"


_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def check_memory(files: Mapping[str, str], config: Config) -> None:
    """Check that every pod with GPUs has the memory that `rayapp plan` gives for a node.

    Args:
        files: file name -> YAML, as `render` returns them.
    Raises:
        ConfigError: a pod has less; the message names the value to set.
        InputError: the model's config.json can't be read.
    """
    shape = model_shape(config)
    for where, group in all_groups(yaml.load(files["rayjob.yaml"], LOADER)):
        limits: dict[str, Any] = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        if not (num_gpus := int(limits.get("nvidia.com/gpu", 0))):
            continue
        node = plan_node(shape, config, num_gpus)
        if node.total > bytes_of(limits["memory"]):
            key = "head" if where == "headGroupSpec" else "workers"
            raise ConfigError(
                f"{key}.memory is {limits['memory']}, but a pod of {num_gpus} GPUs needs {node.described()}. "
                f"Set {key}.memory={-(-node.total // GIB)}Gi, and more for code in sandboxes."
            )


def bytes_of(quantity: object) -> int:
    """Return the bytes of a Kubernetes memory quantity such as 512Gi."""
    text = str(quantity)
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    return int(float(text.removesuffix(unit)) * _UNITS.get(unit, 1))

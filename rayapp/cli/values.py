"""`rayapp doctor CONFIG --values FILE`: does a config fit the Helm values with which the chart would run it?

It renders the chart in configs/kuberay/chart with the Helm library, and finds what neither Helm nor KubeRay's webhook
can: a command line that the job would refuse, a pod without the memory of its processes, files that no volume has.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from rayapp.config.config import Config, sources_of
from rayapp.config.loading import load_config, to_yaml
from rayapp.core.errors import ConfigError, InputError
from rayapp.learner.memory.host import plan_node
from rayapp.learner.memory.shape import GIB, ModelShape, model_shape

Manifest = dict[str, Any]
CHART = Path(__file__).parents[2] / "configs" / "kuberay" / "chart"
# libyaml reads a RayJob (a thousand lines) in 0.1 s, Python's own loader in 1 s
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CONFIG_IN_POD = "/var/configs/run.yaml"
_ROWS = {".parquet", ".jsonl", ".json"}
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def misfits(config: Config, values: Sequence[Path], *, local: Config | None = None) -> Iterator[str]:
    """Yield what does not fit between a config and the values in these files; later files take precedence. `local` is
    the config with a model on this machine."""
    given: dict[str, Any] = {}
    for file in values:
        try:
            given = merged(given, yaml.safe_load(file.read_text()) or {})
        except (OSError, yaml.YAMLError, AttributeError) as error:
            raise InputError(f"values file {file} can't be read as sections: {error}") from None
    files = rendered(to_yaml(config), given)
    job = yaml.load(files["rayjob.yaml"], LOADER)
    try:
        in_pod = config_in_pod(files)
    except ConfigError as error:
        yield f"the job would fail at its start: {error}"
        return
    yield from _too_small(job, in_pod, model_shape(local or config))
    yield from _not_there(job, yaml.load(files["configmap.yaml"], LOADER)["data"], in_pod)


def rendered(config: str, values: Mapping[str, Any], *, name: str = "rayapp", namespace: str = "default") -> Manifest:
    """Render the chart for a config's text. Return file name -> YAML, without templates whose output is empty."""
    try:
        import helm_python as helm
    except ImportError as error:
        raise InputError(f"the Helm library can't be imported ({error}): pip install 'rayapp[k8s]'") from None
    if not (CHART / "Chart.yaml").is_file():
        raise InputError(f"there is no Helm chart in {CHART}. Run this in a clone of the project.")
    try:
        with helm.Chart.load(str(CHART)) as chart:
            whole = merged({"run": {"config": config}}, values)
            made: dict[str, str] = chart.render(whole, name=name, namespace=namespace)
    except helm.HelmError as error:
        raise ConfigError(f"the chart refuses the values: {error}") from None
    return {Path(path).name: text for path, text in made.items() if any(yaml.load_all(text, LOADER))}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sets of values as Helm does: maps key by key; any other value of `above` replaces that of `below`."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def config_in_pod(files: Mapping[str, str]) -> Config:
    """Return the config that the job's entrypoint loads: that of the ConfigMap, with the entrypoint's overrides."""
    job, text = yaml.load(files["rayjob.yaml"], LOADER), yaml.load(files["configmap.yaml"], LOADER)["data"]["run.yaml"]
    words = shlex.split(job["spec"]["entrypoint"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text)
        return load_config(path, words[words.index(CONFIG_IN_POD) + 1 :])


def pod_groups(job: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Yield `head` and `workers`, each with its pods' first container, which is Ray's."""
    cluster = job["spec"]["rayClusterSpec"]
    yield "head", cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    for group in cluster.get("workerGroupSpecs") or []:
        yield "workers", group["template"]["spec"]["containers"][0]


def _too_small(job: Manifest, config: Config, shape: ModelShape) -> Iterator[str]:
    for name, container in pod_groups(job):
        limits = container["resources"]["limits"]
        if not (num_gpus := int(limits.get("nvidia.com/gpu", 0))):
            continue
        node = plan_node(shape, config, num_gpus)
        if node.total > bytes_of(limits["memory"]):
            yield (
                f"{name}.memory is {limits['memory']}, but a pod of {num_gpus} GPUs needs {node.described()}. Set "
                f"{name}.memory={-(-node.total // GIB)}Gi, and more for code in sandboxes"
            )


def bytes_of(quantity: object) -> int:
    """Return the bytes of a Kubernetes memory quantity such as 512Gi."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity)).groups()  # type: ignore[union-attr]
    return int(float(number) * _UNITS.get(unit, 1))


def _not_there(job: Manifest, beside: Mapping[str, str], config: Config) -> Iterator[str]:
    """Yield the config's files that the head's pod, where the driver looks for them, lacks."""
    mounts = [PurePosixPath(each["mountPath"]) for _, head in [next(pod_groups(job))] for each in head["volumeMounts"]]
    sources = [source.config for source in sources_of(config)]
    named = {"model.path": [config.model.path], "agent.tool_file": [each.agent.tool_file for each in sources]}
    named |= {"tasks": [task for each in sources for task in (*each.tasks, *each.eval.tasks) if "://" not in task]}
    for key, paths in named.items():
        for path in dict.fromkeys(map(PurePosixPath, filter(None, paths))):
            if path.parent == PurePosixPath(CONFIG_IN_POD).parent and path.name not in beside:
                yield f"{key}: {path} is not among the files beside the config: add {path.name} to run.files"
            elif path.is_absolute() and not any(path.is_relative_to(mount) for mount in mounts):
                there = ", ".join(map(str, mounts))
                yield f"{key}: {path} is on no volume of the pods ({there}): set storage.models or storage.data"
            elif not path.is_absolute() and path.suffix in _ROWS:
                yield f"{key}: {path} is relative, and the image has no rows: name the file on storage.data"

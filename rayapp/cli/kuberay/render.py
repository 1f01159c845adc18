"""Renders a run's config and Helm values as plain Kubernetes YAML, without a cluster and without the helm program.

Called by `rayapp render-k8s` and by `scripts.kuberay_examples`. The chart in configs/kuberay/chart is the only source
of the manifests: this module merges values, lets the Helm library render, and checks that the entrypoint it got trains.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayapp.cli.kuberay.rules import check_rayjob
from rayapp.config.config import Config
from rayapp.config.loading import load_config, to_yaml
from rayapp.core.errors import ConfigError, InputError

CHART = Path(__file__).parents[3] / "configs" / "kuberay" / "chart"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A RayJob has a thousand lines: libyaml reads in a tenth of a second what takes Python one."""
CONFIG_IN_POD = "/var/configs/run.yaml"
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """An installation of the chart, in Helm's word."""

    name: str
    """Name of the RayJob and of the run; the other objects are named after it."""
    namespace: str


def render(config: Config, release: Release, values: Values, *, chart: Path = CHART) -> dict[str, str]:
    """Every manifest of a run.

    Args:
        config: goes into the ConfigMap whole, with every default, so that a later release trains the same.
        values: what differs from the chart's values.yaml.
    Returns:
        File name -> YAML, one or more documents each; templates that made nothing are left out.
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
    """Two sets of values as Helm merges them: maps key by key, anything else replaced."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def read_values(files: Sequence[Path], settings: Sequence[str]) -> dict[str, Any]:
    """Values of several files and `key.sub=value` settings in Helm's own notation; later ones win.

    Raises:
        ConfigError: a file can't be read or is no YAML map, or a setting is malformed.
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
            raise ConfigError(f"--set {setting!r} is not key.sub=value: {error}") from None
    return values


def _check(files: Mapping[str, str]) -> None:
    """Check what neither the values' schema nor the CRD can say.

    Raises:
        ConfigError: KubeRay would refuse the RayJob, or the run its own command line.
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
            raise ConfigError(f"the run would refuse its config: {str(error).removeprefix(f'{path}: ')}") from None


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
    """Helm's message without its own file positions; the chart's `fail` texts say what to do."""
    if found := re.search(r"execution error at \([^)]*\): (.+)", message, re.DOTALL):
        return f"values: {found.group(1).strip()}"
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    wrong = [line for line in lines if line.startswith("at '")]
    named = [re.sub(r"^at '/?([^']*)': ", lambda m: f"{m.group(1).replace('/', '.')}: ", line) for line in wrong]
    if not named:
        return f"the chart can't be rendered: {message}"
    return "wrong values:\n" + "\n".join(f"  {line}" for line in named) + "\nWhat is allowed: values.yaml of the chart."


def _tidy(text: str) -> str:
    """The text without the blank lines that template actions leave at the edges of documents."""
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n+(---\n)", r"\n\1", text.strip()).removeprefix("---\n") + "\n"

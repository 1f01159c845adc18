"""`rayapp render-k8s`: write a run's Kubernetes manifests and list what the cluster must have before `kubectl apply`.

Helm is imported only when the command runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer
import yaml

from rayapp.cli.arguments import ModelConfig, with_model_config
from rayapp.cli.kuberay.render import LOADER
from rayapp.config.config import Config
from rayapp.core.errors import InputError

app = typer.Typer()


def _check_memory(files: Mapping[str, str], config: Config, model_config: Path | None) -> None:
    """Check the pods' memory if the model's config.json can be read on this machine; otherwise print that the memory
    was not checked."""
    from rayapp.cli.kuberay.render import check_memory

    with with_model_config(config, model_config) as known:
        try:
            check_memory(files, known)
        except InputError as error:
            if model_config is not None:
                raise
            typer.echo(f"the pods' memory was not checked: {error} Give --model-config FILE.", err=True)


@app.command(
    name="render-k8s",
    epilog="Examples:\n\n"
    "  rayapp render-k8s configs/coding_8gpu.yaml --out manifests --name my-run\n\n"
    "  rayapp render-k8s configs/coding_8gpu.yaml --out manifests --values configs/kuberay/examples/kueue.yaml "
    "--set queue.name=team-a",
)
def render_k8s(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's config")],
    out: Annotated[Path, typer.Option(help="Folder to write to; created if missing")],
    name: Annotated[str, typer.Option(help="Name of the RayJob and the run")] = "rayapp",
    namespace: Annotated[str, typer.Option(help="Kubernetes namespace")] = "default",
    values: Annotated[
        list[Path] | None, typer.Option(help="Helm values, e.g. configs/kuberay/examples/kueue.yaml")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="One Helm value, e.g. head.gpus=4")] = None,
    model_config: ModelConfig = None,
    chart: Annotated[Path | None, typer.Option(help="Chart to use in place of configs/kuberay/chart")] = None,
) -> None:
    """Write the Kubernetes manifests of a run as plain YAML, for `kubectl apply -f FOLDER`. Needs no cluster."""
    from rayapp.cli.kuberay.render import CHART, Release, read_values, render
    from rayapp.config.loading import load_config

    loaded = load_config(config)
    files = render(
        loaded,
        Release(name=name, namespace=namespace),
        read_values(values or (), settings or ()),
        chart=chart or CHART,
    )
    _check_memory(files, loaded, model_config)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, text in sorted(files.items()):
            (out / file).write_text(text)
    except OSError as error:
        raise InputError(f"folder {out} can't be written: {error.strerror}") from None
    for file in sorted(files):
        typer.echo(str(out / file))
    needed = "".join(f"\n  - {line}" for line in before_apply(files, namespace))
    typer.echo(f"before `kubectl apply --namespace {namespace} -f {out}` there must be:{needed}", err=True)


_CLAIMS, _SECRETS = "PersistentVolumeClaim", "Secret"


def before_apply(files: Mapping[str, str], namespace: str) -> list[str]:
    """Return one line for each thing that the manifests need but don't create: images, secrets, claims, the model.

    Args:
        files: file name -> YAML, as `render` returns them.
    """
    documents = {file: [each for each in yaml.load_all(text, LOADER) if each] for file, text in files.items()}
    every = [each for of_file in documents.values() for each in of_file]
    made = {(each["kind"], each["metadata"]["name"]) for each in every}
    found = list(dict.fromkeys(need for each in every for need in _needs(each) if need not in made))
    lines = [_LINES[kind].format(name=name, namespace=namespace) for kind, name in found]
    return [*lines, *_model(documents)]


_LINES = {
    "image": "image {name}: built (Dockerfile) and pushed where the cluster pulls it from; --set image.repository=…",
    _SECRETS: "Secret {name}: kubectl create secret generic {name} --namespace {namespace} --from-literal=HF_TOKEN=…",
    _CLAIMS: "PersistentVolumeClaim {name} in namespace {namespace}; kubectl get pvc --namespace {namespace}",
}


def _needs(node: Any) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of the images, secrets and claims that a document names at any depth."""
    if isinstance(node, list):
        for each in node:
            yield from _needs(each)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("image"), str):
        yield "image", node["image"]
    if isinstance(node.get("claimName"), str):
        yield _CLAIMS, node["claimName"]
    for key, value in node.items():
        if key in ("secretRef", "secretKeyRef", "nodePublishSecretRef") and not value.get("optional"):
            yield _SECRETS, value["name"]
        elif key == "imagePullSecrets":
            yield from ((_SECRETS, each["name"]) for each in value)
        else:
            yield from _needs(value)


def _model(documents: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield a line if the run fetches its model from the hub although a volume with models is mounted."""
    job = documents["rayjob.yaml"][0]
    words = shlex.split(job["spec"]["entrypoint"])
    container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    given = [word.partition("=")[2] for word in words if word.startswith("model.path=")]
    of_config = documents["configmap.yaml"][0]["data"]["run.yaml"]
    path = given[-1] if given else yaml.load(of_config, LOADER)["model"]["path"]
    if "models" not in mounts or path.startswith("s3://") or PurePosixPath(path).is_absolute():
        return
    yield (
        f"model.path is {path}: every pod fetches it from the hub, although {mounts['models']} is mounted. To use the "
        "mounted model, name its folder: --set run.model=FOLDER"
    )

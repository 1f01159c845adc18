"""What must be there before `kubectl apply`, read off the rendered manifests. Pure; called by `rayapp render-k8s`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from rayapp.cli.kuberay.render import LOADER

_CLAIMS, _SECRETS = "PersistentVolumeClaim", "Secret"


def before_apply(files: Mapping[str, str], namespace: str) -> list[str]:
    """One line for each thing that the manifests need and don't make: images, secrets, claims, the model.

    Args:
        files: as `render` gives them.
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
    """Images, secrets and claims that a document names, wherever they stand in it."""
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
    """That the run fetches its model from the hub, though a volume with models is mounted."""
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
        f"model.path is {path}: every pod fetches it from the hub, and {mounts['models']} is not used. To take it from "
        f"there, name its folder: --set run.model=FOLDER"
    )

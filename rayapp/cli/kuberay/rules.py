"""KubeRay's admission rules that a schema can't say, for a RayJob. Pure; used by `render.py` and the tests.

KubeRay 1.7 checks them in its webhook and, without one, in the operator, which then leaves the job in ValidationFailed.
Each rule is a function from the manifest to its complaints; a rule that does not apply yields none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

Manifest = dict[str, Any]
MAX_NAME = 47
"""KubeRay appends to a RayJob's name what makes its clusters' names unique, and a label holds 63 characters."""

_RESOURCES = {"num-cpus", "num-gpus", "memory", "resources"}


def check_rayjob(job: Manifest) -> list[str]:
    """All complaints about a RayJob, empty when KubeRay would take it."""
    return [complaint for rule in _RULES for complaint in rule(job)]


def _name(job: Manifest) -> Iterator[str]:
    name = job["metadata"]["name"]
    if len(name) > MAX_NAME:
        yield f"metadata.name {name!r} has {len(name)} characters, {MAX_NAME} are allowed"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"metadata.name {name!r}: only a-z, 0-9 and -, starting with a letter and not ending with -"


def _one_cluster(job: Manifest) -> Iterator[str]:
    spec = job["spec"]
    if bool(spec.get("rayClusterSpec")) == bool(spec.get("clusterSelector")):
        yield "exactly one of rayClusterSpec and clusterSelector must be there"


def _shutdown(job: Manifest) -> Iterator[str]:
    spec = job["spec"]
    shuts_down = spec.get("shutdownAfterJobFinishes", False)
    ttl = spec.get("ttlSecondsAfterFinished", 0)
    if ttl < 0:
        yield f"ttlSecondsAfterFinished is {ttl}, it must not be negative"
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
        yield f"backoffLimit is {backoff}, it must not be negative"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if key in spec and spec[key] <= 0:
            yield f"{key} is {spec[key]}, it must be positive"


def _sidecar(job: Manifest) -> Iterator[str]:
    spec = job["spec"]
    if spec.get("submissionMode") != "SidecarMode":
        return
    for key in ("clusterSelector", "submitterPodTemplate", "submitterConfig"):
        if spec.get(key):
            yield f"submissionMode SidecarMode and {key} exclude each other"
    policy = _head_pod(job).get("restartPolicy", "Never")
    if policy != "Never":
        yield f"submissionMode SidecarMode: restartPolicy of the head is {policy}, it must be Never"


def _interactive(job: Manifest) -> Iterator[str]:
    spec = job["spec"]
    if spec.get("submissionMode") == "InteractiveMode" and spec.get("backoffLimit", 0):
        yield f"submissionMode InteractiveMode: backoffLimit is {spec['backoffLimit']}, it must be 0"


def _entrypoint(job: Manifest) -> Iterator[str]:
    # Our own rule: KubeRay pastes the text into a shell command and would run whatever comes out of that.
    spec = job["spec"]
    if spec.get("submissionMode", "K8sJobMode") in ("K8sJobMode", "SidecarMode"):
        text = spec.get("entrypoint", "")
        if found := re.search(r"[^A-Za-z0-9_./:,= -]", text):
            yield f"entrypoint has {found.group()!r}, which a shell reads as its own: only plain words are safe"


def _groups(job: Manifest) -> Iterator[str]:
    for where, group in _all_groups(job):
        started_with = group.get("rayStartParams") or {}
        if group.get("resources") and (both := _RESOURCES & started_with.keys()):
            yield f"{where}: resources are both in the group and in rayStartParams ({', '.join(sorted(both))})"
        if "labels" in started_with:
            yield f"{where}: labels belong into the group, not into rayStartParams"
        if not group["template"]["spec"].get("containers"):
            yield f"{where}: the first container must be Ray's, there is none"


def _autoscaler(job: Manifest) -> Iterator[str]:
    cluster = job["spec"].get("rayClusterSpec") or {}
    is_kueue = "kueue.x-k8s.io/queue-name" in (job["metadata"].get("labels") or {})
    if not cluster.get("enableInTreeAutoscaling"):
        return
    if is_kueue:
        yield "enableInTreeAutoscaling: Kueue admits clusters of a fixed size only"
    for where, group in _all_groups(job):
        policy = group["template"]["spec"].get("restartPolicy", "Never")
        if policy != "Never":
            yield f"{where}: the autoscaler needs restartPolicy Never, not {policy}"


def _replicas(job: Manifest) -> Iterator[str]:
    for where, group in _all_groups(job):
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
        yield f"authOptions.mode token needs rayVersion 2.52 or newer, it is {version or 'not set'}"


def _head_pod(job: Manifest) -> dict[str, Any]:
    cluster = job["spec"].get("rayClusterSpec") or {}
    pod: dict[str, Any] = cluster["headGroupSpec"]["template"]["spec"] if cluster else {}
    return pod


def _all_groups(job: Manifest) -> Iterator[tuple[str, dict[str, Any]]]:
    cluster = job["spec"].get("rayClusterSpec") or {}
    if cluster:
        yield "headGroupSpec", cluster["headGroupSpec"]
        for group in cluster.get("workerGroupSpecs") or []:
            yield f"workerGroupSpecs {group['groupName']}", group


_RULES: tuple[Callable[[Manifest], Iterator[str]], ...] = (
    _name, _one_cluster, _shutdown, _limits, _sidecar, _interactive, _entrypoint, _groups, _autoscaler, _replicas,
    _auth,
)  # fmt: skip

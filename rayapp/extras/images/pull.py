"""Pulls an image into the cache with skopeo, and unpacks it with umoci.

    name -> skopeo inspect: its digest -> skopeo copy: a folder in OCI's layout -> umoci: a tree -> record

skopeo knows registries, credentials (Docker's `config.json`), folders and archives. umoci unpacks as an unprivileged
user that can write to one folder only (`tree.py`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.core.errors import ImageError, SandboxUnavailableError, one_line
from rayapp.extras.images.programs import Watch, in_child, program, skopeo, this_platform, too_large, usage
from rayapp.extras.images.store import Hold, Store, tree_of
from rayapp.sandbox.images import Image, Reference, is_image, parse

_SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# Registries from which every task's images may come.
PUBLIC = (
    "docker.io", "ghcr.io", "quay.io", "gcr.io", "mcr.microsoft.com", "nvcr.io", "public.ecr.aws",
    "registry.gitlab.com",
)  # fmt: skip
_GUESSED_RATIO = 3  # Estimated size of a tree, as a multiple of the download, for which room is made.
_MAX_DOCUMENT_BYTES = 8 << 20
_RETRIES = 3


def registries_of(registries: Collection[str], aliases: Mapping[str, str]) -> set[str]:
    """Return the registries that may be asked for the images of tasks: public ones, and hosts of the config.

    Args:
        aliases: image that a task names -> image that the config gives in its place.
    """
    given = {parse(image).registry for image in aliases.values() if is_image(image)}
    return {*PUBLIC, *registries, *given}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A place that may have an image, in skopeo's form."""

    name: str
    is_plain: bool = False  # True for a registry that is asked without TLS.


def pull(store: Store, reference: Reference, registries: Collection[str] | None = None) -> Hold:
    """Return a lock that keeps an image in the cache, after pulling it if it is missing. A tag's digest is always asked
    for; a name with a digest needs no request.

    Args:
        registries: registries that may be asked; None: any.
    Raises:
        ImageError: the image is missing, damaged, too large, for another platform, or its registry must not be asked.
        SandboxUnavailableError: the registry can't be reached.
    """
    if reference.digest:
        found = store.named(reference)
        if found is not None and (hold := store.hold(found)) is not None:
            return hold
    source, digest = _resolved(reference, registries)
    for _ in range(3):
        if store.image(digest) is None:
            with store.alone(tree_of(digest)):
                if store.image(digest) is None:
                    _bring(store, source, reference, digest)
        found = store.image(digest)
        if found is not None and (hold := store.hold(found)) is not None:
            pinned = reference.pinned(digest) if reference.kind == "registry" else reference
            store.put(found, *dict.fromkeys([reference, pinned]))
            return hold
    raise SandboxUnavailableError(
        f"image {reference} was evicted from the cache three times before it could be used: the cache is too small. "
        "Raise sandbox.providers[].image_cache_gib"
    )


def resolve(reference: Reference, registries: Collection[str] | None = None) -> Reference:
    """Look up the name's digest without downloading the image. Raises as `pull`."""
    if reference.kind != "registry":
        return reference
    return reference.pinned(_resolved(reference, registries)[1])


def _resolved(reference: Reference, registries: Collection[str] | None) -> tuple[_Source, str]:
    registry = reference.registry.lower()
    if registry and registries is not None and registry not in registries:
        raise ImageError(
            f"image {reference} is refused: its registry {registry} is not in sandbox.providers[].image_registries. A "
            "task may not choose which hosts are asked. Add the registry there"
        )
    source = _source(reference)
    raw = skopeo("inspect", reference, [*(["--tls-verify=false"] if source.is_plain else []), "--raw", source.name])
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    if reference.digest not in ("", digest):
        raise ImageError(f"image {reference} is damaged: the digest of its manifest is {digest}")
    return source, digest


def _source(reference: Reference) -> _Source:
    match reference.kind:
        case "registry":
            host = reference.registry
            which = f"@{reference.digest}" if reference.digest else f":{reference.tag}"
            is_plain = host in _LOOPBACK or host.rpartition(":")[0] in _LOOPBACK
            return _Source(name=f"docker://{host}/{reference.name}{which}", is_plain=is_plain)
        case "oci":
            return _Source(name=f"oci:{reference.name}{f':{reference.tag}' if reference.tag else ''}")
        case "archive":
            return _Source(name=_archive(reference))
    raise ImageError(
        f"image {reference} has to be built, and given in sandbox.providers[].images (docs/environments.md)"
    )


def _archive(reference: Reference) -> str:
    """Return skopeo's name of an image in an archive of `docker save` or of a tool for OCI archives."""
    if not Path(reference.name).is_file():
        raise ImageError(f"image {reference} can't be read: there is no file {reference.name}")
    try:
        with tarfile.open(reference.name) as archive:
            names = {name.removeprefix("./") for name in archive.getnames()}
            if "index.json" in names:
                return f"oci-archive:{reference.name}{f':{reference.tag}' if reference.tag else ''}"
            found = archive.extractfile("manifest.json")
            entries = json.loads(found.read(_MAX_DOCUMENT_BYTES)) if found is not None else []
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        raise ImageError(f"image {reference} can't be read: {one_line(error)}") from error
    for number, entry in enumerate(entries):
        tags = [str(tag) for tag in entry.get("RepoTags") or ()]
        if not reference.tag or any(reference.tag in (tag, *tag.rsplit(":", 1)) for tag in tags):
            return f"docker-archive:{reference.name}:@{number}"
    raise ImageError(f"image {reference} is not in the archive")


def _bring(store: Store, source: _Source, reference: Reference, digest: str) -> None:
    """Download and unpack an image. The caller holds the lock of its tree."""
    what = f"image {reference}"
    with store.pending(tree_of(digest)) as folder:
        layout = folder / "oci"
        flags = ["--src-tls-verify=false"] if source.is_plain else []
        copy = [*flags, f"--retry-times={_RETRIES}", source.name, f"oci:{layout}:image"]
        skopeo("copy", reference, copy, watched=Watch(store, folder, what))
        config = _config(layout, what)
        inner = config.get("config") or {}
        if not store.make_room(_GUESSED_RATIO * usage(folder)[0]):
            raise ImageError(too_large(store, what, "the images in use leave too little room"))
        umoci = program("umoci", what)
        unpack = [umoci, "raw", "unpack", "--rootless", "--image", "oci:image", "rootfs"]
        in_child(store, folder, what, {"argv": unpack})
        shutil.rmtree(layout)
        env = tuple((name, value) for name, _, value in (str(each).partition("=") for each in inner.get("Env") or ()))
        job = {"user": str(inner.get("User") or ""), "search_path": dict(env).get("PATH", _SEARCHED)}
        facts = json.loads(in_child(store, folder, what, job))
        if "problem" in facts:
            raise ImageError(f"{what} is refused: {facts['problem']}")
        if not store.make_room(facts["num_bytes"]):
            raise ImageError(too_large(store, what, f"it unpacks to {facts['num_bytes']} bytes"))
    workdir = str(inner.get("WorkingDir") or "/")
    name = str(reference.pinned(digest)) if reference.kind == "registry" else str(reference)
    store.put(Image(name=name, digest=digest, tree=tree_of(digest), env=env, workdir=workdir, **facts))


def _config(layout: Path, what: str) -> dict[str, Any]:
    """Read a downloaded image's configuration. Raises ImageError: it is malformed, or for another platform."""

    def document(digest: str) -> Any:
        with (layout / "blobs" / digest.replace(":", "/")).open("rb") as file:
            return json.loads(file.read(_MAX_DOCUMENT_BYTES))

    try:
        index = json.loads((layout / "index.json").read_bytes())
        config = document(document(index["manifests"][0]["digest"])["config"]["digest"])
        inner = config.get("config") or {}
        words = [*(inner.get("Env") or ()), inner.get("User") or "", workdir := inner.get("WorkingDir") or "/"]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ImageError(f"{what} is malformed: {one_line(error)}") from error
    has = f"{config.get('os')}/{config.get('architecture')}"
    if has != this_platform():
        raise ImageError(f"{what} is built for {has}, not for {this_platform()}")
    if not all(isinstance(word, str) and "\0" not in word for word in words) or not workdir.startswith("/"):
        raise ImageError(f"{what} is malformed: its environment, user and working folder must be texts, without NUL")
    return dict(config)

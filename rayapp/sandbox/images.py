"""Names of images, as written in `SandboxSpec.template`, and what a sandbox needs of an image.
`rayapp.extras.images` pulls images.

image:REGISTRY/NAME[:TAG][@sha256:…]    in a registry; without REGISTRY, in Docker's
image:oci:FOLDER[:TAG]                  in a folder with OCI's image layout
image:archive:FILE.tar[:NAME]           in a file that `docker save`, or a tool for OCI archives, wrote
image:build:NAME                        of a task whose Dockerfile has to be built; the config gives an image for it
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from rayapp.core.errors import ImageError

PREFIX = "image:"
_DOCKER, _DOCKER_OFFICIAL, _LATEST = "docker.io", "library/", "latest"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:[._/-]+[a-z0-9]+)*")
_REGISTRY = re.compile(r"[A-Za-z0-9.-]+(?::\d+)?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_OWN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,199}")
Kind = Literal["registry", "oci", "archive", "build"]
MOUNT_POINTS = ("dev", "proc", "sys", "tmp")  # in every image's tree, for mounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that is unpacked in the cache."""

    name: str  # with its digest
    digest: str
    tree: str  # folder in `ImageCache.trees`
    num_bytes: int
    env: tuple[tuple[str, str], ...]
    workdir: str
    uid: int
    gid: int
    home: str
    python: str  # path of the image's python3; empty without a usable one

    @property
    def user(self) -> tuple[int, int]:
        return self.uid, self.gid


class Hold(Protocol):
    """A lock on an image: the image can't be evicted until `release` is called or this process ends."""

    image: Image

    def release(self) -> None: ...


class ImageCache(Protocol):
    """The cache of images on this node, as `rayapp.extras.images.pull.ImageSource` implements it."""

    @property
    def trees(self) -> Path: ...

    async def hold(self, template: str) -> Hold:
        """Lock the image of a template; pull it first if it is missing. An unreachable registry is a
        SandboxUnavailableError."""

    def find(self, template: str) -> Image | None: ...

    def prefetch(self, templates: Sequence[str]) -> None:
        """Pull missing images in the background, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A parsed name of an image."""

    kind: Kind
    registry: str = ""  # host and port
    name: str  # repository in a registry, path of a folder or archive, or name of a built image
    tag: str = ""  # for a folder or archive, the name that selects one of its images
    digest: str = ""

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        where = f"{self.registry}/" if self.kind == "registry" else f"{self.kind}:"
        return f"{where}{self.name}{tag}{digest}"

    @property
    def template(self) -> str:
        return f"{PREFIX}{self}"

    def pinned(self, digest: str) -> Reference:
        return replace(self, digest=digest)


def is_image(template: str) -> bool:
    """True for an image, False for a template of a provider."""
    return template.startswith(PREFIX)


def parse(text: str) -> Reference:
    """Parse a name, with or without `image:` before it."""
    rest = text.removeprefix(PREFIX)
    for kind in ("oci", "archive", "build"):
        if rest.startswith(f"{kind}:"):
            return _local(kind, rest.removeprefix(f"{kind}:"), text)
    named, at, digest = rest.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise ImageError(f"image {text!r}: {digest!r} is not a digest; write sha256: and 64 hexadecimal digits")
    host, slash, path = named.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, path = _DOCKER, named
    repository, colon, tag = path.partition(":")
    if host == _DOCKER and "/" not in repository:
        repository = f"{_DOCKER_OFFICIAL}{repository}"
    if not (_REGISTRY.fullmatch(host) and _REPOSITORY.fullmatch(repository)) or (colon and not _TAG.fullmatch(tag)):
        raise ImageError(
            f"image {text!r} is not the name of an image; write REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:…"
        )
    if not (tag or digest):
        tag = _LATEST
    return Reference(kind="registry", registry=host, name=repository, tag=tag, digest=digest)


def _local(kind: Kind, rest: str, text: str) -> Reference:
    if kind == "build":
        if not _OWN.fullmatch(rest):
            raise ImageError(
                f"image {text!r}: the name of a built image may have only letters, digits, `.`, `_`, `-` and `@`"
            )
        return Reference(kind=kind, name=rest)
    # A colon in the last component separates the tag. File names with a colon are therefore not supported.
    folder, slash, last = rest.rpartition("/")
    file, _, tag = last.partition(":")
    if not file:
        missing = "folder" if kind == "oci" else "file"
        raise ImageError(f"image {text!r} names no {missing}: write image:{kind}:{missing.upper()}")
    return Reference(kind=kind, name=f"{folder}{slash}{file}", tag=tag)

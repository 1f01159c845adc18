"""Reads OCI's and Docker's documents about an image: index, manifest and configuration. Pure; the documents are not
trusted.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayapp.core.errors import ImageError

MAX_DOCUMENT_BYTES = 8 << 20
MAX_LAYERS = 512
MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of an image."""

    digest: str
    """Digest of the stored (usually compressed) bytes; empty if only `diff_id` is known."""
    size: int
    """Size of the stored bytes; 0 if unknown."""
    diff_id: str
    """Digest of the uncompressed archive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """The parts of an image's configuration that a sandbox uses."""

    platform: str
    user: str
    workdir: str
    env: tuple[tuple[str, str], ...]
    diff_ids: tuple[str, ...]

    @property
    def search_path(self) -> str:
        return dict(self.env).get("PATH", _SEARCHED)


def this_platform() -> str:
    """Return this machine's platform as OCI writes it, e.g. linux/amd64."""
    return f"linux/{_ARCHITECTURES.get(platform.machine(), platform.machine())}"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def check_digest(data: bytes, digest: str, what: str) -> bytes:
    """Return the data. Raises ImageError: the data don't have this digest."""
    if digest and digest_of(data) != digest:
        raise ImageError(f"{what} is damaged: its digest is {digest_of(data)}, not {digest}")
    return data


def document(data: bytes, what: str) -> dict[str, Any]:
    """Parse an index, manifest or configuration. Raises ImageError: the document is not a JSON object, or is too
    large.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ImageError(f"{what} has {len(data)} bytes: at most {MAX_DOCUMENT_BYTES} are allowed")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{what} is not JSON: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise ImageError(f"{what} is not a JSON object")
    return found


def is_index(found: Mapping[str, Any]) -> bool:
    return "manifests" in found


def choose(index: Mapping[str, Any], wanted: str, what: str) -> str:
    """Return the digest of the manifest for a platform.

    Raises:
        ImageError: the index has no manifest for the platform. The message lists the index's platforms.
    """
    entries = _list(index, "manifests", what)
    named = [(_platform_of(entry.get("platform")), _digest(entry.get("digest"), what)) for entry in entries]
    for has, digest in named:
        if has == wanted or has.startswith(f"{wanted}/"):
            return digest
    if len(named) == 1 and not named[0][0]:
        return named[0][1]  # the image's configuration names the platform
    there = sorted({has for has, _ in named if has and not has.startswith("unknown")})
    raise ImageError(f"{what} is not built for {wanted}: its platforms are {', '.join(there) or 'not named'}")


def _platform_of(found: object) -> str:
    if not isinstance(found, dict):
        return ""
    parts = (found.get("os"), found.get("architecture"), found.get("variant"))
    return "/".join(str(part) for part in parts if part)


def config_digest(manifest: Mapping[str, Any], what: str) -> str:
    """Return the digest of a manifest's configuration. Raises ImageError: the manifest names no configuration."""
    config = manifest.get("config")
    return _digest(config.get("digest") if isinstance(config, dict) else None, what)


def layers_of(manifest: Mapping[str, Any], config: ImageConfig, what: str) -> tuple[Layer, ...]:
    """Return an image's layers, lowest first. Raises ImageError: the documents disagree, or a layer is encrypted."""
    entries = _list(manifest, "layers", what)
    if len(entries) != len(config.diff_ids):
        raise ImageError(f"{what} has {len(entries)} layers, but its configuration lists {len(config.diff_ids)}")
    found = []
    for entry, diff_id in zip(entries, config.diff_ids, strict=True):
        if "encrypted" in str(entry.get("mediaType")):
            raise ImageError(f"{what} has an encrypted layer: rayapp can't decrypt layers")
        size = entry.get("size")
        found.append(
            Layer(
                digest=_digest(entry.get("digest"), what),
                size=size if isinstance(size, int) and size >= 0 else 0,
                diff_id=diff_id,
            )
        )
    return tuple(found)


def read_config(data: bytes, what: str) -> ImageConfig:
    """Read an image's configuration. Raises ImageError: a field is malformed."""
    found = document(data, f"the configuration of {what}")
    inner, rootfs = found.get("config") or {}, found.get("rootfs") or {}
    if not isinstance(inner, dict) or not isinstance(rootfs, dict):
        raise ImageError(f"the configuration of {what} is malformed: `config` and `rootfs` must be objects")
    diff_ids = rootfs.get("diff_ids") or []
    if not isinstance(diff_ids, list) or len(diff_ids) > MAX_LAYERS:
        raise ImageError(
            f"the configuration of {what}: `rootfs.diff_ids` must be a list of at most {MAX_LAYERS} entries"
        )
    workdir = str(inner.get("WorkingDir") or "/")
    if "\0" in workdir or not workdir.startswith("/"):
        raise ImageError(
            f"the configuration of {what} has the working folder {workdir!r}: it must begin with / and contain no NUL "
            "byte"
        )
    return ImageConfig(
        platform=_platform_of({key: found.get(key) for key in ("os", "architecture")}),
        user=str(inner.get("User") or ""),
        workdir=workdir,
        env=_environment(inner.get("Env") or []),
        diff_ids=tuple(_digest(diff_id, what) for diff_id in diff_ids),
    )


def check_platform(config: ImageConfig, wanted: str, what: str) -> None:
    """Check an image's platform. Raises ImageError: the image is for another platform."""
    if config.platform != wanted:
        raise ImageError(f"{what} is built for {config.platform or 'an unnamed platform'}, not for {wanted}")


def chain_id(diff_ids: Sequence[str]) -> str:
    """Return a short name for a stack of layers. Equal stacks have equal names."""
    return hashlib.sha256("\n".join(diff_ids).encode()).hexdigest()[:32]


def _environment(entries: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(entries, list):
        return ()
    pairs = (str(entry).partition("=") for entry in entries)
    return tuple((name, value) for name, _, value in pairs if name and "\0" not in name + value)


def _list(found: Mapping[str, Any], key: str, what: str) -> list[dict[str, Any]]:
    entries = found.get(key)
    if not isinstance(entries, list) or len(entries) > MAX_LAYERS:
        raise ImageError(
            f"{what}: field {key!r} of its {'index' if key == 'manifests' else 'manifest'} must be a list of at most "
            f"{MAX_LAYERS} entries"
        )
    return [entry for entry in entries if isinstance(entry, dict)]


def _digest(found: object, what: str) -> str:
    if not isinstance(found, str) or not _DIGEST.fullmatch(found):
        raise ImageError(f"{what} names the digest {str(found)[:80]!r}: only sha256 digests are supported")
    return found

"""Images for tests, written as folders in OCI's layout without any tool: of a few files, or of this machine's own
Python and shell."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rayapp.core.types import SandboxSpec
from rayapp.extras.images.cache import ImageSource
from rayapp.extras.images.programs import this_platform
from rayapp.sandbox.local.provider import LocalProvider
from rayapp.sandbox.local.sandbox import LocalSandbox
from support.ports import free_port

PROGRAMS = (
    "sh", "cat", "ls", "echo", "env", "true", "sleep", "id", "mkdir", "rm", "dd", "chmod", "chown", "touch", "ln", "mv",
    "head", "sort", "sed", "grep", "bash",
)  # fmt: skip
_LIBRARY_PARTS = re.compile(
    r"(^|/)(test|tests|idlelib|lib2to3|tkinter|turtledemo|ensurepip|__pycache__|site-packages|config-.*)(/|$)"
)


needs_image_programs = pytest.mark.skipif(
    not (shutil.which("skopeo") and shutil.which("umoci")), reason="needs Debian's skopeo and umoci"
)


@contextmanager
def outside_folder() -> Iterator[Path]:
    """Yield a folder that other users than root may enter, unlike pytest's temporary folders."""
    with tempfile.TemporaryDirectory(prefix="rayapp-images-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def entry(name: str, content: bytes | str | None = None, **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    """Return a member of a layer: a file with this content, a link if `linkname` is given, otherwise a folder."""
    info = tarfile.TarInfo(name)
    data = content.encode() if isinstance(content, str) else content
    if data is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    else:
        info.size, info.mode = len(data), 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data or b""


def layer(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return an uncompressed layer with these members."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data) if info.size else None)
    return target.getvalue()


def write_oci(
    folder: Path,
    layers: Sequence[bytes],
    *,
    stored: Sequence[bytes] | None = None,
    platform: str = "",
    config: Mapping[str, object] | None = None,
) -> str:
    """Write an image as a folder in OCI's layout; returns the digest of its manifest.

    Args:
        stored: the layers as stored in the folder; None stores them gzipped.
        config: WorkingDir, Env, User.
    """
    system, _, machine = (platform or this_platform()).partition("/")
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def blob(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    diff_ids = [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in layers]
    about = {"os": system, "architecture": machine, "config": dict(config or {})}
    described = blob(json.dumps({**about, "rootfs": {"type": "layers", "diff_ids": diff_ids}}).encode())
    compressed = stored if stored is not None else [gzip.compress(each, 1) for each in layers]
    entries = [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", **blob(each)} for each in compressed]
    kind = "application/vnd.oci.image.manifest.v1+json"
    configured = {"mediaType": "application/vnd.oci.image.config.v1+json", **described}
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": configured, "layers": entries}
    top = blob(json.dumps(manifest).encode())
    where = {"os": system, "architecture": machine}
    index = {"schemaVersion": 2, "manifests": [{"mediaType": kind, "platform": where, **top}]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(top["digest"])


def machine_layer(*, with_python: bool, programs: Sequence[str] = PROGRAMS) -> bytes:
    """Return a layer with this machine's shell and small programs, and with its Python if `with_python`."""
    files = {f"/usr/bin/{name}": path for name in programs if (path := shutil.which(name))}
    links: dict[str, str] = {}
    if with_python:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        files[f"/usr/local/bin/{version}"] = os.path.realpath(sys.executable)
        links["/usr/local/bin/python3"] = version
        library = Path(sysconfig.get_path("stdlib"))
        for part in library.rglob("*"):
            name = str(part.relative_to(library))
            if part.is_file() and not _LIBRARY_PARTS.search(name):
                files[f"/usr/local/lib/{version}/{name}"] = str(part)
    needing = [path for path in files.values() if "/bin/" in path or path.endswith(".so")]
    files |= {path: path for path in _libraries(needing)}
    folders = {str(parent) for name in (*files, *links, "/tmp/x", "/etc/x") for parent in Path(name).parents}
    entries = [entry(folder) for folder in sorted(folders - {"/"})]
    entries += [entry("bin", "", type=tarfile.SYMTYPE, linkname="usr/bin", size=0)]
    for name, path in sorted(files.items()):
        entries.append(entry(name, Path(path).read_bytes(), mode=Path(path).stat().st_mode & 0o777))
    entries += [entry(name, "", type=tarfile.SYMTYPE, linkname=target) for name, target in links.items()]
    return layer(*entries, entry("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nada:x:1234:1234::/home/ada:/bin/sh\n"))


def _libraries(programs: Iterable[str]) -> set[str]:
    """Return the paths of the loader and of the shared libraries to which these programs and modules link."""
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(?:=> |^\s*)(/\S+) \(0x", said, re.MULTILINE))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineImages:
    """Two images made of this machine's programs, and a cache for them."""

    cache: str
    python: str
    """Template of an image with Python."""
    plain: str
    """Template of an image without Python."""

    def source(self) -> ImageSource:
        return ImageSource(folder=self.cache)

    def provider(self, template: str, **options: Any) -> OnImage:
        """Return a local provider whose sandboxes all use this image."""
        return OnImage(template, images=self.source(), **options)


class OnImage(LocalProvider):
    """A local provider that makes all sandboxes on one image."""

    def __init__(self, template: str, **options: Any) -> None:
        super().__init__(**options)
        self.template = template

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> LocalSandbox:
        on_image = replace(spec, template=self.template)
        return await super().create(on_image, labels=labels, ttl_s=ttl_s, timeout_s=timeout_s)


@contextmanager
def machine_images() -> Iterator[MachineImages]:
    # Don't use pytest's temporary folder: only root may enter it, but the sandboxes' user must.
    folder = Path(tempfile.mkdtemp(prefix="rayapp-images-"))
    folder.chmod(0o755)
    try:
        config = {"WorkingDir": "/work", "Env": ["PATH=/usr/local/bin:/usr/bin", "FROM_IMAGE=yes"]}
        for name, with_python in (("python", True), ("plain", False)):
            write_oci(folder / name, [machine_layer(with_python=with_python)], config=config)
        yield MachineImages(
            cache=str(folder / "cache"), python=f"image:oci:{folder}/python", plain=f"image:oci:{folder}/plain"
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def real_registry(folder: Path) -> Iterator[str]:
    """Run Debian's docker-registry on loopback, with its files in this folder; yield its host and port."""
    host = f"127.0.0.1:{free_port()}"
    settings = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
        "http": {"addr": host},
    }
    (folder / "registry.yml").write_text(json.dumps(settings))
    process = subprocess.Popen(
        ["docker-registry", "serve", folder / "registry.yml"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield host
    finally:
        process.terminate()
        process.wait()

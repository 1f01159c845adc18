"""Reads images from a registry, a folder in OCI's layout, or an archive, all through the interface `StoredImage`.

    StoredImage.top() -> index or manifest -> StoredImage.document(digest) -> StoredImage.fetch(layer) -> a file

Requests to registries go through the library `oras`, which reads credentials from Docker's `config.json` and credential
helpers. This module adds time limits, mirrors and resumed downloads. Callers check digests, except where `fetch` must
know whether a download is complete.
"""

from __future__ import annotations

import itertools
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from rayapp.core.errors import ImageError, SandboxUnavailableError, one_line
from rayapp.core.http import pauses_s
from rayapp.sandbox.images.manifest import MANIFEST_TYPES, MAX_DOCUMENT_BYTES, Layer, digest_of, document
from rayapp.sandbox.images.reference import Reference

_CHUNK = 1 << 20
_CONNECT_S, _READ_S = 10.0, 60.0
_ATTEMPTS, _ATTEMPTS_AT_DOCUMENTS = 6, 3
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_DOCKER_API, _DOCKER_KEY = "registry-1.docker.io", "https://index.docker.io/v1/"
"""Docker's registry has its API at this host, and its credentials in config.json under this key."""
_NAME = "org.opencontainers.image.ref.name"
OnBytes = Callable[[int], None]
T = TypeVar("T")


class StoredImage(Protocol):
    """Interface to one image in one registry, folder or archive."""

    def top(self) -> bytes:
        """Return the bytes of the index or manifest that the image's name stands for. Raises ImageError: there is no
        such image.
        """

    def document(self, digest: str, *, is_manifest: bool) -> bytes:
        """Return the bytes of a manifest or a configuration. Raises ImageError: the document is missing."""

    def fetch(self, layer: Layer, target: Path, on_bytes: OnBytes) -> None:
        """Write a layer's stored bytes to a file. If the file has their first part, continue that download.

        Raises:
            ImageError: the layer is missing or damaged.
            SandboxUnavailableError: the registry can't be reached.
        """


def open_image(reference: Reference, mirrors: Mapping[str, Sequence[str]]) -> StoredImage:
    """Return the source of an image.

    Args:
        mirrors: registry -> mirrors that are tried before it, in order; `http://HOST` is used without TLS.
    """
    match reference.kind:
        case "registry":
            return RegistryImage(reference, mirrors.get(reference.registry, ()))
        case "oci":
            return FolderImage(reference, Path(reference.name))
        case "archive":
            return _archive(reference)
    raise ImageError(f"image {reference} is not in the cache: build it with `rayapp images build`")


class RegistryImage:
    """An image in a registry, or in one of its mirrors."""

    def __init__(self, reference: Reference, mirrors: Sequence[str] = ()) -> None:
        self._reference = reference
        own = _DOCKER_API if reference.registry == "docker.io" else reference.registry
        self._hosts = [*mirrors, own]
        self._clients: dict[str, Any] = {}

    def top(self) -> bytes:
        return self.document(self._reference.digest or self._reference.tag, is_manifest=True)

    def document(self, digest: str, *, is_manifest: bool) -> bytes:
        return self._retried(
            lambda: self._document(f"{'manifests' if is_manifest else 'blobs'}/{digest}"),
            f"image {self._reference}",
            _ATTEMPTS_AT_DOCUMENTS,
        )

    def fetch(self, layer: Layer, target: Path, on_bytes: OnBytes) -> None:
        self._retried(lambda: self._continue(layer, target, on_bytes), self._what(layer), _ATTEMPTS)

    def _retried(self, work: Callable[[], T], what: str, attempts: int) -> T:
        """Return the result of `work`. If the connection breaks or no host answers, do the work again after a pause."""
        for pause_s in itertools.islice(pauses_s(1.0, 10.0), attempts - 1):
            try:
                return work()
            except (OSError, SandboxUnavailableError):
                time.sleep(pause_s)
        try:
            return work()
        except OSError as error:
            raise SandboxUnavailableError(f"{what} can't be downloaded: {one_line(error)}") from error

    def _document(self, path: str) -> bytes:
        with self._asked(path) as answer:
            if answer is not None:
                return _read(answer.raw, str(self._reference))
        raise ImageError(f"image {self._reference} is not in {self._hosts[-1]}: check its name")

    def _continue(self, layer: Layer, target: Path, on_bytes: OnBytes) -> None:
        with target.open("ab") as file:
            begun = file.tell()
            if layer.size and begun == layer.size:
                return
            headers = {"Range": f"bytes={begun}-"} if begun else {}
            with self._asked(f"blobs/{layer.digest}", headers) as answer:
                if answer is None:
                    raise ImageError(f"{self._what(layer)} is missing in {self._hosts[-1]}")
                if begun and answer.status_code != 206:
                    file.truncate(0)
                    begun = 0
                _copy(answer.raw, file, layer.size - begun if layer.size else None, on_bytes)
            if layer.size and file.tell() != layer.size:
                raise ConnectionError(f"only {file.tell()} of {layer.size} bytes arrived")

    @contextmanager
    def _asked(self, path: str, headers: Mapping[str, str] | None = None) -> Iterator[Any]:
        """Yield the response of the first host that has this path, or None if no host has it."""
        import requests

        problem, status = "", 0
        for host in self._hosts:
            try:
                answer = self._ask(host, path, headers or {})
            except requests.RequestException as error:
                problem, status = one_line(error), 0
                continue
            except (ValueError, AttributeError):  # oras raises these if it has no credentials for this host
                status = 401
                continue
            status, problem = answer.status_code, f"status {answer.status_code}"
            with answer:
                if status in (200, 206):
                    yield answer
                    return
        if status in (401, 403):
            raise ImageError(
                f"image {self._reference}: {self._hosts[-1]} refused access. Check the name, or log in with "
                "`docker login` (or write ~/.docker/config.json)"
            )
        if status != 404:
            raise SandboxUnavailableError(f"image {self._reference} can't be fetched from {self._hosts[-1]}: {problem}")
        yield None

    def _ask(self, host: str, path: str, headers: Mapping[str, str]) -> Any:
        client = self._client(host)
        url = f"{client.prefix}://{_bare(host)}/v2/{self._reference.name}/{path}"
        # Bypass oras's decorator, which repeats failed calls for two minutes before it raises the error.
        ask = type(client).do_request.__wrapped__
        accepted = {"Accept": ", ".join(MANIFEST_TYPES)} if path.startswith("manifests/") else {}
        return ask(client, url, "GET", headers={**accepted, **headers, "Accept-Encoding": "identity"}, stream=True)

    def _client(self, host: str) -> Any:
        if host not in self._clients:
            self._clients[host] = _client(host, self._reference.name)
        return self._clients[host]

    def _what(self, layer: Layer) -> str:
        return f"layer {layer.digest} of image {self._reference}"


def _client(host: str, name: str) -> Any:
    """Return an oras client for one host, with credentials and time limits."""
    import oras.container
    import oras.provider
    import requests
    from requests.adapters import HTTPAdapter

    class Timed(HTTPAdapter):
        def send(self, request: Any, *args: Any, **options: Any) -> requests.Response:
            return super().send(request, *args, **{**options, "timeout": (_CONNECT_S, _READ_S)})

    bare = _bare(host)
    is_plain = host.startswith("http://") or bare.rpartition(":")[0] in _LOOPBACK or bare in _LOOPBACK
    scheme = "http" if is_plain else "https"
    probe = requests.Session()
    probe.mount(f"{scheme}://", Timed())
    with probe.get(f"{scheme}://{bare}/v2/") as answer:
        is_basic = answer.headers.get("Www-Authenticate", "").lower().startswith("basic")
    client = oras.provider.Registry(bare, insecure=is_plain, auth_backend="basic" if is_basic else "token")
    client.session.mount(f"{scheme}://", Timed())
    container = oras.container.Container(f"{bare}/{name}")
    if bare == _DOCKER_API:
        container.registry = _DOCKER_KEY
    client.auth.load_configs(container)
    return client


def _bare(host: str) -> str:
    return host.removeprefix("http://").removeprefix("https://").rstrip("/")


def _copy(source: Any, target: IO[bytes], most: int | None, on_bytes: OnBytes) -> None:
    import urllib3

    left = most
    try:
        while left is None or left > 0:
            data = source.read(_CHUNK if left is None else min(_CHUNK, left))
            if not data:
                return
            target.write(data)
            on_bytes(len(data))
            left = None if left is None else left - len(data)
    except urllib3.exceptions.HTTPError as error:
        raise ConnectionError(str(error)) from error


def _read(source: Any, what: str) -> bytes:
    data: bytes = source.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ImageError(
            f"image {what}: its index, manifest or configuration has more than {MAX_DOCUMENT_BYTES} bytes, the limit"
        )
    return data


class FolderImage:
    """An image in a folder in OCI's layout."""

    def __init__(self, reference: Reference, folder: Path) -> None:
        self._reference = reference
        self._folder = folder

    def top(self) -> bytes:
        return _named_in(self._small("index.json"), self._reference)

    def document(self, digest: str, *, is_manifest: bool) -> bytes:
        return self._small(_blob(digest))

    def fetch(self, layer: Layer, target: Path, on_bytes: OnBytes) -> None:
        try:
            with (self._folder / _blob(layer.digest)).open("rb") as stored, target.open("wb") as file:
                _copy(stored, file, None, on_bytes)
        except OSError as error:
            raise ImageError(f"layer {layer.digest} of image {self._reference} can't be read: {error}") from error

    def _small(self, path: str) -> bytes:
        try:
            with (self._folder / path).open("rb") as file:
                return _read(file, str(self._reference))
        except OSError as error:
            raise ImageError(
                f"image {self._reference} can't be read: {error.strerror}: {self._folder / path}"
            ) from error


class ArchiveImage:
    """An image in an archive whose members are those of OCI's layout."""

    def __init__(self, reference: Reference, archive: tarfile.TarFile) -> None:
        self._reference = reference
        self._archive = archive

    def top(self) -> bytes:
        return _named_in(self._small("index.json"), self._reference)

    def document(self, digest: str, *, is_manifest: bool) -> bytes:
        return self._small(_blob(digest))

    def fetch(self, layer: Layer, target: Path, on_bytes: OnBytes) -> None:
        # Each call opens the archive again, because several threads fetch layers and an open file has only one
        # position.
        with tarfile.open(self._archive.name) as own, target.open("wb") as file:
            _copy(_member(own, self.path_of(layer), self._reference), file, None, on_bytes)

    def path_of(self, layer: Layer) -> str:
        return _blob(layer.digest)

    def _small(self, path: str) -> bytes:
        return _read(_member(self._archive, path, self._reference), str(self._reference))


class SavedImage(ArchiveImage):
    """An image in an archive that `docker save` of Docker before 25 wrote. It has no digests of the stored layers."""

    def __init__(self, reference: Reference, archive: tarfile.TarFile) -> None:
        super().__init__(reference, archive)
        entry = self._entry()
        self._config = self._small(str(entry.get("Config")))
        paths = [str(path) for path in entry.get("Layers") or ()]
        diff_ids = (document(self._config, f"the configuration of image {reference}").get("rootfs") or {}).get(
            "diff_ids"
        ) or []
        self._paths = dict(zip(map(str, diff_ids), paths, strict=False))

    def top(self) -> bytes:
        import json

        layers = [{"digest": diff_id} for diff_id in self._paths]
        return json.dumps({"config": {"digest": digest_of(self._config)}, "layers": layers}).encode()

    def document(self, digest: str, *, is_manifest: bool) -> bytes:
        return self._config

    def path_of(self, layer: Layer) -> str:
        return self._paths[layer.diff_id]

    def _entry(self) -> dict[str, Any]:
        import json

        entries = json.loads(self._small("manifest.json"))
        tags = [[str(tag) for tag in entry.get("RepoTags") or ()] for entry in entries]
        known = ", ".join(tag for names in tags for tag in names) or "no tags"
        wanted = self._reference.tag
        for entry, names in zip(entries, tags, strict=True):
            if not wanted or any(wanted in (name, *name.rsplit(":", 1)) for name in names):
                return dict(entry)
        raise ImageError(f"image {self._reference} is not in the archive, which has {known}")


def _archive(reference: Reference) -> ArchiveImage:
    try:
        archive = tarfile.open(reference.name)  # noqa: SIM115  (the source keeps it open)
        names = archive.getnames()
    except (OSError, tarfile.TarError) as error:
        raise ImageError(f"image {reference} can't be read: {one_line(error)}") from error
    if "index.json" in names:
        return ArchiveImage(reference, archive)
    if "manifest.json" in names:
        return SavedImage(reference, archive)
    raise ImageError(f"{reference.name} is not an archive of an image: it has neither index.json nor manifest.json")


def _member(archive: tarfile.TarFile, path: str, reference: Reference) -> IO[bytes]:
    try:
        found = archive.extractfile(path)
    except (KeyError, OSError, tarfile.TarError):
        found = None
    if found is None:
        raise ImageError(f"image {reference} is damaged: the archive has no file {path}")
    return found


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _named_in(index: bytes, reference: Reference) -> bytes:
    """Return the index of an OCI layout, reduced to the entry that the name selects."""
    import json

    found = document(index, f"the index of image {reference}")
    entries = [entry for entry in found.get("manifests") or () if isinstance(entry, dict)]
    if reference.tag:
        names = [(entry.get("annotations") or {}).get(_NAME, "") for entry in entries]
        entries = [entry for entry, name in zip(entries, names, strict=True) if name == reference.tag]
        if not entries:
            raise ImageError(
                f"image {reference}: its index has no tag {reference.tag!r}; the index has "
                f"{', '.join(map(str, filter(None, names))) or 'no tags'}"
            )
    return json.dumps({**found, "manifests": entries}).encode()

"""Pulls an image into the cache: resolve its name, download and unpack its layers, stack them, write its record.

    name -> top document -> manifest for this platform -> configuration -> layers (several at once) -> tree -> record

One process downloads and unpacks a layer; other processes that need the layer wait for its lock, and then find it
unpacked. `pull` blocks; `ImageSource` calls it in threads. `build` builds a Dockerfile into the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rayapp.core.errors import ImageError, SandboxError, SandboxUnavailableError, one_line
from rayapp.sandbox.images import manifest as documents
from rayapp.sandbox.images.manifest import ImageConfig, Layer
from rayapp.sandbox.images.reference import Reference, parse
from rayapp.sandbox.images.sources import StoredImage, open_image
from rayapp.sandbox.images.store import Hold, Image, Store, blob_lock, layer_lock, open_store
from rayapp.sandbox.local.inside.privileges import images_uid

log = logging.getLogger(__name__)
CODE_PATH = str(Path(__file__).resolve().parents[3])
_PROGRAM = "import sys; sys.path.insert(0, {path!r}); from rayapp.sandbox.images.unpack import main; main()"
_MAX_FILES = 2_000_000
_TIMEOUT_S = 3600.0
_MAX_ANSWER_BYTES = 64 << 20
_AT_ONCE = 4
_GUESSED_RATIO = 3
"""Estimated size of a layer's files, as a multiple of the downloaded bytes. This much room is made before unpacking."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Settings of a pull."""

    platform: str = ""
    """Platform as OCI writes it, e.g. linux/arm64; empty for this machine's."""
    mirrors: Mapping[str, Sequence[str]] | None = None
    """Registry -> mirrors that are tried before it."""
    on_bytes: Callable[[int], None] = lambda _: None
    """Called with the number of bytes of each part that was downloaded. Several threads call it."""


def pull(store: Store, reference: Reference, wanted: Wanted | None = None) -> Hold:
    """Return a lock (`Hold`) that keeps an image in the cache; download and unpack the image first if it is missing. An
    image of the cache needs no request if its name has a digest, or if it was built here. For a tag, the registry is
    first asked for the digest.

    Raises:
        ImageError: the image is missing, damaged, too large, or for another platform.
        SandboxUnavailableError: the registry can't be reached.
    """
    wanted = wanted or Wanted()
    if reference.digest or reference.kind == "build":
        found = store.named(reference)
        if found is not None and (hold := store.hold(found)) is not None:
            return hold
    source = open_image(reference, wanted.mirrors or {})
    plan = _resolve(source, reference, wanted.platform or documents.this_platform())
    for _ in range(3):
        found = store.image(plan.digest)
        if found is None:
            _bring(store, source, plan, wanted.on_bytes)
            found = store.image(plan.digest)
        if found is not None and (hold := store.hold(found)) is not None:
            pinned = reference.pinned(plan.digest) if reference.kind == "registry" else reference
            store.put(found, reference, *([pinned] if pinned != reference else []))
            return hold
    raise SandboxUnavailableError(
        f"image {reference} was evicted from the cache three times before it could be used: the cache is too small. "
        "Raise sandbox.providers[].image_cache_gib"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Facts from an image's manifest and configuration that a pull needs."""

    reference: Reference
    digest: str
    """Digest of the manifest for the platform."""
    config: ImageConfig
    layers: tuple[Layer, ...]


def resolve(reference: Reference, wanted: Wanted | None = None) -> Reference:
    """Return the name with its current digest, without downloading the image. A name that has a digest is also looked
    up.

    Raises:
        ImageError: the image is missing, damaged, or for another platform.
        SandboxUnavailableError: the registry can't be reached.
    """
    if reference.kind != "registry":
        return reference
    wanted = wanted or Wanted()
    source = open_image(reference, wanted.mirrors or {})
    return reference.pinned(_resolve(source, reference, wanted.platform or documents.this_platform()).digest)


def _resolve(source: StoredImage, reference: Reference, platform: str) -> _Plan:
    what = f"image {reference}"
    of_manifest = f"the manifest of {what}"
    data = documents.check_digest(source.top(), reference.digest, of_manifest)
    found, digest = documents.document(data, of_manifest), documents.digest_of(data)
    for _ in range(3):  # an index in a folder may list further indexes
        if not documents.is_index(found):
            break
        digest = documents.choose(found, platform, what)
        data = documents.check_digest(source.document(digest, is_manifest=True), digest, of_manifest)
        found = documents.document(data, of_manifest)
    config_digest = documents.config_digest(found, what)
    raw = source.document(config_digest, is_manifest=False)
    documents.check_digest(raw, config_digest, f"the configuration of {what}")
    config = documents.read_config(raw, what)
    documents.check_platform(config, platform, what)
    return _Plan(reference=reference, digest=digest, config=config, layers=documents.layers_of(found, config, what))


def _bring(store: Store, source: StoredImage, plan: _Plan, on_bytes: Callable[[int], None]) -> None:
    """Unpack an image into the cache. Locks keep its layers from being evicted until the image's record is written."""
    stored = sum(layer.size for layer in plan.layers if store.layer(layer.diff_id) is None)
    if stored > store.max_bytes:
        raise ImageError(_too_large(store, plan, f"its download has {stored} bytes"))
    store.make_room(_GUESSED_RATIO * stored)
    with contextlib.ExitStack() as kept, ThreadPoolExecutor(_AT_ONCE) as threads:
        jobs = [threads.submit(_layer, store, source, plan, layer, on_bytes) for layer in dict.fromkeys(plan.layers)]
        problems = []
        for job in jobs:
            try:
                kept.enter_context(job.result())
            except CancelledError:
                continue  # its download was never started, because another layer failed
            except SandboxError as error:
                problems.append(error)
                threads.shutdown(wait=False, cancel_futures=True)
        if problems:
            raise problems[0]
        if not store.make_room(0):
            raise ImageError(_too_large(store, plan, "the images in use leave too little room"))
        _stack(store, plan)


def _too_large(store: Store, plan: _Plan, why: str) -> str:
    return (
        f"image {plan.reference} does not fit into the cache {store.folder} of {store.max_bytes / (1 << 30):g} GiB: "
        f"{why}. Raise sandbox.providers[].image_cache_gib"
    )


def _layer(store: Store, source: StoredImage, plan: _Plan, layer: Layer, on_bytes: Callable[[int], None]) -> IO[bytes]:
    """Download and unpack one layer. Return an open file that holds a lock: the layer can't be evicted until the file
    is closed.
    """
    name = layer_lock(layer.diff_id)
    while True:
        kept = store.keep(name)
        if store.layer(layer.diff_id) is not None:
            return kept
        kept.close()
        with store.alone(name):
            if store.layer(layer.diff_id) is None:
                _unpack(store, source, plan, layer, on_bytes)


def _unpack(store: Store, source: StoredImage, plan: _Plan, layer: Layer, on_bytes: Callable[[int], None]) -> None:
    what = f"layer {layer.diff_id} of image {plan.reference}"
    stored = layer.digest or layer.diff_id
    with store.alone(blob_lock(stored)):
        blob = store.blob(stored)
        was_begun = blob.exists()
        try:
            _unpack_as_it_comes(store, source, layer, what, _Arriving(blob, on_bytes))
        except _BadBytesError:
            if not was_begun:
                raise
            # The part that an earlier pull left was damaged: download the layer again from its beginning.
            _unpack_as_it_comes(store, source, layer, what, _Arriving(blob, on_bytes))
        blob.unlink()


class _BadBytesError(ImageError):
    """The stored bytes of a layer don't have the layer's digest."""


class _Arriving:
    """A download that is read while it arrives."""

    def __init__(self, blob: Path, on_bytes: Callable[[int], None]) -> None:
        self.blob = blob
        blob.touch()
        self._on_bytes = on_bytes
        self._has_news, self._has_ended = threading.Event(), False
        self._hash = hashlib.sha256()

    def on_bytes(self, num_bytes: int) -> None:
        self._on_bytes(num_bytes)
        self._has_news.set()

    def end(self) -> None:
        self._has_ended = True
        self._has_news.set()

    def parts(self) -> Iterator[bytes]:
        """Yield the bytes as they arrive, up to `end`. A download that begins anew brings the same bytes again, or
        fails its digest."""
        with self.blob.open("rb", buffering=0) as file:
            while True:
                self._has_news.clear()
                is_last = self._has_ended
                while data := file.read(_CHUNK):
                    self._hash.update(data)
                    yield data
                if is_last:
                    return
                self._has_news.wait()

    @property
    def digest(self) -> str:
        """Digest of the bytes that were yielded."""
        return f"sha256:{self._hash.hexdigest()}"


def _unpack_as_it_comes(store: Store, source: StoredImage, layer: Layer, what: str, arriving: _Arriving) -> None:
    """Download a layer, and unpack it meanwhile.

    Raises:
        SandboxUnavailableError: the download broke off; what has arrived stays for the next pull.
        ImageError: the layer is missing, damaged, hostile or too large.
    """
    with store.pending(store.layer_folder(layer.diff_id)) as folder:
        limits = {"max_bytes": store.max_bytes, "max_files": _MAX_FILES}
        with ThreadPoolExecutor(1) as thread:
            child = thread.submit(_in_child, folder, what, store, limits, arriving.parts())
            try:
                source.fetch(layer, arriving.blob, arriving.on_bytes)
            finally:
                arriving.end()
        if child.exception() is not None and not isinstance(child.exception(), ImageError):
            child.result()
        try:
            if layer.digest not in ("", layer.diff_id, arriving.digest):
                raise _BadBytesError(f"{what} is damaged: its digest is {arriving.digest}, not {layer.digest}")
            facts = child.result()
            if facts["diff_id"] != layer.diff_id:
                raise ImageError(
                    f"{what} is damaged: the digest of its unpacked archive is {facts['diff_id']}, not {layer.diff_id}"
                )
        except ImageError:
            arriving.blob.unlink()
            raise
    store.put_layer(layer.diff_id, facts)


def _stack(store: Store, plan: _Plan) -> None:
    config = plan.config
    tree = documents.chain_id(config.diff_ids)
    what = f"image {plan.reference}"
    layers = [(str(store.layer_folder(each)), store.layer(each)) for each in config.diff_ids]
    settings = {"layers": layers, "user": config.user, "search_path": config.search_path}
    with store.alone(f"tree-{tree}"):
        if (store.trees / tree).is_dir():  # another image with the same layers already has this tree
            facts = _in_child(store.trees / tree, what, store, {**settings, "layers": []})
        else:
            with store.pending(store.trees / tree) as folder:
                facts = _in_child(folder, what, store, settings)
        store.put(
            Image(
                name=str(plan.reference.pinned(plan.digest)),
                digest=plan.digest,
                tree=tree,
                layers=config.diff_ids,
                num_bytes=sum(int(facts["num_bytes"]) for _, facts in layers if facts is not None),
                env=config.env,
                workdir=config.workdir,
                uid=facts["uid"],
                gid=facts["gid"],
                home=facts["home"],
                python=facts["python"],
            )
        )


def _in_child(
    target: Path, what: str, store: Store, job: Mapping[str, object], stored: Iterable[bytes] = ()
) -> dict[str, Any]:
    """Run `unpack.py` on a job in a child process, and return its result.

    Args:
        stored: the stored bytes of the layer to unpack. All are taken, even if the process ends early.
    Raises:
        ImageError: the layers are damaged, hostile or too large.
    """
    program = _PROGRAM.format(path=CODE_PATH)
    given = json.dumps({**job, "target": str(target), "uid": images_uid()})
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.defpath, **{name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}},
    )
    try:
        _feed(child, itertools.chain([f"{given}\n".encode()], stored))
        said, errors = child.communicate(timeout=_TIMEOUT_S)
    except (TimeoutError, subprocess.TimeoutExpired):
        raise ImageError(f"{what} was not unpacked within {_TIMEOUT_S:g} s") from None
    finally:
        child.kill()
        child.communicate()
    if child.returncode or len(said) > _MAX_ANSWER_BYTES:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2][-300:]
        raise ImageError(f"{what} can't be unpacked: the unpacker ended with exit status {child.returncode}: {last}")
    found: dict[str, Any] = json.loads(said)
    if "problem" in found:
        raise ImageError(f"{what} is refused: {found['problem']}")
    if "failed" in found:
        raise ImageError(f"{what} can't be unpacked into {store.folder}: {found['failed']}")
    return found


def _feed(child: subprocess.Popen[bytes], parts: Iterable[bytes]) -> None:
    """Write to a child's standard input, as long as the child reads. Raises TimeoutError: it reads no more."""
    assert child.stdin is not None
    pipe = child.stdin.fileno()
    os.set_blocking(pipe, False)
    is_read = True
    for part in parts:
        left = memoryview(part)
        while left and is_read:
            if not select.select([], [pipe], [], _TIMEOUT_S)[1]:
                raise TimeoutError
            try:
                left = left[os.write(pipe, left) :]
            except BrokenPipeError:
                is_read = False


_PULLS_AT_ONCE, _AHEAD_AT_ONCE = 4, 2


class ImageSource:
    """The cache of images for asyncio code. It pulls missing images in threads; callers that need the same image share
    one pull.
    """

    def __init__(
        self,
        *,
        folder: str = "",
        max_gib: float = 50.0,
        mirrors: Mapping[str, Sequence[str]] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args: aliases: template -> the template to use in its place, e.g. with a tag -> with the digest that the run has
        pinned.
        """
        self._folder, self._max_gib = folder, max_gib
        self._wanted = Wanted(mirrors=mirrors)
        self._aliases = aliases or {}
        self._opened: Store | None = None
        self._pulls: dict[str, asyncio.Future[None]] = {}
        self._ahead: deque[str] = deque()
        self._num_ahead = 0
        self._threads: ThreadPoolExecutor | None = None

    @property
    def store(self) -> Store:
        """The cache, which is opened at the first use. Raises ImageError: the cache's folder can't be made."""
        if self._opened is None:
            self._opened = open_store(self._folder, self._max_gib)
        return self._opened

    @property
    def trees(self) -> Path:
        return self.store.trees

    async def hold(self, template: str) -> Hold:
        """Return a lock (`Hold`) that keeps the image of a template in the cache; pull the image first if it is
        missing. A pull continues if its caller is cancelled.

        Raises:
            ImageError: the image is missing, damaged, too large, or for another platform.
            SandboxUnavailableError: the registry can't be reached.
        """
        reference = parse(self._aliases.get(template, template))
        while True:
            if (found := self.store.named(reference)) is not None and (hold := self.store.hold(found)) is not None:
                return hold
            await asyncio.shield(self._pull(template))

    def find(self, template: str) -> Image | None:
        """Return the image of a template if it is in the cache."""
        return self.store.named(parse(self._aliases.get(template, template)))

    def prefetch(self, templates: Sequence[str]) -> None:
        """Pull missing images in the background, in this order. Only two are pulled at a time, so that threads are left
        for images that sandboxes wait for now. A failed pull is logged, and raised when the image is used.
        """
        self._ahead.extend(template for template in templates if template not in self._ahead)
        self._pull_ahead()

    def _pull_ahead(self) -> None:
        while self._ahead and self._num_ahead < _AHEAD_AT_ONCE:
            template = self._ahead.popleft()
            if self.find(template) is None and template not in self._pulls:
                self._num_ahead += 1
                self._pull(template).add_done_callback(self._pulled_ahead)

    def _pulled_ahead(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.warning("an image that will be needed was not pulled: %s", error)
        self._num_ahead -= 1
        self._pull_ahead()

    def _pull(self, template: str) -> asyncio.Future[None]:
        if template not in self._pulls:
            self._threads = self._threads or ThreadPoolExecutor(_PULLS_AT_ONCE, thread_name_prefix="pull-image")
            reference = parse(self._aliases.get(template, template))
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self._threads, lambda: pull(self.store, reference, self._wanted).release())
            task.add_done_callback(lambda _: self._pulls.pop(template, None))
            self._pulls[template] = task
        return self._pulls[template]


TOOLS = ("buildah", "podman", "docker")
"""Tools that build Dockerfiles, in the order in which they are looked for. The tool runs the Dockerfile's commands with
its own network and isolation, so build only Dockerfiles that you trust."""


def build(store: Store, folder: Path, name: str, *, tool: str = "", options: Sequence[str] = ()) -> Image:
    """Build a folder's Dockerfile and unpack the image into the cache as `image:build:NAME`. The tool writes to this
    process's stdout and stderr.

    Args:
        tool: one of `TOOLS`; empty: the first that is installed.
        options: passed to the tool's build command.
    Raises:
        ImageError: no tool is installed, or the build failed.
    """
    reference = parse(f"build:{name}")
    if not (folder / "Dockerfile").is_file():
        raise ImageError(f"image {reference}: there is no file {folder / 'Dockerfile'}")
    chosen = tool or next((each for each in TOOLS if shutil.which(each)), "")
    if not chosen or shutil.which(chosen) is None:
        known = ", ".join(TOOLS)
        raise ImageError(
            f"image {reference} can't be built: {f'{chosen} is not' if chosen else f'none of {known} is'} installed"
        )
    with tempfile.TemporaryDirectory(prefix="rayapp-build-") as place:
        tag, archive = f"rayapp.local/{name.lower()}:built", f"{place}/image.tar"
        for argv in _commands(chosen, folder, tag, archive, options):
            _run(argv, f"image {reference}")
        with pull(store, parse(f"archive:{archive}")) as hold:
            store.put(hold.image, reference)
            return hold.image


def _commands(tool: str, folder: Path, tag: str, archive: str, options: Sequence[str]) -> list[list[str]]:
    """Return the commands that build an image and write it to an archive."""
    if tool == "buildah":
        return [
            ["buildah", "build", "-t", tag, *options, str(folder)],
            ["buildah", "push", tag, f"oci-archive:{archive}"],
        ]
    form = ["--format", "oci-archive"] if tool == "podman" else []
    return [[tool, "build", "-t", tag, *options, str(folder)], [tool, "save", *form, "-o", archive, tag]]


def _run(argv: Sequence[str], what: str) -> None:
    try:
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ImageError(f"{what} can't be built: {one_line(error)}") from error

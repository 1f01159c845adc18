"""Brings an image into the cache: resolve its name, download and unpack its layers, stack them, write its record.

    name -> top document -> manifest for this platform -> configuration -> layers (several at once) -> tree -> record

One process downloads and unpacks a layer; other processes that need the layer wait for its lock, and then find it
unpacked. Blocking; call it in a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rayapp.core.errors import ImageError, SandboxError, SandboxUnavailableError
from rayapp.sandbox.images import manifest as documents
from rayapp.sandbox.images.manifest import ImageConfig, Layer
from rayapp.sandbox.images.reference import Reference
from rayapp.sandbox.images.sources import Source, open_source
from rayapp.sandbox.images.store import Hold, Image, Store, blob_lock, layer_lock
from rayapp.sandbox.local.inside.privileges import images_uid

CODE_PATH = str(Path(__file__).resolve().parents[3])
_PROGRAM = "import sys; sys.path.insert(0, {path!r}); from rayapp.sandbox.images.unpack import main; main()"
_MAX_FILES = 2_000_000
_TIMEOUT_S = 3600.0
_MAX_ANSWER_BYTES = 64 << 20
_AT_ONCE = 4
_GUESSED_RATIO = 3
"""Estimated bytes of a layer's files for each downloaded byte: eviction makes this much room before unpacking."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Settings of pulls."""

    platform: str = ""
    """Platform as OCI writes it, e.g. linux/arm64; empty for this machine's."""
    mirrors: Mapping[str, Sequence[str]] | None = None
    """Registry -> mirrors that are tried before it."""
    on_bytes: Callable[[int], None] = lambda _: None
    """Called with the size of each part that was downloaded, from several threads."""


def pull(store: Store, reference: Reference, wanted: Wanted | None = None) -> Hold:
    """Return a `Hold` on an image of the cache; download and unpack the image first if it is missing.
    A name with a digest and a built image need no request if they are in the cache. For a tag, the registry is asked
    for the digest first.

    Raises:
        ImageError: the image is missing, damaged, too large, or for another platform.
        SandboxUnavailableError: the registry can't be reached.
    """
    wanted = wanted or Wanted()
    if reference.digest or reference.kind == "build":
        found = store.named(reference)
        if found is not None and (hold := store.hold(found)) is not None:
            return hold
    source = open_source(reference, wanted.mirrors or {})
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
        f"image {reference} was evicted three times before it could be used: the cache is too small. Raise "
        "sandbox.providers[].image_cache_gib"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Facts from an image's manifest and configuration."""

    reference: Reference
    digest: str
    """Digest of the manifest for the platform."""
    config: ImageConfig
    layers: tuple[Layer, ...]


def resolve(reference: Reference, wanted: Wanted | None = None) -> Reference:
    """Return the name with its current digest, without downloading the image. Raises the errors of `pull`."""
    if reference.is_pinned:
        return reference
    wanted = wanted or Wanted()
    source = open_source(reference, wanted.mirrors or {})
    return reference.pinned(_resolve(source, reference, wanted.platform or documents.this_platform()).digest)


def _resolve(source: Source, reference: Reference, platform: str) -> _Plan:
    what = f"image {reference}"
    data = documents.check_digest(source.top(), reference.digest, what)
    found, digest = documents.document(data, what), documents.digest_of(data)
    for _ in range(3):  # a folder's index names indexes
        if not documents.is_index(found):
            break
        digest = documents.choose(found, platform, what)
        data = documents.check_digest(source.document(digest, is_manifest=True), digest, f"a manifest of {what}")
        found = documents.document(data, what)
    config_digest = documents.config_digest(found, what)
    raw = source.document(config_digest, is_manifest=False)
    documents.check_digest(raw, config_digest, f"the configuration of {what}")
    config = documents.read_config(raw, what)
    documents.check_platform(config, platform, what)
    return _Plan(reference=reference, digest=digest, config=config, layers=documents.layers_of(found, config, what))


def _bring(store: Store, source: Source, plan: _Plan, on_bytes: Callable[[int], None]) -> None:
    """Unpack an image into the cache. Its layers can't be evicted before the image's record is written."""
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
                continue  # never started, because another layer failed
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


def _layer(store: Store, source: Source, plan: _Plan, layer: Layer, on_bytes: Callable[[int], None]) -> IO[bytes]:
    """Download and unpack one layer. Return an open file: until it is closed, the layer can't be evicted."""
    name = layer_lock(layer.diff_id)
    while True:
        kept = store.keep(name)
        if store.layer(layer.diff_id) is not None:
            return kept
        kept.close()
        with store.alone(name):
            if store.layer(layer.diff_id) is None:
                _unpack(store, source, plan, layer, on_bytes)


def _unpack(store: Store, source: Source, plan: _Plan, layer: Layer, on_bytes: Callable[[int], None]) -> None:
    what = f"layer {layer.diff_id} of image {plan.reference}"
    stored = layer.digest or layer.diff_id
    with store.alone(blob_lock(stored)):
        blob = store.blob(stored)
        source.fetch(layer, blob, on_bytes)
        try:
            _check_blob(blob, layer, what)
            with store.pending(store.layer_folder(layer.diff_id)) as folder:
                most = {"max_bytes": store.max_bytes, "max_files": _MAX_FILES}
                facts = _in_child(folder, what, store, {"blob": str(blob), **most})
                if facts["diff_id"] != layer.diff_id:
                    raise ImageError(f"{what} is damaged: unpacked its digest is {facts['diff_id']}")
            store.put_layer(layer.diff_id, facts)
        finally:
            blob.unlink(missing_ok=True)


def _check_blob(blob: Path, layer: Layer, what: str) -> None:
    if layer.digest in ("", layer.diff_id):
        return  # the caller checks the digest of the unpacked layer instead
    with blob.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if layer.digest != f"sha256:{found}":
        raise ImageError(f"{what} is damaged: its digest is sha256:{found}, not {layer.digest}")


def _stack(store: Store, plan: _Plan) -> None:
    config = plan.config
    tree = documents.chain_id(config.diff_ids)
    what = f"image {plan.reference}"
    layers = [(str(store.layer_folder(each)), store.layer(each)) for each in config.diff_ids]
    settings = {"layers": layers, "user": config.user, "search_path": config.search_path}
    with store.alone(f"tree-{tree}"):
        if (store.trees / tree).is_dir():  # another image with the same layers has made this tree
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


def _in_child(target: Path, what: str, store: Store, job: Mapping[str, object]) -> dict[str, Any]:
    """Do a job of `unpack.py` in a process of its own.

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
        said, errors = child.communicate(given.encode(), timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ImageError(f"{what} was not unpacked within {_TIMEOUT_S:g} s") from None
    finally:
        child.kill()
        child.wait()
    if child.returncode or len(said) > _MAX_ANSWER_BYTES:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2][-300:]
        raise ImageError(f"{what} can't be unpacked: exit status {child.returncode}, {last}")
    found: dict[str, Any] = json.loads(said)
    if "problem" in found:
        raise ImageError(f"{what} is refused: {found['problem']}")
    if "failed" in found:
        raise ImageError(f"{what} can't be unpacked into {store.folder}: {found['failed']}")
    return found

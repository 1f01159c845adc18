"""The built-in provider `local`: sandboxes made of warm interpreters on this node, without a service, a key or root.

A zygote (`Slot`) is a warm interpreter that serves one sandbox after the other. Every execution is a new fork, so no
state of one sandbox reaches the next. When the provider's process dies, its zygotes end every process that they
started.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from rayapp.core.errors import (
    IsolationUnavailableError,
    SandboxConfigError,
    SandboxDeadlineError,
    SandboxError,
    SandboxQuotaError,
)
from rayapp.core.machine import num_cores
from rayapp.core.names import load_extra
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.images import MOUNT_POINTS, Hold, Image, ImageCache, is_image
from rayapp.sandbox.local.sandbox import LocalSandbox
from rayapp.sandbox.local.slot import BootError, Slot


def locate(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the folders and files of these packages, with the shared libraries that a wheel puts beside one
    (numpy.libs)."""
    found: list[str] = []
    for package in packages:
        # importlib.util.find_spec can't be used: it looks at modules already imported, and imports parent packages.
        spec = PathFinder.find_spec(package) if package.isidentifier() else None
        if spec is None:
            raise SandboxConfigError(
                f"package {package!r} of the sandbox spec is not installed in this environment: install it, or leave "
                "it out"
            )
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        found += map(str, folders)
        found += [str(libs) for folder in folders if (libs := folder.parent / f"{package}.libs").is_dir()]
        if not folders and spec.origin is not None:
            found.append(spec.origin)
    return tuple(found)


MAX_JOBS_PER_SLOT = 20_000  # bounds a slow memory leak of a zygote
LEVELS: tuple[str, ...] = ("ns+proc", "ns", "ll")  # strongest first
LOOPBACK_LEVELS = ("ns+proc+lo", "ns+lo")  # strongest first; `ll` has no network namespace
# True with a loopback; packages; for images, the user and group that own their files
_Kind = tuple[bool, tuple[str, ...], tuple[int, int] | None]


@dataclass(slots=True)
class _Living:
    sandbox: LocalSandbox
    kind: _Kind
    labels: dict[str, str]
    hold: Hold | None  # keeps the sandbox's image in the cache


def why_no_images(refused: Mapping[str, str]) -> str:
    """Return why this node can't run sandboxes on images; `refused`: isolation level -> reason."""
    steps = "; ".join(f"{level}: {why}" for level, why in refused.items()) or "no level with namespaces was allowed"
    return (
        f"this node can't run sandboxes on images ({steps}): they need user namespaces and Linux 5.11. "
        f"{_what_this_node_needs()}, or use a remote provider (docs/sandboxes.md)"
    )


# Sysctl -> value with which ordinary users can't make user namespaces.
_NAMESPACE_SETTINGS = {
    "user/max_user_namespaces": "0",
    "kernel/unprivileged_userns_clone": "0",
    "kernel/apparmor_restrict_unprivileged_userns": "1",
}


def _what_this_node_needs() -> str:
    for name, forbidding in _NAMESPACE_SETTINGS.items():
        path = Path("/proc/sys", name)
        if path.exists() and path.read_text().strip() == forbidding:
            return f"Change the node's sysctl {name.replace('/', '.')}, which is {forbidding}"
    if "\nSeccomp:\t2" in Path("/proc/self/status").read_text():
        return (
            "This container's seccomp profile may forbid them: use configs/kuberay/seccomp/sandboxes.json (the chart's "
            "isolation.seccompProfile)"
        )
    return "Allow them (in Kubernetes hostUsers: false)"


@functools.cache
def why_no_images_here() -> str:
    """Return why this machine can't run sandboxes on images; empty if it can. The first call takes 0.3 s."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(_try_empty_image(LEVELS))).result()


async def _try_empty_image(levels: Sequence[str]) -> str:
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="rayapp-try-image-") as folder:
        tree = Path(folder, "empty")
        for path in (Path(folder), tree, *(tree / name for name in MOUNT_POINTS)):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
        image = Image(
            name="an empty image", digest="", tree=tree.name, num_bytes=0, env=(), workdir="/", uid=0, gid=0,
            home="/", python="",
        )  # fmt: skip
        for level in (level for level in levels if level.startswith("ns")):
            try:
                slot = await Slot.start(level, images={"trees": folder, "uid": 0, "gid": 0})
            except BootError as error:
                refused[level] = str(error)
                continue
            try:
                await LocalSandbox("local-try-image", slot, SandboxSpec(), lambda _: None, image).run_code(
                    "pass", timeout_s=10.0
                )
                return ""
            except SandboxError as error:
                refused[level] = str(error)
            finally:
                slot.close()
    return why_no_images(refused)


class LocalProvider:
    """Provider of local sandboxes, for one event loop. `core.protocols.SandboxProvider` describes its methods."""

    name = "local"

    def __init__(
        self,
        *,
        allow_unisolated: bool = False,
        packages: tuple[str, ...] = (),
        max_slots: int | None = None,
        levels: tuple[str, ...] = LEVELS,
        images: ImageCache | None = None,
    ) -> None:
        # `allow_unisolated`: on a node without isolation, run with resource limits only, and mark every result.
        # `packages`: preloaded in every sandbox. `max_slots`: sandboxes at once; None: one per core.
        self.images: ImageCache = images or load_extra("images.cache:ImageSource")()
        self._levels = (*levels, "unisolated") if allow_unisolated else levels
        self._packages = packages
        self._max_slots = max_slots or num_cores()
        self._refused: dict[str, str] = {}
        self._idle: dict[_Kind, list[Slot]] = {}
        self._living: dict[str, _Living] = {}
        self._num_starting = 0
        # Tasks that close slots after the zygote has deleted its last sandbox's files.
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def refused(self) -> Mapping[str, str]:
        """Isolation level that this node does not offer -> the step that failed."""
        return self._refused

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> LocalSandbox:
        self._check_can_create(spec)
        self._num_starting += 1
        hold: Hold | None = None
        try:
            async with asyncio.timeout(timeout_s):
                hold = await self.images.hold(spec.template) if spec.template else None
                kind = self._kind_of(spec, hold)
                slot = self._take_idle(kind) or await self._start(kind)
        except TimeoutError:
            raise SandboxDeadlineError(self._why_late(spec, hold, timeout_s)) from None
        except BaseException:
            if hold is not None:
                hold.release()
            raise
        finally:
            self._num_starting -= 1
        if spec.own_files and not slot.level.startswith("ns"):
            slot.close()
            raise SandboxConfigError(
                "this node's sandboxes can't hold repositories or run languages other than Python: at isolation level "
                f"{slot.level}, code can't write files or start programs. Allow user namespaces, or use a "
                "remote provider"
            )
        image = hold.image if hold is not None else None
        sandbox = LocalSandbox(f"local-{uuid.uuid4().hex}", slot, spec, self._ended, image)
        self._living[sandbox.id] = _Living(sandbox, kind, dict(labels), hold)
        await sandbox.extend(ttl_s)
        return sandbox

    async def list(self, labels: Mapping[str, str], *, timeout_s: float = 30.0) -> AsyncIterator[str]:
        for sandbox_id, living in tuple(self._living.items()):
            if labels.items() <= living.labels.items():
                yield sandbox_id

    async def kill(self, sandbox_id: str, *, timeout_s: float = 10.0) -> None:
        if sandbox_id in self._living:
            await self._living[sandbox_id].sandbox.kill(timeout_s=timeout_s)

    async def close(self) -> None:
        self._is_closed = True
        for living in tuple(self._living.values()):
            await living.sandbox.kill(timeout_s=1.0)
        await asyncio.gather(*self._ending, *(slot.finish() for slots in self._idle.values() for slot in slots))
        self._idle.clear()

    def _check_can_create(self, spec: SandboxSpec) -> None:
        if self._is_closed:
            raise SandboxConfigError("the local sandbox provider is closed")
        if spec.template and not is_image(spec.template):
            raise SandboxConfigError(
                f"template {spec.template!r}: the local provider has no templates, only images, whose names begin with "
                "image: (docs/sandboxes.md). Name a remote provider in sandbox.providers, or leave template empty."
            )
        if len(self._living) + self._num_starting >= self._max_slots:
            raise SandboxQuotaError(
                f"all {self._max_slots} local sandboxes are in use: release one, or raise max_sandboxes of the local "
                "provider"
            )

    def _take_idle(self, kind: _Kind) -> Slot | None:
        slots = self._idle.get(kind, [])
        while slots:
            slot = slots.pop()
            if slot.is_alive:
                return slot
            slot.close()
        return None

    def _kind_of(self, spec: SandboxSpec, hold: Hold | None) -> _Kind:
        if hold is not None:
            return spec.loopback, (), hold.image.user  # an image brings its own packages
        return spec.loopback, tuple(sorted({*self._packages, *spec.packages})), None

    def _why_late(self, spec: SandboxSpec, hold: Hold | None, timeout_s: float) -> str:
        if spec.template and hold is None:
            return f"{spec.template} was not pulled within {timeout_s:g} s. The pull continues; try again later"
        return f"no local sandbox was ready within {timeout_s:g} s; the node is overloaded"

    async def _start(self, kind: _Kind) -> Slot:
        with_loopback, packages, user = kind
        levels, images = self._levels, None
        if user is not None:
            levels = tuple(level for level in levels if level.startswith("ns"))
            images = {"trees": str(self.images.trees), "uid": user[0], "gid": user[1]}
        if with_loopback:
            levels = tuple(f"{level}+lo" for level in levels if f"{level}+lo" in LOOPBACK_LEVELS)
        paths = locate(packages)
        for level in levels:
            if level in self._refused:
                continue
            try:
                return await Slot.start(level, packages=packages, paths=paths, images=images)
            except BootError as error:
                self._refused[level] = str(error)
        if user is not None:
            raise IsolationUnavailableError(why_no_images(self._refused))
        steps = "; ".join(f"{level}: {self._refused[level]}" for level in levels) or "none is built in"
        if with_loopback:
            raise IsolationUnavailableError(
                f"agent.external.inside: this node can't make a sandbox with a loopback interface ({steps}). Such a "
                "sandbox needs a network namespace and Landlock's rules for TCP (Linux 6.7). Leave "
                "agent.external.inside out: then the agent runs outside of the sandbox."
            )
        raise IsolationUnavailableError(
            f"this node offers no isolation for model-written code ({steps}). Run `rayapp doctor`, use a "
            "remote provider, or set sandbox.allow_unisolated: true if you accept that code can read and change this "
            "node."
        )

    def _ended(self, sandbox: LocalSandbox) -> None:
        living = self._living.pop(sandbox.id)
        kind, slot = living.kind, sandbox.slot
        if living.hold is not None:
            living.hold.release()
        if slot.is_alive and slot.num_jobs < MAX_JOBS_PER_SLOT and not self._is_closed:
            self._idle.setdefault(kind, []).append(slot)
        else:
            ending = asyncio.create_task(slot.finish())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

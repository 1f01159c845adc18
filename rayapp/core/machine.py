"""Machine resources of a process: memory, cores, network interface."""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import platform
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

SIOCGIFADDR = 0x8915  # ioctl (sockios.h) for an interface's IPv4 address
CPUINFO = Path("/proc/cpuinfo")
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_WEIGHTS_PER_THREAD, _FEW_THREADS = 32 << 20, 4
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # options of glibc's mallopt, from malloc.h


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory instead of returning it to the system: for learners on CPU.

    A page that was returned must be zeroed and mapped again: 1.2 s of a step's 11 s, with 783000 page faults; with this
    function 0.03 s. The process may hold up to twice the memory in use. Other C libraries: no effect.
    """
    set_option = _function("mallopt")
    if set_option is not None:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 256 * 2**20)):
            set_option(option, value)


def trim_heap() -> None:
    """Return freed memory to the system: glibc keeps it per thread, and the driver would grow in every step."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> Callable[..., int] | None:
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found


def available_memory() -> int:
    """Return the bytes that a new process can allocate: the smaller of the machine's and this cgroup's (v2 or v1)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    root, old = Path("/sys/fs/cgroup"), "memory/memory"
    for limit, usage in (("memory.max", "memory.current"), (f"{old}.limit_in_bytes", f"{old}.usage_in_bytes")):
        if (root / limit).exists() and (most := (root / limit).read_text().strip()) != "max":
            return min(free, max(0, int(most) - int((root / usage).read_text())))
    return free


def num_cores() -> int:
    """Return the cores that this process may use: the smaller of its affinity and its container's CPU quota (cgroup v2
    or v1), rounded down: with more threads than that the kernel pauses all of them in each period."""
    quotas = [_quota(folder) for folder in _own_cgroups()]
    return max(1, int(min(len(os.sched_getaffinity(0)), *quotas, math.inf)))


def _own_cgroups() -> Iterator[Path]:
    """Yield the cgroups' folders, which may not exist in this container."""
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            own = CGROUPS / controllers / path.lstrip("/")
            # In a container the path may be the host's. The root folder is then the container's own cgroup.
            yield from (own, *(parent for parent in own.parents if parent.is_relative_to(CGROUPS / controllers)))


def _quota(cgroup: Path) -> float:
    """Return the number of cores that a cgroup may use; infinity without a quota."""
    new, old = cgroup / "cpu.max", cgroup / "cpu.cfs_quota_us"
    if new.exists():
        quota, period = new.read_text().split()
    elif old.exists():
        quota, period = old.read_text(), (cgroup / "cpu.cfs_period_us").read_text()
    else:
        return math.inf
    return int(quota) / int(period) if quota.strip() not in ("max", "-1") else math.inf


# Instruction sets by our name, with Linux's flag (/proc/cpuinfo).
WIDEST_FIRST = {
    "amx": "amx_bf16", "avx512_bf16": "avx512_bf16", "avx512": "avx512f", "avx2": "avx2", "sve_bf16": "svebf16",
    "neon_bf16": "bf16", "neon": "asimd",
}  # fmt: skip
WITH_BFLOAT16 = ("amx", "avx512_bf16", "sve_bf16", "neon_bf16")
# Slowdown of a learner's step over float32, on two threads of a Zen 3 (SmolLM2-135M: 117 and 6.1 s).
EMULATED_BFLOAT16_SLOWDOWN = 20
# Values of oneDNN's ONEDNN_MAX_CPU_ISA, with which one processor imitates a smaller one.
ONEDNN_LIMITS = {
    "AVX2": "avx2",
    "AVX512_CORE": "avx512",
    "AVX512_CORE_VNNI": "avx512",
    "AVX512_CORE_BF16": "avx512_bf16",
}


def instruction_set() -> str:
    """Return the widest vector instructions that matrix products use: a key of `WIDEST_FIRST`, or `unknown`.
    ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY lower it. Libraries choose by these, so every start gives the same
    bits."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set())
    ours = [name for name, flag in WIDEST_FIRST.items() if flag in flags]
    limit = ONEDNN_LIMITS.get(os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(), "")
    if os.environ.get("ATEN_CPU_CAPABILITY", "") in ("avx2", "default"):
        limit = "avx2"
    names = list(WIDEST_FIRST)
    allowed = [name for name in ours if not limit or names.index(name) >= names.index(limit)]
    return next(iter(allowed), "unknown")


def has_bfloat16() -> bool:
    """True if bfloat16 matrix products are faster than float32 ones. Without its own instructions (AVX-512 BF16, AMX,
    Arm's BF16) bfloat16 is emulated: on two threads of a Zen 3, 1.6 GFLOP/s in place of 102."""
    return instruction_set() in WITH_BFLOAT16


def processor_name() -> str:
    """Return the processor's name and its vector instructions, such as `AMD EPYC 7763 (avx2)`."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name} ({instruction_set()})"


def share_of_cores(num_processes: int, *, is_synchronous: bool, model: str = "") -> int:
    """Return the number of threads for each of `num_processes` of a kind.

    In a synchronous run each kind gets all cores; above staleness 0 both compute at once, and each gets half. With
    weights in the folder `model`, at most max(_FEW_THREADS, bytes / _WEIGHTS_PER_THREAD), chosen numbers: threads with
    less work wait for each other. On 2 busy cores, with 0.7 MiB of weights, 2 threads were 0.7 times as fast as 1 for
    16 tokens, and 0.3 times for a training step of 512.
    """
    cores = num_cores()
    if not is_synchronous:
        cores //= 2
    most = max(_FEW_THREADS, _weights_bytes(Path(model)) // _WEIGHTS_PER_THREAD) if model else cores
    return max(1, min(cores // num_processes, most))


def _weights_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.is_dir() else 0


def use_interface_towards(address: str) -> None:
    """Make gloo listen on the interface towards the group's rendezvous, unless GLOO_SOCKET_IFNAME is set. By default it
    uses the address of the host's name, which is 127.0.1.1 on Debian."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # connecting a UDP socket sends nothing
        own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex() if _address_of(name, probe) == own]
    if names:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def _address_of(interface: str, probe: socket.socket) -> str:
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])

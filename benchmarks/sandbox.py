"""Speed of local sandboxes, compared in one run with a bare fork and with the alternatives.

    python benchmarks/sandbox.py [--executions 400] [--json]

The rounds of all figures alternate, so that a busy moment of the machine affects all of them. The output has medians
over all samples. The baselines are a bare `os.fork` of the same warm interpreter (the lower bound of an execution), a
cold interpreter, and a cold interpreter in bubblewrap, runc and gVisor's runsc, where these are installed. runc and
runsc need root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import machine

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import IsolationUnavailableError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.local.inside import boot
from rayapp.sandbox.local.inside.boot import WARM_MODULES
from rayapp.sandbox.local.provider import LEVELS, LocalProvider
from rayapp.sandbox.local.sandbox import LocalSandbox
from rayapp.sandbox.pool.build import open_pool
from rayapp.sandbox.pool.client import PoolClient
from rayapp.sandbox.verdict.compare import equal

ROUNDS = 8
PAUSE_S = 0.01
"""Pause before each execution, in seconds. Between two tool calls of a trajectory the policy generates a turn.
Meanwhile the next child is forked in advance, and cores become idle. Therefore a bare fork is also measured after a
pause."""
TRIVIAL = "def f(x):\n    return x"
SORTING = """
def f(items):
    if len(items) < 2:
        return items
    pivot, *rest = items
    return f([x for x in rest if x < pivot]) + [pivot] + f([x for x in rest if x >= pivot])
"""
NUMPY = "import numpy\ndef f(x):\n    return int(numpy.arange(x).sum())"
BARE_FORK = """
import gc, os, sys, time
sys.path += sys.argv[3].split(os.pathsep)
for name in sys.argv[4:]:
    __import__(name)
gc.collect()
gc.freeze()
for _ in range(int(sys.argv[1])):
    time.sleep(float(sys.argv[2]))
    started = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    print(time.perf_counter() - started)
"""
BWRAP = (
    "bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--proc", "/proc",
    "--dev", "/dev",
)  # fmt: skip
RUNSC = ("runsc", "--network=none", "--ignore-cgroups", "do")
NOT_BOUND = ("proc", "sys", "dev", "tmp")
FOLDERS = os.pathsep.join((str(Path(__file__).resolve().parents[1]), sysconfig.get_path("purelib")))
"""Import path with this project and numpy."""
WARM_INTERPRETER = (*WARM_MODULES, boot.__name__)
"""Modules of the interpreter from which executions are forked: those that are preloaded for candidates, and rayapp's
own."""
HARNESS_IMPORTS = "import " + ", ".join(WARM_MODULES)
PYTHON = os.path.realpath(sys.executable)

Samples = dict[str, list[float]]


async def sample(
    provider: LocalProvider, code: str, argument: object, executions: int, *, pause_s: float = 0.0
) -> list[float]:
    """Return the seconds of each execution in one sandbox, with a pause before each."""
    sandbox = await provider.create(SandboxSpec(), labels={}, ttl_s=600, timeout_s=60)
    try:
        times = []
        for _ in range(executions):
            await asyncio.sleep(pause_s)
            started = time.perf_counter()
            report = await sandbox.call_function(code, "f", [[argument]], timeout_s=30)
            times.append(time.perf_counter() - started)
            assert report.calls[0].ok, report
        return times
    finally:
        await sandbox.kill()


def bare_fork(executions: int, *, pause_s: float = 0.0, modules: Sequence[str] = WARM_INTERPRETER) -> list[float]:
    """Return the seconds of each `os.fork` of an interpreter with these modules. The child ends at once."""
    argv = [PYTHON, "-I", "-S", "-c", BARE_FORK, str(executions), str(pause_s), FOLDERS, *modules]
    done = subprocess.run(argv, env={"OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    return [float(line) for line in done.stdout.split()]


def cold(executions: int, *argv: str) -> list[float]:
    times = []
    for _ in range(executions):
        started = time.perf_counter()
        subprocess.run(argv, env={}, capture_output=True, check=True)
        times.append(time.perf_counter() - started)
    return times


@contextmanager
def runc_bundle(*args: str) -> Iterator[str]:
    """Yield a folder from which runc runs a command, with this machine's folders read-only."""
    with TemporaryDirectory() as folder:
        root, mounts = Path(folder, "rootfs"), []
        for each in [*Path("/").iterdir(), *(Path("/", name) for name in NOT_BOUND)]:
            place = root / each.name
            if each.is_symlink():
                place.symlink_to(each.readlink())
            elif each.is_dir() and not place.exists():
                place.mkdir(parents=True)
                if each.name not in NOT_BOUND:
                    options = ["rbind", "ro"]
                    mounts.append({"destination": str(each), "source": str(each), "type": "bind", "options": options})
        subprocess.run(["runc", "spec", "--bundle", folder], check=True)
        config = json.loads(Path(folder, "config.json").read_text())
        config["process"] |= {"terminal": False, "args": list(args)}
        config["mounts"] += mounts
        config["linux"].pop("resources")  # cgroups may be read-only here, and only make runc slower
        Path(folder, "config.json").write_text(json.dumps(config))
        yield folder


async def open_levels() -> dict[str, LocalProvider]:
    """Open a provider for each isolation level that this machine offers."""
    providers = {}
    for level in LEVELS:
        provider = LocalProvider(levels=(level,), max_slots=64)
        try:
            await sample(provider, TRIVIAL, 1, 20)
            providers[level] = provider
        except IsolationUnavailableError as error:
            print(f"{level}: {error}", file=sys.stderr)
            await provider.close()
    return providers


async def latencies(providers: dict[str, LocalProvider], executions: int) -> Samples:
    """Return the seconds of executions for every provider and baseline, measured in alternating rounds."""
    with_numpy = LocalProvider(levels=("ns", "ll"), packages=("numpy",))
    kinds: dict[str, Callable[[int], Awaitable[list[float]] | list[float]]] = {"bare fork": bare_fork}
    for level, provider in providers.items():
        kinds[level] = lambda count, provider=provider: sample(provider, TRIVIAL, 1, count)  # type: ignore[misc]
    kinds["ns, numpy preloaded"] = lambda count: sample(with_numpy, TRIVIAL, 1, count)
    kinds["bare fork, warm modules only"] = lambda count: bare_fork(count, modules=WARM_MODULES)
    kinds["bare fork, numpy"] = lambda count: bare_fork(count, modules=(*WARM_INTERPRETER, "numpy"))
    kinds["bare fork, after a pause"] = lambda count: bare_fork(count, pause_s=PAUSE_S)
    kinds["ns, after a pause"] = lambda count: sample(providers["ns"], TRIVIAL, 1, count, pause_s=PAUSE_S)
    kinds["ns, numpy, after a pause"] = lambda count: sample(with_numpy, TRIVIAL, 1, count, pause_s=PAUSE_S)
    kinds["ns, numpy used"] = lambda count: sample(with_numpy, NUMPY, 10, count)
    kinds["cold python"] = lambda count: cold(count // 4, PYTHON, "-I", "-S", "-c", "pass")
    if shutil.which("bwrap"):
        kinds["cold bwrap"] = lambda count: cold(count // 4, *BWRAP, PYTHON, "-c", "pass")
        kinds["cold bwrap, imports"] = lambda count: cold(count // 4, *BWRAP, PYTHON, "-c", HARNESS_IMPORTS)
    if shutil.which("runsc") and os.geteuid() == 0:
        kinds["cold runsc"] = lambda count: cold(count // 10, *RUNSC, PYTHON, "-c", "pass")
    samples: Samples = {}
    with runc_bundle(PYTHON, "-c", "pass") if shutil.which("runc") and os.geteuid() == 0 else nullcontext() as bundle:
        if bundle:
            run = ("runc", "run", "--bundle", bundle, f"benchmark-{os.getpid()}")
            kinds["cold runc"] = lambda count: cold(count // 4, *run)
        for _ in range(ROUNDS):
            for kind, measure in kinds.items():
                measured = measure(max(executions // ROUNDS, 4))
                samples.setdefault(kind, []).extend(measured if isinstance(measured, list) else await measured)
    await with_numpy.close()
    return samples


async def rate(level: str, slots: int, executions: int) -> float:
    """Return the executions per second of several concurrent sandboxes after all are warm: the best of three
    measurements.
    """
    provider = LocalProvider(levels=(level,), max_slots=slots)
    rates = []
    for _ in range(4):
        started = time.perf_counter()
        await asyncio.gather(*(sample(provider, TRIVIAL, 1, executions) for _ in range(slots)))
        rates.append(slots * executions / (time.perf_counter() - started))
    await provider.close()
    return max(rates[1:])


def rate_on_cores(level: str, cores: int, executions: int) -> float:
    """Return `rate` for as many slots as cores, measured in a process that may use only these cores."""
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    argv = [sys.executable, __file__, "--rate", level, "--executions", str(executions), "--cores", *map(str, chosen)]
    return float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


async def score_batch(source: PoolClient, completions: int = 500, tests: int = 5) -> float:
    """Return the seconds to score completions on several tests each. Values come from sandboxes and are compared in
    this process.
    """
    inputs = [[[(number * 7919 + at * 104729) % 1000 for at in range(20)]] for number in range(tests)]
    expected = [sorted(args[0]) for args in inputs]
    waiting = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def one() -> bool:
        async with waiting, source.lease(SandboxSpec(), timeout_s=120) as sandbox:
            report = await sandbox.call_function(SORTING, "f", inputs, timeout_s=30)
        return all(equal(want, call.value) for want, call in zip(expected, report.calls, strict=True))

    started = time.perf_counter()
    passed = await asyncio.gather(*(one() for _ in range(completions)))
    assert all(passed)
    return time.perf_counter() - started


def memory_mib(pid: int) -> dict[str, float]:
    """Return memory of a slot's processes: resident, and proportional (see `ProcessMemory`)."""
    found = machine.memory_below([pid])
    return {
        "rss_mib": round(sum(each.resident_mib for each in found), 1),
        "pss_mib": round(sum(each.proportional_mib for each in found), 1),
    }


async def slot_memory(provider: LocalProvider) -> dict[str, float]:
    sandbox: LocalSandbox = await provider.create(SandboxSpec(), labels={}, ttl_s=600, timeout_s=60)
    try:
        return memory_mib(sandbox.slot.pid)
    finally:
        await sandbox.kill()


async def measure(executions: int) -> dict[str, object]:
    providers = await open_levels()
    samples = await latencies(providers, executions)
    cores = len(os.sched_getaffinity(0))
    rates, batches, memory = {}, {}, {}
    for level, provider in providers.items():
        rates[level] = {count: round(rate_on_cores(level, count, executions // 2)) for count in (1, cores)}
        async with open_pool(SandboxConfig(), "benchmark", local=provider) as (source, _):
            batches[level] = min([await score_batch(source) for _ in range(3)])
            memory[level] = await slot_memory(provider)
    return {
        "median_ms": {kind: statistics.median(times) * 1000 for kind, times in samples.items()},
        "p99_ms": {kind: statistics.quantiles(times, n=100)[98] * 1000 for kind, times in samples.items()},
        "executions_per_s_by_cores": rates,
        "score_500x5_s": batches,
        "slot_memory": memory,
        "cores": cores,
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "ratios": ratios({kind: statistics.median(times) for kind, times in samples.items()}, rates),
    }


def ratios(median_s: dict[str, float], rates: dict[str, dict[int, int]]) -> dict[str, float]:
    """Return the ratios of each level: bare fork time / execution time, speed-up over a cold start, and speed-up from
    more cores.
    """
    after_a_pause = median_s["bare fork, after a pause"] / median_s["ns, after a pause"]
    found = {"ns/bare_fork_over_execution_after_a_pause": after_a_pause}
    for level, by_cores in rates.items():
        found[f"{level}/bare_fork_over_execution"] = median_s["bare fork"] / median_s[level]
        for other in ("cold python", "cold bwrap", "cold runc", "cold runsc"):
            if other in median_s:
                found[f"{level}/{other.replace(' ', '_')}_over_execution"] = median_s[other] / median_s[level]
        found[f"{level}/rate_of_all_cores_over_one"] = by_cores[max(by_cores)] / by_cores[1]
    return found


def show(result: dict[str, object]) -> None:
    medians, tails = result["median_ms"], result["p99_ms"]
    assert isinstance(medians, dict)
    assert isinstance(tails, dict)
    fork = medians["bare fork"]
    print(f"{'':30} {'median ms':>10} {'p99 ms':>10} {'x bare fork':>12}")
    for kind, median in medians.items():
        print(f"{kind:30} {median:10.2f} {tails[kind]:10.2f} {median / fork:12.2f}")
    for key in ("executions_per_s_by_cores", "score_500x5_s", "slot_memory", "cores", "kernel", "python"):
        print(f"{key:30} {result[key]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--executions", type=int, default=400, help="of each kind")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rate", choices=LEVELS, help="only executions per second, at this level")
    parser.add_argument("--cores", type=int, nargs="+", default=[], help="with --rate: those to run on")
    options = parser.parse_args()
    if options.rate:
        os.sched_setaffinity(0, options.cores or os.sched_getaffinity(0))
        print(asyncio.run(rate(options.rate, len(os.sched_getaffinity(0)), options.executions)))
        return
    result = asyncio.run(measure(options.executions))
    if options.json:
        print(json.dumps({"settings": {"executions": options.executions}, "machine": machine.describe(), **result}))
    else:
        show(result)


if __name__ == "__main__":
    main()

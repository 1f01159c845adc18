"""Sandboxes on container images: start, sharing and pull, each compared with other tools: python -m benchmarks images

    start   a sandbox that runs /bin/true and ends: on an image, without one, by `runc run`, by `podman run`
    share   sandboxes of one large image on this node: memory and disk
    pull    the large image from Debian's docker-registry on loopback: into the cache, unpacked; by `skopeo copy`, which
            doesn't unpack; and by `skopeo copy` and `umoci unpack`

The benchmark runs as root and needs runc, umoci, skopeo and docker-registry. Rounds alternate, so that ratios hold on a
busy machine.
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
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.machine import ROOT, memory_below
from benchmarks.report import print_report
from rayapp.core.types import SandboxSpec
from rayapp.extras.images.cache import ImageSource
from rayapp.extras.images.pull import pull
from rayapp.extras.images.store import open_store
from rayapp.sandbox.images import parse
from rayapp.sandbox.local.provider import LocalProvider

sys.path.insert(0, str(ROOT / "tests"))
from support.images import entry, layer, machine_layer, real_registry, write_oci

_TRUE = ("/bin/true",)
_MIB = 1 << 20
_TAG = "one"


def make_image(folder: Path, mib: int) -> None:
    """Write an image with small programs of this machine, and `mib` MiB of files, half of which can be compressed."""
    files = [entry(f"data/{number}", os.urandom(_MIB // 2) + bytes(_MIB // 2)) for number in range(mib)]
    write_oci(folder, [machine_layer(with_python=False), layer(*files)])
    index = json.loads((folder / "index.json").read_text())
    index["manifests"][0]["annotations"] = {"org.opencontainers.image.ref.name": _TAG}
    (folder / "index.json").write_text(json.dumps(index))


async def start_ms(provider: LocalProvider, template: str) -> float:
    """Return the milliseconds from the creation of a sandbox to its end."""
    began = time.perf_counter()
    sandbox = await provider.create(SandboxSpec(template=template), labels={}, ttl_s=600, timeout_s=600)
    ran = await sandbox.run_command(_TRUE, timeout_s=30)
    await sandbox.kill()
    assert ran.ok, ran
    return (time.perf_counter() - began) * 1000


async def command_ms(argv: list[str]) -> float:
    """Return the milliseconds that a command takes."""
    began = time.perf_counter()
    child = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, errors = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"{argv}: {errors.decode()[-300:]}")
    return (time.perf_counter() - began) * 1000


def bundle_of(folder: Path, place: Path) -> Path:
    """Unpack the image with umoci, as a bundle for runc that runs /bin/true. Return the bundle's folder."""
    subprocess.run(["umoci", "unpack", "--image", f"{folder}:{_TAG}", str(place)], check=True, capture_output=True)
    config = json.loads((place / "config.json").read_text())
    config["process"] |= {"terminal": False, "args": list(_TRUE)}
    config["linux"].pop("resources", None)  # cgroups may be read-only here, and only make runc slower
    (place / "config.json").write_text(json.dumps(config))
    return place


async def starts(folder: Path, work: Path, cache: ImageSource, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of a start for each way of starting. The ways alternate in rounds."""
    provider, template = LocalProvider(images=cache), f"image:oci:{folder}"
    bundle = bundle_of(folder, work / "bundle")
    ways: dict[str, Callable[[int], Awaitable[float]]] = {
        "image": lambda _: start_ms(provider, template),
        "bare": lambda _: start_ms(provider, ""),
        "runc": lambda number: command_ms(["runc", "run", "-b", str(bundle), f"rayapp-{os.getpid()}-{number}"]),
    }
    podman = ["podman", "--root", str(work / "podman"), "run", "--rm", "--network=none", "--cgroups=disabled"]
    try:
        await command_ms([*podman, f"oci:{folder}:{_TAG}", *_TRUE])
        ways["podman"] = lambda _: command_ms([*podman, f"oci:{folder}:{_TAG}", *_TRUE])
    except (OSError, RuntimeError) as error:
        print(f"without podman: {error}", file=sys.stderr)
    found: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for number in range(-2, rounds):  # the first two rounds warm up
            for name, way in ways.items():
                taken = await way(number + 2)
                found[name] += [taken] if number >= 0 else []
    finally:
        await provider.close()
    return found


async def shared(cache: ImageSource, folder: Path, number: int) -> float:
    """Start `number` sandboxes of one image. Return the MiB of memory that each takes."""
    provider, template = LocalProvider(images=cache, max_slots=number), f"image:oci:{folder}"
    try:
        made = [
            await provider.create(SandboxSpec(template=template), labels={}, ttl_s=600, timeout_s=600)
            for _ in range(number)
        ]
        for sandbox in made:
            assert (await sandbox.run_command(("/bin/cat", "/data/0"), timeout_s=60, max_output_bytes=4 * _MIB)).ok
        return sum(each.proportional_mib for each in memory_below({sandbox.slot.pid for sandbox in made})) / number
    finally:
        await provider.close()


def disk_mib(folder: Path) -> int:
    """Return the MiB of disk that a folder takes. Hard links count once."""
    return int(subprocess.run(["du", "-sm", folder], check=True, capture_output=True, text=True).stdout.split()[0])


def pulls(folder: Path, work: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds that rayapp takes to pull and unpack the image into an empty cache, that skopeo takes to copy
    it, and that `skopeo copy` and `umoci unpack` take together.
    """
    found: dict[str, list[float]] = {"pull": [], "skopeo": [], "skopeo_and_umoci": []}
    with real_registry(work) as host:
        plain = ["--dest-tls-verify=false", f"oci:{folder}:{_TAG}", f"docker://{host}/big:1"]
        subprocess.run(["skopeo", "copy", *plain], check=True, capture_output=True)
        copy = ["skopeo", "copy", "--src-tls-verify=false", f"docker://{host}/big:1", f"oci:{work}/copied:1"]
        for number in range(rounds):
            began = time.perf_counter()
            pull(open_store(str(work / f"pulled{number}"), 100), parse(f"{host}/big:1")).release()
            found["pull"].append(time.perf_counter() - began)
            shutil.rmtree(work / f"pulled{number}")
            began = time.perf_counter()
            subprocess.run(copy, check=True, capture_output=True)
            found["skopeo"].append(time.perf_counter() - began)
            unpack = ["umoci", "unpack", "--image", f"{work}/copied:1", str(work / "unpacked")]
            subprocess.run(unpack, check=True, capture_output=True)
            found["skopeo_and_umoci"].append(time.perf_counter() - began)
            shutil.rmtree(work / "copied")
            shutil.rmtree(work / "unpacked")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the image's files")
    parser.add_argument("--rounds", type=int, default=20, help="starts in each way")
    parser.add_argument("--pulls", type=int, default=2, help="pulls in each way")
    parser.add_argument("--sandboxes", type=int, default=50, help="sandboxes of one image at once")
    settings = parser.parse_args()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rayapp-images-")))
        work.chmod(0o755)
        # podman leaves a bind mount of its folder behind. Unmount it.
        stack.callback(subprocess.run, ["umount", "-q", str(work / "podman/overlay")], check=False)
        folder = work / "oci"
        make_image(folder, settings.mib)
        cache = ImageSource(folder=str(work / "cache"))
        times = asyncio.run(starts(folder, work, cache, settings.rounds))
        memory = asyncio.run(shared(ImageSource(folder=str(work / "cache")), folder, settings.sandboxes))
        sharing = {"memory_mib_each": memory, "disk_mib": disk_mib(work / "cache")}
        pulled = pulls(folder, work, settings.pulls)
    median = {name: statistics.median(each) for name, each in {**times, **pulled}.items()}
    ratios = {f"start_of_{name}_by_image": median[name] / median["image"] for name in times if name != "image"}
    ratios |= {f"{name}_by_pull": median[name] / median["pull"] for name in ("skopeo", "skopeo_and_umoci")}
    starts_ms = {name: median[name] for name in times}
    print_report(settings, ratios, starts_ms=starts_ms, pulls_s={name: median[name] for name in pulled}, shared=sharing)


if __name__ == "__main__":
    main()

"""Speed of uploading and downloading a checkpoint, by rayapp and by the AWS CLI, with the same file and the same
server. The two alternate in one run.

    python benchmarks/storage.py [--gib 1] [--rounds 3] [--server swift|moto] [--json]

Each transfer is a separate process, whose time from start to end and peak memory are measured. The CLI runs in its own
environment (made on the first call under benchmarks/.envs) with its default settings; rayapp uses the defaults of
`rayapp.storage`, with checksums. The server is OpenStack Swift on this machine's disk. A first round with a small file
is not counted: in it both programs compile their modules, and the server warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).resolve().parent
CLI_VERSION = "1.46.3"
BUCKET = "bench"
TIMEOUT_S = 1800.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Time and peak memory of one process."""

    seconds: float
    peak_mib: float


def make_cli() -> Path:
    """Make the AWS CLI's environment, once. Return the path of the CLI."""
    home = HERE / ".envs" / f"awscli-{CLI_VERSION}"
    program = home / "bin" / "aws"
    stamp = home / ".installed"
    if stamp.exists():
        return program
    print(f"making {home}", file=sys.stderr, flush=True)
    beside = Path(sys.executable).with_name("uv")
    uv = shutil.which("uv") or (str(beside) if beside.exists() else None)
    python, requirement = home / "bin" / "python", f"awscli=={CLI_VERSION}"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    installer = [uv, "pip", "install", "--python", str(python)] if uv else [str(python), "-m", "pip", "install"]
    subprocess.run([*installer, requirement], check=True, stdout=sys.stderr)
    stamp.touch()
    return program


def measure(command: list[str], environment: dict[str, str], log: Path) -> Transfer:
    """Run a command to its end and measure it. Raises RuntimeError: the command fails."""
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {status}: {log.read_text()[-2000:]}")
    return Transfer(seconds=seconds, peak_mib=usage.ru_maxrss / 1024)


def worker(direction: str, uri: str, path: Path) -> None:
    """Run rayapp's side of one transfer, in its own process."""
    from rayapp.storage.opening import open_storage

    async def transfer() -> None:
        async with open_storage(uri) as storage:
            if direction == "upload":
                await storage.put_file(path, "ours.bin")
            else:
                await storage.get_file("ours.bin", path)

    asyncio.run(transfer())


def write_random(path: Path, num_bytes: int) -> None:
    draw = random.Random(0)
    with path.open("wb") as file:
        for _ in range(num_bytes // MIB):
            file.write(draw.randbytes(MIB))


def start_server(kind: str, home: Path) -> tuple[str, dict[str, str], Callable[[], None]]:
    """Start a server. Return its address, environment variables for its clients, and a function that ends it."""
    if kind == "moto":
        from support.storage import moto_server as module

        server: Any = module.MotoServer()
    else:
        import swift_server as module  # type: ignore[no-redef]

        server = module.SwiftServer(home / "swift")
    server.start()
    make_bucket(server.url, module.KEY, module.SECRET, module.REGION)
    keys = {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": module.KEY, "AWS_SECRET_ACCESS_KEY": module.SECRET}
    return server.url, keys | {"AWS_REGION": module.REGION, "RAYAPP_S3_PRESET": "minio"}, server.kill


def make_bucket(url: str, key: str, secret: str, region: str) -> None:
    from botocore.session import get_session

    keys = {"aws_access_key_id": key, "aws_secret_access_key": secret}
    client = get_session().create_client("s3", endpoint_url=url, region_name=region, **keys)
    client.create_bucket(Bucket=BUCKET)


def run(gib: float, rounds: int, kind: str) -> dict[str, Any]:
    cli = make_cli()
    with tempfile.TemporaryDirectory(dir=HERE / ".envs") as folder:
        home = Path(folder)
        source, target, log = home / "source.bin", home / "target.bin", home / "log"
        _, keys, stop = start_server(kind, home)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= keys | {"PYTHONPATH": str(HERE.parent), "PYTHONPYCACHEPREFIX": str(HERE / ".envs" / "bytecode")}
        uri, mine = f"s3://{BUCKET}", [sys.executable, str(HERE / "storage.py"), "--worker"]
        commands = {
            "ours/upload": [*mine, "upload", uri, str(source)],
            "cli/upload": [str(cli), "s3", "cp", "--quiet", str(source), f"{uri}/cli.bin"],
            "ours/download": [*mine, "download", uri, str(target)],
            "cli/download": [str(cli), "s3", "cp", "--quiet", f"{uri}/cli.bin", str(target)],
        }
        found: dict[str, list[Transfer]] = {name: [] for name in commands}
        try:
            for number in range(rounds + 1):
                if number < 2:
                    write_random(source, int(gib * 1024) * MIB if number else MIB)
                for name, command in commands.items():
                    target.unlink(missing_ok=True)
                    transfer = measure(command, environment, log)
                    if number > 0:
                        found[name].append(transfer)
                    print(f"round {number}: {name} {transfer.seconds:.1f} s, {transfer.peak_mib:.0f} MiB",
                          file=sys.stderr, flush=True)  # fmt: skip
        finally:
            stop()
    settings = {"server": kind, "gib": gib, "rounds": rounds}
    return {"settings": settings, "machine": machine.describe()} | _summary(found, gib)


def _summary(found: dict[str, list[Transfer]], gib: float) -> dict[str, Any]:
    """Return medians, and the ratio of rayapp's rate to the CLI's rate."""
    sides = {
        name: {
            "mib_per_s": gib * 1024 / statistics.median(transfer.seconds for transfer in transfers),
            "peak_mib": max(transfer.peak_mib for transfer in transfers),
            "transfers": [asdict(transfer) for transfer in transfers],
        }
        for name, transfers in found.items()
    }
    ratios = {
        way: sides[f"ours/{way}"]["mib_per_s"] / sides[f"cli/{way}"]["mib_per_s"] for way in ("upload", "download")
    }
    return {"sides": sides, "ratios": ratios}


def _print(report: dict[str, Any]) -> None:
    for name, side in report["sides"].items():
        print(f"{name:14} {side['mib_per_s']:7.1f} MiB/s   peak {side['peak_mib']:6.0f} MiB")
    for way, ratio in report["ratios"].items():
        print(f"{way}: {ratio:.2f} of the CLI's rate (goal 0.9)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server", choices=("swift", "moto"), default="swift")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=3, metavar=("WAY", "URI", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        way, uri, path = arguments.worker
        worker(way, uri, Path(path))
        return
    report = run(arguments.gib, arguments.rounds, arguments.server)
    print(json.dumps(report, indent=1)) if arguments.json else _print(report)


if __name__ == "__main__":
    main()

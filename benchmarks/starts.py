"""Processor time until a command answers: python -m benchmarks.starts [--rounds 7]

Each command runs in turns with a Python that only imports the libraries that the command can't do without. The ratio is
libraries / command: 1 means that rayapp's own modules cost nothing. Processor time includes child processes. The
fastest of several rounds counts, because other programs on the machine make every start slower.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import print_report

RAYAPP = (sys.executable, "-m", "rayapp")
ANSWER = "def sort_numbers(xs):\n    return xs\n"
_LIBRARIES = "asyncio, numpy, pydantic.main, pydantic.types, ssl, typer.main, yaml"
PAIRS = {
    "help": (("--help",), "typer.main"),
    "score": (("score", "sort_numbers", "ANSWER"), _LIBRARIES),
    "doctor": (("doctor",), f"{_LIBRARIES}, rich.console"),
}
"""Name -> arguments of the command, and the modules that it is compared with."""


def processor_s(command: tuple[str, ...]) -> float:
    """Run a command and return the processor seconds of its process and of all processes that it waited for."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return used.ru_utime + used.ru_stime


def measure(rounds: int, answer: str) -> dict[str, dict[str, float]]:
    """Return the fewest processor seconds of each command and of its libraries."""
    found: dict[str, dict[str, float]] = {name: {} for name in PAIRS}
    for _ in range(rounds):
        for name, (arguments, modules) in PAIRS.items():
            given = tuple(answer if argument == "ANSWER" else argument for argument in arguments)
            for side, command in {
                "command_s": (*RAYAPP, *given),
                "libraries_s": (sys.executable, "-c", f"import {modules}"),
            }.items():
                found[name][side] = min(processor_s(command), found[name].get(side, float("inf")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rayapp-starts-") as folder:
        (answer := Path(folder, "answer.py")).write_text(ANSWER)
        found = measure(args.rounds, str(answer))
    ratios = {f"{name}_libraries_over_command": s["libraries_s"] / s["command_s"] for name, s in found.items()}
    print_report(args, ratios, processor_s=found)


if __name__ == "__main__":
    main()

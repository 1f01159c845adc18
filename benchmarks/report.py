"""The output of every benchmark: one JSON object that `python -m benchmarks` records and compares."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from benchmarks.machine import describe

# Keep vLLM's log out of standard output, which is reserved for the report. vLLM reads this variable when it is
# imported, later than this module.
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def print_report(settings: argparse.Namespace, ratios: Mapping[str, float], **figures: Any) -> None:
    """Print a report: settings, machine, ratios, and the figures behind the ratios.

    Args:
        ratios: name -> ratio of two measurements of this run. Higher is better (benchmarks/history.py).
    """
    told = {key: value for key, value in vars(settings).items() if key != "json"}
    report = {"settings": told, "machine": describe(), "ratios": dict(ratios), **figures}
    print(json.dumps(report, indent=2, default=str), flush=True)


def parse_report(output: str) -> dict[str, Any]:
    """Return the report in a benchmark's standard output. Libraries may have written other lines.

    Raises:
        ValueError: the output contains no report.
    """
    lines = output.splitlines(keepends=True)
    for first in reversed([number for number, line in enumerate(lines) if line.startswith("{")]):
        try:
            found, _ = json.JSONDecoder().raw_decode("".join(lines[first:]))
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict) and "ratios" in found:
            return found
    raise ValueError("the benchmark printed no JSON object with ratios")

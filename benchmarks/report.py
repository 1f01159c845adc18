"""The output of every benchmark: one JSON object that `python -m benchmarks` records and compares."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from benchmarks.machine import describe

# Standard output is reserved for the report. vLLM reads this variable when it is imported, which is after this module.
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def print_report(settings: argparse.Namespace, ratios: Mapping[str, float], **figures: Any) -> None:
    """Print settings, machine, ratios and the figures behind them.

    Args:
        ratios: ratios of two measurements of this run; higher is better; see benchmarks/history.py.
    """
    told = {key: value for key, value in vars(settings).items() if key != "json"}
    report = {"settings": told, "machine": describe(), "ratios": dict(ratios), **figures}
    print(json.dumps(report, indent=2, default=str), flush=True)


def parse_report(output: str) -> dict[str, Any]:
    """Return the report in a benchmark's standard output, to which libraries may have written too.

    Raises:
        ValueError: the output holds no report.
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

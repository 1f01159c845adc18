"""The reward of configs/geometry3k_8gpu.yaml: 1 if the last \\boxed{…} is the ground truth, 0.1 for a box alone.

Numbers are compared as numbers, other answers as text without blanks and LaTeX's spacing. Nothing is evaluated: verl's
rule for this data set computes the model's text with sympy in the trainer's process.
"""

from __future__ import annotations

import re
from typing import Any

_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_SPACING = re.compile(r"\s|\\[,;!]|\\(?:left|right|text|mathrm)\b|\^\{?\\circ\}?|°|\$|\\%|%")
_FRACTION = re.compile(r"(-?)\\d?frac\{(-?[\d.]+)\}\{([\d.]+)\}")
_ROOT = re.compile(r"(-?[\d.]*)\\sqrt\{?([\d.]+)\}?")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    boxes = _BOX.findall(solution_str[-2000:])
    is_right = bool(boxes) and _same(_plain(boxes[-1]), _plain(ground_truth))
    return {"score": 1.0 if is_right else 0.1 * bool(boxes), "solved": float(is_right), "boxed": float(bool(boxes))}


def _plain(text: str) -> str:
    return _SPACING.sub("", str(text)).rpartition("=")[2].rstrip(".")


def _same(answer: str, truth: str) -> bool:
    first, second = _number(answer), _number(truth)
    if first is None or second is None:
        return answer == truth
    return abs(first - second) <= 1e-3 * max(1.0, abs(second))


def _number(text: str) -> float | None:
    try:
        if found := _FRACTION.fullmatch(text):
            return (-1 if found[1] else 1) * float(found[2]) / float(found[3])
        if found := _ROOT.fullmatch(text):
            return float({"": "1", "-": "-1"}.get(found[1], found[1])) * float(found[2]) ** 0.5
        return float(text.replace(",", ""))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None

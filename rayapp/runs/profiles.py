"""Profiles of steps (`train.profile_steps`): traces of a learner and an engine, and where the step's time went.

    learner-0, vllm-server-0 -- Profile --> driver --> profiles/step=000003/learner-0.json.gz, vllm-server-0.json.gz
                                                       profiles/step=000003/summary.json
                                                         '--> console, `rayapp report`, the page of `rayapp view`

A trace is torch's, in Chrome's format. The learner records the first micro-batches of each pass over them, the engine
its first iterations, so that a trace of a long step stays small.
"""

from __future__ import annotations

import gzip
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rayapp.core.files import aside, write_text
from rayapp.runs.layout import PROFILES, step_name

SUMMARY = "summary.json"
MOST_MICRO_BATCHES, MOST_ITERATIONS = 8, 64
_MAX_TRACE_BYTES = 64 << 20
_MAX_JSON_CHARS = 1 << 30
_MOST_OPERATORS, _MOST_TOLD = 20, 4
_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ON_CPU = frozenset({"cpu_op", "cuda_runtime", "cuda_driver"})
_EVENTS = '"traceEvents": ['


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A trace of one process during a step."""

    process: str
    """Name of the process, e.g. `learner-0`."""
    trace: bytes
    """Chrome trace, gzipped."""
    covers: str
    """Part of the step that was recorded, e.g. `8 of 24 micro-batches`."""
    paused_s: float = 0.0
    """Seconds between the trace's first and last event in which nothing was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator or kernel, with its own time in a trace: without the operators that it calls."""

    name: str
    calls: int
    seconds: float
    share: float
    """Share of the own time of all operators on this device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Where the time of one process went."""

    process: str
    covers: str
    device: str
    """`gpu`: the operators are kernels and copies on the GPU; `cpu`: calls on the host."""
    recorded_s: float
    busy_s: float
    """Seconds in which the device computed. The rest it waited, for Python, other processes or data."""
    operators: list[Operator] = field(default_factory=list)
    """Operators by their own seconds, longest first."""

    @property
    def busy_share(self) -> float:
        return self.busy_s / self.recorded_s if self.recorded_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Where the time of a step went: the driver's phases, the learner's parts of `train`, and operators."""

    step: int
    phases_s: dict[str, float]
    learner_s: dict[str, float]
    processes: list[TraceSummary] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        return sum(self.phases_s.values())

    def rows(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, seconds and share of the step, for each phase; the parts of `train` follow it, indented."""
        total_s = self.total_s or 1.0
        for name, seconds in _longest(self.phases_s):
            yield name, seconds, seconds / total_s
            if name == "train":
                for part, part_s in _longest(self.learner_s):
                    yield f"  {part}", part_s, part_s / total_s


def _longest(seconds: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield names and seconds, longest first, without names that took no time."""
    return iter(sorted(((name, each) for name, each in seconds.items() if each > 0), key=lambda pair: -pair[1]))


def summarize(profile: Profile) -> TraceSummary:
    """Read a trace. Takes seconds for a large one: call it in a thread."""
    on: dict[str, dict[tuple[Any, Any], list[tuple[float, float, str]]]] = {
        "gpu": defaultdict(list),
        "cpu": defaultdict(list),
    }
    for event in trace_events(profile.trace):
        category = event.get("cat")
        device = "gpu" if category in _ON_GPU else "cpu" if category in _ON_CPU else ""
        if device and event.get("ph") == "X":
            track = on[device][event.get("pid"), event.get("tid")]
            track.append((float(event["ts"]), float(event.get("dur", 0.0)), str(event["name"])))
    device = "gpu" if on["gpu"] else "cpu"
    everything = [each for tracks in on.values() for track in tracks.values() for each in track]
    begin = min((start for start, _, _ in everything), default=0.0)
    end = max((start + duration for start, duration, _ in everything), default=0.0)
    spans = [(start, start + duration) for track in on[device].values() for start, duration, _ in track]
    return TraceSummary(
        process=profile.process,
        covers=profile.covers,
        device=device,
        recorded_s=max(0.0, (end - begin) / 1e6 - profile.paused_s),
        busy_s=_covered(spans) / 1e6,
        operators=_operators(on[device].values()),
    )


def trace_events(trace: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a gzipped Chrome trace one by one: reading the whole text at once would hold the
    interpreter's lock for seconds, and the driver's event loop with it."""
    with gzip.open(io.BytesIO(trace), "rt", encoding="utf-8", errors="replace") as file:
        text = file.read(_MAX_JSON_CHARS)
    decoder = json.JSONDecoder()
    at = text.find(_EVENTS) + len(_EVENTS)
    while at >= len(_EVENTS) and (at := text.find("{", at)) >= 0:
        event, at = decoder.raw_decode(text, at)
        yield event
        if not text[at : at + 64].lstrip().startswith(","):
            return


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _operators(tracks: Iterable[list[tuple[float, float, str]]]) -> list[Operator]:
    """Return each name's own time: the duration of its events without that of the events inside them."""
    own_us: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for track in tracks:
        open_until: list[tuple[float, str]] = []
        for start, duration, name in sorted(track, key=lambda event: (event[0], -event[1])):
            while open_until and open_until[-1][0] <= start:
                open_until.pop()
            if open_until:
                own_us[open_until[-1][1]] -= duration
            own_us[name] += duration
            calls[name] += 1
            open_until.append((start + duration, name))
    total_us = sum(own_us.values()) or 1.0
    longest = sorted(own_us.items(), key=lambda pair: -pair[1])[:_MOST_OPERATORS]
    return [Operator(name=name, calls=calls[name], seconds=us / 1e6, share=us / total_us) for name, us in longest]


def read_trace(file: Path) -> bytes:
    """Return a trace file's bytes.

    Raises:
        ValueError: it is too large to be kept.
    """
    if (size := file.stat().st_size) > _MAX_TRACE_BYTES:
        raise ValueError(
            f"the trace is too large: it has {size >> 20} MiB, and the maximum is {_MAX_TRACE_BYTES >> 20} MiB"
        )
    return file.read_bytes()


def write_profile(
    run_folder: Path, step: int, profiles: Sequence[Profile], metrics: Mapping[str, float]
) -> StepProfile:
    """Write the traces and `summary.json` of a step. Call it in a thread.

    Args:
        metrics: the step's metrics, of which `timing_s/*` are read.
    """
    folder = run_folder / PROFILES / step_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    for profile in profiles:
        with aside(folder / f"{profile.process}.json.gz") as file:
            file.write_bytes(profile.trace)
    summary = StepProfile(
        step=step,
        phases_s=_timings(metrics, "timing_s/", without=("step", "generate", "score")),
        learner_s=_timings(metrics, "timing_s/learner/", without=("total",)),
        processes=[summarize(profile) for profile in profiles],
    )
    write_text(folder / SUMMARY, json.dumps(asdict(summary)))
    return summary


def _timings(metrics: Mapping[str, float], prefix: str, *, without: Sequence[str]) -> dict[str, float]:
    names = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    return {name: seconds for name, seconds in names.items() if "/" not in name and name not in without}


def read_profile(text: bytes) -> StepProfile:
    """Read a `summary.json`.

    Raises:
        ValueError: it is damaged.
    """
    try:
        raw = json.loads(text)
        processes = [
            TraceSummary(**each | {"operators": [Operator(**one) for one in each["operators"]]})
            for each in raw["processes"]
        ]
        return StepProfile(**raw | {"processes": processes})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is not the summary of a profile: {error!r}") from error


def profile_lines(profile: StepProfile, folder: str) -> Iterator[str]:
    """Yield lines for the console: the phases, each process's operators, and the place of the traces."""
    phases = ", ".join(f"{name.strip()} {share:.0%}" for name, _, share in profile.rows() if share >= 0.005)
    yield f"profile of step {profile.step}, {profile.total_s:.1f} s: {phases}"
    for process in profile.processes:
        told = ", ".join(f"{one.name:.60} {one.share:.0%}" for one in process.operators[:_MOST_TOLD])
        yield (
            f"{process.process}: {process.device} busy for {process.busy_share:.0%} of {process.recorded_s:.1f} s "
            f"({process.covers}): {told}"
        )
    yield f"traces for chrome://tracing or Perfetto: {folder}"

"""One execution gives one result, whether its frames came in lines from a remote sandbox or with lengths."""

from __future__ import annotations

import signal
import struct
from collections.abc import Sequence

import pytest

from rayapp.core.errors import SandboxGoneError
from rayapp.core.types import CallReport, ExecOutcome, StopCause
from rayapp.sandbox.local.wire import split_frames
from rayapp.sandbox.verdict.codec import decode_frames
from rayapp.sandbox.verdict.results import RawResult, call_report, script_result, split_lines

HONEST = (b'["defined"]', b'["value",0,7]', b'["raised",1,"ValueError: no"]', b'["done"]')


def answer(frames: bytes = b"", **changed: object) -> RawResult:
    known = {"exit_code": 0, "stopped": None, "stdout": b"", "stderr": b"", "frames": frames, "duration_s": 0.1}
    return RawResult(**(known | changed))  # type: ignore[arg-type]


def both(frames: Sequence[bytes], **changed: object) -> tuple[CallReport, CallReport]:
    in_lines = answer(b"".join(frame + b"\n" for frame in frames), **changed)
    raw = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    return call_report(in_lines, "x", 3), call_report(answer(raw, split=split_frames, **changed), "x", 3)


@pytest.mark.parametrize(
    ("frames", "changed"),
    [
        (HONEST, {}),
        (HONEST[:2], {"exit_code": -signal.SIGKILL, "stopped": StopCause.TIMEOUT}),
        (HONEST[:1], {"exit_code": -signal.SIGSEGV}),
        (HONEST[:1], {"exit_code": -signal.SIGXCPU}),
        ((), {"exit_code": 3}),
        ((*HONEST[:2], b"", HONEST[2]), {}),
    ],
    ids=["whole", "timeout", "crash", "cpu", "exit", "empty-frame"],
)
def test_a_local_and_a_remote_execution_that_left_the_same_have_the_same_result(
    frames: Sequence[bytes], changed: dict[str, object]
) -> None:
    remote, local = both(frames, **changed)
    assert remote == local
    assert len(local.calls) == 3


def test_code_that_used_up_its_cpu_time_was_stopped() -> None:
    result = script_result(answer(exit_code=-signal.SIGXCPU), "x")
    assert (result.outcome, result.stopped_for) == (ExecOutcome.CODE_STOPPED, StopCause.CPU)


def test_code_that_could_not_begin_has_no_result() -> None:
    with pytest.raises(SandboxGoneError, match="no memory"):
        script_result(answer(problem="no memory"), "x")


def test_of_a_million_forged_lines_a_few_are_read() -> None:
    lines = split_lines(b'["defined"]\n' * 1_000_000)
    decode_frames(lines, 3)
    assert sum(1 for _ in lines) > 999_000

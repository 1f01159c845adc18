"""Traces of profiled steps are written where the run folder has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayapp.core import timing
from rayapp.core.timing import Profile, read_trace
from rayapp.runs.profiles import write_profile


def test_the_traces_of_a_step_are_in_its_folder(tmp_path: Path) -> None:
    write_profile(tmp_path, 7, [Profile(process=name, trace=name.encode(), covers="") for name in ("a", "b")])
    folder = tmp_path / "profiles" / "step=000007"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a.json.gz": b"a", "b.json.gz": b"b"}


def test_a_trace_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MAX_TRACE_BYTES", 3)
    (file := tmp_path / "trace").write_bytes(b"abcd")
    with pytest.raises(ValueError, match="too large"):
        read_trace(file)

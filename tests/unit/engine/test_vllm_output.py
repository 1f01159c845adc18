"""The cause that an engine's process has logged is found if the output is a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayapp.engine.vllm_output import EngineOutput, way_out

OF_BEFORE = b"(EngineCore pid=1) ERROR 11-22 14:06:22 [core.py:1368] RuntimeError: of an engine before\n"
FATAL = b"""WARNING 11-22 14:05:22 [arg_utils.py:1812] ValueError: is no error of an engine
(Worker_TP0 pid=71) ERROR 11-22 14:06:22 [multiproc.py:9] Traceback (most recent call last):
(Worker_TP0 pid=71) ERROR 11-22 14:06:22 [multiproc.py:9]   File "x.py", line 1, in forward
(Worker_TP0 pid=71) ERROR 11-22 14:06:22 [multiproc.py:9] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB
(EngineCore pid=70) ERROR 11-22 14:06:23 [core.py:1368] RuntimeError: Worker failed
"""


def test_the_first_exception_that_a_process_of_the_engine_logged_is_the_cause(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb", buffering=0) as out:
        out.write(OF_BEFORE)
        output = EngineOutput(out.fileno())
        assert output.cause() == ""
        out.write(FATAL)

        assert output.cause() == ", because torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"


@pytest.mark.timeout(5)
def test_of_a_pipe_nothing_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, FATAL)

    assert EngineOutput(writing).cause() == ""

    assert os.read(reading, 1 << 16) == FATAL
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    "why",
    [
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "ValueError: Available memory on node 0 (22.1/23.4 GiB) is less than requested memory for kv (9.0 GiB)",
    ],
)
def test_where_vllm_speaks_of_its_cache_the_key_is_named(why: str) -> None:
    assert "server.kv_cache_gib" in way_out(why)
    assert way_out("RuntimeError: cached property of a model") == ""

"""The text process: it can be ended in the middle of a text, at a known cost."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayapp.tasks.answer_rules import format_term
from rayapp.tasks.banned import screen
from rayapp.tasks.text_process import MAX_TEXT_CHARS, TextProcess, TextReadingFailedError, TextTooCostlyError, on_text

GOOD = "def f(x):\n    return 1\n"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def process() -> Iterator[TextProcess]:
    process = TextProcess(cpu_limit_s=0.1)
    yield process
    process.close()


FUNCTIONS = """
import os, re, signal, sys
def for_ever(text):
    re.match("(a|aa)+$", text)
def crash(text):
    os.kill(os.getpid(), signal.SIGSEGV)
def is_killed(text):
    os.kill(os.getpid(), signal.SIGKILL)
def fills_memory(text):
    return len(bytearray(4 << 30))
def told(text):
    return [text, dict(os.environ), sorted(set(sys.modules) & {"numpy", "torch", "ray"})]
"""
ENDLESS = "a" * 60 + "b"
"""A text for `for_ever`, which holds the interpreter's lock as every regular expression does."""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "text_functions.py").write_text(FUNCTIONS)
    monkeypatch.setattr("rayapp.tasks.text_process._PACKAGE_ROOT", f"{ROOT}:{tmp_path}")
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("text_functions")


async def test_a_text_that_takes_too_long_is_given_up_and_the_next_one_is_read(
    process: TextProcess, functions: Any
) -> None:
    with pytest.raises(TextTooCostlyError, match=r"more than 0\.1 s of CPU time") as caught:
        await process.call(functions.for_ever, ENDLESS)

    assert caught.value.kind == "unreadable"
    assert (await process.call(screen, GOOD, "f", "", []))[0] == GOOD


async def test_the_event_loop_goes_on_while_a_hostile_text_is_read(process: TextProcess, functions: Any) -> None:
    reading = asyncio.create_task(process.call(functions.for_ever, ENDLESS))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert isinstance(reading.exception(), TextTooCostlyError)
    assert turns > 100  # a thread that held the interpreter's lock would leave it no turns


async def test_a_text_that_crashes_its_reader_is_a_verdict_on_the_text(process: TextProcess, functions: Any) -> None:
    with pytest.raises(TextTooCostlyError, match="SIGSEGV"):
        await process.call(functions.crash, "x")


async def test_a_process_ended_from_outside_is_replaced_once_and_then_no_verdict(
    process: TextProcess, functions: Any
) -> None:
    await process.call(screen, GOOD, "f", "", [])
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)

    assert (await process.call(screen, GOOD, "f", "", []))[1] == ""
    with pytest.raises(TextReadingFailedError, match="was killed from outside twice") as caught:
        await process.call(functions.is_killed, "x")
    assert caught.value.kind == "text_process"


async def test_what_the_function_raises_is_told_and_its_process_stays(process: TextProcess, functions: Any) -> None:
    with pytest.raises(TextReadingFailedError, match="fills_memory: MemoryError"):
        await process.call(functions.fills_memory, "x")
    pid = process.pid
    with pytest.raises(TextReadingFailedError, match="TypeError"):
        await process.call(format_term, "x", "one too many")
    assert process.pid == pid


async def test_no_secret_and_no_heavy_package_is_where_a_text_is_read(
    process: TextProcess, functions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")

    text, environment, packages = await process.call(functions.told, "\ud800 and \0")

    assert text == "\ud800 and \0"
    assert set(environment) <= {"PYTHONPATH", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "LC_CTYPE"}
    assert packages == []


async def test_a_text_that_is_too_long_is_not_looked_at(process: TextProcess) -> None:
    with pytest.raises(TextTooCostlyError) as caught:
        await process.call(screen, "x" * (MAX_TEXT_CHARS + 1), "f", "", [])

    assert (caught.value.kind, process.pid) == ("too_long", None)


async def test_texts_of_many_callers_are_read_in_turn() -> None:
    texts = [f"#### {number}" + " x" * (number % 2) for number in range(50)]

    found = await asyncio.gather(*(on_text(format_term, text) for text in texts))

    assert found == [1.0, 0.0] * 25


def test_the_text_process_ends_with_the_one_that_started_it() -> None:
    program = (
        "import asyncio, os, signal\n"
        "from rayapp.tasks import text_process\n"
        "from rayapp.tasks.answer_rules import format_term\n"
        "asyncio.run(text_process.on_text(format_term, ''))\n"
        "print(text_process._shared.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    deadline = time.monotonic() + 60
    while _is_alive(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_alive(int(done.stdout))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

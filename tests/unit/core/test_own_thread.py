"""Work in its own thread: its result, its error, and that the caller waits for its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from rayapp.core.aio import run_until_done
from rayapp.core.own_thread import work_apart


def test_without_a_running_loop_work_stays_in_its_thread() -> None:
    assert work_apart(threading.current_thread) is threading.current_thread()


async def test_with_a_running_loop_work_may_run_another_one() -> None:
    async def two() -> int:
        return 2

    assert work_apart(lambda: run_until_done(two())) == 2


async def test_what_the_work_raises_comes_out() -> None:
    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        work_apart(fails)


PROGRAM = """
import asyncio, sys
from rayapp.core.aio import run_until_done
from rayapp.core.own_thread import work_apart

async def work():
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)

async def cell():
    try:
        work_apart(lambda: run_until_done(work()))
    except KeyboardInterrupt:
        print("interrupted", flush=True)

asyncio.new_event_loop().run_until_complete(cell())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_in_a_notebook_ends_the_work_and_comes_out_when_that_has_ended(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=os.environ) as cell:
        try:
            assert cell.stdout is not None
            assert cell.stdout.readline() == "ready\n"
            cell.send_signal(number)
            assert cell.communicate(timeout=240)[0] == "cleaned up\ninterrupted\n"
        finally:
            cell.kill()


def test_a_stop_that_does_not_wake_who_waits_is_noticed_within_a_second() -> None:
    # A signal in the instant before the wait interrupts no sleep: this is rare, so the test sends one there.
    stops_itself = "time.sleep(0.2); signal.pthread_kill(threading.get_ident(), signal.SIGINT)"
    program = PROGRAM.replace('print("ready", flush=True)', f'print("ready", flush=True); {stops_itself}')
    command = [sys.executable, "-c", "import signal, threading, time" + program]
    assert subprocess.check_output(command, text=True, timeout=240) == "ready\ncleaned up\ninterrupted\n"

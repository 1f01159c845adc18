"""The machines behind the stub servers: ending one ends all its processes."""

from __future__ import annotations

import asyncio

import psutil

from support.stubs.boxes import Boxes

STARTS_A_SESSION = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
time.sleep(600)
"""


async def test_stopping_a_program_ends_what_it_started_in_a_session_of_its_own() -> None:
    boxes = Boxes()
    try:
        box = boxes.create(template="default", labels={}, ttl_s=60)
        process = await box.start(["python3", "-c", STARTS_A_SESSION])
        assert process.stdout is not None
        child = psutil.Process(int(await process.stdout.readline()))

        box.stop(process)

        await process.wait()
        # This process does not wait for the child, so it may stay as a zombie, which runs nothing.
        async with asyncio.timeout(60):
            while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)
    finally:
        boxes.close()

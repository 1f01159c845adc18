"""Freed memory goes back to the system."""

from __future__ import annotations

import threading

import psutil

from rayapp.core.machine import trim_heap

MIB = 2**20


def test_memory_that_a_thread_freed_is_given_back() -> None:
    # 64 MiB in blocks too small for mmap (128 KiB), all but the last of them freed: the last one keeps the pool from
    # shrinking by itself.
    kept: list[bytearray] = []

    def allocate() -> None:
        blocks = [bytearray(b"x" * 64 * 1024) for _ in range(1024)]
        kept.append(blocks.pop())

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    process = psutil.Process()
    before = process.memory_info().rss

    trim_heap()

    assert process.memory_info().rss <= before - 32 * MIB

"""Lines of the log that say what they are about, and names that Ray shows."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.spawn import ROLES, _load
from rayapp.core.logs import JsonLines, Labels, about, hand_over, start_logs, tracebacks_in


@pytest.fixture
def lines() -> Iterator[Any]:
    """Yield a logger as in a process of run `seed0`, and a function that returns its lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    handler.addFilter(Labels("seed0"))
    root = logging.getLogger()
    # Detach pytest's handlers: other tests may have labelled them, and the first label stays on a line.
    before, root.handlers[:] = (list(root.handlers), root.level), [handler]
    root.setLevel(logging.INFO)
    try:
        yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    finally:
        root.handlers[:], level = before
        root.setLevel(level)


@pytest.fixture
def untouched_loggers() -> Iterator[None]:
    """Restore handlers and levels afterwards."""
    loggers = [logging.getLogger(), logging.getLogger("rayapp")]
    before = [(list(logger.handlers), logger.level) for logger in loggers]
    try:
        yield
    finally:
        for logger, (handlers, level) in zip(loggers, before, strict=True):
            logger.handlers[:] = handlers
            logger.setLevel(level)


def test_a_line_carries_the_ids_of_the_block_it_is_logged_in(lines: Any) -> None:
    log = logging.getLogger("any.library")
    log.info("outside")
    with about(step=3):
        with about(group=12):
            log.info("of %s", "a group")
        log.info("of the step")

    found = [(line["message"], line["run"], line.get("step"), line.get("group")) for line in lines()]
    assert found == [
        ("outside", "seed0", None, None),
        ("of a group", "seed0", 3, 12),
        ("of the step", "seed0", 3, None),
    ]


async def test_groups_that_run_at_once_keep_their_ids_apart(lines: Any) -> None:
    both_began = asyncio.Barrier(2)

    async def group(number: int) -> None:
        with about(group=number):
            await both_began.wait()
            logging.getLogger("x").info("done %d", number)

    await asyncio.gather(group(1), group(2))

    assert {line["message"]: line["group"] for line in lines()} == {"done 1": 1, "done 2": 2}


def test_an_exception_stays_on_its_line(lines: Any) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("x").exception("it failed")

    [line] = lines()
    assert line["exc_text"].splitlines()[-1] == "ValueError: why"


@pytest.mark.usefixtures("untouched_loggers")
def test_the_commands_own_text_lines_give_way_to_json(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("rayapp").addHandler(logging.StreamHandler())

    start_logs("seed0", "json")
    logging.getLogger("rayapp.driver.loop").info("once")
    hand_over()

    [line] = capsys.readouterr().err.splitlines()
    assert (json.loads(line)["message"], json.loads(line)["run"]) == ("once", "seed0")
    assert not [h for h in logging.getLogger().handlers if isinstance(h.formatter, JsonLines)]


@pytest.mark.parametrize("role", ROLES)
def test_every_actor_says_what_it_is_in_log_prefixes(role: str) -> None:
    kinds = _load(ROLES[role].class_path).__mro__[:-1]
    assert any("__repr__" in vars(kind) for kind in kinds)


async def test_errors_of_calls_that_nobody_waits_for_are_in_a_file_that_one_line_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, notes = tmp_path / "faults.log", list[str]()

    async def fail() -> None:
        raise ValueError("\x1b[36mray::VllmServer\x1b[39m is gone")

    with tracebacks_in(file, notes.append):
        assert not file.exists()
        for _ in range(2):
            task = asyncio.create_task(fail())
            await asyncio.wait([task])
            del task
            gc.collect()
        logging.getLogger("asyncio").warning("slow")

    assert [record.getMessage() for record in caplog.records] == ["slow"]
    assert notes == [f"tracebacks of the lost calls are in {file}"]
    assert file.read_text().count("Task exception was never retrieved") == 2
    assert "is gone" in file.read_text()

"""Text from a model, a tool or a service can't control the terminal of the person who reads it."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayapp.cli.doctor import doctor_command
from rayapp.cli.machine import Finding
from rayapp.cli.main import app, run
from rayapp.core.errors import InputError, LearnerError
from rayapp.core.logs import label_logs, visible

ROOT = Path(__file__).parents[3]
HOSTILE = "\x1b[2J\x1b]0;title\x07\r\x9b31m\u202e\u2028\ud800\x7f"
SHOWN = r"\x1b[2J\x1b]0;title\x07\r\x9b31m\u202e\u2028\ud800\x7f"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Output of a product logger, in a process started as in a run."""
    make = logging.getLogRecordFactory()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("rayapp.someone")
    logger.addHandler(handler)
    try:
        label_logs("run")
        yield stream
    finally:
        logger.removeHandler(handler)
        logging.setLogRecordFactory(make)


def test_control_characters_are_shown_and_text_is_left_as_it_is() -> None:
    text = "Ünïcode 文字 🙂 [red]\tand a\nnew line"

    assert visible(HOSTILE) == SHOWN
    assert visible(SHOWN) == SHOWN
    assert visible(text) == text


def test_a_log_line_shows_what_a_model_wrote_in_its_message_and_its_traceback(log: io.StringIO) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("rayapp.someone").warning("a tool said %s", HOSTILE, exc_info=True)

    first, *_, last = log.getvalue().split("\n")[:-1]
    assert (first, last) == (f"a tool said {SHOWN}", f"ValueError: {SHOWN}")


@pytest.mark.parametrize("error", [InputError(HOSTILE), LearnerError(HOSTILE)])
def test_an_error_that_quotes_a_model_is_printed_visibly(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    @app.command(name="fail-visibly")
    def fail() -> None:
        raise error

    try:
        assert run(["fail-visibly"]) in (1, 2)
    finally:
        app.registered_commands.pop()
    assert capsys.readouterr().err.endswith(f"{SHOWN}\n")


def test_an_unexpected_errors_traceback_is_printed_visibly() -> None:
    program = "import rayapp.cli.main as c\n"
    program += f"def run(_): raise ValueError({HOSTILE!r})\nc.run = run\nc.main()"

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False)

    assert done.returncode == 1
    assert done.stderr.decode().endswith(f"ValueError: {SHOWN}\n")


def test_a_finding_of_the_doctor_is_text_and_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Finding(level="note", what="model", detail=f"[/red]models/[bold]x {HOSTILE}", cure="move [it]")
    monkeypatch.setattr("rayapp.cli.doctor.machine", lambda: iter([found]))

    doctor_command(None)

    printed = capsys.readouterr().out
    assert f"[/red]models/[bold]x {SHOWN}" in printed
    assert "cure: move [it]" in printed

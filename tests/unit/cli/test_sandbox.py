"""`rayapp sandbox`: exit statuses and messages."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rayapp.cli.sandbox import app
from rayapp.core.errors import InputError, SandboxConfigError


def invoke(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [*args], input=stdin)


def write(folder: Path, code: str) -> str:
    file = folder / "code.py"
    file.write_text(code)
    return str(file)


@pytest.mark.parametrize(
    ("code", "statuses"),
    [
        ("raise SystemExit(3)", {3}),
        ("1 / 0", {1}),
        ("import os\nos._exit(7)", {7}),
        # The first process of a pid namespace ignores SIGABRT (6), so libc goes on to crash it (11).
        ("import os\nos.abort()", {128 + 6, 128 + 11}),
    ],
)
def test_the_exit_status_is_that_of_the_code(tmp_path: Path, code: str, statuses: set[int]) -> None:
    assert invoke("run", write(tmp_path, code)).exit_code in statuses


def test_a_terminal_shows_control_characters_and_does_not_obey_them(tmp_path: Path) -> None:
    file = write(tmp_path, r"print('\x1b]0;owned\x07\tgr\u00fcn\r\x9b2J\u202e')")
    program = "from rayapp.cli.sandbox import app; app()"
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", 0) as terminal, os.fdopen(theirs, "wb", 0) as its_end:
        argv = [sys.executable, "-c", program, "run", file]
        subprocess.run(argv, check=True, stdout=its_end, env={**os.environ, "PYTHONUTF8": "1"})
        shown = terminal.read(1000).decode()

    assert shown == "\\x1b]0;owned\\x07\tgrün\\r\\x9b2J\\u202e\r\n"
    assert "\x1b]0;owned\x07" in invoke("run", file).stdout, "a file or a pipe gets what was written"


def test_a_file_that_is_missing_or_no_text_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("nothing", "No such file"), ("binary", "is not text")):
        error = invoke("run", str(tmp_path / name)).exception
        assert isinstance(error, InputError)
        assert reason in str(error)


def test_an_unknown_provider_or_level_names_the_known_ones(tmp_path: Path) -> None:
    file = write(tmp_path, "pass")
    unknown_provider = invoke("run", file, "--provider", "heaven").exception
    assert isinstance(unknown_provider, SandboxConfigError)
    assert "local, e2b, daytona, mcp" in str(unknown_provider)
    unknown_level = invoke("run", file, "--level", "best").exception
    assert isinstance(unknown_level, InputError)
    assert "ns+proc, ns, ll" in str(unknown_level)

"""The command line: exit codes, messages and what `rayapp score` prints."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rayapp.cli.arguments import told_while_silent
from rayapp.cli.main import COMMANDS, app, load_command, run
from rayapp.core.errors import ConfigError, LearnerError

ROOT = Path(__file__).parents[3]


def rayapp(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The program as a user starts it, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "rayapp", *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_config_error_prints_the_message_alone_and_exits_with_2() -> None:
    done = rayapp("train", "configs/coding_cpu.yaml", "rollout.group_sise=3")

    assert done.returncode == 2
    assert done.stderr == (
        "error: configs/coding_cpu.yaml: unknown key rollout.group_sise; did you mean rollout.group_size?\n"
    )


@pytest.mark.parametrize("arguments", [[], ["nope"], ["train"], ["train", "--nope", "x.yaml"], ["config"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert run(arguments) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_something_on_a_terminal_before_it_imports_anything(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def imported(path: str) -> None:
        raise ConfigError(f"it imports {path}")

    monkeypatch.setattr("rayapp.cli.main.load_command", imported)
    assert run(command.split()) == 2
    assert capsys.readouterr().err == f"error: it imports {command.split(maxsplit=1)[0]}\n", "not in a log"

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run([*command.split(), "x"])
    assert capsys.readouterr().err.startswith(f"rayapp {command.split(maxsplit=1)[0]} …\n")


def test_help_imports_no_command_and_no_library_but_that_of_the_command_line() -> None:
    program = "import sys, rayapp.cli.main as c; c.run(['--help']); print(*sys.modules, file=sys.stderr)"

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    imported = set(done.stderr.split())
    assert not imported & {
        *("numpy", "pydantic", "yaml", "omegaconf", "torch", "ray", "httpx", "starlette", "asyncio", "rich", "hmac"),
    }
    assert {name for name in imported if name.startswith("rayapp.cli.")} == {"rayapp.cli.arguments", "rayapp.cli.main"}
    assert len(imported) < 400


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_the_program_has_the_first_sentence_of_each_command(name: str) -> None:
    described = " ".join((load_command(name).help or "").split())

    assert described.startswith(COMMANDS[name][1])


@pytest.fixture
def failing_command():  # type: ignore[no-untyped-def]
    """A command that raises the exceptions in the list."""
    raised: list[BaseException] = []

    def fail() -> None:
        raise raised[0]

    app.command(name="fail", hidden=True)(fail)
    yield raised
    app.registered_commands.pop()


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("mend it"), 2, "error: mend it\n"),
        (LearnerError("no gradient"), 1, "failed: LearnerError: no gradient\n"),
        (KeyboardInterrupt(), 130, ""),
        (PermissionError(13, "Permission denied", "models/m"), 2, "error: models/m: Permission denied."),
        (FileNotFoundError(2, "No such file or directory", "/proc/x"), 2, "error: /proc/x: No such file or directory."),
        (OSError(28, "No space left on device", "outputs"), 1, "failed: outputs: No space left on device."),
        (OSError("Can't load 'x'\nbecause"), 1, "failed: OSError: Can't load 'x'"),
    ],
)
def test_errors_become_exit_codes_and_one_line(
    failing_command: list[BaseException], error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_command.append(error)
    assert run(["fail"]) == code
    said = capsys.readouterr().err
    assert said.startswith(text)
    assert said.count("\n") == bool(text)


def test_ctrl_c_while_the_program_is_loaded_leaves_no_traceback() -> None:
    program = "import sys, types\nimport rayapp.__main__ as m\n"
    program += "class Interrupted:\n    def find_spec(self, name, *_):\n"
    program += "        if name.startswith('rayapp.cli'): raise KeyboardInterrupt\n"
    program += "sys.meta_path.insert(0, Interrupted())\nm.main()"

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (130, "")


def test_unexpected_error_keeps_its_traceback(failing_command: list[BaseException]) -> None:
    failing_command.append(ZeroDivisionError("a bug"))

    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(["fail"])


def test_a_locale_of_another_encoding_changes_nothing() -> None:
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    done = subprocess.run(
        [sys.executable, "-m", "rayapp", "score", "--help"],
        cwd=ROOT,
        env=os.environ | ascii_locale,
        capture_output=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "…" in done.stdout.decode()


WAITS = """
import asyncio, pathlib
from rayapp.tools.base import ToolBase, ToolSchema

async def wait(*args, **kwargs):
    try:
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        pathlib.Path("cleaned").touch()

class Tool(ToolBase):
    schema = ToolSchema(name="wait")
    execute = wait

class Task:
    name = "waits"
    score = wait
    render = None

TASK = Task()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["task", "audit", "waits.py"],
        ["score", "waits.py:wait", "--answer", "x"],
        ["try", "tool", "waits.py:Tool", "wait", "{}"],
    ],
    ids=" ".join,
)
def test_a_command_that_is_terminated_gives_back_what_it_has_leased(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    process = subprocess.Popen(
        [sys.executable, "-m", "rayapp", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None

    assert process.stdout.readline() == "ready\n"
    process.terminate()

    assert process.wait(timeout=30) == 130
    assert (tmp_path / "cleaned").exists()
    process.stdout.close()


def test_a_silent_check_tells_where_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rayapp.cli.arguments.SILENCE_S", 0.05)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    with told_while_silent():
        exec("sleep(0.5)", {"__name__": "rayapp.slow", "sleep": time.sleep})

    assert "0 s in rayapp.slow, <module> …" in capsys.readouterr().err

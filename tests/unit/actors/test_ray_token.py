"""A Ray that a run starts: its token is readable only by its user, and a Ray that does not start is an error."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import JobID
from ray._private import services
from ray._private.node import Node
from ray._private.worker import listen_error_messages

from actors import own_ray
from actors.own_ray import _make_token_folder, _messages_of_raylets_logged, ray_session
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, RayappError
from rayapp.core.logs import tracebacks_in

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new home folder, in an environment without settings for tokens."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_other_users_cannot_reach_the_token_that_ray_writes(home: Path) -> None:
    _make_token_folder()
    _make_token_folder()

    assert (home / ".ray").stat().st_mode & 0o777 == 0o700


def test_a_home_that_cannot_be_written_to_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/none")

    with pytest.raises(ConfigError, match="Set HOME to a folder of your own, or RAY_AUTH_TOKEN to a token"):
        _make_token_folder()


@pytest.mark.parametrize(
    ("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "t"), ("RAY_AUTH_TOKEN_PATH", "/run/token")]
)
def test_without_a_token_to_keep_no_home_is_needed(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.setenv(name, value)

    _make_token_folder()


def test_a_ray_that_does_not_come_up_is_a_message_with_the_machines_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(**options: Any) -> None:
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 - as Ray does

    assert "timed out during startup" in Path(inspect.getfile(Node)).read_text()
    monkeypatch.setattr(ray, "init", too_slow)
    monkeypatch.setenv("RAY_ADDRESS", "local")

    said = r"Ray did not start in 0 s; the load of this machine is \d+ on \d+ cores"
    with pytest.raises(RayappError, match=said), ray_session(Config()):
        pass


def test_a_node_that_registers_late_is_waited_for_and_one_whose_raylet_has_ended_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, lines = iter([RuntimeError(), RuntimeError(), {"node": 1}, RuntimeError(), RuntimeError()]), list[str]()

    def get_node(*args: Any) -> Any:
        if isinstance(answer := next(answers), RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(own_ray, "PROGRESS_S", 0.0)
    with own_ray._own_session_and_time_to_start(lines.append):
        found = services.get_node("address", "id")
        (tmp_path / "raylet").symlink_to("/bin/true")
        services.ConsolePopen([str(tmp_path / "raylet"), f"--session_dir={tmp_path}"]).wait()
        with pytest.raises(own_ray._RayletEndedError):
            services.get_node("address", "id")

    assert found == {"node": 1}
    assert lines == ["Ray has not started in 0 s; waiting for at most 300 s"] * 2
    assert services.get_node is get_node


def test_what_a_raylet_says_of_a_killed_process_is_in_the_file_of_faults_and_not_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, notes, is_over = tmp_path / "faults.log", list[str](), threading.Event()

    class Errors:
        def subscribe(self) -> None: ...

        def poll(self) -> tuple[bytes, dict[str, Any]]:
            is_over.set()
            return b"", {"job_id": None, "error_message": "A worker died or was killed while executing a task"}

    driver: Any = SimpleNamespace(gcs_error_subscriber=Errors(), current_job_id=JobID.nil())
    with tracebacks_in(file, notes.append), _messages_of_raylets_logged():
        listen_error_messages(driver, is_over)

    assert "A worker died or was killed" in file.read_text()
    assert notes == [f"tracebacks of the lost calls are in {file}"]
    assert capsys.readouterr() == ("", "")

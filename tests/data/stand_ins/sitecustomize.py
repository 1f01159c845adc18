"""On PYTHONPATH of runs whose servers are stand-ins: what takes seconds to import is not found, or found as a module
of this folder.

PyTorch is found in learners alone, which are told by their environment (actors/environments/learner.yaml), vLLM
nowhere: see `vllm.py`. In place of its tool parsers there is the one in `tool_parser.py`. A Ray worker is one process
instead of two.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path


def run_worker():
    """In Ray's first process of a worker, which sets variables and runs the second in its place: do so before it has
    imported all of Ray, which the second does again. Returns where there is more to do."""
    context, rest = {}, []
    for argument in sys.orig_argv[2:]:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
        elif name != "--language":
            rest.append(argument)
    variables = context.get("env_vars", {})
    if not context.get("command_prefix") and "$" not in "".join(variables.values()):
        os.execve(sys.executable, [sys.executable, *rest], os.environ | variables)


if sys.orig_argv[1:] and sys.orig_argv[1].endswith("/ray/_private/workers/setup_worker.py"):
    run_worker()

PARSERS = "rayapp.engine.vllm_tool_parser"


class Finder:
    """Of one module that is another one here."""

    def find_spec(self, name, path=None, target=None):
        file = Path(__file__).with_name("tool_parser.py")
        return importlib.util.spec_from_file_location(name, file) if name == PARSERS else None


sys.meta_path.insert(0, Finder())

if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
    sys.modules["torch"] = None
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)

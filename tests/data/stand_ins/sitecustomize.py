"""On PYTHONPATH of runs whose servers are stand-ins: what takes seconds to import is not found, or found as a module
of this folder.

PyTorch is found in learners alone, which are told by their environment (actors/environments/learner.yaml), vLLM
nowhere: see `vllm.py`. In place of its tool parsers there is the one in `tool_parser.py`.
"""

import importlib.util
import os
import sys
from pathlib import Path

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

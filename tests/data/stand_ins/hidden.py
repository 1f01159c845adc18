"""What takes seconds to import is not found in runs whose servers are stand-ins, or is a module of this folder.

vLLM is found nowhere: see `vllm.py`. In place of its tool parsers there is the one in `tool_parser.py`. Of the
processes that are started, only learners find PyTorch; they are told by their environment
(actors/environments/learner.yaml). A fork has it: see ../forked_processes.py.
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

if "torch" not in sys.modules and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
    sys.modules["torch"] = None
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)

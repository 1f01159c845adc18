"""On PYTHONPATH of processes that have no use for PyTorch: nothing finds it, as on a machine where it is missing.

Except in a learner, which is told by its environment: actors/environments/learner.yaml.
"""

import importlib.util
import os
import sys

if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
    sys.modules["torch"] = None
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)

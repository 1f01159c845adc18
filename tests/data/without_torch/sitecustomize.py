"""On PYTHONPATH of processes that have no use for PyTorch: nothing finds it, as on a machine where it is missing."""

import importlib.util
import sys

sys.modules["torch"] = None
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)

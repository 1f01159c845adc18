"""What takes seconds to import is not found in runs whose servers are stand-ins, or is a module of this folder.

vLLM is found nowhere: see `vllm.py`. In place of its tool parsers there is the one in `tool_parser.py`.
"""

import importlib.util
import sys
from pathlib import Path

PARSERS = "rayapp.rollout.agent.vllm_tool_parser"


class Finder:
    """Of one module that is another one here."""

    def find_spec(self, name, path=None, target=None):
        file = Path(__file__).with_name("tool_parser.py")
        return importlib.util.spec_from_file_location(name, file) if name == PARSERS else None


sys.meta_path.insert(0, Finder())

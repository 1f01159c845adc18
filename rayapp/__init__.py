"""GRPO post-training on Ray, in rooms: docs/develop.md says what is where.

Tasks and tools of users import a few modules by the names that these had before there were rooms; they still can.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.1.0"

MOVED = {
    "rayapp.types": "rayapp.core.types",
    "rayapp.errors": "rayapp.core.errors",
    "rayapp.protocols": "rayapp.core.protocols",
    "rayapp.tracking": "rayapp.runs.tracking",
    "rayapp.tracking.trajectories": "rayapp.runs.trajectories",
}


class _OldNames:
    """Finds a module under its old name; it is the same object as under the new one, so are its classes."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what stands here afterwards.
        sys.modules[module.__name__] = import_module(MOVED[module.__name__])


sys.meta_path.append(_OldNames())

"""The names that `import rayapp` offers, each loaded at its first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rayapp.core import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from rayapp.api.run import Run, open_run
    from rayapp.api.running import Evaluation, evaluate, sft, train
    from rayapp.api.sandboxes import Sandbox, SandboxPool
    from rayapp.api.scoring import score
    from rayapp.config.config import Config
    from rayapp.config.foreign_keys import GivenRun
    from rayapp.config.loading import load_config
    from rayapp.core.errors import RayappError, StopTraining, UserError
    from rayapp.core.types import Reward, SandboxSpec
    from rayapp.tasks.coding import CodingTask
    from rayapp.tools.base import ToolBase, ToolOutput, ToolSchema

    trl_config: Callable[..., GivenRun]

__all__ = [
    "CodingTask", "Config", "Evaluation", "RayappError", "Reward", "Run", "Sandbox", "SandboxPool",
    "SandboxSpec", "StopTraining", "ToolBase", "ToolOutput", "ToolSchema", "UserError", "__version__", "evaluate",
    "load_config", "open_run", "score", "sft", "train", "trl_config",
]  # fmt: skip

_PLACES = {
    "rayapp.api.run": ("Run", "open_run"),
    "rayapp.api.running": ("Evaluation", "evaluate", "sft", "train"),
    "rayapp.api.sandboxes": ("Sandbox", "SandboxPool"),
    "rayapp.api.scoring": ("score",),
    "rayapp.config.config": ("Config",),
    "rayapp.config.loading": ("load_config",),
    "rayapp.core.errors": ("RayappError", "StopTraining", "UserError"),
    "rayapp.core.types": ("Reward", "SandboxSpec"),
    "rayapp.tasks.coding": ("CodingTask",),
    "rayapp.tools.base": ("ToolBase", "ToolOutput", "ToolSchema"),
}
_PLACE_OF = {name: module for module, names in _PLACES.items() for name in names}


_EXTRAS = {"trl_config": "trl.translation:trl_config"}


def __getattr__(name: str) -> Any:
    if name in _EXTRAS:
        from rayapp.core.names import load_extra

        found = load_extra(_EXTRAS[name])
    elif name in _PLACE_OF:
        found = getattr(import_module(_PLACE_OF[name]), name)
    else:
        raise AttributeError(f"module 'rayapp' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

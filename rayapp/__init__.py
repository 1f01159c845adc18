"""GRPO post-training on Ray. docs/develop.md describes the packages; `rayapp.api` lists the names that this module
offers.

    import rayapp
    run = rayapp.train("configs/coding_cpu.yaml", {"train.num_steps": 20})

Everything is loaded at its first use: importing this module loads neither torch nor Ray.
"""

from typing import TYPE_CHECKING, Any

from rayapp import api

if TYPE_CHECKING:
    from rayapp.api import *  # noqa: F403

__all__ = api.__all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rayapp' has no attribute {name!r}")
    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

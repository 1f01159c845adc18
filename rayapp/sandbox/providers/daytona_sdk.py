"""Finds Daytona's SDK, which is published under two names with the same code. Called by the Daytona modules only."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

from rayapp.core.errors import SandboxConfigError

NAMES = ("daytona", "daytona_sdk")


@cache
def sdk() -> ModuleType:
    """The SDK's module.

    Raises:
        SandboxConfigError: it is not installed.
    """
    for name in NAMES:
        if find_spec(name) is not None:
            with warnings.catch_warnings():
                # The older name warns that it is older; which one is installed is not the user's choice here.
                warnings.simplefilter("ignore", DeprecationWarning)
                return importlib.import_module(name)
    raise SandboxConfigError("the package daytona-sdk is not installed: pip install daytona-sdk")

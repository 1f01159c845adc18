"""Keys of services: they stand in the environment, never in a configuration."""

from __future__ import annotations

import os

from rayapp.core.errors import ConfigError, UserError


def read_key(variable: str, who: str, error: type[UserError] = ConfigError) -> str:
    """The key in an environment variable; empty where no variable is named.

    Args:
        who: needs it, for the message: `provider e2b`.
    Raises:
        UserError: of the type `error`: the variable is not set.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise error(
            f"{who} needs a key: set {variable} in the environment (for a Ray job: in the env_vars of its "
            "runtime_env), or name another variable in api_key_env"
        )
    return key

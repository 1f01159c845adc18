"""Configuration of sandboxes. Interim: the pool's author replaces this file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SandboxConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    allow_unisolated: bool = False
    """Run model-written code with no isolation where the node offers none."""

"""The base class of every section of the configuration. Imports nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["float32", "bfloat16"]


class FrozenModel(BaseModel):
    """A section of the configuration: immutable, and a key it doesn't know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

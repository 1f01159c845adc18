"""The base class of every section of the configuration. Imports no heavy package."""

from __future__ import annotations

from typing import Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

Dtype = Literal["float32", "bfloat16"]
AutoDtype = Literal["auto", "float32", "bfloat16"]


class FrozenModel(BaseModel):
    """A section of the configuration: immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_empty(cls, values: Any) -> Any:
        # A null (`reward.custom=`, `tasks:`) is an empty string or list if the key's type is one.
        if not isinstance(values, dict):
            return values
        return {key: _empty(cls.model_fields.get(key)) if value is None else value for key, value in values.items()}


def _empty(field: FieldInfo | None) -> Any:
    kind = None if field is None else get_origin(field.annotation) or field.annotation
    return {str: "", tuple: ()}.get(kind)  # type: ignore[arg-type]

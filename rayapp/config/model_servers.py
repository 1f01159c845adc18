"""Models that a run serves beside its policy and does not train: judges, reward models, teachers.

A part of the schema in `config.py`, which says what holds for all sections. Data only.
"""

from __future__ import annotations

from pydantic import Field, field_validator

from rayapp.config.base import FrozenModel

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
SCHEME = "run://"
"""Of a base_url that names a model server of the run: run://NAME."""


class ModelServerSection(FrozenModel):
    """A vLLM server of the run, on GPUs of its own: started before whoever asks it, and again when it dies."""

    name: str = Field(pattern=NAME)
    """Whoever asks it has base_url: run://NAME, and this as the model's name. No two are alike."""
    path: str = Field(min_length=1)
    """A Hugging Face folder, one on s3://, or a hub id."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that the model is split over, of one node."""
    gpu_memory_utilization: float = Field(0.9, gt=0.0, lt=1.0)
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further options of `vllm serve`: {max-model-len: 8192}, {runner: pooling} for a reward model."""

    @field_validator("options", mode="after")
    @classmethod
    def _not_ours(cls, options: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
        for name in options:
            if name.strip("-").replace("_", "-") in _OURS:
                raise ValueError(f"the option {name!r} follows from the run: leave it out, or use the key of that name")
        return options


_OURS = (
    *("host", "port", "uds", "api-key", "model", "served-model-name"),
    *("tensor-parallel-size", "gpu-memory-utilization"),
)


def server_named(base_url: str) -> str:
    """NAME of run://NAME; empty for any other URL."""
    return base_url.removeprefix(SCHEME) if base_url.startswith(SCHEME) else ""

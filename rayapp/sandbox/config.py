"""Configuration of sandboxes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SandboxConfig(BaseModel):
    """Where model-written code runs. The provider is `local`: isolated processes on the rollout worker's node."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    max_leases: int = Field(0, ge=0)
    """Sandboxes in use at once over all rollout workers; 0 is one per core: with more, how long code runs, and so whether
    it meets its deadline, would depend on its neighbours."""
    max_waiting: int = Field(10_000, ge=1)
    """Callers that may wait for a lease; one more is refused rather than left to time out."""
    lease_ttl_s: float = Field(600.0, gt=0)
    """A lease not given back by then is taken back. Longer than any task's timeout_s."""
    allow_unisolated: bool = False
    """Run model-written code with no isolation where the node offers none; every result then says so."""

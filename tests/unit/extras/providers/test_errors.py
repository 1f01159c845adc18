"""The meaning of a service's HTTP status."""

from __future__ import annotations

import pytest

from rayapp.core.errors import (
    SandboxConfigError,
    SandboxError,
    SandboxProtocolError,
    SandboxQuotaError,
    SandboxRateLimitError,
    SandboxUnavailableError,
)
from rayapp.extras.providers.service import DAYTONA, E2B, Wording, error_of_status

BOTH = pytest.mark.parametrize("wording", [E2B, DAYTONA], ids=["e2b", "daytona"])


@BOTH
@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 422])
def test_what_no_second_try_can_mend_stops_with_what_to_check(wording: Wording, status: int) -> None:
    error = error_of_status(status, "refused", wording)
    assert type(error) is SandboxConfigError
    assert f"Check {wording.to_check}" in str(error)


RETRIED = {429: SandboxRateLimitError, 409: SandboxUnavailableError, 502: SandboxUnavailableError}


@BOTH
@pytest.mark.parametrize(("status", "kind"), [*RETRIED.items(), (302, SandboxProtocolError)])
def test_everything_else_may_be_tried_again(wording: Wording, status: int, kind: type[SandboxError]) -> None:
    assert type(error_of_status(status, "busy", wording)) is kind


def test_a_quota_is_told_by_each_services_own_words() -> None:
    assert type(error_of_status(429, "maximum number of concurrent sandboxes", E2B)) is SandboxQuotaError
    assert type(error_of_status(400, "Total CPU limit exceeded", DAYTONA)) is SandboxQuotaError
    # Daytona says `limit exceeded` of its rate as well.
    assert type(error_of_status(429, "Rate limit exceeded", DAYTONA)) is SandboxRateLimitError

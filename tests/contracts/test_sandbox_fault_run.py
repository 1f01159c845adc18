"""The pool while the services behind it fail: a small run of benchmarks/sandbox_faults.py."""

from __future__ import annotations

import pytest

from support.faults.run import FaultRun, run_with_faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


async def test_failing_services_cost_retries_and_never_a_verdict_a_sandbox_or_a_lease() -> None:
    # A call that hangs costs timeout_s + answer_within_s, so they are as short as an honest program on a busy machine
    # allows, and this takes half a minute.
    run = FaultRun(
        executions=300, share=0.05, concurrency=5, timeout_s=14.0, answer_within_s=6.0, create_timeout_s=8.0, seed=1
    )

    outcome = await run_with_faults(run)

    assert outcome.wrong == [], outcome
    assert sum(outcome.leaked.values()) == 0, outcome
    assert (outcome.hung, outcome.leases_left, outcome.reclaimed, outcome.reported_left) == (0, 0, 0, 0), outcome
    assert outcome.executions == 300 == sum(outcome.verdicts.values()) + sum(outcome.invalid.values())
    # The run shows something only if calls did fail, and executions felt it.
    assert sum(outcome.injected.values()) >= 20
    assert {name.partition(":")[0] for name in outcome.injected} == {"e2b", "daytona", "mcp"}
    assert outcome.retried >= 1, outcome
    # Two failures in a row at 5% a call, several calls an execution: 2 in 100. A busy machine misses deadlines besides.
    assert sum(outcome.invalid.values()) <= 60, outcome

"""Each fault of a provider's service at each call, through the real SDK: one of our errors, in time, nothing left."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import pytest

from rayapp.core.errors import (
    SandboxConfigError,
    SandboxDeadlineError,
    SandboxError,
    SandboxGoneError,
    SandboxQuotaError,
    SandboxRateLimitError,
)
from rayapp.core.types import ExecOutcome, SandboxSpec
from rayapp.sandbox.leases import RemoteProvider
from support import providers
from support.stubs.faults import Faults

T = TypeVar("T")
LABELS = {"rayapp-faults": "yes"}
HANG_S = 1.5
CONTROL = ("drop", "lost", "429", "500", "502", "503", "hang", "garbage", "slow")
DATA = ("drop", "502", "hang", "garbage", "cut", "slow")
"""Of calls into a sandbox that go on living; `die` is apart."""


def opened(kind: str, **options: Any) -> AbstractAsyncContextManager[tuple[Any, Any]]:
    return providers.opened(kind, faults=Faults(hang_s=HANG_S), **options)


async def attempted(call: Awaitable[T]) -> T | SandboxError:
    """What a call gives; or its error, which may be any of ours but the one that says to change the configuration."""
    try:
        return await call
    except SandboxConfigError as error:
        pytest.fail(f"the service failed and the configuration was blamed: {error}")
    except SandboxError as error:
        return error


KINDS = pytest.mark.parametrize("kind", ["e2b", "kruise", "daytona"])
WRITE = {"e2b": "write", "kruise": "write", "daytona": "write"}
RUN = {"e2b": "start", "kruise": "start", "daytona": "execute"}
SESSION = {"e2b": "execute", "kruise": "execute", "daytona": "session"}


@KINDS
@pytest.mark.parametrize("fault", CONTROL)
async def test_a_creation_that_fails_leaves_nothing_and_blames_nobodys_config(kind: str, fault: str) -> None:
    async with opened(kind) as (provider, stub):
        stub.faults.next("create", fault)
        made = await attempted(provider.create(SandboxSpec(), labels=LABELS, ttl_s=300, timeout_s=60))
        assert isinstance(made, SandboxError) or made.id in stub.boxes.living
        assert stub.faults.injected[f"create:{fault}"] == 1


@KINDS
async def test_a_creation_that_hangs_ends_at_our_deadline(kind: str) -> None:
    async with opened(kind) as (provider, stub):
        stub.faults.slow_s = 60.0
        stub.faults.next("create", "slow")
        with pytest.raises(SandboxDeadlineError, match=r"1\.5 s"):
            await provider.create(SandboxSpec(), labels=LABELS, ttl_s=300, timeout_s=1.5)


async def listed(provider: RemoteProvider) -> set[str]:
    return {found async for found in provider.list(LABELS, timeout_s=10)}


@KINDS
@pytest.mark.parametrize("fault", CONTROL)
async def test_a_listing_that_fails_is_an_error_and_never_a_shorter_list(kind: str, fault: str) -> None:
    async with opened(kind) as (provider, stub):
        made = {(await provider.create(SandboxSpec(), labels=LABELS, ttl_s=300, timeout_s=60)).id for _ in range(3)}
        stub.faults.next("list", fault)
        found = await attempted(listed(provider))
        assert isinstance(found, SandboxError) or found == made


@KINDS
@pytest.mark.parametrize("fault", CONTROL)
async def test_a_kill_that_fails_says_so_and_the_next_one_works(kind: str, fault: str) -> None:
    async with opened(kind) as (provider, stub):
        sandbox = await provider.create(SandboxSpec(), labels=LABELS, ttl_s=300, timeout_s=60)
        stub.faults.next("kill", fault)
        error = await attempted(sandbox.kill(timeout_s=10))
        assert not isinstance(error, SandboxGoneError), "killing what is gone is no error"
        # The SDK takes any answer below 300 for a yes. What then still lives is found by the pool's sweep.
        is_hidden = (kind, fault) == ("e2b", "garbage")
        assert error is not None or is_hidden or sandbox.id not in stub.boxes.living
        await sandbox.kill(timeout_s=10)
        assert sandbox.id not in stub.boxes.living


@KINDS
@pytest.mark.parametrize("is_stateful", [False, True], ids=["fresh", "session"])
@pytest.mark.parametrize("fault", DATA)
async def test_a_run_that_the_service_breaks_is_no_verdict(kind: str, fault: str, is_stateful: bool) -> None:
    async with opened(kind) as (provider, stub):
        sandbox = await provider.create(SandboxSpec(), labels=LABELS, ttl_s=300, timeout_s=60)
        stub.faults.next((SESSION if is_stateful else RUN)[kind], fault)
        code = "print('honest')\nprint('x' * 100)"
        result = await attempted(sandbox.run_code(code, timeout_s=5, stateful=is_stateful))
        if not isinstance(result, SandboxError):
            # A result is the code's own: whole, or not said at all.
            assert (result.outcome, result.stdout) == (ExecOutcome.OK, "honest\n" + "x" * 100 + "\n"), result
        assert sum(stub.faults.injected.values()) == 1
        again = await sandbox.run_code("print('again')", timeout_s=10)
        assert again.stdout == "again\n"


@KINDS
@pytest.mark.parametrize("is_stateful", [False, True], ids=["fresh", "session"])
async def test_a_sandbox_that_dies_while_code_runs_is_gone_and_the_code_is_not_blamed(
    kind: str, is_stateful: bool
) -> None:
    async with opened(kind) as (provider, stub):
        sandbox = await provider.create(SandboxSpec(), labels=LABELS, ttl_s=300, timeout_s=60)
        stub.faults.next((SESSION if is_stateful else RUN)[kind], "die")
        with pytest.raises(SandboxGoneError):
            await sandbox.run_code("import time\ntime.sleep(20)", timeout_s=30, stateful=is_stateful)
        assert not await sandbox.alive()


@KINDS
async def test_a_call_without_an_answer_ends_at_our_own_deadline(kind: str) -> None:
    async with opened(kind) as (provider, stub):
        sandbox = await provider.create(SandboxSpec(), labels=LABELS, ttl_s=300, timeout_s=60)
        stub.faults.hang_s = 600.0  # longer than a test may take
        stub.faults.next(RUN[kind], "hang")
        stub.faults.next(WRITE[kind], "hang")
        with pytest.raises(SandboxDeadlineError):
            await sandbox.read_file("a", timeout_s=0.5)
        with pytest.raises(SandboxDeadlineError):
            await sandbox.write_file("a", b"x", timeout_s=0.5)


@KINDS
async def test_a_quota_that_is_met_is_told_from_a_failure(kind: str) -> None:
    async with opened(kind, max_alive=1) as (provider, _):
        await provider.create(SandboxSpec(), labels=LABELS, ttl_s=300, timeout_s=60)
        with pytest.raises(SandboxQuotaError):
            await provider.create(SandboxSpec(), labels=LABELS, ttl_s=300, timeout_s=60)


@KINDS
async def test_a_service_that_goes_on_asking_to_wait_is_told_from_a_failure(kind: str) -> None:
    async with opened(kind) as (provider, stub):
        stub.faults.retry_after_s = 0
        stub.faults.next("create", *["429"] * 20)
        with pytest.raises(SandboxRateLimitError):
            await provider.create(SandboxSpec(), labels=LABELS, ttl_s=300, timeout_s=30)


@KINDS
@pytest.mark.parametrize("fault", ["drop", "429", "502", "garbage", "slow"])
async def test_a_life_that_could_not_be_made_longer_says_so(kind: str, fault: str) -> None:
    async with opened(kind) as (provider, stub):
        sandbox = await provider.create(SandboxSpec(), labels=LABELS, ttl_s=300, timeout_s=60)
        before_s = stub.boxes.living[sandbox.id].ends_at
        stub.faults.next("extend", fault)
        error = await attempted(sandbox.extend(3000.0, timeout_s=10))
        is_hidden = (kind, fault) == ("e2b", "garbage")  # as above: any answer below 300 is a yes to the SDK
        assert error is not None or is_hidden or stub.boxes.living[sandbox.id].ends_at > before_s + 2000

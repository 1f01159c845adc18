"""Work in a sandbox that ends in a verdict, for everything that is scored by running it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rayapp.core.errors import SandboxConfigError, SandboxError
from rayapp.core.protocols import Sandbox, SandboxSource
from rayapp.core.types import Reward, SandboxSpec

LEASE_TIMEOUT_S = 120.0
"""Longest wait for a sandbox: a busy pool is normal, one that gives none for two minutes is broken."""


async def judged_in_sandbox(
    sandboxes: SandboxSource, spec: SandboxSpec, judge: Callable[[Sandbox], Awaitable[Reward]]
) -> Reward:
    """The verdict of `judge`, which has a sandbox for itself; one that fails is replaced once. When that fails too, the
    verdict is invalid.

    Raises:
        SandboxConfigError: no sandbox can ever be had with this configuration.
    """
    failed: SandboxError | None = None
    for _ in range(2):
        try:
            async with sandboxes.lease(spec, timeout_s=LEASE_TIMEOUT_S) as sandbox:
                return await judge(sandbox)
        except SandboxConfigError:
            raise
        except SandboxError as error:
            failed = error
    assert failed is not None
    return Reward.invalid(_failure_kind(failed), str(failed))


def _failure_kind(error: SandboxError) -> str:
    """`SandboxGoneError` -> `sandbox_gone`."""
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in type(error).__name__)
    return words.strip("_").removesuffix("_error")

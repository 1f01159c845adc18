"""Builds a pool and its sources from the configuration. Called by the sandbox-pool actor and by benchmarks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rayapp.config.sandbox import LocalConfig, McpConfig, ProviderConfig, SandboxConfig
from rayapp.core.errors import SandboxConfigError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import APP_LABEL, APP_NAME, HOST_LABEL, RUN_LABEL, RemoteProvider
from rayapp.sandbox.pool.breaker import CircuitBreaker
from rayapp.sandbox.pool.bucket import TokenBucket
from rayapp.sandbox.pool.keeper import GRACE_S, Keeper, KeeperRules, Source
from rayapp.sandbox.pool.pool import LeasePool
from rayapp.sandbox.pool.supply import Supply
from rayapp.sandbox.providers.table import num_local_sandboxes, remote_providers


def labels_of(run_name: str) -> dict[str, str]:
    """Labels of every remote sandbox of a run on this host."""
    return {APP_LABEL: APP_NAME, RUN_LABEL: run_name, HOST_LABEL: socket.gethostname()[:63]}


def build_pool(
    config: SandboxConfig,
    run_name: str,
    *,
    providers: Mapping[str, RemoteProvider] | None = None,
    clock: Callable[[], float] = time.monotonic,
    grace_s: float = GRACE_S,
) -> LeasePool:
    """The pool of a configuration.

    Args:
        run_name: labels the sandboxes.
        providers: provider objects by name, in place of those of the configuration; for tests.
        grace_s: how long past its own deadline a provider is waited for.
    Raises:
        SandboxConfigError: a provider's package or key is not there.
    """
    made = remote_providers(config) if providers is None else providers
    builder = _Builder(config, run_name, clock, grace_s)
    sources = [builder.source(section, made.get(section.type)) for section in config.providers]
    limits = (num_local_sandboxes(config) if isinstance(s, LocalConfig) else s.max_sandboxes for s in config.providers)
    builder.pool = LeasePool(
        max_leases=config.max_leases or sum(limits),
        max_waiting=config.max_waiting,
        ttl_s=config.lease_ttl_s,
        sources=sources,
        min_ready=config.min_ready,
        holder_timeout_s=config.holder_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        is_ahead=config.prefetch,
        clock=clock,
    )
    return builder.pool


@dataclass(slots=True)
class _Builder:
    """Keepers call the pool back, and the pool needs its keepers first: this ties the knot."""

    config: SandboxConfig
    run_name: str
    clock: Callable[[], float]
    grace_s: float
    pool: LeasePool = field(init=False)

    def source(self, section: ProviderConfig, provider: RemoteProvider | None) -> Source:
        config, clock = self.config, self.clock
        if isinstance(section, LocalConfig):
            return Source(Supply("local", max_sandboxes=num_local_sandboxes(config), clock=clock))
        breaker = CircuitBreaker(failures=config.breaker_failures, cooldown_s=config.breaker_cooldown_s, clock=clock)
        if isinstance(section, McpConfig):
            return Source(Supply(section.type, max_sandboxes=section.max_sandboxes, clock=clock, breaker=breaker))
        if provider is None:
            raise SandboxConfigError(f"there is no provider {section.type}")
        supply = Supply(
            section.type,
            max_sandboxes=section.max_sandboxes,
            clock=clock,
            bucket=TokenBucket(rate_per_s=section.creations_per_s, burst=section.creation_burst, clock=clock),
            breaker=breaker,
            cooldown_s=config.breaker_cooldown_s,
        )
        return Source(supply, self._keeper(supply, provider, section.answer_within_s))

    def _keeper(self, supply: Supply, provider: RemoteProvider, answer_within_s: float) -> Keeper:
        config = self.config
        rules = KeeperRules(
            create_timeout_s=config.create_timeout_s,
            sandbox_ttl_s=config.sandbox_ttl_s,
            idle_timeout_s=config.idle_timeout_s,
            min_ready=config.min_ready,
            max_uses=config.max_uses,
            kill_timeout_s=answer_within_s,
            grace_s=self.grace_s,
        )
        return Keeper(
            supply,
            provider,
            rules,
            labels=labels_of(self.run_name),
            clock=self.clock,
            on_change=self._changed,
            on_config_error=self._refuse,
        )

    def _changed(self) -> None:
        self.pool.pump()

    def _refuse(self, spec: SandboxSpec, error: SandboxConfigError) -> None:
        self.pool.refuse(spec, error)

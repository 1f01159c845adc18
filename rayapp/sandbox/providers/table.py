"""From configuration to provider objects. Each SDK is imported only when its provider is asked for."""

from __future__ import annotations

import os
from importlib.util import find_spec

from rayapp.config.sandbox import (
    DaytonaConfig,
    E2BConfig,
    FakeConfig,
    LocalConfig,
    McpConfig,
    PluginConfig,
    ProviderConfig,
    SandboxConfig,
)
from rayapp.core.errors import SandboxConfigError, UserError
from rayapp.core.keys import read_key
from rayapp.core.names.plugins import load_plugin
from rayapp.sandbox.leases import RemoteProvider
from rayapp.sandbox.local.provider import LocalProvider


def num_local_sandboxes(config: SandboxConfig) -> int:
    """How many local sandboxes may be in use at once."""
    own = config.local.max_sandboxes if config.local is not None else 0
    return own or config.max_leases or len(os.sched_getaffinity(0))


def local_provider(config: SandboxConfig) -> LocalProvider | None:
    """Makes sandboxes in the calling process; None where the configuration names no local provider."""
    if config.local is None:
        return None
    return LocalProvider(
        allow_unisolated=config.allow_unisolated,
        packages=config.local.packages,
        max_slots=num_local_sandboxes(config),
    )


def remote_providers(config: SandboxConfig) -> dict[str, RemoteProvider]:
    """Every remote provider of the configuration, by name.

    Raises:
        SandboxConfigError: its package or its key is not there.
    """
    sections = [section for section in config.providers if not isinstance(section, LocalConfig)]
    return {section.type: remote_provider(section) for section in sections}


def listing_providers(config: SandboxConfig) -> dict[str, RemoteProvider]:
    """The remote providers that say, to any process, what lives there: those whose sandboxes outlive their maker.

    Raises:
        SandboxConfigError: its package or its key is not there.
    """
    sections = [section for section in config.providers if isinstance(section, E2BConfig | DaytonaConfig)]
    return {section.type: remote_provider(section) for section in sections}


def remote_provider(section: ProviderConfig) -> RemoteProvider:
    """One remote provider.

    Raises:
        SandboxConfigError: its package or its key is not there.
    """
    match section:
        case E2BConfig():
            _needs("e2b", "e2b")
            from rayapp.sandbox.providers.e2b import E2BProvider

            return E2BProvider(section, api_key=_key(section))
        case DaytonaConfig():
            from rayapp.sandbox.providers.daytona_channel import sdk

            sdk()
            from rayapp.sandbox.providers.daytona import DaytonaProvider

            return DaytonaProvider(section, api_key=_key(section))
        case McpConfig():
            _needs("mcp", "mcp")
            from rayapp.sandbox.providers.mcp import McpProvider

            return McpProvider(section, api_key=_key(section))
        case FakeConfig():
            from rayapp.sandbox.providers.fake import FakeProvider

            return FakeProvider(latency_s=section.latency_s, fail_share=section.fail_share, seed=section.seed)
        case PluginConfig():
            return _of_plugin(section)
        case _:
            raise SandboxConfigError("the local provider makes its sandboxes in the rollout worker's process")


def _of_plugin(section: PluginConfig) -> RemoteProvider:
    try:
        provider: RemoteProvider = load_plugin("sandbox_providers", section.name)(section.options)
    except UserError as error:
        raise SandboxConfigError(str(error)) from error
    except Exception as error:  # boundary: a plug-in is foreign code
        raise SandboxConfigError(f"plug-in {section.name} can't be made: {type(error).__name__}: {error}") from error
    return provider


def why_no_sandbox(config: SandboxConfig, template: str) -> str:
    """Why no provider has sandboxes of this image or template; empty where each of them may.

    A provider that can't have them would fail every lease that falls to it, so one is enough to tell.
    """
    for section in config.providers if template else ():
        if isinstance(section, LocalConfig):
            return "the local provider builds and runs no images: name a remote one in sandbox.providers"
        if isinstance(section, E2BConfig | McpConfig) and template not in section.images:
            return f"provider {section.type} has templates of its own: build one, name it in images: {{{template}: …}}"
    return ""


def _key(section: E2BConfig | DaytonaConfig | McpConfig) -> str:
    return read_key(section.api_key_env, f"provider {section.type}", SandboxConfigError)


def _needs(module: str, package: str) -> None:
    if find_spec(module) is None:
        raise SandboxConfigError(f"the package {package} is not installed: pip install {package}")

"""Makes provider objects from the configuration. A remote provider's SDK is imported only if needed."""

from __future__ import annotations

from typing import Any

from rayapp.config.sandbox import (
    DaytonaConfig,
    E2BConfig,
    LocalConfig,
    McpConfig,
    PluginConfig,
    ProviderConfig,
    SandboxConfig,
)
from rayapp.core.errors import ImageError, SandboxConfigError, UserError
from rayapp.core.http import read_key
from rayapp.core.machine import num_cores
from rayapp.core.names import load_extra, load_plugin
from rayapp.core.types import AgentStart
from rayapp.sandbox.images import PREFIX, ImageCache, is_image, parse
from rayapp.sandbox.leases import RemoteProvider
from rayapp.sandbox.local.provider import LocalProvider, why_no_images_here

# Type of a provider -> place of its class in `rayapp.extras`.
REMOTE = {
    "e2b": "providers.e2b:E2BProvider",
    "daytona": "providers.daytona:DaytonaProvider",
    "mcp": "providers.mcp:McpProvider",
}


def num_local_sandboxes(config: SandboxConfig) -> int:
    own = config.local.max_sandboxes if config.local is not None else 0
    return own or config.max_leases or num_cores()


def local_provider(config: SandboxConfig) -> LocalProvider | None:
    if config.local is None:
        return None
    return LocalProvider(
        allow_unisolated=config.allow_unisolated,
        packages=config.local.packages,
        max_slots=num_local_sandboxes(config),
        images=image_source(config.local),
    )


def registries_of(section: LocalConfig) -> Any:
    """Return the registries that may be asked for the images of tasks."""
    return load_extra("images.pull:registries_of")(section.image_registries, section.images)


def image_source(section: LocalConfig) -> ImageCache:
    source: ImageCache = load_extra("images.cache:ImageSource")(
        folder=section.image_cache,
        max_gib=section.image_cache_gib,
        registries=registries_of(section),
        aliases=section.images,
    )
    return source


def remote_providers(config: SandboxConfig) -> dict[str, RemoteProvider]:
    sections = [section for section in config.providers if not isinstance(section, LocalConfig)]
    return {section.type: remote_provider(section) for section in sections}


def remote_provider(section: ProviderConfig) -> RemoteProvider:
    """Make a provider. SandboxConfigError: its package or key is missing."""
    match section:
        case E2BConfig() | DaytonaConfig() | McpConfig():
            try:
                make = load_extra(REMOTE[section.type])
            except ModuleNotFoundError as error:
                raise SandboxConfigError(
                    f"the package {error.name} is not installed: pip install {error.name}"
                ) from error
            key = read_key(section.api_key_env, f"provider {section.type}", SandboxConfigError)
            provider: RemoteProvider = make(section, api_key=key)
            return provider
        case PluginConfig():
            return _of_plugin(section)
        case _:
            raise SandboxConfigError(
                "provider local is not a remote provider: each rollout worker makes its own local sandboxes"
            )


def _of_plugin(section: PluginConfig) -> RemoteProvider:
    try:
        provider: RemoteProvider = load_plugin("sandbox_providers", section.name)(section.options)
    except UserError as error:
        raise SandboxConfigError(str(error)) from error
    except Exception as error:  # boundary: a plug-in is foreign code
        raise SandboxConfigError(
            f"sandbox provider {section.name} (plug-in) can't be made: {type(error).__name__}: {error}"
        ) from error
    return provider


def why_no_sandbox(config: SandboxConfig, template: str) -> str:
    """Return why a provider can't make sandboxes of this image or template; empty if all may. The pool may send any
    lease to any provider."""
    for section in config.providers if template else ():
        name = template.removeprefix(PREFIX).removeprefix("build:")
        if isinstance(section, LocalConfig) and (why := _why_no_image(section, template)):
            return why
        if isinstance(section, E2BConfig | McpConfig) and not {template, name} & section.images.keys():
            return (
                f"provider {section.type} has no template for this image. Build one, and name it in "
                f"sandbox.providers[].images: {{{name}: …}}"
            )
        if isinstance(section, DaytonaConfig) and name.startswith(("oci:", "archive:")) and name not in section.images:
            return (
                f"provider daytona can't read {name}. Push this image to a registry, or name a snapshot for it in "
                "sandbox.providers[].images"
            )
    return ""


def _why_no_image(section: LocalConfig, template: str) -> str:
    wanted = section.images.get(template, template)
    if not is_image(wanted):
        return (
            f"the local provider can use only images. Name one in sandbox.providers[].images: {{{template}: 'image:…'}}"
        )
    try:
        reference = parse(wanted)
    except ImageError as error:
        return str(error)
    if reference.kind == "build":
        return "the local provider builds none: run `docker build` and `docker save`, and give the file in its `images`"
    return why_no_images_here()


def why_no_workspace(config: SandboxConfig, start: AgentStart) -> str:
    """Return why a provider can't make the sandboxes that an agent needs; empty if every provider can."""
    images = start.images or ({start.spec.template: ""} if start.spec else {})
    for image, needed in images.items():
        if why := why_no_sandbox(config, image):
            told = f"{image} ({needed})" if needed else image
            return f"needs sandboxes of {told}, but {why} (docs/environments.md)"
    return ""

"""Section `sandbox`: the sandbox providers in their order, and the limits of the pool. Data only."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rayapp.config.base import FrozenModel


class LocalConfig(FrozenModel):
    """Isolated processes on the rollout worker's node. Needs no service, no key and no root."""

    type: Literal["local"] = "local"
    max_sandboxes: int = Field(0, ge=0)
    """Maximum number of sandboxes alive at once. 0: `max_leases`, or one per core if `max_leases` is 0. With more than
    one per core, other sandboxes slow code down, and it could miss its deadline."""
    packages: tuple[str, ...] = ()
    """Python packages that every sandbox has, e.g. [numpy], besides the packages that its task names."""
    image_cache: str = ""
    """Folder of unpacked images. Empty: ~/.cache/rayapp/images, for root /var/cache/rayapp/images."""
    image_cache_gib: float = Field(50.0, gt=0)
    """Maximum size of unpacked images in GiB. Above it, the least recently used images are removed, except images in
    use."""
    image_registries: tuple[str, ...] = ()
    """Registries, as HOST or HOST:PORT, that the images of tasks may come from, besides docker.io, ghcr.io, quay.io,
    gcr.io, mcr.microsoft.com, nvcr.io, public.ecr.aws, registry.gitlab.com, and the hosts in `images`. Other hosts are
    refused: rows could name any of your network."""
    images: dict[str, str] = Field(default_factory=dict)
    """Image that a task requires -> image to use in its place, e.g. {"image:python:3.12": "image:oci:/shared/py"}."""


class _Remote(FrozenModel):
    max_sandboxes: int = Field(20, ge=1)
    """Maximum number of sandboxes alive at once: the account's quota minus other use. If the provider's quota turns out
    smaller, the pool adapts to it."""
    images: dict[str, str] = Field(default_factory=dict)
    """Image or folder name that a repository task requires -> this provider's template for it (Daytona: snapshot)."""

    def template_of(self, wanted: str) -> str:
        """Return the provider's template for the image that a task requires; empty: the provider's default."""
        name = wanted.removeprefix("image:").removeprefix("build:")
        return self.images.get(wanted, self.images.get(name, name))


class _Created(_Remote):
    """Providers whose sandboxes the pool creates ahead of use."""

    creations_per_s: float = Field(1.0, gt=0, le=1000)
    """Sandboxes to create per second over a longer time; providers refuse more (E2B: 1 on Hobby, 5 on Pro). After a
    pause, as many as in five seconds are created at once."""


class E2BConfig(_Created):
    """E2B's cloud, a self-hosted E2B, or an OpenKruise/ACK sandbox-manager, which has an earlier version of E2B's
    API."""

    type: Literal["e2b"] = "e2b"
    template: str = "code-interpreter-v1"
    """Template, or name of the SandboxSet, for tasks that name no template. The template needs python3, and Jupyter for
    stateful code."""
    api_key_env: str = Field("E2B_API_KEY", min_length=1)
    """Environment variable that holds the key; a config never holds keys."""
    api_url: str = ""
    """Full URL of the control plane. Empty: E2B's own. A URL that ends in /kruise/api is that of OpenKruise's
    sandbox-manager (docs/sandbox-providers.md)."""
    sandbox_url: str = ""
    """Full URL of sandboxes. Empty: as the control plane says."""

    @property
    def is_kruise(self) -> bool:
        """True if the control plane is OpenKruise's sandbox-manager, which has an earlier version of E2B's API."""
        return self.api_url.rstrip("/").endswith("/kruise/api")


class DaytonaConfig(_Created):
    """Daytona's cloud, or an endpoint with the same API."""

    type: Literal["daytona"] = "daytona"
    max_sandboxes: int = Field(10, ge=1)
    """Maximum number of sandboxes alive at once: the account's CPU quota minus other use."""
    creations_per_s: float = Field(4.0, gt=0, le=1000)
    """Sandboxes to create per second over a longer time; the lowest tier allows 300 a minute."""
    template: str = ""
    """Snapshot, or image such as python:3.12-slim, for tasks that name no template. Empty: Daytona's default. A
    snapshot also sets cores and memory."""
    api_key_env: str = Field("DAYTONA_API_KEY", min_length=1)
    """Environment variable that holds the key."""
    api_url: str = ""
    """URL of the API. Empty: Daytona's own."""


class McpConfig(_Remote):
    """A remote MCP server with the tools run_code and run_command (streamable HTTP)."""

    type: Literal["mcp"] = "mcp"
    url: str = Field(min_length=1)
    """The server's endpoint, e.g. http://127.0.0.1:8082/mcp."""
    api_key_env: str = ""
    """Environment variable that holds the key, which is sent as E2B-API-KEY and as a bearer token. Empty: send no
    key."""
    template: str = "code-interpreter"
    """Template for tasks that name no template, sent as X-Template."""


class PluginConfig(_Created):
    """Sandboxes of a provider from another package (docs/plugins.md)."""

    type: Literal["plugin"] = "plugin"
    name: str = Field(min_length=1)
    """The provider's name in the entry-point group rayapp.sandbox_providers."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options passed to the provider. Put keys into the environment, not here."""


ProviderConfig = Annotated[
    LocalConfig | E2BConfig | DaytonaConfig | McpConfig | PluginConfig, Field(discriminator="type")
]


class SandboxConfig(FrozenModel):
    """Sandboxes for model-written code: their providers, and the limits of the pool (docs/sandboxes.md)."""

    providers: tuple[ProviderConfig, ...] = (LocalConfig(),)
    """Sandbox provider of the run, as a list with one section."""
    max_leases: int = Field(0, ge=0)
    """Maximum number of sandboxes in use at once, over all rollout workers. 0: the provider's limit."""
    lease_ttl_s: float = Field(600.0, gt=0)
    """Longest time that one use of a sandbox (a lease) may take; then the sandbox is taken back. Must exceed any task's
    timeout_s."""
    min_ready: int = Field(0, ge=0)
    """Idle remote sandboxes to keep ready for each template in use, so that the start of a step does not wait."""
    max_uses: int = Field(1, ge=1)
    """Number of uses of a remote sandbox before it is ended. With 1, no use finds files of an earlier use; with more,
    each returned sandbox is checked."""
    allow_unisolated: bool = False
    """Run model-written code without isolation on nodes that offer none. The isolation of each result is then
    `unisolated`."""

    @model_validator(mode="after")
    def _one_provider(self) -> Self:
        if len(self.providers) != 1:
            raise ValueError(
                f"providers has {len(self.providers)} sections: a run uses one provider. "
                "Name one, e.g. providers: [{type: local}]"
            )
        return self

    @property
    def provider(self) -> ProviderConfig:
        return self.providers[0]

    @property
    def without_stock(self) -> Self:
        """Copy that keeps no idle sandboxes, which cost money, for callers with few leases."""
        return self.model_copy(update={"min_ready": 0})

    @property
    def local(self) -> LocalConfig | None:
        return next((provider for provider in self.providers if isinstance(provider, LocalConfig)), None)

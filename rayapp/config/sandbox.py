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
    gcr.io, mcr.microsoft.com, nvcr.io, public.ecr.aws, registry.gitlab.com, the hosts in `image_mirrors` and `images`,
    and images that `rayapp images pull` has brought. Other hosts are refused: rows could name any of your network."""
    image_mirrors: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Registry -> mirrors to ask first, e.g. {docker.io: [mirror.example:5000]}; `http://HOST` is asked without TLS."""
    images: dict[str, str] = Field(default_factory=dict)
    """Image that a task requires -> image to use in its place, e.g. {"image:python:3.12": "image:oci:/shared/py"}."""


class _Remote(FrozenModel):
    max_sandboxes: int = Field(20, ge=1)
    """Maximum number of sandboxes alive at once: the account's quota minus other use. If the provider's quota turns out
    smaller, the pool adapts to it."""
    answer_within_s: float = Field(20.0, gt=0, le=60)
    """Time limit for the overhead of a call to a sandbox (network and interpreter start). A call that runs code also
    has the code's own time limit. A sandbox that takes longer has failed."""
    images: dict[str, str] = Field(default_factory=dict)
    """Image or folder name that a repository task requires -> this provider's template for it (Daytona: snapshot)."""

    def template_of(self, wanted: str) -> str:
        """Return the provider's template for the image that a task requires; empty: the provider's default."""
        name = wanted.removeprefix("image:").removeprefix("build:")
        return self.images.get(wanted, self.images.get(name, name))


class _Created(_Remote):
    """Providers whose sandboxes the pool creates ahead of use."""

    creations_per_s: float = Field(1.0, gt=0, le=1000)
    """Sandboxes to create per second over a longer time; providers refuse more (E2B: 1 on Hobby, 5 on Pro)."""
    creation_burst: int = Field(5, ge=1)
    """Sandboxes that may be created at once after a pause, beyond the sustained rate."""


class E2BConfig(_Created):
    """E2B's cloud, a self-hosted E2B, or an OpenKruise/ACK sandbox-manager, which has an earlier version of E2B's
    API."""

    type: Literal["e2b"] = "e2b"
    dialect: Literal["e2b", "kruise"] = "e2b"
    """API dialect. kruise: routes and addresses of OpenKruise's sandbox-manager (docs/sandbox-providers.md)."""
    template: str = "code-interpreter-v1"
    """Template, or name of the SandboxSet, for tasks that name no template. The template needs python3, and Jupyter for
    stateful code."""
    api_key_env: str = Field("E2B_API_KEY", min_length=1)
    """Environment variable that holds the key; a config never holds keys."""
    domain: str = ""
    """Domain of the endpoint. Empty: E2B's own."""
    api_url: str = ""
    """Full URL of the control plane, if it is not https://api.DOMAIN. Required for dialect kruise."""
    sandbox_url: str = ""
    """Full URL of sandboxes, if it is not https://PORT-ID.DOMAIN."""
    allow_internet: bool = False
    """Let code in a sandbox reach the internet. Completions could then look up their answers."""

    @model_validator(mode="after")
    def _kruise_needs_its_url(self) -> Self:
        if self.dialect == "kruise" and not self.api_url:
            raise ValueError("dialect kruise needs api_url, e.g. http://sandbox-manager.example/kruise/api")
        return self


class DaytonaConfig(_Created):
    """Daytona's cloud, or an endpoint with the same API."""

    type: Literal["daytona"] = "daytona"
    max_sandboxes: int = Field(10, ge=1)
    """Maximum number of sandboxes alive at once: the account's CPU quota minus other use."""
    creations_per_s: float = Field(4.0, gt=0, le=1000)
    """Sandboxes to create per second over a longer time; the lowest tier allows 300 a minute."""
    snapshot: str = ""
    """Snapshot for tasks that name no template. Empty: Daytona's default. Can't be combined with `image`."""
    image: str = ""
    """Image to create from instead of a snapshot."""
    cpu: int = Field(1, ge=1)
    """Cores per sandbox; only used with `image`, as a snapshot has its own."""
    memory_gib: int = Field(1, ge=1)
    """Memory per sandbox in GiB; only used with `image`."""
    api_key_env: str = Field("DAYTONA_API_KEY", min_length=1)
    """Environment variable that holds the key."""
    api_url: str = ""
    """URL of the API. Empty: Daytona's own."""
    target: str = ""
    """Region of the sandboxes. Empty: the account's default."""
    allow_internet: bool = False
    """Let code in a sandbox reach the internet. Completions could then look up their answers."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.snapshot and self.image:
            raise ValueError(f"snapshot {self.snapshot!r} and image {self.image!r} contradict each other: keep one")
        return self


class McpConfig(_Remote):
    """A remote MCP server with the tools run_code and run_command (streamable HTTP)."""

    type: Literal["mcp"] = "mcp"
    url: str = Field(min_length=1)
    """The server's endpoint, e.g. http://127.0.0.1:8082/mcp."""
    api_key_env: str = ""
    """Environment variable that holds the key. Empty: send no key."""
    api_key_header: str = "E2B-API-KEY"
    """Header that carries the key; `Authorization` sends it as a bearer token."""
    template: str = "code-interpreter"
    """Template for tasks that name no template, sent as X-Template."""
    execution_timeout_s: int = Field(60, ge=1, le=3600)
    """The server's time limit for one execution, sent as X-Execution-Timeout. Must exceed any task's time limit."""


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
    max_waiting: int = Field(10_000, ge=1)
    """Maximum number of requests for a sandbox that wait. Further requests are refused immediately instead of timing
    out."""
    lease_ttl_s: float = Field(600.0, gt=0)
    """Longest time that one use of a sandbox (a lease) may take; then the sandbox is taken back. Must exceed any task's
    timeout_s."""
    holder_timeout_s: float = Field(60.0, gt=0)
    """Time without a message from a rollout worker after which it counts as dead, and its leases are revoked."""
    min_ready: int = Field(0, ge=0)
    """Idle remote sandboxes to keep ready for each template in use, so that the start of a step does not wait."""
    max_uses: int = Field(1, ge=1)
    """Number of uses of a remote sandbox before it is ended. With 1, no use finds files of an earlier use; with more,
    each returned sandbox is checked."""
    create_timeout_s: float = Field(90.0, gt=0, le=3600)
    """Longest wait for a new sandbox. A sandbox that becomes ready later is used for another request or ended."""
    sandbox_ttl_s: float = Field(900.0, ge=60, le=86400)
    """Lifetime that the provider is asked for, extended while the sandbox is in use. If the run dies, the provider ends
    the sandbox after this time."""
    idle_timeout_s: float = Field(300.0, gt=0)
    """Idle time after which a remote sandbox beyond min_ready is ended, because it costs money."""
    sweep_every_s: float = Field(60.0, gt=0)
    """Seconds between comparisons of the provider's list of sandboxes with the pool's list. Sandboxes that the pool
    doesn't know are ended."""
    reaper_grace_s: float = Field(120.0, gt=0)
    """Time without a message from the run after which it counts as dead, and the reaper ends its sandboxes."""
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

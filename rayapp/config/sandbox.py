"""Configuration of sandboxes: which providers, in which order, and the rules of the pool. Data only."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rayapp.config.base import FrozenModel


class LocalConfig(FrozenModel):
    """Isolated processes on the rollout worker's node: no service, no key, no root."""

    type: Literal["local"] = "local"
    max_sandboxes: int = Field(0, ge=0)
    """Sandboxes alive at once; 0 is `max_leases`, or else one per core: with more, how long code runs, and so whether
    it meets its deadline, would depend on its neighbours."""
    packages: tuple[str, ...] = ()
    """Packages preloaded in every sandbox besides those its task names, e.g. [numpy]."""


class _Remote(FrozenModel):
    max_sandboxes: int = Field(20, ge=1)
    """Sandboxes alive at once: the account's quota, less what others use. A smaller quota is found out and kept to."""
    answer_within_s: float = Field(20.0, gt=0, le=60)
    """How long a call to a sandbox may take that runs no code, and how much longer than the code's own time limit one
    that does: the way there and back, and starting an interpreter. A sandbox that takes longer has failed."""
    images: dict[str, str] = Field(default_factory=dict)
    """Image or folder name of a task over a repository -> this provider's template for it (Daytona: snapshot)."""

    def template_of(self, wanted: str) -> str:
        """The provider's template for what a task asks for; empty is its default."""
        return self.images.get(wanted, wanted)


class _Created(_Remote):
    """Sandboxes that the pool creates, ahead of those who use them."""

    creations_per_s: float = Field(1.0, gt=0, le=1000)
    """Sandboxes created per second, sustained: providers refuse more (E2B: 1 on Hobby, 5 on Pro)."""
    creation_burst: int = Field(5, ge=1)
    """Creations that may start at once after a pause."""


class E2BConfig(_Created):
    """E2B's cloud, a self-hosted E2B, or an OpenKruise/ACK sandbox-manager, which speaks an older dialect."""

    type: Literal["e2b"] = "e2b"
    dialect: Literal["e2b", "kruise"] = "e2b"
    """`kruise`: the routes and the addressing of OpenKruise's sandbox-manager (see docs/sandbox-providers.md)."""
    template: str = "code-interpreter-v1"
    """Template, or name of the SandboxSet, for tasks that name none. It needs python3; stateful code also Jupyter."""
    api_key_env: str = Field("E2B_API_KEY", min_length=1)
    """Environment variable that holds the key: keys never stand in a config."""
    domain: str = ""
    """Domain of the endpoint; empty is E2B's own."""
    api_url: str = ""
    """Whole URL of the control plane, where it is not https://api.DOMAIN. Needed for dialect kruise."""
    sandbox_url: str = ""
    """Whole URL through which sandboxes are reached, where it is not https://PORT-ID.DOMAIN."""
    allow_internet: bool = False
    """Let code in a sandbox reach the internet: then a completion can look its answer up."""
    claim_timeout_s: int = Field(30, ge=1, le=600)
    """kruise only: longest wait for a sandbox of the warm set. Always sent: without it the server waits for ever."""
    ready_timeout_s: int = Field(60, ge=1, le=600)
    """kruise only: longest wait for a claimed sandbox to answer. Always sent, as above."""

    @model_validator(mode="after")
    def _kruise_needs_its_url(self) -> Self:
        if self.dialect == "kruise" and not self.api_url:
            raise ValueError("dialect kruise needs api_url, e.g. http://sandbox-manager.example/kruise/api")
        return self


class DaytonaConfig(_Created):
    """Daytona's cloud, or an endpoint that speaks its API."""

    type: Literal["daytona"] = "daytona"
    max_sandboxes: int = Field(10, ge=1)
    """Sandboxes alive at once: the account's quota of CPUs, less what others use."""
    creations_per_s: float = Field(4.0, gt=0, le=1000)
    """Sandboxes created per second, sustained: the lowest tier allows 300 a minute."""
    snapshot: str = ""
    """Snapshot for tasks that name no template; empty is Daytona's default. Not together with `image`."""
    image: str = ""
    """Image to create from instead of a snapshot."""
    cpu: int = Field(1, ge=1)
    """Cores per sandbox; with `image` only, a snapshot has its own."""
    memory_gib: int = Field(1, ge=1)
    """Memory per sandbox in GiB; with `image` only."""
    api_key_env: str = Field("DAYTONA_API_KEY", min_length=1)
    """Environment variable that holds the key."""
    api_url: str = ""
    """Endpoint; empty is Daytona's own."""
    target: str = ""
    """Region; empty is the account's default."""
    allow_internet: bool = False
    """Let code in a sandbox reach the network."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.snapshot and self.image:
            raise ValueError(f"snapshot {self.snapshot!r} and image {self.image!r} contradict each other: keep one")
        return self


class McpConfig(_Remote):
    """A remote MCP server with the tools run_code, run_code_once and run_command (streamable HTTP)."""

    type: Literal["mcp"] = "mcp"
    url: str = Field(min_length=1)
    """The server's endpoint, e.g. http://127.0.0.1:8082/mcp."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty sends none."""
    api_key_header: str = "E2B-API-KEY"
    """Header that carries the key; `Authorization` sends it as a bearer token."""
    template: str = "code-interpreter"
    """Sent as X-Template, for tasks that name none."""
    tool: Literal["session", "once"] = "session"
    """`session`: run_command in the sandbox of the session, and run_code for stateful code. `once`: every program by
    run_code_once, in a sandbox of its own that ends with it; no files, nothing stateful."""
    execution_timeout_s: int = Field(60, ge=1, le=3600)
    """The server's own limit for one execution in seconds, sent as X-Execution-Timeout. Longer than any task's."""


class FakeConfig(_Created):
    """Sandboxes that run nothing and answer what a script says: to test tasks and the pool itself."""

    type: Literal["fake"] = "fake"
    creations_per_s: float = Field(1000.0, gt=0, le=1000)
    """Sandboxes created per second, sustained; here no provider limits them."""
    latency_s: float = Field(0.0, ge=0, le=60)
    """How long each call takes, in seconds."""
    fail_share: float = Field(0.0, ge=0, le=1)
    """Share of calls that fail, in every way a provider can."""
    seed: int = 0
    """Which calls fail."""


class PluginConfig(_Created):
    """Sandboxes of a provider that another package brings (docs/plugins.md)."""

    type: Literal["plugin"] = "plugin"
    name: str = Field(min_length=1)
    """Its name in the group rayapp.sandbox_providers."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What it is made with. Keys belong into the environment, not here."""


ProviderConfig = Annotated[
    LocalConfig | E2BConfig | DaytonaConfig | McpConfig | FakeConfig | PluginConfig, Field(discriminator="type")
]


class SandboxConfig(FrozenModel):
    """The sandboxes that model-written code runs in: providers, and how many at a time."""

    providers: tuple[ProviderConfig, ...] = (LocalConfig(),)
    """In order of preference. The next one serves only while all before it can't: their quota is zero, or they fail
    again and again. Results of a fallback say so."""
    max_leases: int = Field(0, ge=0)
    """Sandboxes in use at once over all rollout workers and providers; 0 is what the providers' limits add up to."""
    max_waiting: int = Field(10_000, ge=1)
    """Callers that may wait for a lease; one more is refused rather than left to time out."""
    lease_ttl_s: float = Field(600.0, gt=0)
    """A lease not given back by then is taken back. Longer than any task's timeout_s."""
    holder_timeout_s: float = Field(60.0, gt=0)
    """A rollout worker not heard of for so long is dead: its leases are taken back."""
    min_ready: int = Field(0, ge=0)
    """Remote sandboxes kept warm, idle, for each kind in use. A step's burst should find them ready."""
    prefetch: bool = False
    """Have as many remote sandboxes ready for the next step as the steps before used at once: they are made while the
    learner trains. Idle ones cost money; they are ended after idle_timeout_s, which a step should not outlast."""
    max_uses: int = Field(1, ge=1)
    """Leases one remote sandbox serves. 1 leaves nothing behind for the next; with more, each return is checked."""
    create_timeout_s: float = Field(90.0, gt=0, le=3600)
    """Longest wait for one creation. One that answers later is adopted or killed."""
    sandbox_ttl_s: float = Field(900.0, ge=60, le=86400)
    """The provider ends a sandbox that nobody extended for so long: the last resort against leaks."""
    idle_timeout_s: float = Field(300.0, gt=0)
    """A warm sandbox beyond min_ready that nobody used for so long is ended: it costs money."""
    sweep_every_s: float = Field(60.0, gt=0)
    """How often the pool compares what lives at the provider with what it knows of, and ends strays."""
    breaker_failures: int = Field(5, ge=1)
    """Failed creations in a row after which a provider is left alone for a while."""
    breaker_cooldown_s: float = Field(30.0, gt=0)
    """For how long; doubled each time it fails again, up to ten minutes."""
    reaper_grace_s: float = Field(120.0, gt=0)
    """A run not heard of for so long is dead: the reaper ends its sandboxes."""
    allow_unisolated: bool = False
    """Run model-written code with no isolation where the node offers none; every result then says so."""

    @model_validator(mode="after")
    def _distinct_providers(self) -> Self:
        if not self.providers:
            raise ValueError("providers is empty: name one at least, e.g. providers: [{type: local}]")
        kinds = [provider.type for provider in self.providers]
        if twice := {kind for kind in kinds if kinds.count(kind) > 1}:
            raise ValueError(f"provider {', '.join(sorted(twice))} is there twice; each kind may be there once")
        return self

    @property
    def without_stock(self) -> Self:
        """The same without a stock of warm sandboxes, which would cost money and serve nobody where few are leased."""
        return self.model_copy(update={"min_ready": 0})

    @property
    def local(self) -> LocalConfig | None:
        """The local provider's section, if it is in the list."""
        return next((provider for provider in self.providers if isinstance(provider, LocalConfig)), None)

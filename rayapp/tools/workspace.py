"""The workspace: the sandbox of one trajectory, which the trajectory's tools for files and code share.

    first call of any tool -> lease -> write the task's files -> all calls, one after the other -> release

No verdict is computed in it: answers are scored in another sandbox, after the workspace has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Generic, TypeVar

from pydantic import Field

from rayapp.core.errors import ConfigError, InputError, SandboxConfigError, SandboxError, SandboxGoneError
from rayapp.core.protocols import Sandbox, SandboxLease, SandboxSource
from rayapp.core.types import ExecRecord, ExecResult, SandboxSpec
from rayapp.tools.base import ToolBase, ToolConfig, ToolContext, ToolFailedError, ToolSchema
from rayapp.tools.config import parse

T = TypeVar("T")
MAX_FILE_BYTES = 1 << 18  # of a file that a tool reads or writes
_SETUP_TIMEOUT_S = 30.0


class WorkspaceConfig(ToolConfig):
    """Section `config` of a tool that uses the workspace. Of several tools, the largest value of each key applies."""

    timeout: float = Field(10.0, gt=0)
    """Time limit of the code in one call, in seconds."""
    lease_timeout: float = Field(120.0, gt=0)
    """Maximum seconds to wait for a free sandbox, which a trajectory keeps to its end."""
    packages: tuple[str, ...] = ()
    memory_mib: int = Field(512, ge=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Used(Generic[T]):
    """Result of one call of `Workspace.use`."""

    value: T
    waited_s: float  # for the sandbox; 0 after the first use
    ran: ExecRecord


@dataclass(slots=True, eq=False, repr=False)
class Workspace:
    """The sandbox of one trajectory. It is leased at the first use."""

    sandboxes: SandboxSource
    spec: SandboxSpec
    _: KW_ONLY
    lease_timeout_s: float
    files: Mapping[str, str] = field(default_factory=dict)  # relative path -> text, at the start
    setup: Sequence[str] = ()  # command after the files are written; if it fails, the workspace is used as it is
    has_shell: bool = False  # a probe has shown that command lines can run
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _lease: SandboxLease | None = None
    _sandbox: Sandbox | None = None
    _num_uses: int = 0
    _is_closed: bool = False

    @property
    def is_used(self) -> bool:
        return self._num_uses > 0

    async def use(self, work: Callable[[Sandbox], Awaitable[T]]) -> Used[T]:
        """Run `work` in the sandbox, one use after the other, in the order in which calls were written. A sandbox that
        is dead at the first use is replaced, because it holds no state yet."""
        async with self._turn:
            try:
                return await self._use(work)
            except SandboxConfigError:
                raise
            except SandboxError:
                await self._give_back()
                if self._num_uses:
                    self._is_closed = True
                    raise
                return await self._use(work)

    async def _use(self, work: Callable[[Sandbox], Awaitable[T]]) -> Used[T]:
        started = time.monotonic()
        sandbox = self._sandbox or await self._open()
        waited_s = time.monotonic() - started
        started_at_s, started = time.time(), time.monotonic()
        value = await work(sandbox)
        ran = ExecRecord(
            sandbox_id=sandbox.id,
            provider=sandbox.provider,
            outcome=value.outcome.value if isinstance(value, ExecResult) else "ok",
            started_at_s=started_at_s,
            duration_s=time.monotonic() - started,
        )
        self._num_uses += 1
        return Used(value=value, waited_s=waited_s, ran=ran)

    async def _open(self) -> Sandbox:
        if self._is_closed:
            raise SandboxGoneError("this trajectory's workspace has ended")
        lease = self.sandboxes.lease(self.spec, timeout_s=self.lease_timeout_s)
        sandbox = await lease.__aenter__()
        self._lease = lease
        try:
            await self._fill(sandbox)
        except BaseException:
            # A call that exceeds its deadline also ends here. The next call opens the workspace again.
            await self._give_back()
            raise
        self._sandbox = sandbox
        return sandbox

    async def _fill(self, sandbox: Sandbox) -> None:
        for path, text in self.files.items():
            try:
                await sandbox.write_file(path, text.encode())
            except OSError as error:
                if isinstance(error, SandboxError):
                    raise
                raise InputError(f"the task's file {path!r} can't be written to its workspace: {error}") from error
        if self.setup:
            await sandbox.run_command(self.setup, timeout_s=_SETUP_TIMEOUT_S)

    async def close(self) -> None:
        self._is_closed = True
        await self._give_back()

    async def _give_back(self) -> None:
        lease, self._lease, self._sandbox = self._lease, None, None
        if lease is not None:
            await lease.__aexit__(None, None, None)


class WorkspaceTool(ToolBase):
    """Base class of tools that share the trajectory's workspace. Subclasses add `schema` and `execute`, and `join` if
    their state is more than the workspace."""

    Config: type[WorkspaceConfig] = WorkspaceConfig
    config: WorkspaceConfig

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        schema: ToolSchema | None = None,
        context: ToolContext | None = None,
    ) -> None:
        super().__init__(config, schema, context)
        # The deadline allows for the wait for a sandbox and the code's time, twice, because the first sandbox may be
        # dead.
        self.timeout_s = 2 * (self.config.timeout + self.config.lease_timeout) + 30.0
        if self.context.sandboxes is None:
            raise ConfigError(
                f"tool {self.schema.name} needs sandboxes, but none were passed to it. Pass ToolContext(sandboxes=...)"
            )
        self.sandboxes = self.context.sandboxes

    @classmethod
    def holds_sandbox(cls, config: Mapping[str, Any], *, where: str) -> bool:
        """True if a trajectory with this tool (by the `config` of its entry) keeps a sandbox to its end."""
        parse(config, cls.Config, where=where)
        return True

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        """Return the state of one trajectory, with a workspace that no other tool shares."""
        return await self.join(open_workspace([self]), kwargs)

    async def join(self, workspace: Workspace, kwargs: Mapping[str, Any]) -> Any:
        """Return the state of one trajectory whose tools share this workspace. It must be cheap, like `create`."""
        return workspace

    async def release(self, state: Any) -> None:
        await state.close()


def open_workspace(
    tools: Sequence[WorkspaceTool],
    *,
    files: Mapping[str, str] | None = None,
    packages: tuple[str, ...] = (),
    spec: SandboxSpec | None = None,
    setup: Sequence[str] = (),
) -> Workspace:
    """Return a workspace that the tools share; it leases a sandbox when first used. `spec` is the task's, to which
    tools may add, e.g. more memory."""
    asked = spec or SandboxSpec()
    spec = replace(
        asked,
        packages=tuple(
            sorted({*asked.packages, *packages, *(name for tool in tools for name in tool.config.packages)})
        ),
        memory_mib=max([tool.config.memory_mib for tool in tools] + ([spec.memory_mib] if spec else [])),
    )
    wait_s = max(tool.config.lease_timeout for tool in tools)
    return Workspace(tools[0].sandboxes, spec, lease_timeout_s=wait_s, files=files or {}, setup=setup)


async def read_text(sandbox: Sandbox, path: str) -> str:
    """Return the text of a file. ToolFailedError: it doesn't exist, is not UTF-8, or is too large."""
    try:
        data = await sandbox.read_file(path, max_bytes=MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ToolFailedError(f"{path} is larger than {MAX_FILE_BYTES >> 10} KiB")
        return data.decode()
    except FileNotFoundError:
        raise ToolFailedError(f"there is no file {path}") from None
    except UnicodeDecodeError:
        raise ToolFailedError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        if isinstance(error, SandboxError):
            raise
        raise ToolFailedError(f"{path} can't be read") from None

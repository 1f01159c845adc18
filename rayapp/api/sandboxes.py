"""The sandbox pool as a library: lease a sandbox, run code in it, and return it.

    with Sandbox() as box:                  async with Sandbox() as box:
        box.run_code("print(1)").stdout         (await box.run_code("print(1)", timeout_s=5)).stdout

As in training, code in a sandbox has no network, can't read your files, and gets no environment variables
(docs/sandboxes.md).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Self

from rayapp.api.arguments import ConfigLike, Overrides, load
from rayapp.core import protocols
from rayapp.core.own_thread import LoopThread
from rayapp.core.types import CallReport, ExecResult, SandboxSpec
from rayapp.sandbox.pool.build import open_pool

LEASE_TIMEOUT_S = 120.0
TIMEOUT_S = 10.0


class SandboxPool:
    """A pool of sandboxes in this process, from the config's providers (local ones by default).

    In blocking code, write `with SandboxPool() as pool`, and use `pool.run_code`, `pool.run_all` and `pool.lease`. In
    async code, `async with SandboxPool() as source` gives a `rayapp.core.protocols.SandboxSource`: use
    `async with source.lease(SandboxSpec(), timeout_s=60)`.

    Args:
        config: config whose section `sandbox` is used.
        overrides: settings that replace those of the config.
    """

    def __init__(self, config: ConfigLike = None, overrides: Overrides = ()) -> None:
        self._config = load(config, overrides).sandbox.without_stock
        self._opened = AsyncExitStack()
        self._thread: LoopThread | None = None
        self._source: protocols.SandboxSource | None = None

    async def __aenter__(self) -> protocols.SandboxSource:
        name = f"library-{os.getpid()}-{secrets.token_hex(4)}"
        client, _ = await self._opened.enter_async_context(open_pool(self._config, name))
        return client

    async def __aexit__(self, *raised: object) -> None:
        await self._opened.aclose()

    def __enter__(self) -> Self:
        self._thread = LoopThread("rayapp sandboxes")
        try:
            self._source = self._thread.run(self.__aenter__())
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._thread is not None
        try:
            self._thread.run(self._opened.aclose())
        finally:
            self._thread.close()
            self._thread = self._source = None

    @contextmanager
    def lease(
        self, spec: SandboxSpec | None = None, *, timeout_s: float = LEASE_TIMEOUT_S
    ) -> Iterator[BlockingSandbox]:
        """Lease a sandbox during a block. SandboxUnavailableError: none is free in time."""
        thread, source = self._open()
        lease = source.lease(spec or SandboxSpec(), timeout_s=timeout_s)
        box = thread.run(lease.__aenter__())
        try:
            yield BlockingSandbox(box, thread)
        finally:
            thread.run(lease.__aexit__(None, None, None))

    def run_code(self, code: str, *, timeout_s: float = TIMEOUT_S, stdin: str = "") -> ExecResult:
        """Run Python in a fresh sandbox."""
        return self.run_all([code], timeout_s=timeout_s, stdin=stdin)[0]

    def run_all(
        self, codes: Sequence[str], *, timeout_s: float = TIMEOUT_S, stdin: str = "", spec: SandboxSpec | None = None
    ) -> list[ExecResult]:
        """Run several programs, each in its own sandbox, as many in parallel as the pool allows. SandboxError: a
        sandbox failed; the code is not the cause."""
        thread, source = self._open()

        async def one(code: str) -> ExecResult:
            async with source.lease(spec or SandboxSpec(), timeout_s=LEASE_TIMEOUT_S) as box:
                return await box.run_code(code, timeout_s=timeout_s, stdin=stdin)

        async def all_of_them() -> list[ExecResult]:
            return await asyncio.gather(*map(one, codes))

        return thread.run(all_of_them())

    def _open(self) -> tuple[LoopThread, protocols.SandboxSource]:
        if self._thread is None or self._source is None:
            raise RuntimeError("the pool is not open: use it within `with SandboxPool() as pool:`")
        return self._thread, self._source


class BlockingSandbox:
    """A sandbox whose calls block until they are done. `SandboxPool.lease` and `Sandbox` make it.

    If the code fails (it raises, exits, loops or floods its output), the result has the failure. Every call raises
    SandboxError if the sandbox itself fails.
    """

    def __init__(self, box: protocols.Sandbox, thread: LoopThread) -> None:
        self._box = box
        self._thread = thread

    @property
    def id(self) -> str:
        return self._box.id

    def run_code(
        self, code: str, *, timeout_s: float = TIMEOUT_S, stdin: str = "", stateful: bool = False
    ) -> ExecResult:
        """Run Python. `stateful` keeps variables from one call to the next."""
        return self._thread.run(self._box.run_code(code, timeout_s=timeout_s, stdin=stdin, stateful=stateful))

    def call_function(
        self, code: str, function: str, inputs: Sequence[Sequence[object]], *, timeout_s: float = TIMEOUT_S
    ) -> CallReport:
        """Define `code`, then call `function(*args)` for each args of `inputs`: plain data in and out."""
        return self._thread.run(self._box.call_function(code, function, inputs, timeout_s=timeout_s))

    def run_command(self, argv: Sequence[str], *, timeout_s: float = TIMEOUT_S, stdin: str = "") -> ExecResult:
        """Run a program."""
        return self._thread.run(self._box.run_command(argv, timeout_s=timeout_s, stdin=stdin))

    def write_file(self, path: str, data: bytes) -> None:
        self._thread.run(self._box.write_file(path, data))

    def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Return the contents of a file in the sandbox. Raises FileNotFoundError: there is no such file."""
        return self._thread.run(self._box.read_file(path, max_bytes=max_bytes))


class Sandbox:
    """A sandbox that has its own pool and exists during a `with` or `async with` block.

    Args:
        config: config whose section `sandbox` is used.
        overrides: settings that replace those of the config.
        packages: packages that the sandbox imports in advance, e.g. ("numpy",).
        memory_mib: maximum memory in MiB of code in the sandbox.
    """

    def __init__(
        self,
        config: ConfigLike = None,
        overrides: Overrides = (),
        *,
        packages: Sequence[str] = (),
        memory_mib: int = 512,
    ) -> None:
        self._pool = SandboxPool(config, overrides)
        self._spec = SandboxSpec(packages=tuple(packages), memory_mib=memory_mib)
        self._held = ExitStack()
        self._held_async = AsyncExitStack()

    def __enter__(self) -> BlockingSandbox:
        with ExitStack() as entered:
            box = entered.enter_context(entered.enter_context(self._pool).lease(self._spec))
            self._held = entered.pop_all()
        return box

    def __exit__(self, *raised: object) -> None:
        self._held.close()

    async def __aenter__(self) -> protocols.Sandbox:
        async with AsyncExitStack() as entered:
            source = await entered.enter_async_context(self._pool)
            box = await entered.enter_async_context(source.lease(self._spec, timeout_s=LEASE_TIMEOUT_S))
            self._held_async = entered.pop_all()
        return box

    async def __aexit__(self, *raised: object) -> None:
        await self._held_async.aclose()

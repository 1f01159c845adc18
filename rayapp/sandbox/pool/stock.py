"""Makes one provider's remote sandboxes for the pool, keeps them alive, and ends them.

Failures are not raised in the pool: they are counted, and change the limits of the `Supply`. Before a sandbox is leased
again, `fingerprint` compares its processes and files with the new sandbox's. Code that controls the interpreter there
can forge this, so a sandbox is used once unless `max_uses` is larger, and no verdict relies on it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

from rayapp.core.errors import (
    SandboxConfigError,
    SandboxDeadlineError,
    SandboxError,
    SandboxProtocolError,
    SandboxQuotaError,
    SandboxRateLimitError,
)
from rayapp.core.protocols import Sandbox
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import ANSWER_WITHIN_S, ConnectedSandbox, RemoteProvider
from rayapp.sandbox.pool.supply import CREATE_TIMEOUT_S, IDLE_TIMEOUT_S, StockItem, StockState, Supply

_LOOK = r"""
import hashlib, itertools, os, stat
own = {os.getpid(), os.getppid()}
seen = []
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in own:
        try:
            line = open(f"/proc/{name}/cmdline", "rb").read().replace(b"\0", b" ").decode("utf-8", "replace")
            parent = int(open(f"/proc/{name}/stat").read().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if line and parent not in own and "rayapp-" not in line:
            seen.append(f"process {name} {line}")

def files_below(root):
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if n not in ("__pycache__", ".cache") and not n.startswith("rayapp-"))
        for file in files:
            path = os.path.join(folder, file)
            try:
                info = os.lstat(path)
            except OSError:
                continue
            if not file.startswith("rayapp-"):
                yield f"file {path} {info.st_size} {info.st_mtime_ns} {stat.filemode(info.st_mode)}"

roots = {os.path.expanduser("~"), "/tmp", "/var/tmp", "/dev/shm", os.getcwd()}
found = (line for root in sorted(roots) for line in files_below(root))
seen += itertools.islice(found, MOST_FILES)
# More than are looked at: never the same again, so this sandbox serves once.
is_whole = next(found, None) is None
look = hashlib.sha256("\n".join(sorted(seen)).encode(errors="surrogateescape")).hexdigest()
print("look:" + (look if is_whole else os.urandom(32).hex()))
"""
MOST_FILES = 50_000  # A sandbox with more is used once: reading its disk would take longer than making another.
_ANSWER = re.compile(r"look:([0-9a-f]{64})\s*\Z")


def look_program(most_files: int) -> str:
    """Return the source of the check program, which prints `look:` and a hash of 64 hex digits."""
    return _LOOK.replace("MOST_FILES", str(most_files))


async def fingerprint(sandbox: Sandbox, *, timeout_s: float) -> str:
    """Return a hash of the processes and files in a sandbox; with more than MOST_FILES files, another at every call."""
    result = await sandbox.run_code(look_program(MOST_FILES), timeout_s=timeout_s)
    found = _ANSWER.search(result.stdout)
    if not result.ok or found is None:
        raise SandboxProtocolError(
            f"sandbox {sandbox.id} could not be checked for leftover processes and files: exit status "
            f"{result.exit_code}, {result.error[:200]}"
        )
    return found.group(1)


log = logging.getLogger(__name__)
GRACE_S = 5.0
# Lifetime that providers are asked for, extended every third of it. The sandboxes of a killed run end within it.
SANDBOX_TTL_S = 300.0
_KILL_ATTEMPTS = 3
_CLOSE_ROUNDS = 3
_MAX_CALLS_AT_ONCE = 32
_CHECK_TIMEOUT_S = 15.0
_LIST_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StockRules:
    """Settings of a stock, as in `SandboxConfig`."""

    min_ready: int
    max_uses: int
    create_timeout_s: float = CREATE_TIMEOUT_S
    sandbox_ttl_s: float = SANDBOX_TTL_S
    idle_timeout_s: float = IDLE_TIMEOUT_S
    kill_timeout_s: float = ANSWER_WITHIN_S
    grace_s: float = GRACE_S  # after the provider's own deadline


@dataclass(slots=True, eq=False, repr=False)
class Stock:
    supply: Supply
    provider: RemoteProvider
    rules: StockRules
    _: KW_ONLY
    labels: Mapping[str, str]  # by them its sandboxes are found if the pool dies
    clock: Callable[[], float]
    on_change: Callable[[], None]  # a sandbox is ready, or there is room for another
    on_config_error: Callable[[SandboxSpec, SandboxConfigError], None]  # a kind of sandbox can never be made
    num_created: int = 0
    num_ended: int = 0
    num_strays_ended: int = 0
    num_soiled: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _stray_since: dict[str, float] = field(default_factory=dict)
    _calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_CALLS_AT_ONCE))
    _has_asked: bool = False
    _is_closing: bool = False

    def create(self, spec: SandboxSpec) -> None:
        """Start making one sandbox; `on_change` is called when it is ready."""
        self._has_asked = True
        self.supply.num_creating[spec] += 1
        self._spawn(self._create(spec), "create a sandbox")

    def retire(self, item: StockItem) -> None:
        """End a sandbox. It counts as alive until the provider confirms that it is gone."""
        if item.state is not StockState.ENDING:
            self.supply.withdraw(item)
            item.state = StockState.ENDING
            self._spawn(self._end(item), "end a sandbox")

    def give_back(self, item: StockItem, *, is_clean: bool) -> None:
        """Take back a sandbox whose lease ended: check it for the next lease, or end it."""
        item.num_uses += 1
        if is_clean and item.num_uses < self.rules.max_uses and not self._is_closing:
            item.state = StockState.CHECKING
            self._spawn(self._check(item), "check a sandbox")
        else:
            self.retire(item)

    def _spawn(self, work: Coroutine[object, object, None], what: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"{what} ({self.supply.name})")
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed unexpectedly", task.get_name(), exc_info=error)

    async def _create(self, spec: SandboxSpec) -> None:
        wait_s = self.rules.create_timeout_s + self.rules.grace_s
        try:
            # A sweep ends a sandbox that arrives after this, or whose answer was lost.
            async with asyncio.timeout(wait_s):
                with self._asking():
                    sandbox = await self.provider.create(
                        spec,
                        labels=self.labels,
                        ttl_s=self.rules.sandbox_ttl_s,
                        timeout_s=self.rules.create_timeout_s,
                    )
            await self._welcome(sandbox, spec)
        except TimeoutError as error:
            late = SandboxDeadlineError(f"sandbox provider {self.supply.name} did not answer within {wait_s:g} s")
            self._failed(error if isinstance(error, SandboxError) else late, spec)
        except SandboxError as error:
            self._failed(error, spec)
        finally:
            self.supply.num_creating[spec] -= 1
            self.supply.num_creating += Counter()  # drops kinds without creations
            self.on_change()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Count an exception of the provider's code in the block, and raise it as a SandboxError."""
        try:
            yield
        except SandboxError:
            raise
        except Exception as error:  # boundary: a provider's SDK may raise anything
            raise SandboxProtocolError(
                f"sandbox provider {self.supply.name} failed: {type(error).__name__}: {error}"
            ) from error

    async def _welcome(self, sandbox: ConnectedSandbox, spec: SandboxSpec) -> None:
        now = self.clock()
        item = StockItem(
            connection=sandbox.connection,
            spec=spec,
            expires_at=now + self.rules.sandbox_ttl_s,
            idle_since=now,
            state=StockState.CHECKING,
        )
        self.supply.items[sandbox.connection.sandbox_id] = item
        self.num_created += 1
        self.supply.num_failed = 0
        if self._is_closing:
            self.retire(item)
            return
        if self.rules.max_uses > 1:
            try:
                item.fingerprint = await self._look(lambda: sandbox)
            except SandboxError:
                self.retire(item)
                raise
        self.supply.put_ready(item)

    def _failed(self, error: SandboxError, spec: SandboxSpec) -> None:
        self.supply.note(error)
        if isinstance(error, SandboxConfigError):
            self.on_config_error(spec, error)
        if isinstance(error, SandboxQuotaError):
            self.supply.quota_met()
        else:
            self.supply.failed(error.retry_after_s if isinstance(error, SandboxRateLimitError) else None)

    async def _end(self, item: StockItem) -> None:
        sandbox_id = item.connection.sandbox_id
        try:
            await self._kill(sandbox_id)
            self.num_ended += 1
        except SandboxError as error:
            # Leave the sandbox. A sweep will try to end it again; in the end the provider's own time limit ends it.
            self.supply.note(error, "kill")
        finally:
            self.supply.items.pop(sandbox_id, None)
            self.on_change()

    def scalars(self) -> dict[str, float]:
        supply, prefix = self.supply, f"sandbox/{self.supply.name}"
        return {
            f"{prefix}/alive": float(len(supply.items)),
            f"{prefix}/ready": float(sum(1 for _ in supply.idle_items())),
            f"{prefix}/creating": float(supply.num_creating.total()),
            f"{prefix}/limit": float(supply.limit),
            f"{prefix}/created": float(self.num_created),
            f"{prefix}/ended": float(self.num_ended),
            f"{prefix}/strays_ended": float(self.num_strays_ended),
            f"{prefix}/soiled": float(self.num_soiled),
            **{f"{prefix}/failed_{kind}": float(count) for kind, count in supply.failures.items()},
        }

    async def _kill(self, sandbox_id: str) -> None:
        """End a sandbox; try a few times. A SandboxError says that it may still be alive."""
        for attempt in range(_KILL_ATTEMPTS):
            try:
                async with self._calls, asyncio.timeout(self.rules.kill_timeout_s + self.rules.grace_s):
                    await self.provider.kill(sandbox_id, timeout_s=self.rules.kill_timeout_s)
                return
            except Exception as error:  # boundary: a provider's SDK may raise anything; the last error is raised
                if attempt == _KILL_ATTEMPTS - 1:
                    raise SandboxError(f"sandbox {sandbox_id} could not be ended: {error}") from error
            await asyncio.sleep(0.1 * 4**attempt)

    async def _check(self, item: StockItem) -> None:
        try:
            attach = self.provider.attach
            is_same = await self._look(lambda: attach(item.connection, item.spec)) == item.fingerprint
        except SandboxError as error:
            self.supply.note(error)
            is_same = False
        if is_same and item.state is StockState.CHECKING and not self._is_closing:
            self.supply.put_ready(item)
        else:
            self.num_soiled += 1
            self.retire(item)
        self.on_change()

    async def _look(self, attach: Callable[[], Sandbox]) -> str:
        # If it raises, the caller must change the state: a sandbox in state CHECKING is never leased.
        with self._asking():
            return await fingerprint(attach(), timeout_s=_CHECK_TIMEOUT_S)

    def tend(self, kinds_in_use: Collection[SandboxSpec], *, num_kept: int) -> None:
        """Extend the sandboxes in use, and end idle ones but `num_kept` of each kind in use."""
        now = self.clock()
        for item in tuple(self.supply.items.values()):
            if (
                item.state in (StockState.READY, StockState.LEASED)
                and item.expires_at - now < self.rules.sandbox_ttl_s * 2 / 3  # twice before it ends: a call may fail
            ):
                # Set the new end before the answer arrives, so that the next call of `tend` does not extend the sandbox
                # again.
                item.expires_at = now + self.rules.sandbox_ttl_s
                self._spawn(self._extend(item), "extend a sandbox")
        for item in self.supply.idle_items():
            is_spare = self.supply.num_ready(item.spec) > (num_kept if item.spec in kinds_in_use else 0)
            if is_spare and now - item.idle_since > self.rules.idle_timeout_s:
                self.retire(item)

    async def _extend(self, item: StockItem) -> None:
        try:
            sandbox = self.provider.attach(item.connection, item.spec)
            async with self._calls, asyncio.timeout(self.rules.kill_timeout_s + self.rules.grace_s):
                await sandbox.extend(self.rules.sandbox_ttl_s, timeout_s=self.rules.kill_timeout_s)
        # boundary: a provider's SDK may raise anything; `tend` replaces a ready sandbox that could not be extended
        except Exception as error:
            self.supply.failures[type(error).__name__] += 1
            if item.state is StockState.READY:
                self.retire(item)

    async def sweep(self, *, stray_after_s: float | None = None) -> int:
        """End sandboxes at the provider that this stock does not know for `stray_after_s` (None: longer than a creation
        takes). Return their number."""
        patience_s = self.rules.create_timeout_s + 2 * self.rules.grace_s if stray_after_s is None else stray_after_s
        known_before = set(self.supply.items)
        try:
            living = await self.living()
        except SandboxError as error:
            self.supply.note(error, "list")
            return 0
        self._bury(known_before - living)
        return await self._end_strays(living - set(self.supply.items), patience_s)

    async def living(self) -> set[str]:
        with self._asking():
            async with asyncio.timeout(_LIST_TIMEOUT_S + self.rules.grace_s):
                return {found async for found in self.provider.list(self.labels, timeout_s=_LIST_TIMEOUT_S)}

    def _bury(self, gone: set[str]) -> None:
        for sandbox_id in gone:
            item = self.supply.items.get(sandbox_id)
            if item is not None and item.state is StockState.READY:
                self.retire(item)

    async def _end_strays(self, unknown: set[str], patience_s: float) -> int:
        now = self.clock()
        self._stray_since = {found: self._stray_since.get(found, now) for found in unknown}
        strays = [found for found, since in self._stray_since.items() if now - since >= patience_s]
        results = await asyncio.gather(*(self._kill(found) for found in strays), return_exceptions=True)
        num_failed = sum(isinstance(result, BaseException) for result in results)
        self.supply.failures["kill"] += num_failed
        self.num_strays_ended += len(strays) - num_failed
        return len(strays) - num_failed

    async def close(self, *, timeout_s: float = 30.0) -> set[str]:
        """End every sandbox, also those being made. Return the ids of sandboxes that may be left."""
        self._is_closing = True
        for item in tuple(self.supply.items.values()):
            if item.state is not StockState.CHECKING:
                self.retire(item)
        deadline = self.clock() + timeout_s
        # Wait for creations in progress: a cancelled creation may leave a sandbox that this stock does not know. A
        # sandbox that arrives meanwhile is ended at once.
        await self._settle(min(timeout_s / 2, 10.0))
        for task in self._tasks:
            task.cancel()
        left = await self._end_all(deadline)
        await self.provider.close()
        return left

    async def _end_all(self, deadline: float) -> set[str]:
        # The provider's list is used, because this stock does not know sandboxes whose creation was never answered.
        left = {"an unknown number: they could not be listed"} if self._has_asked else set()
        for is_last in (*[False] * _CLOSE_ROUNDS, True):
            try:
                left = await self.living()
            except SandboxError as error:
                self.supply.note(error, "list")
                continue
            if not left or is_last or self.clock() > deadline:
                break
            await self._end_strays(left, 0.0)
        return left

    async def _settle(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (pending := {*self._tasks}) and loop.time() < deadline:
            await asyncio.wait(pending, timeout=deadline - loop.time())

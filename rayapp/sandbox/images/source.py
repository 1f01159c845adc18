"""The cache of images for asyncio: pulls run in threads, and concurrent callers share one pull of an image."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rayapp.sandbox.images.pull import Wanted, pull
from rayapp.sandbox.images.reference import parse
from rayapp.sandbox.images.store import Hold, Image, Store, open_store

_PULLS_AT_ONCE = 2


class ImageSource:
    """Holds images of the cache, and pulls missing ones."""

    def __init__(
        self,
        *,
        folder: str = "",
        max_gib: float = 50.0,
        mirrors: Mapping[str, Sequence[str]] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            aliases: template -> template to use instead, e.g. a tag -> the digest that a run has pinned it to.
        """
        self._folder, self._max_gib = folder, max_gib
        self._wanted = Wanted(mirrors=mirrors)
        self._aliases = aliases or {}
        self._opened: Store | None = None
        self._pulls: dict[str, asyncio.Future[None]] = {}
        self._threads: ThreadPoolExecutor | None = None

    @property
    def store(self) -> Store:
        """The cache, opened on first use. Raises ImageError: it can't be made."""
        if self._opened is None:
            self._opened = open_store(self._folder, self._max_gib)
        return self._opened

    @property
    def trees(self) -> Path:
        return self.store.trees

    async def hold(self, template: str) -> Hold:
        """Return a `Hold` on the image of a template; pull the image first if it is missing.
        A pull continues if its caller is cancelled.

        Raises:
            ImageError: the image is missing, damaged, too large, or for another platform.
            SandboxUnavailableError: its registry can't be reached.
        """
        reference = parse(self._aliases.get(template, template))
        while True:
            if (found := self.store.named(reference)) is not None and (hold := self.store.hold(found)) is not None:
                return hold
            await asyncio.shield(self._pull(template))

    def find(self, template: str) -> Image | None:
        """Return the image of a template if it is in the cache."""
        return self.store.named(parse(self._aliases.get(template, template)))

    def prefetch(self, template: str) -> None:
        """Pull an image in the background if it is missing. A failure is raised only when the image is used."""
        reference = parse(self._aliases.get(template, template))
        if self.store.named(reference) is None:
            self._pull(template).add_done_callback(lambda done: done.cancelled() or done.exception())

    def _pull(self, template: str) -> asyncio.Future[None]:
        if template not in self._pulls:
            self._threads = self._threads or ThreadPoolExecutor(_PULLS_AT_ONCE, thread_name_prefix="pull-image")
            reference = parse(self._aliases.get(template, template))
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self._threads, lambda: pull(self.store, reference, self._wanted).release())
            task.add_done_callback(lambda _: self._pulls.pop(template, None))
            self._pulls[template] = task
        return self._pulls[template]

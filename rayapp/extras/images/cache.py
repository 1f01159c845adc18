"""The cache of images for asyncio code (`rayapp.sandbox.images.ImageCache`): missing images are pulled in threads."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rayapp.extras.images.pull import pull
from rayapp.extras.images.store import Hold, Store, open_store
from rayapp.sandbox.images import Image, parse

log = logging.getLogger(__name__)
_PULLS_AT_ONCE, _AHEAD_AT_ONCE = 4, 2


class ImageSource:
    """The cache of images for asyncio code, which pulls in threads. Callers that need the same image share one pull."""

    def __init__(
        self,
        *,
        folder: str = "",
        max_gib: float = 50.0,
        registries: Collection[str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Args: aliases: template -> the one to use in its place, e.g. with the digest that the run has pinned."""
        self._folder, self._max_gib = folder, max_gib
        self._registries = registries
        self._aliases = aliases or {}
        self._opened: Store | None = None
        self._pulls: dict[str, asyncio.Future[None]] = {}
        self._ahead: deque[str] = deque()
        self._num_ahead = 0
        self._threads: ThreadPoolExecutor | None = None

    @property
    def store(self) -> Store:
        if self._opened is None:
            self._opened = open_store(self._folder, self._max_gib)
        return self._opened

    @property
    def trees(self) -> Path:
        return self.store.trees

    async def hold(self, template: str) -> Hold:
        """Return a lock that keeps the image of a template in the cache, after pulling it if it is missing. A pull
        continues if its caller is cancelled.

        Raises:
            ImageError: the image is missing, damaged, too large, or for another platform.
            SandboxUnavailableError: the registry can't be reached.
        """
        reference = parse(self._aliases.get(template, template))
        while True:
            if (found := self.store.named(reference)) is not None and (hold := self.store.hold(found)) is not None:
                return hold
            await asyncio.shield(self._pull(template))

    def find(self, template: str) -> Image | None:
        return self.store.named(parse(self._aliases.get(template, template)))

    def prefetch(self, templates: Sequence[str]) -> None:
        """Pull missing images in the background, in order, two at a time: threads are left for images that sandboxes
        wait for. A failed pull is raised when the image is used."""
        self._ahead.extend(template for template in templates if template not in self._ahead)
        self._pull_ahead()

    def _pull_ahead(self) -> None:
        while self._ahead and self._num_ahead < _AHEAD_AT_ONCE:
            template = self._ahead.popleft()
            if self.find(template) is None and template not in self._pulls:
                self._num_ahead += 1
                self._pull(template).add_done_callback(self._pulled_ahead)

    def _pulled_ahead(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.warning("an image that will be needed was not pulled: %s", error)
        self._num_ahead -= 1
        self._pull_ahead()

    def _pull(self, template: str) -> asyncio.Future[None]:
        if template not in self._pulls:
            self._threads = self._threads or ThreadPoolExecutor(_PULLS_AT_ONCE, thread_name_prefix="pull-image")
            reference = parse(self._aliases.get(template, template))
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self._threads, lambda: pull(self.store, reference, self._registries).release())
            task.add_done_callback(lambda _: self._pulls.pop(template, None))
            self._pulls[template] = task
        return self._pulls[template]

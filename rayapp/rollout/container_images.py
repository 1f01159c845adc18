"""The container images of a run's tasks: their digests, fixed at the run's start, and the rollout workers with them.

A prompt's images follow from the prompt's number, so the driver knows the images of groups that it has not started yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import ceil
from pathlib import Path

from rayapp.config.config import Config, sources_of
from rayapp.config.sandbox import LocalConfig, SandboxConfig
from rayapp.core.errors import ImageError
from rayapp.core.files import write_text
from rayapp.core.names import load_extra
from rayapp.rollout.agents import SINGLE_TURN_AGENT
from rayapp.rollout.order import GroupRequest, Mixing, prompt_index
from rayapp.rollout.problem import agent_start, plays_environments
from rayapp.sandbox.images import Reference, is_image, parse
from rayapp.sandbox.providers import image_source, registries_of
from rayapp.tasks.loading import load_tasks

# Images of each task of one source, in the order of `tasks`; empty if none needs an image.
PromptImages = tuple[tuple[str, ...], ...]
_ASKED_AT_ONCE = 8


def images_of_prompts(config: Config, *, held_out: bool = False) -> tuple[PromptImages, ...]:
    """Return the images that the tasks of each source need, for training or (`held_out`) for evaluation."""
    own = [source.config for source in sources_of(config)]
    have = [not each.uses_data and each.agent_name != SINGLE_TURN_AGENT for each in own]
    named = [each.eval.tasks if held_out else each.tasks for each in own]
    return tuple(_images_of_tasks(names) if has else () for names, has in zip(named, have, strict=True))


def _images_of_tasks(names: Sequence[str]) -> PromptImages:
    tasks = load_tasks(names) if names else ()
    if plays_environments(tasks):
        return ()
    starts = [agent_start(task) for task in tasks]
    found = [start.images or ([start.spec.template] if start.spec else []) for start in starts]
    images = tuple(tuple(image for image in each if image) for each in found)
    return images if any(images) else ()


def each_once(sources: Sequence[PromptImages]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(image for source in sources for prompt in source for image in prompt))


def with_pinned_images(sandbox: SandboxConfig, images: Sequence[str], record: Path) -> SandboxConfig:
    """Return the section in which local sandboxes use every image by the digest that its tag had at the run's start. A
    resumed run reads the digests from `record`."""
    section = sandbox.local
    wanted = {image: section.images.get(image, image) for image in images} if section is not None else {}
    tags = [name for name in dict.fromkeys(wanted.values()) if is_image(name) and parse(name).kind == "registry"]
    if section is None or not tags:
        return sandbox
    earlier: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
    with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="pin-image") as threads:
        found = list(threads.map(lambda name: _pinned(section, name, earlier.get(name, ""), record), tags))
    pins = dict(zip(tags, found, strict=True))
    write_text(record, json.dumps(earlier | pins, indent=2))
    images_now = {image: pins[name] for image, name in wanted.items() if name in pins}
    pinned = section.model_copy(update={"images": {**section.images, **images_now}})
    others = tuple(pinned if each is section else each for each in sandbox.providers)
    return sandbox.model_copy(update={"providers": others})


def _pinned(section: LocalConfig, name: str, earlier: str, record: Path) -> str:
    """Return the image's name with the digest `earlier`, which the run folder has, or else the tag's now."""
    reference = parse(earlier or name)
    if reference.digest and image_source(section).find(reference.template) is not None:
        return reference.template
    try:
        current: Reference = load_extra("images.pull:resolve")(reference, registries_of(section))
        return current.template
    except ImageError as error:
        if not earlier:
            raise
        raise ImageError(
            f"image {earlier} can't be fetched any more: {error}. The run has used this image for {name} since its "
            f"start. Push the image again, or delete the line of {name} in {record}: the run then uses the current "
            f"{name}"
        ) from error


class ImagePlacement:
    """Chooses the rollout worker of each group, so that each worker, and the cache of its node, needs few images.

    Every image has a few home workers, at least two if there are two workers. A group runs on the home worker of its
    first image with the fewest groups in flight; without images on worker `group_id` modulo their number. Prompts,
    seeds and verdicts don't depend on the worker.
    """

    def __init__(self, images: Sequence[PromptImages], mixing: Mixing, *, seed: int, num_workers: int) -> None:
        self._images, self._mixing, self._seed = images, mixing, seed
        self._in_flight = [0] * num_workers
        firsts = dict.fromkeys(prompt[0] for source in images for prompt in source if prompt)
        self._numbers: Mapping[str, int] = {image: number for number, image in enumerate(firsts)}

    @classmethod
    def of(cls, config: Config, images: Sequence[PromptImages] = ()) -> ImagePlacement:
        mixing = Mixing([source.ratio for source in sources_of(config)], seed=config.run.seed)
        return cls(images, mixing, seed=config.run.seed, num_workers=config.rollout.num_workers)

    def images(self, request: GroupRequest) -> tuple[str, ...]:
        """Return the images that a training group needs. The first one is the image of the workspaces."""
        if request.purpose == "eval" or not self._numbers:
            return ()
        source, place = self._mixing.place(request.group_id)
        prompts = self._images[source]
        return prompts[prompt_index(place, num_prompts=len(prompts), seed=self._seed)] if prompts else ()

    def homes(self, image: str) -> tuple[int, ...]:
        """Return the workers that run an image's groups."""
        num_workers, num_images = len(self._in_flight), len(self._numbers)
        first = self._numbers[image] * max(1, num_workers // num_images)
        num_homes = min(num_workers, 1 + ceil(num_workers / num_images))
        return tuple((first + step) % num_workers for step in range(num_homes))

    @contextmanager
    def placed(self, request: GroupRequest) -> Iterator[int]:
        """Context manager with the index of a group's worker. The group counts towards the worker's load during the
        block."""
        images = self.images(request)
        homes = self.homes(images[0]) if images else (request.group_id % len(self._in_flight),)
        worker = min(homes, key=lambda home: self._in_flight[home])
        self._in_flight[worker] += 1
        try:
            yield worker
        finally:
            self._in_flight[worker] -= 1

    def ahead(self, group_ids: Sequence[int]) -> dict[int, list[str]]:
        """Return index of a worker -> images that it should pull for these future groups, in order."""
        found: dict[int, list[str]] = {}
        for group_id in group_ids:
            if images := self.images(GroupRequest(group_id=group_id, policy_version=0)):
                found.setdefault(self.homes(images[0])[0], []).extend(images)
        return {worker: list(dict.fromkeys(images)) for worker, images in found.items()}

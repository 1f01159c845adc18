"""The images of a run's tasks: pinned from its start to its end, and met by few workers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, ImageError, SandboxUnavailableError
from rayapp.extras.images.pull import pull
from rayapp.extras.images.store import open_store
from rayapp.rollout.check import check_tasks
from rayapp.rollout.container_images import ImagePlacement, each_once, images_of_prompts, with_pinned_images
from rayapp.rollout.order import GroupRequest, Mixing
from rayapp.sandbox.images import parse
from rayapp.sandbox.local import provider
from rayapp.sandbox.providers import image_source
from support.images import entry, layer, needs_image_programs, write_oci
from support.stubs.registry_stub import RegistryStub

LIBRARY = Path(__file__).parents[3] / "rayapp" / "tasks" / "library" / "repositories"


def config_of(tmp_path: Path, *images: str, **local: object) -> Config:
    """A config with one task for each image."""
    tasks = []
    for number, image in enumerate(images):
        folder = Path(shutil.copytree(LIBRARY / "fix_median", tmp_path / f"task{number}", dirs_exist_ok=True))
        (folder / "environment/Dockerfile").write_text(f"FROM {image}\n")
        tasks.append(str(folder))
    section = {"type": "local", "image_cache": str(tmp_path / "cache"), **local}
    return Config.model_validate({"tasks": tasks, "agent": {"name": "tool_agent"}, "sandbox": {"providers": [section]}})


def pinned(config: Config, tmp_path: Path) -> dict[str, str]:
    made = with_pinned_images(config.sandbox, each_once(images_of_prompts(config)), tmp_path / "images.json")
    return dict(made.local.images)


@needs_image_programs
def test_a_run_keeps_the_digest_that_a_tag_had_at_its_start(tmp_path: Path) -> None:
    first = write_oci(tmp_path / "oci", [layer(entry("one", "1"))])
    with RegistryStub(tmp_path / "oci").running() as host:
        config = config_of(tmp_path, f"{host}/name:1", image_registries=[host])
        template = f"image:{host}/name:1"

        assert pinned(config, tmp_path) == {template: f"{template}@{first}"}
        second = write_oci(tmp_path / "oci", [layer(entry("two", "2"))])

        assert pinned(config, tmp_path) == {template: f"{template}@{first}"}, "the tag moved, the run goes on"
        assert json.loads((tmp_path / "images.json").read_text()) == {template: f"{template}@{first}"}
        assert pinned(config, tmp_path / "oci") == {template: f"{template}@{second}"}, "another run"


@needs_image_programs
def test_a_digest_that_is_gone_is_told_with_the_way_out_unless_the_cache_has_it(tmp_path: Path) -> None:
    digest = write_oci(tmp_path / "oci", [layer(entry("one", "1"))])
    with RegistryStub(tmp_path / "oci").running() as host:
        config = config_of(tmp_path, f"{host}/name:1", image_registries=[host])
        before = pinned(config, tmp_path)
        kept = shutil.copytree(tmp_path / "oci", tmp_path / "kept")
        shutil.rmtree(tmp_path / "oci/blobs")
        write_oci(tmp_path / "oci", [layer(entry("two", "2"))])

        with pytest.raises(ImageError, match=r"can't be fetched any more.*delete the line .*images\.json") as raised:
            pinned(config, tmp_path)
        assert digest in str(raised.value)
        assert "\n" not in str(raised.value)

        shutil.copytree(kept, tmp_path / "oci", dirs_exist_ok=True)
        with pull(open_store(str(tmp_path / "cache")), parse(before[f"image:{host}/name:1"])):
            pass
        shutil.rmtree(tmp_path / "oci")
        assert pinned(config, tmp_path) == before


@pytest.fixture
def asked() -> Iterator[tuple[int, list[str]]]:
    """Yield a port on all addresses of this machine, and the connections that it gets."""
    found: list[str] = []

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            found.append(str(self.client_address))

    with ThreadingTCPServer(("", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1], found
        server.shutdown()
        thread.join()


LOCAL = ["127.0.0.1", "localhost", "LOCALHOST", "127.1", "0x7f.1", "0.0.0.0", "127.0.0.1.nip.io"]


@pytest.mark.parametrize("host", [*LOCAL, f"{socket.gethostname()}."])
async def test_a_task_can_not_choose_which_hosts_are_asked(
    tmp_path: Path, asked: tuple[int, list[str]], host: str, caplog: pytest.LogCaptureFixture
) -> None:
    port, connections = asked
    for name in (f"{host}:{port}/a/b:1", f"{host}:{port}/a@sha256:{'0' * 64}", f"docker.io.{host}:{port}/a:1"):
        config = config_of(tmp_path, name)
        with pytest.raises(ImageError, match=r"is refused: its registry .* is not in sandbox.*image_registries"):
            pinned(config, tmp_path)
        source = image_source(config.sandbox.local)
        with pytest.raises(ImageError, match="is refused: its registry"):
            await source.hold(f"image:{name}")
        source.prefetch([f"image:{name}"])
        while "was not pulled" not in caplog.text:
            await asyncio.sleep(0.01)
        caplog.clear()
    assert connections == []


@pytest.mark.parametrize(
    ("local", "is_asked"),
    [
        ({}, False),
        ({"image_registries": ["127.0.0.1:{port}"]}, True),
        ({"image_registries": ["127.0.0.1"]}, False),
        ({"images": {"image:python:3": "image:127.0.0.1:{port}/python:3"}}, True),
    ],
)
@needs_image_programs
def test_hosts_that_the_config_names_are_asked(
    tmp_path: Path, asked: tuple[int, list[str]], local: dict[str, object], is_asked: bool
) -> None:
    port, connections = asked
    given = json.loads(json.dumps(local).replace("{port}", str(port)))

    with pytest.raises((ImageError, SandboxUnavailableError)):
        pinned(config_of(tmp_path, f"127.0.0.1:{port}/a:1", **given), tmp_path)

    assert bool(connections) == is_asked


def test_images_of_folders_and_other_providers_are_left_as_they_are(tmp_path: Path) -> None:
    assert pinned(config_of(tmp_path, "x:1", images={"image:x:1": "image:oci:/here"}), tmp_path) == {
        "image:x:1": "image:oci:/here"
    }
    assert not (tmp_path / "images.json").exists()


def placement(num_images: int, num_workers: int) -> ImagePlacement:
    prompts = tuple((f"image:{number}",) for number in range(num_images))
    return ImagePlacement([prompts], Mixing([1.0], seed=0), seed=3, num_workers=num_workers)


@pytest.mark.parametrize(
    ("num_images", "num_workers", "most_homes"), [(300, 16, 2), (16, 16, 2), (4, 16, 5), (1, 8, 8)]
)
def test_a_worker_meets_few_images_and_has_no_more_groups_than_others(
    num_images: int, num_workers: int, most_homes: int
) -> None:
    placed = placement(num_images, num_workers)
    met: dict[str, set[int]] = {}
    for step in range(40):
        load: Counter[int] = Counter()
        with ExitStack() as stack:
            for group_id in range(step * 64, step * 64 + 64):
                request = GroupRequest(group_id=group_id, policy_version=0)
                worker = stack.enter_context(placed.placed(request))
                load[worker] += 1
                met.setdefault(placed.images(request)[0], set()).add(worker)
        assert max(load.values()) <= 2 * 64 / num_workers

    assert max(map(len, met.values())) <= most_homes
    assert len(met) == num_images


def test_images_of_coming_groups_go_to_the_workers_that_will_run_them() -> None:
    placed = placement(6, 3)

    ahead = placed.ahead(range(6))

    assert sorted(image for images in ahead.values() for image in images) == [f"image:{n}" for n in range(6)]
    for worker, images in ahead.items():
        assert all(worker in placed.homes(image) for image in images)
    assert ImagePlacement.of(Config()).ahead(range(6)) == {}


@needs_image_programs
async def test_prefetched_images_are_there_before_a_sandbox_asks(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    names = []
    for number in range(5):
        write_oci(tmp_path / f"oci{number}", [layer(entry("file", os.urandom(1000)))])
        names.append(f"image:oci:{tmp_path}/oci{number}")
    section = config_of(tmp_path, "x").sandbox.local
    cache = image_source(section)

    cache.prefetch(["image:oci:/nowhere", *names])
    (await cache.hold(names[-1])).release()
    while any(cache.find(name) is None for name in names):
        for pull_of in [*cache._pulls.values()]:
            await pull_of


def test_where_images_cannot_be_mounted_one_line_says_so_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "LEVELS", ("ll",))
    provider.why_no_images_here.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"task task0 needs .*this node can.t run sandboxes on images.*they need user namespaces"
        ) as said:
            check_tasks(config_of(tmp_path, "x:1"), training=True)
    finally:
        provider.why_no_images_here.cache_clear()
    assert "\n" not in str(said.value)

"""Images come into the cache whole or not at all, once for all who want them; and leave it when nobody holds them."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayapp.core.errors import ImageError, SandboxUnavailableError
from rayapp.extras.images.pull import pull, resolve
from rayapp.extras.images.store import Store
from rayapp.sandbox.images import Image, parse
from support.images import entry, layer, needs_image_programs, outside_folder, write_oci
from support.stubs.registry_stub import RegistryStub

pytestmark = needs_image_programs
BIG = layer(entry("big", os.urandom(300_000)), entry("etc/hostname", "one"))
SMALL = layer(entry("bin/tool", "x", mode=0o755), entry("etc/.wh.hostname", ""))

PULL = (
    "import sys; from pathlib import Path; from rayapp.extras.images.pull import pull;"
    "from rayapp.extras.images.store import Store; from rayapp.sandbox.images import parse;"
    "pull(Store(Path(sys.argv[1]), max_bytes=1 << 30).prepare(), parse(sys.argv[2]))"
)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with outside_folder() as folder:
        yield folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache", max_bytes=1 << 30).prepare()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_oci(tmp_path / "oci", [BIG, SMALL], config={"Env": ["A=b"], "WorkingDir": "/work", "User": "7:8"})
    return tmp_path / "oci"


def taken(store: Store, name: str) -> Image:
    with pull(store, parse(name)) as hold:
        return hold.image


def leftovers(store: Store) -> list[str]:
    return [str(path) for path in store.folder.glob("*/*") if ".pending" in path.name]


def test_an_image_of_a_registry_is_unpacked_and_described(store: Store, folder: Path) -> None:
    with RegistryStub(folder).running() as host:
        image = taken(store, f"image:{host}/team/name:1")

    tree = store.trees / image.tree
    assert (tree / "bin/tool").read_text() == "x"
    assert not (tree / "etc/hostname").exists()
    assert (dict(image.env), image.workdir, image.user, image.python) == ({"A": "b"}, "/work", (7, 8), "")
    assert image.name == f"{host}/team/name:1@{image.digest}"
    assert leftovers(store) == []


def test_a_digest_is_taken_from_the_cache_without_asking(store: Store, folder: Path) -> None:
    with RegistryStub(folder).running() as host:
        pinned = resolve(parse(f"{host}/name:1"))
        image = taken(store, str(pinned))

    assert taken(store, str(pinned)) == image, "its registry is gone"
    with pytest.raises(SandboxUnavailableError, match="can't be fetched from"):
        taken(store, f"{host}/name:1")


def test_two_processes_that_pull_an_image_share_one_download(store: Store, folder: Path) -> None:
    stub = RegistryStub(folder, wait=threading.Event())
    with stub.running() as host:
        argv = [sys.executable, "-c", PULL, str(store.folder), f"{host}/name:1"]
        children = [subprocess.Popen(argv) for _ in range(2)]
        while stub.asked.total() < 2:
            time.sleep(0.02)
        stub.wait.set()
        assert [child.wait(60) for child in children] == [0, 0]
    largest = max(folder.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    assert stub.asked[f"sha256:{largest.name}"] == 1
    assert len(store.images()) == 1


def test_a_killed_pull_leaves_nothing_that_looks_whole(store: Store, folder: Path, tmp_path: Path) -> None:
    stub = RegistryStub(folder, wait=threading.Event())
    with stub.running() as host:
        child = subprocess.Popen([sys.executable, "-c", PULL, str(store.folder), f"{host}/name:1"])
        while not stub.asked:
            time.sleep(0.02)
        time.sleep(0.1)
        child.send_signal(signal.SIGKILL)
        child.wait()
        stub.wait.set()
        assert store.images() == []

        image = taken(store, f"{host}/name:1")

    assert (store.trees / image.tree / "big").stat().st_size == 300_000
    write_oci(tmp_path / "other", [SMALL])
    taken(store, f"oci:{tmp_path}/other")
    assert leftovers(store) == [], "the next pull removes them"


def test_a_login_comes_from_config_json(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    with RegistryStub(folder, login="ada:secret").running() as host:
        with pytest.raises(ImageError, match="log in with"):
            taken(store, f"{host}/name:1")
        (tmp_path / ".docker").mkdir()
        auth = base64.b64encode(b"ada:secret").decode()
        (tmp_path / ".docker/config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))

        assert taken(store, f"{host}/name:1").tree


def test_mirrors_are_those_of_registries_conf(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".config/containers").mkdir(parents=True)
    with RegistryStub(folder).running() as host:
        mirrors = "".join(
            f'[[registry.mirror]]\nlocation = "{each}"\ninsecure = true\n' for each in ("127.0.0.1:9", host)
        )
        (tmp_path / ".config/containers/registries.conf").write_text(
            f'[[registry]]\nlocation = "registry.invalid"\n{mirrors}'
        )

        image = taken(store, "registry.invalid/name:1")

    assert image.name.startswith("registry.invalid/name:1@")


def broken_layer(folder: Path) -> None:
    largest = max(folder.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (lambda _: None, "{host}/name:missing", "is not in"),
        (broken_layer, "{host}/name:1", "can't be read"),
        (broken_layer, "oci:{folder}", "can't be"),
        (lambda folder: write_oci(folder, [BIG], platform="plan9/mips"), "{host}/name:1", "plan9|mips"),
        (
            lambda folder: write_oci(folder, [BIG], config={"User": "unknown"}),
            "{host}/name:1",
            "'unknown' is not in its /etc/passwd",
        ),
        (lambda folder: write_oci(folder, [BIG], config={"WorkingDir": "here"}), "{host}/name:1", "malformed"),
        (lambda folder: write_oci(folder, [BIG], stored=[SMALL]), "{host}/name:1", "can't be unpacked"),
        (lambda folder: (folder / "index.json").write_text("{"), "oci:{folder}", "can't be read"),
        (lambda folder: shutil.rmtree(folder / "blobs"), "oci:{folder}", "can't be read"),
        (lambda _: None, "oci:{folder}:other", "can't be read"),
        (lambda _: None, "archive:/nowhere.tar", "can't be read"),
        (lambda _: None, "build:unknown", r"has to be built, and given in"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_one_line_with_the_name(
    store: Store, folder: Path, change: object, name: str, says: str
) -> None:
    change(folder)  # type: ignore[operator]
    with RegistryStub(folder).running() as host:
        named = name.format(host=host, folder=folder)
        with pytest.raises(ImageError, match=says) as raised:
            taken(store, named)

    assert named.removeprefix("image:") in str(raised.value)
    assert "\n" not in str(raised.value)
    assert store.images() == []
    assert leftovers(store) == []


def test_an_image_that_is_larger_than_the_cache_is_refused(store: Store, folder: Path) -> None:
    small = Store(store.folder, max_bytes=200_000)

    with pytest.raises(ImageError, match=r"does not fit|file too large|can't be"):
        taken(small, f"oci:{folder}")

    assert small.images() == []
    assert leftovers(small) == []


def test_the_least_recently_used_image_goes_but_none_that_is_held(store: Store, tmp_path: Path) -> None:
    for number in range(4):
        write_oci(tmp_path / str(number), [layer(entry("file", os.urandom(1_000_000)))])
    small = Store(store.folder, max_bytes=4_600_000)

    with pull(small, parse(f"oci:{tmp_path}/0")) as held:
        second = taken(small, f"oci:{tmp_path}/1")
        third = taken(small, f"oci:{tmp_path}/2")

        assert small.image(second.digest) is None
        assert {image.digest for image, _ in small.images()} == {held.image.digest, third.digest}
        with pull(small, parse(f"oci:{tmp_path}/2")), pytest.raises(ImageError, match="does not fit"):
            taken(small, f"oci:{tmp_path}/3")


def test_an_archive_of_docker_save_and_of_oci_give_the_same_tree(store: Store, folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    image = taken(store, f"oci:{folder}")
    config = json.loads((folder / "blobs" / _config_of(folder).replace(":", "/")).read_text())
    (saved / "config.json").write_text(json.dumps(config))
    for number, data in enumerate((BIG, SMALL)):
        (saved / f"{number}.tar").write_bytes(data)
    entries = [{"Config": "config.json", "RepoTags": ["name:1"], "Layers": ["0.tar", "1.tar"]}]
    (saved / "manifest.json").write_text(json.dumps(entries))
    for name in ("saved", "oci"):
        # Tools write names without a leading ./
        members = [path.name for path in (tmp_path / name).iterdir()]
        subprocess.run(["tar", "-cf", tmp_path / f"{name}.tar", "-C", tmp_path / name, *members], check=True)

    found = [taken(store, f"archive:{tmp_path}/{name}") for name in ("saved.tar", "saved.tar:1", "oci.tar")]

    for each in found:
        assert (store.trees / each.tree / "big").read_bytes() == (store.trees / image.tree / "big").read_bytes()
        assert (each.env, each.workdir, each.user) == (image.env, image.workdir, image.user)


def _config_of(folder: Path) -> str:
    top = json.loads((folder / "index.json").read_text())["manifests"][0]["digest"]
    return str(json.loads((folder / "blobs" / top.replace(":", "/")).read_text())["config"]["digest"])

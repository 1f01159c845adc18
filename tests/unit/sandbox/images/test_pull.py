"""Images come into the cache whole or not at all, once for all who want them; and leave it when nobody holds them."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rayapp.core.errors import ImageError, SandboxUnavailableError
from rayapp.sandbox.images import sources
from rayapp.sandbox.images.pull import Wanted, pull, resolve
from rayapp.sandbox.images.reference import parse
from rayapp.sandbox.images.store import Image, Store
from support.images import entry, layer, real_registry, write_oci
from support.stubs.registry_stub import RegistryStub

BIG = layer(entry("big", os.urandom(300_000)), entry("etc/hostname", "one"))
SMALL = layer(entry("bin/tool", "x", mode=0o755), entry("etc/.wh.hostname", ""))

PULL = (
    "import sys; from pathlib import Path; from rayapp.sandbox.images.pull import pull;"
    "from rayapp.sandbox.images.store import Store; from rayapp.sandbox.images.reference import parse;"
    "pull(Store(Path(sys.argv[1]), max_bytes=1 << 30).prepare(), parse(sys.argv[2]))"
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    tmp_path.chmod(0o755)
    return Store(tmp_path / "cache", max_bytes=1 << 30).prepare()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_oci(tmp_path / "oci", [BIG, SMALL], config={"Env": ["A=b"], "WorkingDir": "/work", "User": "7:8"})
    return tmp_path / "oci"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "pauses_s", lambda first, longest: iter([0.01] * 9))


def taken(store: Store, name: str, wanted: Wanted | None = None) -> Image:
    with pull(store, parse(name), wanted) as hold:
        return hold.image


def leftovers(store: Store) -> list[str]:
    return [str(path) for path in store.folder.glob("*/*") if ".pending" in path.name or path.suffix == ".part"]


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


def test_a_tag_that_moves_is_another_image_and_shares_layers(store: Store, folder: Path) -> None:
    stub = RegistryStub(folder)
    with stub.running() as host:
        first = taken(store, f"{host}/name:1")
        write_oci(folder, [BIG, layer(entry("other", ""))])
        second = taken(store, f"{host}/name:1")

    assert first.tree != second.tree
    assert first.layers[0] == second.layers[0]
    assert (
        sum(stub.asked[f"sha256:{path.name}"] for path in folder.glob("blobs/sha256/*") if path.stat().st_size > 9999)
        == 1
    )


def test_two_pulls_share_one_download(store: Store, folder: Path) -> None:
    go = threading.Event()
    stub = RegistryStub(folder, wait=go)
    with stub.running() as host, ThreadPoolExecutor(3) as threads:
        pulls = [threads.submit(taken, store, f"{host}/name:1") for _ in range(3)]
        while not stub.asked:
            time.sleep(0.01)
        time.sleep(0.2)
        go.set()
        found = [each.result() for each in pulls]

    assert found[0] == found[1] == found[2]
    assert (
        max(
            count
            for name, count in stub.asked.items()
            if (folder / "blobs" / name.replace(":", "/")).stat().st_size > 9999
        )
        == 1
    )


def test_a_download_that_breaks_off_goes_on_where_it_was(store: Store, folder: Path) -> None:
    stub = RegistryStub(folder, cuts=3)
    with stub.running() as host:
        image = taken(store, f"{host}/name:1")

    assert (store.trees / image.tree / "big").stat().st_size == 300_000
    assert stub.sent_bytes < 400_000, "parts that had come were asked for again"


def test_two_processes_that_pull_an_image_share_one_download(store: Store, folder: Path) -> None:
    stub = RegistryStub(folder, wait=threading.Event())
    with stub.running() as host:
        argv = [sys.executable, "-c", PULL, str(store.folder), f"{host}/name:1"]
        children = [subprocess.Popen(argv) for _ in range(2)]
        while stub.asked.total() < 2:
            time.sleep(0.02)
        assert stub.wait is not None
        stub.wait.set()
        assert [child.wait(60) for child in children] == [0, 0]

    largest = max(folder.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    assert stub.asked[f"sha256:{largest.name}"] == 1
    assert len(store.images()) == 1


def test_a_bad_part_of_an_earlier_download_is_loaded_anew(store: Store, folder: Path) -> None:
    largest = max(folder.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    store.blob(f"sha256:{largest.name}").write_bytes(b"x" * 1000)

    with RegistryStub(folder).running() as host:
        image = taken(store, f"{host}/name:1")

    assert (store.trees / image.tree / "big").stat().st_size == 300_000


def test_a_registry_that_starts_while_it_is_asked_is_asked_again(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, stack = RegistryStub(folder), ExitStack()
    # Bound, but not listening: connections are refused, and no other program gets the port.
    held = stack.enter_context(socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]

    def start_in_a_pause(pause_s: float) -> None:
        if not stub.port:
            stub.port = port
            stack.enter_context(stub.running())

    monkeypatch.setattr(sources.time, "sleep", start_in_a_pause)
    with stack:
        assert taken(store, f"127.0.0.1:{port}/name:1").layers


def test_a_killed_pull_leaves_nothing_that_looks_whole(store: Store, folder: Path, tmp_path: Path) -> None:
    stub = RegistryStub(folder, wait=threading.Event())
    with stub.running() as host:
        child = subprocess.Popen([sys.executable, "-c", PULL, str(store.folder), f"{host}/name:1"])
        while not stub.asked:
            time.sleep(0.02)
        time.sleep(0.1)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert stub.wait is not None
        stub.wait.set()
        assert store.images() == []

        image = taken(store, f"{host}/name:1")

    assert (store.trees / image.tree / "big").stat().st_size == 300_000
    store.prune(unused_s=1000)
    assert leftovers(store) == []


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

        assert taken(store, f"{host}/name:1").layers


def test_a_mirror_is_asked_first_and_the_registry_after_it(store: Store, folder: Path) -> None:
    with RegistryStub(folder).running() as host:
        elsewhere = "registry.invalid"

        image = taken(store, f"{elsewhere}/name:1", Wanted(mirrors={elsewhere: ["127.0.0.1:9", host]}))

    assert image.name.startswith(f"{elsewhere}/name:1@")


def broken_layer(folder: Path) -> None:
    largest = max(folder.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (lambda _: None, "{host}/name:missing", "is not in"),
        (broken_layer, "{host}/name:1", "is damaged"),
        (broken_layer, "oci:{folder}", "is damaged"),
        (lambda folder: write_oci(folder, [BIG], platform="plan9/mips"), "{host}/name:1", "is built for plan9/mips"),
        (
            lambda folder: write_oci(folder, [BIG], config={"User": "unknown"}),
            "{host}/name:1",
            "'unknown' is not in its /etc/passwd",
        ),
        (lambda folder: write_oci(folder, [BIG], stored=[SMALL]), "{host}/name:1", "digest of its unpacked archive"),
        (lambda folder: (folder / "index.json").write_text("{"), "oci:{folder}", "is not JSON"),
        (lambda folder: shutil.rmtree(folder / "blobs"), "oci:{folder}", "can't be read"),
        (lambda _: None, "oci:{folder}:other", "its index has no tag 'other'"),
        (lambda _: None, "archive:/nowhere.tar", "can't be read"),
        (lambda _: None, "build:unknown", "rayapp images build"),
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

    with pytest.raises(ImageError, match=r"larger than|does not fit") as raised:
        taken(small, f"oci:{folder}")

    assert "oci" in str(raised.value)
    assert small.images() == []
    assert leftovers(small) == []


def test_the_least_recently_used_image_goes_but_none_that_is_held(store: Store, tmp_path: Path) -> None:
    for number in range(4):
        write_oci(tmp_path / str(number), [layer(entry("file", os.urandom(100_000)))])
    small = Store(store.folder, max_bytes=250_000)

    with pull(small, parse(f"oci:{tmp_path}/0")) as held:
        second = taken(small, f"oci:{tmp_path}/1")
        third = taken(small, f"oci:{tmp_path}/2")

        assert small.image(second.digest) is None
        assert {image.digest for image, _ in small.images()} == {held.image.digest, third.digest}
        with pull(small, parse(f"oci:{tmp_path}/2")), pytest.raises(ImageError, match="does not fit"):
            taken(small, f"oci:{tmp_path}/3")
        assert small.prune() == [third]
    assert small.prune() == [held.image]
    assert small.num_bytes() == 0
    assert [*small.trees.iterdir(), *(small.folder / "layers").iterdir()] == []


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

    assert [each.tree for each in found] == [image.tree] * 3
    assert replace(found[2], name="") == replace(image, name="")


def _config_of(folder: Path) -> str:
    top = json.loads((folder / "index.json").read_text())["manifests"][0]["digest"]
    return str(json.loads((folder / "blobs" / top.replace(":", "/")).read_text())["config"]["digest"])


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Debian's docker-registry, on loopback."""
    if shutil.which("docker-registry") is None or shutil.which("skopeo") is None:
        pytest.skip("needs Debian's docker-registry and skopeo")
    with real_registry(tmp_path) as host:
        yield host


def test_a_real_registry_gives_the_tree_that_umoci_unpacks(store: Store, tmp_path: Path, registry: str) -> None:
    if shutil.which("umoci") is None or os.geteuid() != 0:
        pytest.skip("needs Debian's umoci, as root")
    first = layer(
        entry("usr"), entry("usr/bin"), entry("usr/bin/sh", "sh", mode=0o755), entry("etc"), entry("etc/a", "1"),
        entry("etc/gone", "1"), entry("var"), entry("var/old"), entry("var/old/x", "1"), entry("home"),
        entry("home/x", ""),        entry("dev"), entry("proc"), entry("sys"), entry("tmp", mode=0o1777),
        entry("bin", "", type=b"2", linkname="usr/bin", size=0),
    )  # fmt: skip
    second = layer(
        entry("etc/.wh.gone", ""), entry("var/old"), entry("var/old/.wh..wh..opq", ""), entry("var/old/y", "2"),
        entry("usr/bin/ls", "ls", mode=0o755), entry("etc/b", "", type=b"1", linkname="etc/a", size=0),
        entry("home", "now a file", mode=0o640), entry("bin/late", "late", mode=0o755),
    )  # fmt: skip
    write_oci(tmp_path / "real", [first, second])
    index = json.loads((tmp_path / "real/index.json").read_text())
    index["manifests"][0]["annotations"] = {"org.opencontainers.image.ref.name": "one"}
    (tmp_path / "real/index.json").write_text(json.dumps(index))
    source = f"oci:{tmp_path}/real:one"
    for argv in (
        ["skopeo", "copy", "--dest-tls-verify=false", source, f"docker://{registry}/team/real:1"],
        ["umoci", "unpack", "--image", f"{tmp_path}/real:one", str(tmp_path / "bundle")],
    ):
        subprocess.run(argv, check=True, capture_output=True)

    image = taken(store, f"{registry}/team/real:1")

    assert described(store.trees / image.tree) == described(tmp_path / "bundle/rootfs")


def described(tree: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(tree.rglob("*")):
        facts = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else "folder"
        found[str(path.relative_to(tree))] = (
            content,
            oct(facts.st_mode & 0o777) if not path.is_symlink() else "",
            int(facts.st_mtime),
        )
    return found

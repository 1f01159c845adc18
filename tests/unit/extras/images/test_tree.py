"""Images are hostile: what their layers may make, what is refused, and what a stack of layers looks like."""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayapp.core.errors import ImageError
from rayapp.extras.images import programs
from rayapp.extras.images.pull import pull
from rayapp.extras.images.store import Store
from rayapp.extras.images.tree import BadImageError, python_in, user_of
from rayapp.sandbox.images import parse
from support.images import entry, layer, needs_image_programs, outside_folder, write_oci

pytestmark = needs_image_programs
SYMLINK, HARDLINK = tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.fixture
def place() -> Iterator[Path]:
    with outside_folder() as folder:
        yield folder


def tree(place: Path, *layers: bytes, stored: list[bytes] | None = None, max_bytes: int = 1 << 26) -> Path:
    """Pull an image of these layers; return its folder."""
    write_oci(place / "oci", layers, stored=stored)
    store = Store(place / "cache", max_bytes=max_bytes).prepare()
    with pull(store, parse(f"oci:{place}/oci")) as hold:
        return store.trees / hold.image.tree


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


def link(name: str, target: str, kind: bytes = SYMLINK) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, "", type=kind, linkname=target, size=0)


HOSTILE = {
    "a path that leads out": [entry("../../../outside/x", "x")],
    "a path that leads out later": [entry("a/b/../../../../../../outside/x", "x")],
    "an absolute path": [entry("/outside/x", "x")],
    "a file below a link that leads out": [link("up", "../../../../../../PLACE/outside"), entry("up/x", "x")],
    "a file below an absolute link": [link("abs", "PLACE/outside"), entry("abs/x", "x")],
    "a hard link that leads out": [link("inside", "../../../../../../PLACE/outside/secret", HARDLINK)],
    "a hard link to a link": [link("a", "PLACE/outside/secret"), link("b", "a", HARDLINK)],
    "a whiteout of the root": [entry(".wh...", "")],
    "a whiteout below a link": [link("up", "PLACE/outside"), entry("up/.wh.secret", "")],
    "an opaque folder below a link": [link("up", "PLACE/outside"), entry("up/.wh..wh..opq", "")],
    "a device": [entry("sda", "", type=tarfile.BLKTYPE, devmajor=8, size=0)],
    "a folder as deep as can be": [entry("/".join("d" * 300), "x")],
}


@pytest.mark.parametrize("entries", HOSTILE.values(), ids=HOSTILE)
def test_nothing_outside_of_the_tree_is_written_read_or_removed(
    place: Path, entries: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    outside = place / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    (outside / "secret").write_text("secret")
    (outside / "secret").chmod(0o666)
    for info, _ in entries:
        info.linkname = info.linkname.replace("PLACE", str(place))

    made: Path | None = None
    with contextlib.suppress(ImageError):
        made = tree(place, layer(*entries))

    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "secret"
    assert (outside / "secret").stat().st_nlink == 1
    found = [path for path in made.rglob("*") if not path.is_symlink()] if made is not None else []
    assert not any(path.is_block_device() or path.is_char_device() for path in found)
    assert not any(path.is_file() and path.read_text() == "secret" for path in found)
    assert [path.name for path in (place / "cache/trees").iterdir() if "pending" in path.name] == []


def test_all_files_belong_to_one_user_who_may_read_them_and_set_id_bits_are_dropped(place: Path) -> None:
    made = tree(
        place,
        layer(
            entry("bin/su", "x", mode=0o4755), entry("bin/closed", "x", mode=0), entry("shared", mode=0o3777),
            entry("dark", mode=0), entry("dark/file", "x", uid=7, gid=8),
        ),
    )  # fmt: skip

    names = ("bin/su", "bin/closed", "shared", "dark")
    modes = {name: stat.S_IMODE((made / name).stat().st_mode) for name in names}
    assert modes == {"bin/su": 0o755, "bin/closed": 0o600, "shared": 0o1777, "dark": 0o700}
    owners = {path.lstat().st_uid for path in [made, *made.rglob("*")]}
    assert len(owners) == 1
    assert os.getuid() != 0 or owners != {0}


def sparse(place: Path) -> bytes:
    with (place / "hole").open("wb") as hole:
        hole.truncate(1 << 27)
    return subprocess.run(["tar", "-cS", "-C", place, "hole"], capture_output=True, check=True).stdout


def test_a_bomb_is_refused_by_its_bytes_its_holes_and_its_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = layer(*(entry(f"zeros{number}", bytes(1 << 22)) for number in range(8)))
    bombs = [zeros, sparse(place)]
    for number, data in enumerate(bombs):
        (place / str(number)).mkdir()
        (place / str(number)).chmod(0o755)
        with pytest.raises(ImageError, match=r"does not fit|can't be unpacked"):
            tree(place / str(number), data, max_bytes=1 << 24)
    monkeypatch.setattr(programs, "MAX_FILES", 10)
    with pytest.raises(ImageError, match="more than 10 files"):
        tree(place, layer(*(entry(f"f{number}", "") for number in range(20))))


def test_an_image_counts_as_it_lies_on_the_disk(place: Path) -> None:
    made = tree(place, layer(entry("file", bytes(1 << 20))), layer(entry("file", bytes(1 << 20)), entry("f", "x")))
    (image, _), *_ = Store(place / "cache", max_bytes=1).images()

    on_disk = int(subprocess.check_output(["du", "-s", "--block-size=1", made]).split()[0])
    assert abs(image.num_bytes - on_disk) <= 16 << 10


@pytest.mark.parametrize("cut", [10, 600, -20])
def test_a_cut_layer_is_refused(place: Path, cut: int) -> None:
    data = layer(entry("a", os.urandom(4000)))

    with pytest.raises(ImageError):
        tree(place, data, stored=[gzip.compress(data)[:cut]])


def test_layers_are_stacked_as_oci_says(place: Path) -> None:
    lower = layer(
        entry("keep", "1"), entry("gone", "1"), entry("d/old", "1"), entry("o/old", "1"), entry("o/s/deep", "1"),
        entry("a", "old"), entry("folder/x", "1"), entry("link-target", "1"), link("link", "link-target"),
        entry("usr"), entry("usr/bin"), entry("usr/bin/sh", "sh"), link("bin", "usr/bin"),
    )  # fmt: skip
    upper = layer(
        entry(".wh.gone", ""), entry(".wh.d", ""), entry("o/.wh..wh..opq", ""), entry("o/new", "2"),
        entry("a", "new"), entry("folder", "a file"), entry("link", "a file"), link("hard", "keep", HARDLINK),
        entry("bin/tool", "tool"), link("proc", "/keep"), entry("dev", "a file"),
    )  # fmt: skip

    made = tree(place, lower, upper)

    assert files_in(made) == {
        "keep", "o/new", "a", "folder", "link", "link-target", "hard", "usr/bin/sh", "usr/bin/tool", "bin",
    }  # fmt: skip
    assert (made / "a").read_text() == "new"
    assert (made / "folder").read_text() == (made / "link").read_text() == "a file"
    assert (made / "hard").stat().st_ino == (made / "keep").stat().st_ino
    assert (made / "bin").is_symlink()
    assert all((made / name).is_dir() and not (made / name).is_symlink() for name in ("dev", "proc", "sys", "tmp"))


@pytest.mark.parametrize(
    ("user", "found"),
    [("", (0, 0, "/root")), ("ada", (7, 8, "/home/ada")), ("7", (7, 8, "/home/ada")), ("99:5", (99, 5, "/")),
     ("ada:wheel", (7, 10, "/home/ada"))],
)  # fmt: skip
def test_the_user_is_the_one_that_the_image_names(tmp_path: Path, user: str, found: tuple[int, int, str]) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nbroken\nada:x:7:8::/home/ada:/bin/sh\n")
    (tmp_path / "etc/group").write_text("wheel:x:10:\n")

    assert user_of(os.open(tmp_path, os.O_RDONLY), user) == found
    with pytest.raises(BadImageError, match="nobody-here"):
        user_of(os.open(tmp_path, os.O_RDONLY), "nobody-here")


def test_the_python_is_one_that_can_run_our_harness(tmp_path: Path) -> None:
    def folder_with(name: str, *files: str, **links: str) -> int:
        for file in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).touch(mode=0o755)
        for path, target in links.items():
            (tmp_path / name / path.replace("_", "/")).symlink_to(target)
        return os.open(tmp_path / name, os.O_RDONLY)

    old = folder_with("old", "usr/bin/python3.8", usr_bin_python3="python3.8")
    good = {"opt_bin_python3": "/opt/bin/python3.12"}
    whole = folder_with("whole", "opt/bin/python3.12", "opt/lib/python3.12/json/x", **good)

    assert python_in(old, "/usr/bin") == ""
    assert python_in(folder_with("minimal", "opt/bin/python3.12", **good), "/opt/bin") == ""
    assert python_in(whole, "/usr/bin:/opt/bin") == "/opt/bin/python3"
    assert python_in(folder_with("none", "x"), "/usr/bin") == ""

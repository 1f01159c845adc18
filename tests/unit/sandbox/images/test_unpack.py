"""Layers are hostile: what they may make, what is refused, and what a stack of them looks like."""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from rayapp.sandbox.images.unpack import BadLayerError, Unpacked, python_in, stack, unpack, user_of
from support.images import entry, layer

SYMLINK, HARDLINK = tarfile.SYMTYPE, tarfile.LNKTYPE


def unpacked(folder: Path, data: bytes, *, max_bytes: int = 1 << 24, max_files: int = 1000) -> Unpacked:
    stored = folder.with_name(f"{folder.name}.blob")
    stored.write_bytes(data)
    folder.mkdir()
    root = os.open(folder, os.O_RDONLY)
    with stored.open("rb") as file:
        try:
            return unpack(file, root, max_bytes=max_bytes, max_files=max_files)
        finally:
            os.close(root)


def stacked(folder: Path, *layers: bytes) -> Path:
    opened = []
    folder.mkdir(exist_ok=True)
    for number, data in enumerate(layers):
        facts = unpacked(folder / str(number), data)
        opened.append((os.open(folder / str(number), os.O_RDONLY), facts))
    tree = folder / "tree"
    tree.mkdir()
    stack(opened, os.open(tree, os.O_RDONLY))
    return tree


def files_in(tree: Path) -> set[str]:
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if not path.is_dir() or path.is_symlink()}


def link(name: str, target: str, kind: bytes = SYMLINK) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, "", type=kind, linkname=target, size=0)


HOSTILE = {
    "a path that leads out": [entry("../outside", "x")],
    "a path that leads out later": [entry("a/b/../../../outside", "x")],
    "a hard link that leads out": [link("inside", "../../outside", HARDLINK)],
    "a folder as deep as can be": [entry("/".join("d" * 300), "x")],
}


@pytest.mark.parametrize("entries", HOSTILE.values(), ids=HOSTILE)
def test_what_leads_out_is_refused(tmp_path: Path, entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    (tmp_path / "outside").write_text("secret")

    with pytest.raises(BadLayerError):
        unpacked(tmp_path / "root", layer(*entries))

    assert (tmp_path / "outside").read_text() == "secret"


def test_links_that_lead_out_are_followed_inside_only(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    up = link("up", "../../../../../../" + str(tmp_path / "outside"))
    absolute = link("abs", str(tmp_path / "outside"))

    facts = unpacked(tmp_path / "root", layer(up, absolute, entry("up/one", "1"), entry("abs/two", "2")))

    assert list((tmp_path / "outside").iterdir()) == []
    inside = tmp_path / "root" / str(tmp_path).lstrip("/") / "outside"
    assert {path.name for path in inside.iterdir()} == {"one", "two"}
    assert facts.implicit


def test_a_hard_link_to_a_link_shows_nothing_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")

    unpacked(tmp_path / "root", layer(link("a", str(tmp_path / "secret")), link("b", "a", HARDLINK)))

    assert (tmp_path / "root/b").is_symlink()


def test_device_nodes_are_left_out_and_set_id_bits_dropped(tmp_path: Path) -> None:
    data = layer(
        entry("dev/sda", "", type=tarfile.BLKTYPE, devmajor=8, size=0),
        entry("dev/mem", "", type=tarfile.CHRTYPE, devmajor=1, devminor=1, size=0),
        entry("bin/su", "x", mode=0o4755),
        entry("bin/closed", "x", mode=0),
        entry("shared", mode=0o3777),
    )

    unpacked(tmp_path / "root", data)

    assert list((tmp_path / "root/dev").iterdir()) == []
    modes = {
        name: stat.S_IMODE((tmp_path / "root" / name).stat().st_mode) for name in ("bin/su", "bin/closed", "shared")
    }
    assert modes == {"bin/su": 0o755, "bin/closed": 0o600, "shared": 0o1777}


def test_a_bomb_is_refused_by_its_bytes_its_files_and_its_holes(tmp_path: Path) -> None:
    zeros = layer(entry("zeros", bytes(1 << 22)))
    with (tmp_path / "hole").open("wb") as hole:
        hole.truncate(1 << 40)
    sparse = subprocess.run(["tar", "-cS", "-C", tmp_path, "hole"], capture_output=True, check=True).stdout

    for number, (data, limits) in enumerate(
        [
            (gzip.compress(zeros), {"max_bytes": 1 << 20}),
            (zstd.compress(zeros), {"max_bytes": 1 << 20}),
            (layer(*(entry(f"f{each}", "") for each in range(20))), {"max_files": 10}),
            (sparse, {"max_bytes": 1 << 20}),
        ]
    ):
        with pytest.raises(BadLayerError, match=r"larger than|more than"):
            unpacked(tmp_path / str(number), data, **limits)


def test_the_digest_is_that_of_the_archive_however_it_is_compressed(tmp_path: Path) -> None:
    data = layer(entry("a", "one"), entry("b/c", "two"))
    halves = gzip.compress(data[:700]) + gzip.compress(data[700:])
    ways = [data, gzip.compress(data), zstd.compress(data), halves]

    found = {unpacked(tmp_path / str(number), each).diff_id for number, each in enumerate(ways)}

    assert len(found) == 1


@pytest.mark.parametrize("cut", [10, 600, -20])
@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress])
def test_a_cut_layer_is_refused(tmp_path: Path, compress: object, cut: int) -> None:
    data = layer(entry("a", os.urandom(4000)))

    with pytest.raises(BadLayerError):
        unpacked(tmp_path / "root", compress(data)[:cut])  # type: ignore[operator]


@given(st.binary(max_size=3000))
def test_no_bytes_break_more_than_themselves(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(BadLayerError):
        unpacked(Path(folder, "root"), data)


def test_whiteouts_remove_what_lower_layers_have(tmp_path: Path) -> None:
    lower = layer(
        entry("keep", "1"), entry("gone", "1"), entry("d/old", "1"), entry("o/old", "1"), entry("o/s/deep", "1")
    )
    upper = layer(entry(".wh.gone", ""), entry(".wh.d", ""), entry("o/.wh..wh..opq", ""), entry("o/new", "2"))

    tree = stacked(tmp_path, lower, upper)

    assert files_in(tree) == {"keep", "o/new"}


def test_a_later_layer_replaces_files_links_and_folders(tmp_path: Path) -> None:
    lower = layer(
        entry("a", "old"), entry("folder/x", "1"), link("link", "a"), entry("real/x", "1"), link("moved", "real")
    )
    upper = layer(
        entry("a", "new"), entry("folder", "a file"), entry("link", "a file"), entry("moved"), entry("moved/y", "2")
    )

    tree = stacked(tmp_path, lower, upper)

    assert (tree / "a").read_text() == "new"
    assert (tree / "folder").read_text() == (tree / "link").read_text() == "a file"
    assert (tree / "moved").is_dir()
    assert not (tree / "moved").is_symlink()
    assert files_in(tree) == {"a", "folder", "link", "real/x", "moved/y"}


def test_a_file_below_a_link_of_a_lower_layer_lands_where_the_link_leads(tmp_path: Path) -> None:
    lower = layer(entry("usr"), entry("usr/bin"), entry("usr/bin/sh", "sh"), link("bin", "usr/bin"))

    tree = stacked(tmp_path, lower, layer(entry("bin/tool", "tool")))

    assert (tree / "bin").is_symlink()
    assert (tree / "usr/bin/tool").read_text() == "tool"


def test_a_hard_link_finds_its_file_in_a_lower_layer(tmp_path: Path) -> None:
    tree = stacked(tmp_path, layer(entry("a/file", "x")), layer(link("b", "a/file", HARDLINK)))

    assert (tree / "b").stat().st_ino == (tree / "a/file").stat().st_ino
    with pytest.raises(BadLayerError):
        stacked(tmp_path / "again", layer(entry("c", "")), layer(link("b", "nowhere", HARDLINK)))


def test_trees_share_the_files_of_their_layers(tmp_path: Path) -> None:
    tree = stacked(tmp_path, layer(entry("a", "x")))

    assert (tree / "a").stat().st_ino == (tmp_path / "0/a").stat().st_ino


def test_mount_points_are_folders_whatever_an_image_has_there(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()

    tree = stacked(tmp_path, layer(link("proc", str(tmp_path / "outside")), entry("dev", "a file"), entry("tmp/x", "")))

    assert all((tree / name).is_dir() and not (tree / name).is_symlink() for name in ("dev", "proc", "sys", "tmp"))


@pytest.mark.parametrize(
    ("user", "found"),
    [("", (0, 0, "/root")), ("ada", (7, 8, "/home/ada")), ("7", (7, 8, "/home/ada")), ("99:5", (99, 5, "/")),
     ("ada:wheel", (7, 10, "/home/ada"))],
)  # fmt: skip
def test_the_user_is_the_one_that_the_image_names(tmp_path: Path, user: str, found: tuple[int, int, str]) -> None:
    passwd = entry("etc/passwd", "root:x:0:0::/root:/bin/sh\nbroken\nada:x:7:8::/home/ada:/bin/sh\n")
    tree = stacked(tmp_path, layer(passwd, entry("etc/group", "wheel:x:10:\n")))

    assert user_of(os.open(tree, os.O_RDONLY), user) == found
    with pytest.raises(BadLayerError, match="nobody-here"):
        user_of(os.open(tree, os.O_RDONLY), "nobody-here")


def test_the_python_is_one_that_can_run_our_harness(tmp_path: Path) -> None:
    def tree_with(name: str, *entries: tuple[tarfile.TarInfo, bytes]) -> int:
        return os.open(stacked(tmp_path / name, layer(*entries)), os.O_RDONLY)

    old = tree_with("old", entry("usr/bin/python3.8", "", mode=0o755), link("usr/bin/python3", "python3.8"))
    good = entry("opt/bin/python3.12", "", mode=0o755), link("opt/bin/python3", "/opt/bin/python3.12")
    whole = tree_with("whole", *good, entry("opt/lib/python3.12/json/x", ""))

    assert python_in(old, "/usr/bin") == ""
    assert python_in(tree_with("minimal", *good), "/opt/bin") == ""
    assert python_in(whole, "/usr/bin:/opt/bin") == "/opt/bin/python3"
    assert python_in(tree_with("none"), "/usr/bin") == ""

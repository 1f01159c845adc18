"""Nothing that a lease leaves, wherever it can write, is there for the next one: at every level, with and without an
image, with a Python that everyone can read, as ordinary installations have it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayapp.core.errors import IsolationUnavailableError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.local import slot, staging
from rayapp.sandbox.local.provider import LEVELS, LOOPBACK_LEVELS, LocalProvider
from support.images import MachineImages
from support.levels import EACH_LEVEL

WALK = '''
import json, os, sys
sys.setrecursionlimit(10000)
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/proc")

def folders():
    """All folders that code sees. Of the machine's own programs only folders of packages."""
    for folder, names, files in os.walk("/"):
        if folder.startswith("/proc"):
            names[:] = []
            continue
        if folder.startswith(SYSTEM) and folder.count("/") > 3:
            names[:] = [name for name in names if name in ("site-packages", "dist-packages")]
        if not folder.startswith(SYSTEM) or "-packages" in folder:
            yield folder, files

def write(num_files):
    """Leave whatever can be left in every folder, file and counter. Return the number of ways that worked."""
    done = []
    def attempt(way, action):
        try:
            action()
            done.append(way)
        except (OSError, ValueError):
            pass
    for folder, files in [*folders()]:
        mark = os.path.join(folder, "zz_mark.py")
        attempt("file", lambda: open(mark, "w").write("ANSWER = 4711"))
        attempt("folder", lambda: os.mkdir(mark + ".d"))
        attempt("link", lambda: os.symlink("/4711", mark + ".l"))
        attempt("attribute", lambda: os.setxattr(folder, "user.mark", b"4711"))
        attempt("mode", lambda: os.chmod(folder, os.stat(folder).st_mode | 0o1000))
        attempt("time", lambda: os.utime(folder, (4711, 4711)))
        for _ in range(num_files):
            attempt("unnamed", lambda: os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR)))
        for file in files[:50]:
            path = os.path.join(folder, file)
            if path.startswith("/dev/") and "python" not in path:
                attempt("device", lambda: os.utime(path, (4711, 4711)))
                continue
            attempt("append", lambda: open(path, "a").write("# 4711"))
            attempt("mode", lambda: os.chmod(path, 0o777))
            attempt("time", lambda: os.utime(path, (4711, 4711)))
    return sorted(set(done))

def look():
    """Return everything that a lease can see, and the numbers that new files get."""
    found, counters = {}, {}
    for folder, files in folders():
        for path in [folder, *(os.path.join(folder, file) for file in files)]:
            try:
                facts, names = os.lstat(path), []
            except OSError:
                continue
            if not path.startswith("/dev/") or "python" in path or "zz_mark" in path:
                found[path] = [oct(facts.st_mode), facts.st_size, facts.st_mtime_ns if facts.st_mtime == 4711 else 0]
        try:
            descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR)
            counters[folder] = os.fstat(descriptor).st_ino
            os.close(descriptor)
        except OSError:
            pass
    return [found, counters]
'''


@pytest.fixture(scope="module")
def readable_python() -> Iterator[staging.Python]:
    """A Python that everyone can read, with a folder for installed packages in its library."""
    copied = staging._copied((), ())
    home = Path(copied.executable).parents[1]
    with tempfile.TemporaryDirectory(prefix="rayapp-python-", dir="/var/tmp") as folder:
        own = Path(folder, "python")
        shutil.copytree(home, own, symlinks=True)
        library = own / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        (library / "site-packages").mkdir(exist_ok=True)
        Path(folder).chmod(0o755)
        executable = str(own / "bin" / Path(copied.executable).name)
        yield staging.Python(executable=executable, paths=(), environment={"LD_LIBRARY_PATH": str(own / "lib")})


def seen(sandbox_answer: str) -> tuple[dict[str, object], dict[str, int]]:
    found, counters = json.loads(sandbox_answer)
    return found, counters


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("on_image", [False, True], ids=["machine", "image"])
@pytest.mark.parametrize("num_files", [0, 1])
async def test_the_number_of_a_new_file_does_not_tell_whether_the_lease_before_made_files(
    on_image: bool, num_files: int, images: MachineImages
) -> None:
    levels = ("ns+proc",)
    provider = images.provider(images.plain, levels=levels) if on_image else LocalProvider(levels=levels, max_slots=1)
    make_files = "import os\nmade = [os.fstat(os.open('/tmp', os.O_TMPFILE | os.O_RDWR)).st_ino for _ in range({})]\n"
    read = list[int]()
    try:
        for code in [make_files.format(num_files), f"{make_files.format(1)}print(made[0])"] * 8:
            sandbox = await provider.create(SandboxSpec(), labels={}, ttl_s=600, timeout_s=60)
            ran = await sandbox.run_code(code, timeout_s=60)
            await sandbox.kill()
            read += map(int, ran.stdout.split())
    except IsolationUnavailableError as error:
        pytest.skip(str(error))
    finally:
        await provider.close()

    assert len(read) == 8
    assert len(set(read)) > 1


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("level", [*LEVELS, *LOOPBACK_LEVELS])
@pytest.mark.parametrize("on_image", [False, True], ids=["machine", "image"])
async def test_no_lease_finds_anything_of_the_one_before(
    level: str, on_image: bool, readable_python: staging.Python, images: MachineImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_image and not level.startswith("ns"):
        pytest.skip("images need namespaces")
    monkeypatch.setattr(slot, "readable_python", lambda packages, paths: readable_python)
    provider = images.provider(images.plain, levels=(level,)) if on_image else LocalProvider(levels=(level,))
    spec = SandboxSpec(loopback=level.endswith("+lo"))

    async def lease(code: str, *, calls: str = "") -> tuple[str, object]:
        sandbox = await provider.create(spec, labels={}, ttl_s=600, timeout_s=60)
        try:
            ran = await sandbox.run_code(WALK + code, timeout_s=60, max_output_bytes=1 << 24)
            assert ran.ok, ran.error + ran.stderr
            if not calls:
                return ran.stdout, None
            report = await sandbox.call_function(WALK, calls, [[37]] if calls == "write" else [[]], timeout_s=60)
            return ran.stdout, report.calls[0].value
        finally:
            await sandbox.kill()

    try:
        print_look = "print(json.dumps(look()))"
        first, first_call = await lease(print_look, calls="look")
        ways, ways_of_call = await lease("print(json.dumps(write(90)))", calls="write")
        second, second_call = await lease(print_look, calls="look")
    except IsolationUnavailableError as error:
        pytest.skip(str(error))
    finally:
        await provider.close()

    assert seen(first)[0] == seen(second)[0], "a program finds what another lease's program left"
    assert isinstance(first_call, list)
    assert isinstance(second_call, list)
    assert first_call[0] == second_call[0], "a call finds what another lease's call left"
    for before, after in ((seen(first)[1], seen(second)[1]), (first_call[1], second_call[1])):
        assert before.keys() == after.keys()
        # Each lease may use up some numbers itself, but none that its code chooses.
        moved = {folder: (number, after[folder]) for folder, number in before.items() if after[folder] - number > 30}
        assert moved == {}
    if level.startswith("ns"):
        assert {"file", "folder", "link", "unnamed"} <= set(json.loads(ways))
        assert ways_of_call


HOLD = """
import fcntl, time
for path, mode, lock in (("/dev/null", "r+b", fcntl.LOCK_EX), (fcntl.__file__, "rb", fcntl.LOCK_SH)):
    held = open(path, mode, buffering=0)
    fcntl.lockf(held, lock, 1, 4711)
    globals()[path] = held
time.sleep(4)
"""
FIND = """
import fcntl, struct, time
ask, end, found = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 4711, 1, 0), time.time() + 3, set()
while time.time() < end:
    for path, mode in (("/dev/null", "r+b"), (fcntl.__file__, "rb")):
        with open(path, mode, buffering=0) as file:
            if struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, ask))[0] != fcntl.F_UNLCK:
                found.add(path)
            if "+" in mode:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 4711)
                except OSError:
                    found.add(path)
print(sorted(found))
"""


@pytest.mark.parametrize("level", EACH_LEVEL)
async def test_no_lease_sees_a_lock_of_another_at_the_same_time(level: str) -> None:
    provider = LocalProvider(levels=(level,), max_slots=2)
    try:
        one, two = [await provider.create(SandboxSpec(), labels={}, ttl_s=600, timeout_s=60) for _ in range(2)]
        held, found = await asyncio.gather(one.run_code(HOLD, timeout_s=60), two.run_code(FIND, timeout_s=60))
        database = (
            "import sqlite3\nfor n in 1, 2: sqlite3.connect('/tmp/a').execute('pragma journal_mode=wal').fetchone()"
        )
        wal = await one.run_code(database, timeout_s=60) if level.startswith("ns") else held
    except IsolationUnavailableError as error:
        pytest.skip(str(error))
    finally:
        await provider.close()

    assert (held.error, found.error, found.stdout, wal.error) == ("", "", "[]\n", "")

"""The local provider at every isolation level that this machine offers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest

from rayapp.core.errors import IsolationUnavailableError, SandboxConfigError, SandboxGoneError, SandboxQuotaError
from rayapp.core.types import ExecOutcome, SandboxSpec, StopCause
from rayapp.sandbox.local.inside import zygote
from rayapp.sandbox.local.levels.limits import MAX_OPEN_FILES
from rayapp.sandbox.local.levels.loopback import PORT
from rayapp.sandbox.local.provider import LocalProvider
from rayapp.sandbox.local.sandbox import LocalSandbox
from rayapp.sandbox.local.slot import BootError, Slot
from rayapp.tasks.code.languages import language_of
from rayapp.tasks.code.scoring import spec_of
from support.levels import EACH_LEVEL

USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
REFUSALS: dict[str, str] = {}
"""By level: the reason why this machine does not offer it; empty if it does."""


async def refusal(level: str) -> str:
    if level not in REFUSALS:
        try:
            (await Slot.start(level)).close()
            REFUSALS[level] = ""
        except BootError as error:
            REFUSALS[level] = str(error)
    return REFUSALS[level]


@pytest.fixture(params=EACH_LEVEL)
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[LocalProvider]:
    if reason := await refusal(request.param):
        pytest.skip(reason)
    made = LocalProvider(levels=(request.param,), max_slots=2)
    yield made
    await made.close()


async def new(provider: LocalProvider, spec: SandboxSpec | None = None) -> LocalSandbox:
    return await provider.create(spec or SandboxSpec(), labels={}, ttl_s=60, timeout_s=30)


@pytest.fixture
async def sandbox(provider: LocalProvider) -> LocalSandbox:
    return await new(provider)


async def test_each_execution_starts_from_the_same_interpreter_with_a_seed_and_a_process_group_of_its_own(
    sandbox: LocalSandbox,
) -> None:
    # A signal to group 0 reaches every process of the group, on this side of a pid namespace and on the other.
    code = (
        "import json, os, random\nold = getattr(json, 'mark', 0)\njson.mark = 1\n"
        "def f(): return old, os.getpgrp() == os.getsid(0) == os.getpid(), random.random()"
    )
    reports = [await sandbox.call_function(code, "f", [[]], timeout_s=5) for _ in range(3)]
    values: list[Any] = [report.calls[0].value for report in reports]

    assert [value[:2] for value in values] == [(0, True)] * 3
    assert len({value[2] for value in values}) == 3


async def test_a_zygote_keeps_what_it_compiles_of_ours_and_code_compiles_nothing_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = Path(cache_from_source(zygote.__file__))

    async def compiles_and_prints(*, keeps_nothing: bool) -> tuple[bool, str]:
        compiled.unlink(missing_ok=True)
        monkeypatch.setattr(sys, "dont_write_bytecode", keeps_nothing)
        provider = LocalProvider(allow_unisolated=True)
        ran = await (await new(provider)).run_code("import sys; print(sys.dont_write_bytecode)", timeout_s=5)
        await provider.close()
        return compiled.exists(), ran.stdout

    # Sandboxes of tests that run at the same time may compile it meanwhile.
    tries = [await compiles_and_prints(keeps_nothing=True) for _ in range(5)]
    assert (False, "True\n") in tries
    assert await compiles_and_prints(keeps_nothing=False) == (True, "True\n")


async def test_a_fork_by_the_code_itself_has_a_seed_of_its_own(sandbox: LocalSandbox) -> None:
    """Executions are forked without the hooks that Python modules hang on a fork; the code's own forks have them."""
    if sandbox.isolation == "ll":
        pytest.skip("level ll has no new processes")
    code = (
        "import os, random\n"
        "def f():\n"
        "    read, write = os.pipe()\n"
        "    if os.fork() == 0:\n"
        "        os.write(write, repr(random.random()).encode())\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    return os.read(read, 100).decode() == repr(random.random())\n"
    )

    report = await sandbox.call_function(code, "f", [[]], timeout_s=5)

    assert [call.value for call in report.calls] == [False]


async def begun(sandbox: LocalSandbox) -> None:
    """Return when the sandbox has a job whose answer is awaited."""
    async with asyncio.timeout(60):
        while sandbox.slot._pending is None:
            await asyncio.sleep(0.01)


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants_of(pid: int) -> set[int]:
    children = children_of(pid)
    return {*children, *(each for child in children for each in descendants_of(child))}


def template_of(sandbox: LocalSandbox) -> int:
    """The zygote's only child; in namespaces another process waits for the zygote."""
    (child,) = children_of(sandbox.slot.pid)
    return children_of(child)[0] if sandbox.isolation.startswith("ns") else child


async def test_what_the_application_inherited_changes_neither_the_level_nor_the_code(provider: LocalProvider) -> None:
    # given: a umask as hardened machines set it, and signals as some service managers leave them
    umask = os.umask(0o077)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGALRM, signal.SIGTERM))
    child = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        level = (await new(provider)).isolation
        hardened = LocalProvider(levels=(level,), max_slots=1)
        sandbox = await new(hardened)
    finally:
        os.umask(umask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGCHLD, child)

    # when
    code = "import os, signal, wave\ndef f(): return [os.umask(0), len(signal.pthread_sigmask(0, ()))]"
    report = await sandbox.call_function(code, "f", [[]], timeout_s=5)
    await hardened.close()

    # then
    assert report.exec.ok, report
    assert report.calls[0].value == [0o022, 0]


async def test_beside_an_execution_lives_nothing_but_the_child_that_waits_for_the_next_job(
    sandbox: LocalSandbox,
) -> None:
    # given: a level where code can leave processes behind, or threads only
    in_namespaces = sandbox.isolation.startswith("ns")
    daemon = "subprocess.Popen(['/bin/sleep', '60'], start_new_session=True)" if in_namespaces else ""
    thread = "threading.Thread(target=time.sleep, args=(60,)).start()"
    code = f"import subprocess, threading, time\ndef f():\n    {daemon}\n    {thread}"
    await sandbox.call_function("def f(): return 1", "f", [[]], timeout_s=5)
    code_that_stays = "import time\ndef f(): time.sleep(60)"
    template, expected = template_of(sandbox), 2 if in_namespaces else 1

    for _ in range(5):
        # when: one execution follows another that left something
        left = await sandbox.call_function(code, "f", [[]], timeout_s=5)
        running = asyncio.create_task(sandbox.call_function(code_that_stays, "f", [[]], timeout_s=60))
        async with asyncio.timeout(60):
            while len(descendants_of(template)) < expected:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # any process too many would be there all along

        # then
        assert left.exec.ok, left
        assert len(descendants_of(template)) == expected
        running.cancel()
        await asyncio.wait({running})


async def test_a_child_that_was_forked_before_meets_nothing_of_what_ran_since(provider: LocalProvider) -> None:
    # given: as many children as there ever are were forked when /tmp was empty
    sandbox = await new(provider)
    look = "import os\ndef f(): return os.listdir('.') if os.getcwd() == '/tmp' else []"
    write = "import os\ndef f():\n    os.chmod('/tmp', 0o755)\n    open('/tmp/left', 'w').write('x')"
    await sandbox.call_function(look, "f", [[]], timeout_s=5)

    # when
    written = await sandbox.call_function(write, "f", [[]], timeout_s=5)
    seen = [await sandbox.call_function(look, "f", [[]], timeout_s=5) for _ in range(4)]

    # then
    assert written.calls[0].ok == sandbox.isolation.startswith("ns")
    assert [report.calls[0].value for report in seen] == [[], [], [], []]


async def test_a_child_that_waits_beside_an_execution_does_not_count_against_its_limits(
    provider: LocalProvider,
) -> None:
    sandbox = await new(provider, SandboxSpec(max_processes=1))

    report = await sandbox.call_function("import time\ndef f(): time.sleep(0.3)", "f", [[]], timeout_s=5)

    assert report.exec.ok, report


@contextlib.contextmanager
def busy_core() -> Iterator[int]:
    """Give a core for which twelve others compete, each in a session of its own: the scheduler shares it among them."""
    core = min(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    argv = [sys.executable, "-SEc", spin]
    spinners = [subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE) for _ in range(12)]
    try:
        for spinner in spinners:
            spinner.stdout.readline()
        yield core
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.communicate()


@pytest.mark.parametrize("where", ["in its first thread", "in a thread"])
async def test_waiting_for_a_processor_is_not_the_codes_time(sandbox: LocalSandbox, where: str) -> None:
    code = (
        "import os, threading, time\n"
        "def work(core):\n"
        "    os.sched_setaffinity(0, {core})\n"
        "    while time.process_time() < 0.25: pass\n"
        "def f(core, is_threaded):\n"
        "    thread = threading.Thread(target=work, args=(core,))\n"
        "    thread.start() if is_threaded else work(core)\n"
        "    thread.join() if is_threaded else None\n"
        "    return 'through'\n"
    )

    with busy_core() as core:
        report = await sandbox.call_function(code, "f", [[core, where == "in a thread"]], timeout_s=2.3)

    assert report.calls[0].value == "through", report


async def test_sleeping_is_the_codes_time_whatever_the_neighbours_do(sandbox: LocalSandbox) -> None:
    code = "import os, time\ndef f(core):\n    os.sched_setaffinity(0, {core})\n    time.sleep(60)"

    with busy_core() as core:
        report = await sandbox.call_function(code, "f", [[core]], timeout_s=2.0)

    assert report.exec.stopped_for is StopCause.TIMEOUT
    assert report.exec.duration_s < 45


async def test_processes_share_the_time_of_their_execution(sandbox: LocalSandbox) -> None:
    """Including processes that are never waited for, which the kernel's own count of children misses."""
    if sandbox.isolation == "ll":
        pytest.skip("level ll has no new processes")
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "def f():\n"
        "    while True:\n"
        "        try: child = os.fork()\n"
        "        except OSError: child = None  # as many as there may be, on a slow machine\n"
        "        if child == 0:\n"
        "            while time.process_time() < 0.2: pass\n"
        "            os._exit(0)\n"
        "        time.sleep(0.4)\n"
    )

    report = await sandbox.call_function(code, "f", [[]], timeout_s=1.0)

    assert report.exec.stopped_for is StopCause.TIMEOUT


async def test_a_session_has_its_time_anew_for_each_job(sandbox: LocalSandbox) -> None:
    work = "import time\nstart = time.process_time()\nwhile time.process_time() < start + 0.2: pass"

    done = [await sandbox.run_code(work, timeout_s=2.3, stateful=True) for _ in range(12)]

    assert [ran.stopped_for for ran in done] == [None] * 12


async def test_an_execution_may_open_few_files_and_its_zygote_as_many_as_we(sandbox: LocalSandbox) -> None:
    """The zygote's limit also bounds the descriptors in flight of its user; at that bound it can send none."""
    code = "from resource import *\ndef f(): return [getrlimit(RLIMIT_NOFILE)[1], getrlimit(RLIMIT_CORE)]"
    report = await sandbox.call_function(code, "f", [[]], timeout_s=5)

    assert report.calls[0].value == [MAX_OPEN_FILES, (1, 1)]
    ours, zygotes = (
        [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "open files" in line]
        for pid in ("self", sandbox.slot.pid)
    )
    assert zygotes == ours


async def test_a_traceback_shows_the_lines_of_the_code_and_nothing_of_ours(sandbox: LocalSandbox) -> None:
    raised = await sandbox.run_code("def f():\n    return 1 / 0\nf()", timeout_s=5)

    assert 'File "<candidate>", line 2, in f' in raised.stderr
    assert "rayapp" not in raised.stderr


async def test_names_stay_in_a_session_also_after_an_exception_and_an_exit_and_nowhere_else(
    sandbox: LocalSandbox,
) -> None:
    await sandbox.run_code("x = 20", timeout_s=5, stateful=True)
    fresh = await sandbox.run_code("print(x)", timeout_s=5)
    called = await sandbox.call_function("import os\ndef f(): return os.listdir('.')", "f", [[]], timeout_s=5)
    raised = await sandbox.run_code("x += 1\nraise KeyError(x)", timeout_s=5, stateful=True)
    exited = await sandbox.run_code("raise SystemExit(4)", timeout_s=5, stateful=True)
    then = await sandbox.run_code("print(input(), x)", timeout_s=5, stateful=True, stdin="in")

    assert fresh.error.startswith("NameError")
    assert not called.calls[0].ok or called.calls[0].value == []
    assert (raised.outcome, raised.error) == (ExecOutcome.CODE_FAILED, "KeyError: 21")
    assert exited.exit_code == 4
    assert (then.ok, then.stdout) == (True, "in 21\n")


async def test_a_stopped_session_is_forgotten_and_the_next_one_works(sandbox: LocalSandbox) -> None:
    await sandbox.run_code("x = 1", timeout_s=5, stateful=True)
    stopped = await sandbox.run_code("while True: pass", timeout_s=0.5, stateful=True)
    died = await sandbox.run_code("import os\nos._exit(7)", timeout_s=5, stateful=True)
    then = await sandbox.run_code("print('x' in dir())", timeout_s=5, stateful=True)

    assert stopped.stopped_for is StopCause.TIMEOUT
    assert (died.outcome, died.exit_code) == (ExecOutcome.CODE_FAILED, 7)
    assert then.stdout == "False\n"


@pytest.mark.parametrize("most_jobs", [2, 3], ids=["a worn slot", "a slot that could go on"])
async def test_the_folder_of_a_sandbox_at_level_ll_is_gone_when_its_provider_is_closed(
    most_jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayapp.sandbox.local.provider.MAX_JOBS_PER_SLOT", most_jobs)
    provider = LocalProvider(levels=("ll",))
    sandbox = await new(provider)
    await sandbox.write_file("a", b"")
    home = (await sandbox.run_code("import os; print(os.getcwd())", timeout_s=30)).stdout.strip()
    assert Path(home).is_dir()

    await provider.kill(sandbox.id)
    await provider.close()
    assert not Path(home).exists()


async def test_at_level_ll_code_that_needs_files_of_its_own_is_refused_with_the_way_out() -> None:
    provider = LocalProvider(levels=("ll",))

    with pytest.raises(SandboxConfigError, match=r"write files or start programs\. Allow user namespaces"):
        await provider.create(spec_of(language_of("c++"), 512), labels={}, ttl_s=60, timeout_s=60)
    await provider.close()


async def test_files_outside_the_sandbox_or_larger_than_its_disk_are_refused(sandbox: LocalSandbox) -> None:
    with pytest.raises(OSError, match="can't be written"):
        await sandbox.write_file("/usr/lib/x", b"1")
    with pytest.raises(OSError, match=r"can't be read|no file"):
        await sandbox.read_file("/etc/shadow")
    with pytest.raises(OSError, match="don't fit on its disk"):
        await sandbox.write_file("big", b"\0" * (17 << 20))


async def test_a_program_is_found_on_the_usual_path_and_never_in_the_working_folder(sandbox: LocalSandbox) -> None:
    # A script of Harbor's calls pytest by name, and the agent may have left a file of that name.
    await sandbox.write_file("mytool", b"#!/bin/sh\necho paid\n")
    missing = await sandbox.run_command(["no-such-program"], timeout_s=5)
    asked = await sandbox.run_command(["bash", "-c", "type -a mytool; echo $PATH"], timeout_s=5)

    assert (missing.exit_code, "no-such-program" in missing.stderr) == (127, True)
    assert asked.stdout == f"{USUAL_PATH}\n"


async def test_a_program_may_be_started_as_the_user_that_it_is_as_gnu_make_does(provider: LocalProvider) -> None:
    sandbox = await new(provider)
    if sandbox.isolation == "ll":
        pytest.skip("at level ll code starts no programs")
    start = "os.posix_spawn('/bin/echo', ['echo', 'hi'], {}, resetids=True)"
    others = "[os.setresuid(*ids) for ids in [(0, 0, 0), (-1, os.getuid() + 1, -1)]]"

    ran = await sandbox.run_code(f"import os\nos.waitpid({start}, 0)", timeout_s=30)
    refused = await sandbox.run_code(f"import os\n{others}", timeout_s=30)

    assert ran.stdout == "hi\n", ran
    assert "PermissionError" in str(refused.error) + refused.stderr


async def test_only_the_spec_s_environment_is_there(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    sandbox = await new(provider, SandboxSpec(env=(("WHO", "me"),)))

    done = await sandbox.run_code(
        "import os\npath = os.environ.pop('PATH')\nprint(dict(os.environ), path)", timeout_s=5
    )

    assert done.stdout == f"{{'PYTHONHASHSEED': '0', 'WHO': 'me'}} {USUAL_PATH}\n"


async def test_a_connection_that_nobody_accepted_ends_with_its_sandbox() -> None:
    spec = SandboxSpec(loopback=True)
    provider = LocalProvider(max_slots=1)
    try:
        sandbox = await provider.create(spec, labels={}, ttl_s=60, timeout_s=30)
    except IsolationUnavailableError as error:
        pytest.skip(str(error))
    sends = f"import socket\nheld = socket.create_connection(('127.0.0.1', {PORT}))\nheld.send(b'{{}}')"
    assert (await sandbox.run_code(sends.format("stale"), timeout_s=5, stateful=True)).ok
    slot = sandbox.slot
    await sandbox.kill()
    sandbox = await provider.create(spec, labels={}, ttl_s=60, timeout_s=30)
    assert sandbox.slot is slot

    async with asyncio.timeout(60), sandbox.loopback() as loopback:
        assert (await sandbox.run_code(sends.format("new"), timeout_s=5)).ok
        with await loopback.accept() as connection:
            assert await asyncio.get_running_loop().sock_recv(connection, 99) == b"new"
    await provider.close()


async def test_a_call_can_be_cancelled_at_any_moment_and_nothing_stays_open(sandbox: LocalSandbox) -> None:
    """Before it began, while it runs, as its answer arrives, and after."""
    for _ in range(3):  # by then all that stays open anyway is
        await sandbox.run_code("print(1)", timeout_s=5)
    gc.collect()  # sockets that earlier tests left must not be closed in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    ends: Counter[str] = Counter()

    for moment in range(60):
        running = asyncio.create_task(sandbox.run_code("print(1)", timeout_s=5))
        await asyncio.wait({running}, timeout=moment * 0.0002 if moment < 55 else None)
        running.cancel()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        ends[type(outcome).__name__] += 1

    assert ends.keys() == {"CancelledError", "ExecResult"}
    assert (await sandbox.run_code("print(1)", timeout_s=5)).stdout == "1\n"
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


async def test_killing_a_sandbox_ends_what_runs_in_it_and_is_idempotent(provider: LocalProvider) -> None:
    sandbox = await new(provider)
    running = asyncio.create_task(sandbox.run_code("while True: pass", timeout_s=60))
    await begun(sandbox)

    async with asyncio.timeout(60):
        await sandbox.kill()
        await sandbox.kill()
        assert (await running).stopped_for is StopCause.KILLED

    assert not await sandbox.alive()
    with pytest.raises(SandboxGoneError, match="has ended"):
        await sandbox.run_code("pass", timeout_s=5)


async def test_only_a_sandbox_that_left_no_trace_passes_its_waiting_children_on(provider: LocalProvider) -> None:
    first = await new(provider)
    in_namespaces = first.isolation.startswith("ns")
    await first.kill()
    kept = []
    for code in ("print(1)", "import os; os.mkdir('left')", "import os; os.setxattr('.', 'user.left', b'1')"):
        sandbox = await new(provider)
        seen = await sandbox.run_code("import os; print(os.listdir(), os.listxattr('.'))", timeout_s=5)
        await sandbox.run_code(code, timeout_s=5)
        waiting = await sandbox.slot.own_processes()
        await sandbox.kill()
        kept.append(waiting == await sandbox.slot.own_processes())

        assert seen.stdout in ("[] []\n", ""), seen  # at level ll code can't list the folder

    assert kept == [True, False, False] if in_namespaces else [True, True, True]  # at level ll nothing can be left


async def test_a_folder_passed_on_has_the_size_that_the_next_sandbox_asks_for(provider: LocalProvider) -> None:
    for disk_mib, num_files, outcome in ((8, 6, ExecOutcome.OK), (2, 3, ExecOutcome.CODE_FAILED)):
        before = await new(provider, SandboxSpec(disk_mib=4))
        assert (await before.run_code("pass", timeout_s=5)).ok
        await before.kill()
        sandbox = await new(provider, SandboxSpec(disk_mib=disk_mib))
        fill = f"for name in range({num_files}): open(f'{{name}}', 'wb').write(bytes(1 << 20))"
        filled = await sandbox.run_code(fill, timeout_s=5)
        await sandbox.kill()

        if before.isolation.startswith("ns"):  # at level ll code can't write
            assert filled.outcome is outcome


async def test_more_sandboxes_than_slots_are_a_quota_error(provider: LocalProvider) -> None:
    await new(provider)
    await new(provider)

    with pytest.raises(SandboxQuotaError, match="all 2 local sandboxes are in use"):
        await new(provider)


async def test_the_memory_of_the_whole_tree_is_bounded(provider: LocalProvider) -> None:
    sandbox = await new(provider, SandboxSpec(memory_mib=64))
    one = await sandbox.run_code("x = b'x' * (200 << 20)", timeout_s=20)

    assert one.error.startswith("MemoryError")
    if sandbox.isolation == "ll":
        return  # processes are refused there
    code = (
        "import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        x = b'x' * (40 << 20)\n"
        "        time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    together = await sandbox.run_code(code, timeout_s=20)
    assert together.stopped_for is StopCause.MEMORY
    assert together.duration_s < 15


async def test_preloaded_packages_can_be_used(provider: LocalProvider) -> None:
    sandbox = await new(provider, SandboxSpec(packages=("numpy",)))

    report = await sandbox.call_function(
        "import numpy as np\nimport numpy.polynomial\ndef f(x): return np.linalg.inv(np.array(x)).tolist()",
        "f",
        [[[[2.0, 0.0], [0.0, 4.0]]]],
        timeout_s=10,
    )

    assert report.calls[0].value == [[0.5, 0.0], [0.0, 0.25]], report


async def test_a_package_below_tmp_is_there_read_only_in_a_tmp_of_the_sandboxs_own(
    provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given: an environment below /tmp, with a space in its path; the sandbox has files of its own
    package = tmp_path / "a b" / "site-packages" / "belowtmp"
    assert str(package).startswith("/tmp/")
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("here = __file__")
    (package / "later.py").write_text("value = 7")
    monkeypatch.syspath_prepend(package.parent)
    sandbox = await new(provider, SandboxSpec(packages=("belowtmp",)))
    await sandbox.write_file("own", b"1")

    # when: it is imported in part; something writes to /tmp; another execution imports again
    code = (
        "import os, belowtmp\n"
        "def f():\n"
        "    import belowtmp.later\n"
        "    try:\n"
        "        open('/tmp/left', 'w').close()\n"
        "    except PermissionError:\n"
        "        pass\n"
        "    for path in (belowtmp.here, os.path.dirname(belowtmp.here) + '/new'):\n"
        "        try:\n"
        "            open(path, 'a')\n"
        "        except OSError:\n"
        "            continue\n"
        "        return 'writable'\n"
        "    return belowtmp.later.value\n"
    )
    calls = [(await sandbox.call_function(code, "f", [[]], timeout_s=5)).calls[0] for _ in range(4)]
    script = await sandbox.run_code(f"{code}print(f())", timeout_s=5)

    # then
    assert [call.value for call in calls] == [7] * 4, calls
    assert script.stdout == "7\n"


async def test_a_package_finds_the_files_of_what_it_imported_and_of_nothing_else(
    provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"outer": "import needed, single", "needed": "", "unnamed": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        (tmp_path / name / "data.txt").write_text("7")
    (tmp_path / "single.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    sandbox = await new(provider, SandboxSpec(packages=("outer",)))
    code = (
        "import os, needed, single\n"
        "def f(name):\n"
        "    folder = os.path.dirname(os.path.dirname(needed.__file__))\n"
        "    return open(os.path.join(folder, name, 'data.txt')).read()\n"
    )

    report = await sandbox.call_function(code, "f", [["needed"], ["unnamed"]], timeout_s=5)

    assert [call.value for call in report.calls] == ["7", None], report


async def test_a_package_that_is_not_there_is_a_config_error(provider: LocalProvider) -> None:
    with pytest.raises(SandboxConfigError, match="nosuchpackage"):
        await new(provider, SandboxSpec(packages=("nosuchpackage",)))


async def test_a_zygote_that_dies_is_a_gone_sandbox_and_the_next_one_is_new(provider: LocalProvider) -> None:
    sandbox = await new(provider)
    running = asyncio.create_task(sandbox.run_code("while True: pass", timeout_s=60))
    await begun(sandbox)
    sandbox.slot.close()

    with pytest.raises(SandboxGoneError):
        async with asyncio.timeout(60):
            await running
    assert not await sandbox.alive()
    await sandbox.kill()
    assert (await (await new(provider)).run_code("print(1)", timeout_s=5)).stdout == "1\n"

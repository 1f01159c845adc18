"""Checks that every sandbox provider must pass: rayapp's own providers, remote services, and providers that you write.

    for check in CHECKS: await check(provider)          each makes its sandboxes and ends them

`tests/contracts/` runs them over the local provider and over the real SDKs against stub servers, `tests/live/` against
the services themselves. A check that fails raises AssertionError.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction, signature

from rayapp.core.errors import SandboxConfigError, SandboxError, SandboxGoneError
from rayapp.core.protocols import Sandbox, SandboxProvider
from rayapp.core.types import ExecOutcome, SandboxSpec, StopCause
from rayapp.sandbox.loopback import Accept, loopback_of

Check = Callable[[SandboxProvider], Awaitable[None]]
LABELS = {"rayapp-contract": "yes"}
_READY_S = 90.0


@asynccontextmanager
async def made(provider: SandboxProvider, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
    """Context manager with a sandbox, which is ended after the block."""
    sandbox = await provider.create(spec or SandboxSpec(), labels=LABELS, ttl_s=300.0, timeout_s=_READY_S)
    try:
        yield sandbox
    finally:
        await sandbox.kill()


async def code_prints_reads_and_ends(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        result = await sandbox.run_code("print('got', input())", timeout_s=20, stdin="a line\n")
        assert (result.outcome, result.exit_code, result.stdout) == (ExecOutcome.OK, 0, "got a line\n"), result
        assert result.isolation, "a result must name the isolation"
        assert 0 <= result.duration_s < 20


async def code_that_raises_is_a_result_and_no_error(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        result = await sandbox.run_code("import sys\nprint('so far')\nraise ValueError('no')", timeout_s=20)
        assert (result.outcome, result.exit_code, result.error) == (ExecOutcome.CODE_FAILED, 1, "ValueError: no")
        assert result.stdout == "so far\n"
        assert "Traceback" in result.stderr


async def an_exit_status_comes_back(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        result = await sandbox.run_code("raise SystemExit(3)", timeout_s=20)
        assert (result.outcome, result.exit_code) == (ExecOutcome.CODE_FAILED, 3), result


async def stateless_runs_share_no_names(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        await sandbox.run_code("kept = 1", timeout_s=20)
        result = await sandbox.run_code("print('kept' in globals())", timeout_s=20)
        assert result.stdout == "False\n", result


async def stateful_runs_share_names(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        await sandbox.run_code("kept = 41", timeout_s=30, stateful=True)
        result = await sandbox.run_code("print(kept + 1)", timeout_s=30, stateful=True)
        assert (result.outcome, result.stdout) == (ExecOutcome.OK, "42\n"), result
        failed = await sandbox.run_code("1 / 0", timeout_s=30, stateful=True)
        assert failed.outcome is ExecOutcome.CODE_FAILED, failed
        assert failed.error.startswith("ZeroDivisionError"), failed


async def an_endless_loop_is_stopped_in_time(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        started = time.monotonic()
        result = await sandbox.run_code("while True: pass", timeout_s=1.0)
        assert (result.outcome, result.stopped_for) == (ExecOutcome.CODE_STOPPED, StopCause.TIMEOUT), result
        assert time.monotonic() - started < 15
        assert await sandbox.alive(), "the code hung, not the sandbox"


async def a_flood_of_output_is_cut_and_stopped(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        code = "while True: print('x' * 100)"
        result = await sandbox.run_code(code, timeout_s=20, max_output_bytes=1000)
        assert (result.outcome, result.stopped_for) == (ExecOutcome.CODE_STOPPED, StopCause.OUTPUT), result
        assert result.truncated
        assert len(result.stdout.encode()) <= 1000


async def a_flood_past_the_watcher_is_the_codes_failure(provider: SandboxProvider) -> None:
    """Code may flood the output of the process that watches it. Then the watcher's report is lost, which counts as the
    code's failure.
    """
    code = (
        "import os\n"
        "try:\n"
        "    out = os.open(f'/proc/{os.getppid()}/fd/1', os.O_WRONLY)\n"
        "    for _ in range(400):\n"
        "        os.write(out, (b'x' * 99 + b'\\n') * 1000)\n"
        "except OSError:\n"
        "    pass\n"
        "raise SystemExit(3)\n"
    )
    async with made(provider) as sandbox:
        result = await sandbox.run_code(code, timeout_s=20)
        assert result.outcome is ExecOutcome.CODE_FAILED, result
        assert (await sandbox.run_code("print('after')", timeout_s=20)).stdout == "after\n"


async def a_function_is_called_on_each_input(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        code = "def f(x, y):\n    return (x, [y], {x: 1.5})"
        report = await sandbox.call_function(code, "f", [[1, "ä"], [True, None], [2**80, b"\xff"]], timeout_s=20)
        assert report.exec.ok, report
        values = [call.value for call in report.calls]
        assert values == [(1, ["ä"], {1: 1.5}), (True, [None], {True: 1.5}), (2**80, [b"\xff"], {2**80: 1.5})]
        assert type(values[1][0]) is bool  # type: ignore[index]


async def calls_that_fail_do_not_fail_the_others(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        report = await sandbox.call_function("def f(x):\n    return 1 / x", "f", [[1], [0], [2]], timeout_s=20)
        assert [call.ok for call in report.calls] == [True, False, True], report
        assert report.calls[1].error.startswith("ZeroDivisionError")


async def a_definition_that_fails_gives_one_failed_call_per_input(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        report = await sandbox.call_function("def f(x: return x", "f", [[1], [2]], timeout_s=20)
        assert report.exec.outcome is ExecOutcome.CODE_FAILED, report
        assert [call.ok for call in report.calls] == [False, False]


async def a_function_that_hangs_keeps_the_results_before_it(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        code = "def f(x):\n    while x: pass\n    return 'quick'"
        report = await sandbox.call_function(code, "f", [[0], [1], [0]], timeout_s=1.5)
        assert report.exec.stopped_for is StopCause.TIMEOUT, report
        assert [call.ok for call in report.calls] == [True, False, False]


async def an_object_is_no_value(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        code = "class Equal(int):\n    def __eq__(self, other): return True\ndef f(): return Equal()"
        report = await sandbox.call_function(code, "f", [[]], timeout_s=20)
        assert not report.calls[0].ok, report


async def a_process_left_behind_ends_with_its_run(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        code = (
            "import os, time\n"
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    if os.fork() == 0:\n"
            "        time.sleep(60)\n"
            "    os._exit(0)\n"
        )
        started = time.monotonic()
        result = await sandbox.run_code(code, timeout_s=20)
        assert time.monotonic() - started < 15, "the call waited for the daemon"
        assert result.outcome in (ExecOutcome.OK, ExecOutcome.CODE_FAILED), result  # level ll (Landlock) forbids fork


async def a_command_runs_with_its_input(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        result = await sandbox.run_command(["cat"], timeout_s=20, stdin="through")
        assert (result.outcome, result.stdout) == (ExecOutcome.OK, "through"), result
        failed = await sandbox.run_command(["sh", "-c", "echo out; echo err >&2; exit 7"], timeout_s=20)
        assert (failed.exit_code, failed.stdout, failed.stderr) == (7, "out\n", "err\n"), failed


async def files_go_in_and_come_out_up_to_a_limit(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        data = bytes(range(256)) * 300
        await sandbox.write_file("folder.bin", data, timeout_s=30)
        assert await sandbox.read_file("folder.bin", timeout_s=30) == data
        assert await sandbox.read_file("folder.bin", max_bytes=10, timeout_s=30) == data[:10]
        try:
            await sandbox.read_file("no such file", timeout_s=30)
        except FileNotFoundError:
            return
        raise AssertionError("a file that is not there has to raise FileNotFoundError")


async def the_environment_is_the_specs(provider: SandboxProvider) -> None:
    async with made(provider, SandboxSpec(env=(("MODE", "test"),))) as sandbox:
        result = await sandbox.run_code("import os; print(os.environ.get('MODE'), len(os.environ) < 12)", timeout_s=20)
        assert result.stdout == "test True\n", result


async def texts_are_hashed_alike_in_every_sandbox(provider: SandboxProvider) -> None:
    """Check that sandboxes have the same hash seed. Otherwise the order of a set of strings, and so a verdict, would
    depend on the sandbox.
    """
    outputs = []
    for _ in range(2):
        async with made(provider) as sandbox:
            called = await sandbox.call_function("def f(): return hash('text')", "f", [[]], timeout_s=20)
            printed = (await sandbox.run_code("print(hash('text'))", timeout_s=20)).stdout
            command = (await sandbox.run_command(["sh", "-c", "echo $PYTHONHASHSEED"], timeout_s=20)).stdout
            outputs.append((called.calls[0].value, printed, command))
    assert outputs[0] == outputs[1], outputs
    assert outputs[0][1:] == (f"{outputs[0][0]}\n", "0\n"), outputs


async def what_lies_in_its_folder_replaces_no_module(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        for name in ("json.py", "base64.py", "sitecustomize.py"):
            await sandbox.write_file(name, b"raise SystemExit('planted')", timeout_s=30)
        result = await sandbox.run_code("import json; print(json.dumps('ran'))", timeout_s=20)
        assert result.stdout == '"ran"\n', result


async def a_script_imports_what_lies_beside_it_as_it_is_now(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        for value in (1, 2):
            await sandbox.write_file("beside.py", f"value = {value}".encode(), timeout_s=30)
            result = await sandbox.run_code("import beside; print(beside.value)", timeout_s=20)
            assert result.stdout == f"{value}\n", result


async def ten_megabytes_of_code_are_refused_and_cost_nothing(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        result = await sandbox.run_code("x = 1\n" * 1_700_000, timeout_s=20)
        assert result.outcome is ExecOutcome.CODE_FAILED, result.error[:200]
        assert "characters" in result.error


async def killed_is_gone_and_killing_twice_is_fine(provider: SandboxProvider) -> None:
    sandbox = await provider.create(SandboxSpec(), labels=LABELS, ttl_s=300.0, timeout_s=_READY_S)
    assert await sandbox.alive()
    await sandbox.extend(200.0)
    await sandbox.kill()
    await sandbox.kill()
    assert not await sandbox.alive()
    try:
        await sandbox.run_code("print('still here')", timeout_s=10)
    except SandboxGoneError:
        return
    raise AssertionError("a sandbox that was killed has to raise SandboxGoneError")


async def a_list_holds_those_with_all_labels(provider: SandboxProvider) -> None:
    mine = {**LABELS, "which": f"list of {time.time_ns()}"}
    sandbox = await provider.create(SandboxSpec(), labels=mine, ttl_s=300.0, timeout_s=_READY_S)
    try:
        assert [found async for found in provider.list(mine)] == [sandbox.id]
        assert [found async for found in provider.list({**mine, "other": "x"})] == []
        await provider.kill(sandbox.id)
        await provider.kill(sandbox.id)
        assert [found async for found in provider.list(mine)] == []
    finally:
        await sandbox.kill()


async def a_call_that_is_cancelled_leaves_a_sandbox_that_can_be_ended(provider: SandboxProvider) -> None:
    async with made(provider) as sandbox:
        running = asyncio.ensure_future(sandbox.run_code("import time; time.sleep(30)", timeout_s=60))
        await asyncio.sleep(0.3)
        running.cancel()
        try:
            await running
        except (asyncio.CancelledError, SandboxError):
            return
        raise AssertionError("a cancelled run_code call has to raise CancelledError or SandboxError, but it returned")


_CONNECTS = """
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20) for _ in range(4)]
texts = [f"{number} " + str(number) * 200_000 for number in range(3)]
for one, text in zip(held, texts):
    one.sendall(text.encode() + b"\\n")
files = [one.makefile("rb") for one in held]
print([file.readline().decode().strip() == text[::-1] for file, text in zip(files, texts)])
held[3].sendall(b"bye\\n")
print(files[3].readline(), files[3].read())
"""


async def what_programs_connect_to_on_their_loopback_is_accepted_here(provider: SandboxProvider) -> None:
    async with made(provider, SandboxSpec(loopback=True)) as sandbox:
        try:
            way = loopback_of(sandbox)
        except SandboxConfigError:
            return  # not every provider has a loopback
        async with way as loopback, asyncio.TaskGroup() as group:
            answering = group.create_task(_answer_backwards(loopback.accept, 4))
            run = sandbox.run_command(["python3", "-c", _CONNECTS, str(loopback.port)], timeout_s=30)
            result = await run
            assert result.stdout == "[True, True, True]\nb'eyb\\n' b''\n", result
            assert await answering == [3, 200_002, 200_002, 200_002], "and a program that ends hangs up"


async def _answer_backwards(accept: Accept, number: int) -> list[int]:
    """Accept `number` connections, answer the first line of each with the reversed line, and return the lengths of the
    lines.
    """

    async def answer(one: socket.socket) -> int:
        reader, writer = await asyncio.open_connection(sock=one, limit=1 << 20)
        line = (await reader.readline()).strip()
        writer.write(line[::-1] + b"\n")
        if len(line) > 3:
            assert await reader.read() == b""
        writer.close()
        return len(line)

    answers = [asyncio.create_task(answer(await accept())) for _ in range(number)]
    return sorted(await asyncio.gather(*answers))


CHECKS: tuple[Check, ...] = tuple(
    each for each in list(globals().values()) if iscoroutinefunction(each) and "provider" in signature(each).parameters
)
"""Every coroutine function above that takes a provider, in their order."""

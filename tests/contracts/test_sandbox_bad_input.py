"""Bad input to sandboxes: one clear error that says what to do, of our own tree, and nothing left behind."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import ValidationError

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import (
    SandboxConfigError,
    SandboxError,
    SandboxProtocolError,
    SandboxUnavailableError,
    UserError,
)
from rayapp.core.http import MAX_WAIT_S, retry_after_s
from rayapp.core.protocols import SandboxProvider
from rayapp.core.types import ExecOutcome, SandboxSpec
from rayapp.sandbox.local.provider import LocalProvider
from rayapp.sandbox.providers import remote_providers
from rayapp.sandbox.verdict.program import read_report
from support.providers import KEY_ENV, KEYS, opened, provider_of, section_of

KINDS = list(KEYS)


@asynccontextmanager
async def any_provider(kind: str) -> AsyncIterator[SandboxProvider]:
    if kind == "local":
        provider = LocalProvider()
        yield provider
        await provider.close()
        return
    async with opened(kind) as (remote, _):
        yield remote


REMOTE = pytest.mark.parametrize("kind", KINDS)


EVERY = pytest.mark.parametrize("kind", ["local", *KINDS])


def test_an_unknown_provider_is_named_with_those_that_exist() -> None:
    with pytest.raises(ValidationError) as caught:
        SandboxConfig.model_validate({"providers": [{"type": "e3b"}]})
    for name in ("e3b", "local", "e2b", "daytona", "mcp"):
        assert f"'{name}'" in str(caught.value)


@pytest.mark.parametrize("kind", ["e2b", "daytona", "mcp"])
def test_a_missing_key_names_its_variable_before_anything_is_called(kind: str) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(KEY_ENV, raising=False)
        with pytest.raises(SandboxConfigError, match=f"the environment variable {KEY_ENV} is not set"):
            remote_providers(SandboxConfig.model_validate({"providers": [section_of(kind, "http://127.0.0.1:9")]}))


@REMOTE
async def test_a_wrong_key_says_where_the_key_is_configured(kind: str) -> None:
    async with opened(kind, key="e2b_wrong") as (provider, _):
        with pytest.raises(SandboxConfigError, match=r"key"):
            await provider.create(SandboxSpec(), labels={}, ttl_s=300, timeout_s=20)


@pytest.mark.parametrize("kind", ["local", "e2b", "kruise", "daytona"])
async def test_an_unknown_template_is_named(kind: str) -> None:
    async with any_provider(kind) as provider:
        with pytest.raises(SandboxConfigError, match="no-such-template"):
            await provider.create(SandboxSpec(template="no-such-template"), labels={}, ttl_s=300, timeout_s=20)


async def test_an_unknown_template_of_an_mcp_server_is_named_when_it_first_makes_a_sandbox() -> None:
    """Opening a session makes none: the first tool does."""
    async with opened("mcp") as (provider, _):
        sandbox = await provider.create(SandboxSpec(template="no-such-template"), labels={}, ttl_s=300, timeout_s=20)
        with pytest.raises(SandboxConfigError, match="no-such-template"):
            await sandbox.run_code("print(1)", timeout_s=10)


@EVERY
@pytest.mark.parametrize("code", [b"print(1)", None, 7], ids=["bytes", "nothing", "a number"])
async def test_code_that_is_not_text_is_the_callers_mistake(kind: str, code: object) -> None:
    async with any_provider(kind) as provider:
        sandbox = await provider.create(SandboxSpec(), labels={}, ttl_s=300, timeout_s=30)
        with pytest.raises(TypeError, match=type(code).__name__):
            await sandbox.run_code(code, timeout_s=10)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=type(code).__name__):
            await sandbox.call_function(code, "f", [[1]], timeout_s=10)  # type: ignore[arg-type]
        await sandbox.kill()


@EVERY
@pytest.mark.parametrize("code", ["print('\ud800')", "x = 1\0", "\ufeffprint(1", "print('a')\r\n\x0c)"])
async def test_text_that_is_no_program_fails_as_code_and_the_sandbox_goes_on(kind: str, code: str) -> None:
    async with any_provider(kind) as provider:
        sandbox = await provider.create(SandboxSpec(), labels={}, ttl_s=300, timeout_s=30)
        result = await sandbox.run_code(code, timeout_s=10)
        assert result.outcome is ExecOutcome.CODE_FAILED, result
        report = await sandbox.call_function(code, "f", [[1]], timeout_s=10)
        assert [call.ok for call in report.calls] == [False]
        assert (await sandbox.run_code("print(1)", timeout_s=10)).stdout == "1\n"
        await sandbox.kill()


ANSWERS = ["", "null", "[]", "{}", "7", '"x"', '{"sandboxID": 7}', '[{"id": null}]', "<html>", '{"id": {}}', "\xff\xfe"]


@REMOTE
@pytest.mark.parametrize("status", [200, 201, 204, 418])
async def test_a_service_that_answers_nonsense_gives_one_of_our_errors_that_names_the_call(
    kind: str, status: int
) -> None:
    said = {"text": ""}

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=said["text"].encode("latin-1"), status=status, content_type="application/json")

    async with serving(answer) as url:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(KEY_ENV, "key")
            provider = provider_of(kind, url)
        for said["text"] in ANSWERS:
            with pytest.raises((SandboxProtocolError, SandboxUnavailableError), match=r"\w+"):
                await provider.create(SandboxSpec(), labels={}, ttl_s=300, timeout_s=10)
            if kind != "mcp":
                await listed_or_refused(provider)
        await asyncio.wait_for(provider.close(), 60)


async def listed_or_refused(provider: SandboxProvider) -> None:
    try:
        found = [sandbox_id async for sandbox_id in provider.list({}, timeout_s=10)]
    except SandboxError:
        return
    assert found == [], "an empty list is the one answer that could be meant"


@asynccontextmanager
async def serving(answer: Callable[[web.Request], object]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)  # type: ignore[arg-type]
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("said", "meant_s"),
    [(-5, 0.0), (0.25, 0.25), (math.nan, 0.0), (math.inf, 86400.0), (10**400, 86400.0), (-math.inf, 0.0)],
)
def test_a_sandbox_whose_clock_jumps_reports_a_duration_within_reason(said: float, meant_s: float) -> None:
    report = {"status": 0, "stopped": "", "duration_s": said, "stdout": "", "stderr": "", "frames": ""}
    assert read_report(report, max_output_bytes=10).duration_s == meant_s


@pytest.mark.parametrize("said", ["soon", "nan", "-1", "", None, "Fri, 31 Dec 1999 23:59:59 GMT"])
def test_a_wait_that_makes_no_sense_is_not_kept_to_and_one_of_a_year_is_ten_minutes(said: str | None) -> None:
    assert retry_after_s(said) is None
    assert (retry_after_s("31536000"), retry_after_s("inf"), retry_after_s("2.5")) == (MAX_WAIT_S, MAX_WAIT_S, 2.5)


def test_no_deadline_depends_on_a_clock_that_can_be_set() -> None:
    """Wall clocks jump (NTP, a suspended machine, an operator). Only the store of images reads one, for files' ages."""
    folder = Path(__file__).parents[2] / "rayapp/sandbox"
    sources = [path for path in folder.rglob("*.py") if path != folder / "images" / "store.py"]
    assert len(sources) > 40
    readers = [str(path) for path in sources if "time.time(" in path.read_text() or "datetime.now" in path.read_text()]
    assert readers == []


REFUSING = """
import asyncio, sys
from rayapp.sandbox.local.levels import kernel, seccomp
from rayapp.sandbox.local.provider import LocalProvider
from rayapp.core.types import SandboxSpec

async def main():
    provider = LocalProvider(allow_unisolated="unisolated" in sys.argv)
    try:
        sandbox = await provider.create(SandboxSpec(), labels={}, ttl_s=60, timeout_s=30)
        print((await sandbox.run_code("print('ran')", timeout_s=10)).isolation)
    except Exception as error:
        print(type(error).__name__, error)
    finally:
        await provider.close()

kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
# Only user namespaces: a Python that root alone can read is shown to others by a mount, which needs none as root.
rules = {"unshare": seccomp.without_bits(0, kernel.CLONE_NEWUSER)}
rules |= {name: seccomp.refuse() for name in sys.argv[1:] if name.startswith("landlock")}
seccomp.install(seccomp.program(rules))
asyncio.run(main())
"""


def run_where_refused(*options: str) -> str:
    """What the local provider says on a node without user namespaces, and without the system calls named besides."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSING, *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_permission_for_namespaces_the_level_that_needs_none_is_used_and_said() -> None:
    assert run_where_refused() == "ll"


def test_without_any_isolation_nothing_runs_and_each_refused_step_is_named() -> None:
    said = run_where_refused("landlock_create_ruleset")
    assert said.startswith("IsolationUnavailableError this node offers no isolation"), said
    for part in ("ns+proc: ", "ns: ", "ll: ", "rayapp doctor", "allow_unisolated"):
        assert part in said
    assert issubclass(SandboxConfigError, UserError), "the run ends with this message, without a traceback"


def test_code_runs_without_isolation_only_where_that_was_spelled_out_and_says_so() -> None:
    assert run_where_refused("landlock_create_ruleset", "unisolated") == "unisolated"

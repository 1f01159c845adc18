"""Every program of the battery at every level this machine has: once as the user who runs the tests, in this process,
and once as an ordinary user. An ordinary user's tests run it once.

`support.isolation.try_attack` runs a program of `battery/*.yaml`, then an honest one, then looks at what must not have
changed. Without isolation the same programs must get somewhere, or they would
prove nothing; that is tried only as an ordinary user.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rayapp.core.errors import IsolationUnavailableError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.local.provider import LEVELS, LOOPBACK_LEVELS, LocalProvider
from rayapp.sandbox.local.sandbox import LocalSandbox
from support import isolation
from support.images import MachineImages
from support.isolation import Attack, Canary, load_attacks, try_attack
from support.levels import EACH_LEVEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

ATTACKS = load_attacks()
QUICK = ("files", "kernel", "network", "processes", "secrets")
REST = pytest.param(LOOPBACK_LEVELS[1], marks=pytest.mark.long)
"""Differs from one level in the loopback and from another in /proc, both of which are tried on every run."""
ROOT = Path(__file__).parents[2]
AS_USER = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from rayapp.sandbox.local.inside.privileges import leave_root
leave_root([sys.base_prefix, sys.prefix, {str(ROOT)!r}])
assert os.getuid() != 0
os.chdir("/")
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
"""
START = f"""
import asyncio, dataclasses, json, sys
sys.path[:0] = {[str(ROOT), str(ROOT / "tests")]!r}
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.local.provider import LocalProvider
from support.isolation import Canary, load_attacks, try_attack
"""
ISOLATED = f"""{START}
async def main():
    provider = LocalProvider(levels=(sys.argv[1],))
    sandbox = await provider.create(SandboxSpec(), labels={{}}, ttl_s=3600, timeout_s=60)
    async with Canary(sandbox.slot) as canary:
        attacks = [attack for attack in load_attacks() if attack.is_for(sandbox.isolation)]
        checks = [await try_attack(sandbox, attack, canary) for attack in attacks]
    print(json.dumps([sandbox.isolation, sandbox.slot.uid, [dataclasses.asdict(check) for check in checks]]))
    await provider.close()

asyncio.run(main())
"""
UNISOLATED = f"""{START}
async def main():
    provider = LocalProvider(levels=(), allow_unisolated=True)
    found = {{}}
    for attack in load_attacks():
        if attack.unisolated == "must-reach":
            sandbox = await provider.create(SandboxSpec(), labels={{}}, ttl_s=60, timeout_s=60)
            async with Canary(sandbox.slot) as canary:
                report = await sandbox.call_function(attack.source, "attack", [[canary.facts]], timeout_s=10)
            found[attack.name] = [report.exec.isolation, report.calls[0].value, report.calls[0].error]
            await sandbox.kill()
    await provider.close()
    print(json.dumps(found))

asyncio.run(main())
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=(*EACH_LEVEL, LOOPBACK_LEVELS[0], REST))
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[LocalSandbox]:
    """One sandbox for all programs: what one of them breaks, the next one finds broken."""
    provider = LocalProvider(levels=(request.param,))
    try:
        yield await provider.create(SandboxSpec(), labels={}, ttl_s=3600, timeout_s=60)
    except IsolationUnavailableError as error:
        pytest.skip(str(error))
    finally:
        await provider.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def canary(sandbox: LocalSandbox) -> AsyncIterator[Canary]:
    async with Canary(sandbox.slot) as canary:
        yield canary


@pytest.mark.parametrize("attack", ATTACKS, ids=[f"{attack.family}: {attack.name}" for attack in ATTACKS])
async def test_the_sandbox_holds_and_the_next_honest_program_passes(
    attack: Attack, sandbox: LocalSandbox, canary: Canary
) -> None:
    if not attack.is_for(sandbox.isolation):
        pytest.skip(attack.because)

    check = await try_attack(sandbox, attack, canary)

    assert check.passed, check.found
    assert await sandbox.alive()


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("level", [*LEVELS, pytest.param(LOOPBACK_LEVELS[0], marks=pytest.mark.long), REST])
def test_every_attack_is_held_for_an_ordinary_user(level: str) -> None:
    done = run_python(ISOLATED, level, as_user=True)

    isolation, uid, checks = json.loads(done.stdout)
    assert isolation == level
    assert uid > 0
    assert len(checks) >= 60
    assert [check for check in checks if not check["passed"]] == []


@pytest.mark.usefixtures("namespaces")
def test_without_isolation_the_attacks_get_somewhere() -> None:
    """Or an empty list would prove nothing about the levels that hold."""
    done = run_python(UNISOLATED, as_user=True)

    found = json.loads(done.stdout)
    assert len(found) >= 25
    assert {isolation for isolation, _, _ in found.values()} == {"unisolated"}
    assert {name: error for name, (_, reached, error) in found.items() if not reached} == {}


def run_python(program: str, *args: str, as_user: bool) -> subprocess.CompletedProcess[str]:
    """As an ordinary user where the tests run as root: a broken sandbox must not be able to change this machine."""
    programs = [AS_USER, program] if as_user and os.getuid() == 0 else [program]
    done = subprocess.run(
        [sys.executable, "-c", *programs, *args], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.stdout, done.stderr
    return done


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("levels", [("ns+proc", "ns"), ("ll",)], ids=["namespaces", "ll"])
async def test_a_process_and_a_file_that_stay_after_an_execution_are_found(
    levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() != 0:
        pytest.skip("processes are counted only where sandboxes have a user of their own")
    monkeypatch.setattr(isolation, "_SETTLED_AFTER_S", 0.5)
    provider = LocalProvider(levels=levels)
    try:
        sandbox = await provider.create(SandboxSpec(), labels={}, ttl_s=3600, timeout_s=60)
        async with Canary(sandbox.slot) as canary:
            await sandbox.run_code("print(1)", timeout_s=30)
            assert await canary.damage() == []
            # The interpreter of a session lives on after its execution, as a leftover would.
            await sandbox.run_code("x = 1", timeout_s=30, stateful=True)
            while_no_child_waits = await canary.damage()
            await sandbox.run_code("print(2)", timeout_s=30)
            (Path(str(canary.facts["folder"])) / "planted").touch()
            found = await canary.damage()
    finally:
        await provider.close()

    assert while_no_child_waits == ["processes of the sandbox's user: 0 before, 1 after"]
    assert [each.partition(":")[0] for each in found] == ["files", "processes of the sandbox's user"]
    assert "0 before, 1 after" in found[1]


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("kind", "families", "levels"),
    [
        ("plain", QUICK, ("ns+proc", "ns")),
        pytest.param("plain", QUICK, ("ns",), marks=pytest.mark.long),
        pytest.param("python", None, ("ns+proc", "ns"), marks=pytest.mark.long),
    ],
    ids=["no Python of its own", "without /proc", "its own Python"],
)
async def test_sandboxes_on_images_hold_too(
    kind: str, families: tuple[str, ...] | None, levels: tuple[str, ...], images: MachineImages
) -> None:
    provider = images.provider(getattr(images, kind), levels=levels)
    try:
        sandbox = await provider.create(SandboxSpec(), labels={}, ttl_s=3600, timeout_s=60)
        attacks = [each for each in ATTACKS if each.is_for(sandbox.isolation) and each.on_image != "never"]
        attacks = [each for each in attacks if families is None or each.family in families]
        async with Canary(sandbox.slot) as canary:
            checks = [await try_attack(sandbox, attack, canary) for attack in attacks]
    finally:
        await provider.close()

    assert [check for check in checks if not check.passed] == []
    assert len(checks) > 40

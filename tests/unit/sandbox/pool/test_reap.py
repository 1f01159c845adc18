"""`rayapp sandbox reap` ends exactly the sandboxes with a run's labels."""

from __future__ import annotations

from rayapp.core.errors import SandboxUnavailableError
from rayapp.sandbox.leases import RUN_LABEL
from rayapp.sandbox.pool.reap import labels_to_reap, reap
from support.fake_sandboxes import FakeProvider

MINE = {RUN_LABEL: "run-1", "rayapp-host": "here"}


async def test_a_dry_run_names_and_ends_nothing() -> None:
    provider = FakeProvider()
    provider.living |= {"a": MINE, "b": {RUN_LABEL: "run-2"}}

    found = [each async for each in reap({"fake": provider}, labels_to_reap("run-1"), dry_run=True)]

    assert [(each.sandbox_id, each.ended, each.error) for each in found] == [("a", False, None)]
    assert set(provider.living) == {"a", "b"}


async def test_one_provider_that_cannot_be_listed_does_not_spare_the_next() -> None:
    broken, sound = FakeProvider(name="broken"), FakeProvider(name="sound")
    broken.fail_next("list", SandboxUnavailableError("502"))
    sound.living |= {"a": MINE, "of another run": {RUN_LABEL: "run-2"}}

    found = [each async for each in reap({"broken": broken, "sound": sound}, labels_to_reap("run-1"))]

    assert [(each.provider, each.ended) for each in found] == [("broken", False), ("sound", True)]
    assert isinstance(found[0].error, SandboxUnavailableError)
    assert set(sound.living) == {"of another run"}

"""`rayapp sandbox reap` against E2B's protocol on loopback: the sandboxes that it ends, its output, its exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rayapp.cli.main import run
from rayapp.sandbox.leases import APP_LABEL, APP_NAME, RUN_LABEL
from support.stubs.e2b_stub import API_KEY, E2BStub

TEMPLATE = "base"


@pytest.fixture
def stub() -> Iterator[E2BStub]:
    server = E2BStub()
    with server.running_in_thread():
        yield server


@pytest.fixture
def config(stub: E2BStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("E2B_API_KEY", API_KEY)
    file = tmp_path / "run.yaml"
    file.write_text(f"sandbox:\n  providers: [{{type: e2b, api_url: '{stub.url}', sandbox_url: '{stub.url}'}}]\n")
    return str(file)


@pytest.fixture
def sandboxes(stub: E2BStub) -> dict[str, str]:
    """Ids by name: two of one run, one of another, one that is not ours."""
    app = {APP_LABEL: APP_NAME}
    labels = {
        "first": app | {RUN_LABEL: "mine"},
        "second": app | {RUN_LABEL: "mine"},
        "other run": app | {RUN_LABEL: "other"},
        "not ours": {"team": "web"},
    }
    return {name: stub.boxes.create(template=TEMPLATE, labels=own, ttl_s=600).id for name, own in labels.items()}


def living(stub: E2BStub, sandboxes: dict[str, str]) -> set[str]:
    return {name for name, sandbox_id in sandboxes.items() if stub.boxes.get(sandbox_id) is not None}


def test_it_ends_the_sandboxes_of_one_run_with_a_line_each_and_without_a_run_those_of_every_run(
    stub: E2BStub, config: str, sandboxes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sandbox", "reap", "--config", config, "--run", "mine"]) == 0

    assert living(stub, sandboxes) == {"other run", "not ours"}
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"e2b {sandboxes[name]} ended" for name in ("first", "second"))
    assert run(["sandbox", "reap", "--config", config, "--yes"]) == 0
    assert living(stub, sandboxes) == {"not ours"}
    assert run(["sandbox", "reap", "--config", config, "--run", "mine"]) == 0
    assert "no sandbox to end at e2b" in capsys.readouterr().err


def test_a_dry_run_ends_nothing_and_says_what_it_would(
    stub: E2BStub, config: str, sandboxes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sandbox", "reap", "--config", config, "--dry-run", "--run", "other"]) == 0

    assert living(stub, sandboxes) == set(sandboxes)
    assert capsys.readouterr().out == f"e2b {sandboxes['other run']} would be ended\n"


def test_a_sandbox_that_cannot_be_ended_is_named_and_exits_with_1(
    stub: E2BStub, config: str, sandboxes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    # More failures than the SDK's own attempts.
    stub.faults.next("kill", *["500"] * 10)

    assert run(["sandbox", "reap", "--config", config, "--run", "other"]) == 1

    assert f"e2b {sandboxes['other run']} could not be ended: " in capsys.readouterr().err


def test_a_wrong_key_exits_with_2(
    config: str, sandboxes: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "1" * 40)

    assert run(["sandbox", "reap", "--config", config, "--run", "mine"]) == 2

    assert "e2b: can't be listed: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "set E2B_API_KEY or DAYTONA_API_KEY"),
        (["--provider", "daytona"], "the environment variable DAYTONA_API_KEY is not set"),
        (["--provider", "local"], "provider 'local' can't list"),
        (["--provider", "nonsense"], "provider 'nonsense' is unknown"),
        (["--config", "local.yaml"], "the config has no e2b or daytona provider"),
    ],
)
def test_where_nothing_can_be_listed_it_says_why(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable in ("E2B_API_KEY", "DAYTONA_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("local.yaml").write_text("sandbox:\n  providers: [{type: local}]\n")

    assert run(["sandbox", "reap", *words]) == 2
    assert told in capsys.readouterr().err

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


def test_it_ends_the_sandboxes_of_one_run_with_a_line_each(
    stub: E2BStub, config: str, sandboxes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sandbox", "reap", "--config", config, "--run", "mine"]) == 0

    assert living(stub, sandboxes) == {"other run", "not ours"}
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"e2b {sandboxes[name]} ended" for name in ("first", "second"))


def test_without_a_run_it_ends_those_of_every_run_and_nobody_elses(
    stub: E2BStub, config: str, sandboxes: dict[str, str]
) -> None:
    assert run(["sandbox", "reap", "--config", config, "--yes"]) == 0

    assert living(stub, sandboxes) == {"not ours"}


def test_a_dry_run_ends_nothing_and_says_what_it_would(
    stub: E2BStub, config: str, sandboxes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sandbox", "reap", "--config", config, "--dry-run", "--run", "other"]) == 0

    assert living(stub, sandboxes) == set(sandboxes)
    assert capsys.readouterr().out == f"e2b {sandboxes['other run']} would be ended\n"


def test_nothing_to_end_is_said_and_no_failure(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sandbox", "reap", "--config", config, "--run", "mine"]) == 0

    said = capsys.readouterr()
    assert said.out == ""
    assert "no sandbox to end at e2b" in said.err


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


def test_without_any_key_the_error_says_which_to_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("E2B_API_KEY", "DAYTONA_API_KEY"):
        monkeypatch.delenv(variable, raising=False)

    assert run(["sandbox", "reap"]) == 2
    assert "set E2B_API_KEY or DAYTONA_API_KEY" in capsys.readouterr().err

    assert run(["sandbox", "reap", "--provider", "daytona"]) == 2
    assert "the environment variable DAYTONA_API_KEY is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "reason"), [("local", "can't list"), ("mcp", "can't list"), ("nonsense", "is unknown")]
)
def test_a_provider_without_a_list_is_refused(kind: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sandbox", "reap", "--provider", kind]) == 2

    assert f"provider {kind!r} {reason}" in capsys.readouterr().err


def test_a_config_with_only_local_sandboxes_has_nothing_to_reap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("sandbox:\n  providers: [{type: local}]\n")

    assert run(["sandbox", "reap", "--config", str(file)]) == 2

    assert "the config has no e2b or daytona provider" in capsys.readouterr().err

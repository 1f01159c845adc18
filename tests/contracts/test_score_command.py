"""`rayapp score` on real sandboxes: known answers get their known rewards, as JSON lines."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
import yaml

from rayapp.cli.main import run
from support.stubs import e2b_stub

INSERTION_SORT = """
def sort_numbers(xs):
    ys = []
    for x in xs:
        i = 0
        while i < len(ys) and ys[i] <= x:
            i += 1
        ys.insert(i, x)
    return ys

print(sort_numbers(int(input())))
"""


# reward, status, and whether every test passed, for completions of sort_numbers that go on from its prefill
COMPLETIONS = {
    "\n    return xs\n": (0.1, "scored"),
    "\n    return sorted(xs)\n": (-1.0, "banned"),
    "\n    return sort(\n": (-1.0, "syntax_error"),
    "\n    return nothing_like_it\n": (-1.0, "error"),
    "\n    while True:\n        pass\n": (-1.0, "timeout"),
    "\n    raise SystemExit(0)\n": (-1.0, "error"),
}


def score(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert run(["score", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_right_answer_in_a_file_solves_the_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answer.py"
    path.write_text(INSERTION_SORT)

    [line] = score(capsys, "sort_numbers", str(path), "--seed", "7")

    assert line["terms"] == {"pass_rate": 1.0, "solved": 1.0, "raised_rate": 0.0}
    assert (line["reward"], line["status"], line["valid"], line["file"]) == (1.0, "scored", True, str(path))


def test_completions_of_a_jsonl_file_are_scored_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps({"completion": text}) for text in COMPLETIONS))

    lines = score(capsys, "sort_numbers", str(path))

    assert [(line["reward"], line["status"]) for line in lines] == list(COMPLETIONS.values())
    assert [line["line"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_standard_input_is_a_file_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(INSERTION_SORT))

    [line] = score(capsys, "sort_numbers", "-")

    assert (line["file"], line["reward"]) == ("-", 1.0)


async def test_the_configs_provider_runs_what_is_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = e2b_stub.E2BStub()
    (tmp_path / "answer.py").write_text(INSERTION_SORT)
    monkeypatch.setenv("RAYAPP_TEST_KEY", e2b_stub.API_KEY)
    async with stub.running() as url:
        section = {"type": "e2b", "api_url": url, "sandbox_url": url, "api_key_env": "RAYAPP_TEST_KEY"}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"sandbox": {"providers": [section], "min_ready": 3}}))
        config = ("--config", str(tmp_path / "config.yaml"))
        [line] = await asyncio.to_thread(score, capsys, "sort_numbers", str(tmp_path / "answer.py"), *config)

    assert (line["reward"], line["status"]) == (1.0, "scored")
    assert stub.boxes.num_created == 1
    assert not stub.boxes.living


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "{", "a.jsonl, line 1 is not JSON"),
        ("a.jsonl", '\n{"text": "x"}', 'a.jsonl, line 2 must be an object like {"completion": "…"}'),
        ("nowhere.txt", None, "nowhere.txt can't be read"),
    ],
)
def test_file_that_holds_no_completions_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)

    assert run(["score", "sort_numbers", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err

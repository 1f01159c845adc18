"""The server of `rayapp view`: who may look, its answers, and that runs are not affected."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from rayapp.cli.main import run as run_command
from rayapp.core.errors import InputError
from rayapp.extras.view.command import address, bind
from rayapp.extras.view.run import ViewedRun
from rayapp.extras.view.security import Guard, is_loopback
from rayapp.extras.view.server import answer, make_app
from rayapp.runs.source import open_source
from rayapp.runs.trajectories import write_trajectories
from support.runs import hostile_group

ROOT = Path(__file__).parents[4]
SCRIPT = "<script>document.title='owned'</script>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    write_trajectories(folder / "trajectories" / "step=000001.parquet", 1, [hostile_group(0)])
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1, "reward/mean": 0.5, "bad": NaN}\n')
    return folder


def client(folder: Path, token: str = "", host: str = "127.0.0.1") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=make_app([ViewedRun(open_source(str(folder)))], token=token))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8088")


@pytest.mark.parametrize(
    "path",
    ["/", "/api/runs", "/api/runs/0/panels", "/api/runs/0/groups", "/static/app.js", "/api/runs/9/panels", "/nothing"],
)
async def test_every_answer_tells_the_browser_to_run_nothing_else(run: Path, path: str) -> None:
    async with client(run) as browser:
        headers = (await browser.get(path)).headers

    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


async def test_what_a_model_wrote_comes_as_json_and_never_as_a_page(run: Path) -> None:
    async with client(run) as browser:
        reply = await browser.get("/api/runs/0/group", params={"step": 1, "group": 0})

    assert reply.headers["content-type"] == "application/json"
    assert SCRIPT in reply.json()["trajectories"][0]["completion"]


async def test_nothing_can_be_written(run: Path) -> None:
    async with client(run) as browser:
        answers = [await browser.request(method, "/api/runs") for method in ("POST", "PUT", "DELETE", "PATCH")]
    assert {each.status_code for each in answers} == {405}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/api/runs/3/panels", "there is no run 3: this page shows 1 runs, numbered from 0"),
        ("/api/runs/0/groups?sort=nope", "can't be sorted by 'nope'"),
        ("/api/runs/0/group?step=1", "whole numbers for step, group"),
        ("/api/runs/0/group?step=1&group=7", "step 1 has no group 7"),
        ("/api/runs/0/trajectory?step=1&group=0&index=9", "no trajectory 9"),
    ],
)
async def test_a_wrong_address_is_told_what_is_wrong(run: Path, path: str, says: str) -> None:
    async with client(run) as browser:
        reply = await browser.get(path)

    assert (reply.status_code, says in reply.json()["error"]) == (404, True)


@pytest.mark.parametrize("path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd"])
async def test_only_the_pages_own_files_are_served(run: Path, path: str) -> None:
    async with client(run) as browser:
        assert (await browser.get(path)).status_code == 404


async def test_a_foreign_name_for_this_machine_is_refused(run: Path) -> None:
    async with client(run, host="evil.example") as browser:
        assert (await browser.get("/api/runs")).status_code == 403
    async with client(run, host="localhost") as browser:
        assert (await browser.get("/api/runs")).status_code == 200


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/runs", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ("/api/runs", {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"}, 403),
        ("/api/runs", {"origin": "https://evil.example"}, 403),
        ("/api/runs", {"origin": "http://127.0.0.1:9999"}, 403),
        ("/api/runs", {"origin": "http://127.0.0.1:8088", "sec-fetch-site": "same-origin"}, 200),
        ("/", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
    ],
)
async def test_a_page_of_another_site_makes_this_one_compute_nothing(
    run: Path, path: str, headers: dict[str, str], status: int
) -> None:
    async with client(run) as browser:
        assert (await browser.get(path, headers=headers)).status_code == status


async def test_with_a_token_nobody_looks_without_it_and_the_address_loses_it(run: Path) -> None:
    async with client(run, token="s3cret", host="node7") as browser:
        refused = [await browser.get("/api/runs"), await browser.get("/?token=wrong")]
        welcome = await browser.get("/?token=s3cret")
        shown = await browser.get("/api/runs")

    assert [reply.status_code for reply in refused] == [401, 401]
    assert (welcome.status_code, welcome.headers["location"]) == (303, "/")
    assert "HttpOnly" in welcome.headers["set-cookie"]
    assert shown.status_code == 200


async def test_an_address_with_the_token_never_leads_to_another_host(run: Path) -> None:
    async with client(run, token="s3cret", host="node7") as browser:
        welcome = await browser.get("http://node7:8088//evil.example/?token=s3cret")

    assert welcome.headers["location"] == "/evil.example/"


SPELLINGS = (
    "/api/runs%0A", "/api/runs/", "//api/runs", "/%61pi/runs", "/static/app.js", "/static%2fapp.js", "/?x=token", "/",
)  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "TRACE"])
async def test_no_spelling_of_a_path_is_shown_without_the_token(run: Path, method: str) -> None:
    async with client(run, token="s3cret", host="node7") as browser:
        answered = {path: (await browser.request(method, path)).status_code for path in SPELLINGS}

    assert answered == dict.fromkeys(SPELLINGS, 401 if method in ("GET", "HEAD") else 405)


async def test_a_websocket_reaches_nothing_behind_the_guard(run: Path) -> None:
    sent: list[object] = []

    async def receive() -> dict[str, str]:
        raise AssertionError("nobody reads")

    async def send(message: object) -> None:
        sent.append(message)

    await Guard(make_app([], token=""), "t")({"type": "websocket", "path": "/", "headers": []}, receive, send)

    assert sent == []


def test_numbers_that_are_none_become_null() -> None:
    assert answer({"a": [float("nan"), float("-inf"), 1.5]}).body == b'{"a":[null,null,1.5]}'


def test_only_loopback_goes_without_a_token() -> None:
    hosts = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "10.0.0.4", "node7")
    assert list(filter(is_loopback, hosts)) == ["127.0.0.1", "localhost", "::1"]


def test_a_port_that_is_taken_is_told_with_the_way_out() -> None:
    with closing(bind("127.0.0.1", 0)) as taken, pytest.raises(InputError, match="--port 0 for any free one"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_the_address_of_a_wildcard_is_this_machines_name() -> None:
    assert address("0.0.0.0", 80, "t") == f"http://{socket.gethostname()}:80/?token=t"
    assert address("::1", 80, "") == "http://[::1]:80/"


@pytest.fixture
def served(run: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`rayapp view`, started as by a user."""
    command = [sys.executable, "-m", "rayapp", "view", str(run), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as one:
        line = one.stdout.readline()
        yield one, line.split()[1]
        one.kill()


def test_the_command_serves_until_interrupted_also_browsers_that_are_closed_and_leaves_the_run_as_it_was(
    run: Path, served: tuple[subprocess.Popen[str], str]
) -> None:
    program, where = served
    before = sorted((path.name, path.stat().st_mtime_ns) for path in run.rglob("*"))
    host = urlsplit(where)
    for _ in range(20):
        with socket.create_connection((host.hostname, host.port), timeout=60) as browser:
            # Disconnect with the answer unread: the server gets a reset while it writes.
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            browser.sendall(b"GET /api/runs HTTP/1.1\r\nHost: " + host.netloc.encode() + b"\r\n\r\n")

    reply = httpx.get(f"{where}api/runs", timeout=60)
    program.send_signal(signal.SIGINT)

    assert reply.json()[0]["name"] == "run"
    assert program.wait(timeout=240) in (0, 130)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_a_folder_that_is_no_run_ends_with_the_users_exit_code(tmp_path: Path) -> None:
    assert run_command(["view", str(tmp_path)]) == 2


def test_the_list_has_each_run_with_its_state_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, last in (("slow", '"cost/total": 2.5'), ("quick\x1b[31m", '"reward/solved/mean": 0.75')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(f'{{"step": 2, "time": 1, "reward/mean": 0.2, {last}}}\n')
        (tmp_path / name / "config.yaml").write_text("train: {num_steps: 2}\n")

    assert run_command(["view", str(tmp_path), "--list"]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in said.splitlines()}

    assert lines["run"] == ["state", "step", "reward", "solved", "cost"]
    assert lines["slow"] == ["finished", "2/2", "0.2", "-", "2.5"]
    assert "\x1b" not in said


async def test_a_picture_is_sent_as_a_picture_and_other_files_are_not(run: Path) -> None:
    png, script = b"\x89PNG\r\n", b"<script></script>"
    (run / "pictures").mkdir()
    (run / "pictures" / ("a" * 64)).write_bytes(png)
    (run / "pictures" / ("b" * 64)).write_bytes(script)

    async with client(run) as browser:
        shown = await browser.get("/api/runs/0/picture", params={"sha256": "a" * 64})
        refused = [
            (await browser.get("/api/runs/0/picture", params={"sha256": name})).status_code
            for name in ("b" * 64, "c" * 64, "../metrics.jsonl", "")
        ]

    assert (shown.headers["content-type"], shown.content) == ("image/png", png)
    assert refused == [404] * 4

"""`rayapp sandbox serve` for clients of SandboxFusion: verl's scorer and the `sandbox-fusion` package, unchanged."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import sandbox_fusion as fusion
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.sandbox_fusion.utils import check_correctness

from rayapp.config.sandbox import SandboxConfig
from rayapp.extras.service.app import serving
from support.languages import SUM as SUM_IN
from support.languages import installed

ROOT = Path(__file__).parents[2]


@contextmanager
def service(*arguments: str, **environment: str) -> Iterator[str]:
    command = [sys.executable, "-m", "rayapp", "sandbox", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving at "), line
        yield line.split()[2]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with service("--no-key", "sandbox.providers=[{type: local, max_sandboxes: 2}]") as address:
        yield address


def run_code(url: str, **fields: Any) -> fusion.RunCodeResponse:
    return fusion.run_code(fusion.RunCodeRequest(**{"language": "python", **fields}), endpoint=url, max_attempts=1)


SUM = "a, b = map(int, input().split())\nprint(a + b)"
SLOW = ("java", "go", "rust")


def program(key: str) -> str:
    """Return a program that adds two numbers; skip the test where its compiler is missing."""
    return SUM_IN[installed(key).key]


TESTS = {"inputs": ["1 2\n", "3 4\n", "-1 1\n"], "outputs": ["3\n", "7\n", "0\n"]}


@pytest.mark.parametrize(
    ("code", "share"),
    [(SUM, 1.0), (SUM.replace("+", "-"), 0.0), (f"{SUM}\nif a == 3: raise ValueError", 2 / 3), ("while 1: pass", 0.0)],
    ids=["right", "wrong", "raises once", "loops"],
)
def test_verl_scores_prime_code_rows_through_the_service(url: str, code: str, share: float) -> None:
    score = default_compute_score(
        "codecontests",
        f"I think\n```python\n{code}\n```",
        json.dumps(TESTS),
        sandbox_fusion_url=f"{url}/run_code",
        memory_limit_mb=1024,
    )

    assert score == pytest.approx(share)


def test_verl_scores_functions_through_the_service(url: str) -> None:
    tests = {"inputs": ["[1, 2]\n3", "[]\n1"], "outputs": ["[1, 2, 3]", "[1]"], "fn_name": "f"}
    score = default_compute_score(
        "apps", "```python\ndef f(a, b):\n    return a + [b]\n```", tests, sandbox_fusion_url=f"{url}/run_code"
    )

    assert score == 1.0


def test_a_program_that_takes_too_long_is_reported_as_such(url: str) -> None:
    done = run_code(url, code="print('so far', flush=True)\nwhile True: pass", run_timeout=2)

    assert fusion.summary_run_code_result(done, fusion.SummaryMapping(RunTimeout="late")) == "late"
    assert done.run_result.stdout == "so far\n"


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("key", ["cpp", "nodejs", "perl", *(pytest.param(key, marks=pytest.mark.long) for key in SLOW)])
def test_verl_scores_programs_in_other_languages(url: str, key: str) -> None:
    """Run one test of a row as verl does, in the language that verl is told."""
    code = program(key)
    asked = {"sandbox_fusion_url": f"{url}/run_code", "in_outs": TESTS, "timeout": 60, "language": key}
    right, _ = check_correctness(generation=code, memory_limit_mb=512, **asked)
    wrong, found = check_correctness(generation=code.replace("+", "-"), memory_limit_mb=512, **asked)
    broken, reasons = check_correctness(generation="}{ ((( 'x", memory_limit_mb=512, **asked)

    assert (right, wrong) == ([True] * 3, [False, False, False])
    assert found[0]["status"] == "wrong_answer"
    is_compiled = key in ("cpp", "java", "go", "rust")
    assert set(broken) == {-4 if is_compiled else -2}
    assert (reasons[0]["compile_stderr"] or reasons[0]["stderr"]).strip()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"code": "1", "language": "cobol"}, "unknown language 'cobol': known are python, cpp, c, java"),
        ({"language": "python"}, "code: Field required"),
        ({"code": "1", "files": {"x": ""}}, "files: Dictionary should have at most 0 items"),
        ({"code": "1", "run_timeout": -1}, "run_timeout: Input should be greater than 0"),
    ],
)
def test_a_wrong_request_names_what_is_wrong(url: str, body: dict[str, Any], message: str) -> None:
    answer = requests.post(f"{url}/run_code", json=body, timeout=60)

    assert (answer.status_code, answer.json()["status"]) == (400, "Failed")
    assert message in answer.json()["message"]


@pytest.mark.parametrize("way", ["run_code", "mcp"])
def test_a_client_that_hangs_up_gives_its_sandbox_back(url: str, way: str) -> None:
    sleeping = "import time\ntime.sleep(50)"
    call = {"name": "run_code_once", "arguments": {"code": sleeping}}
    path, body = {
        "run_code": ("/run_code", {"code": sleeping, "run_timeout": 60}),
        "mcp": ("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}),
    }[way]
    headers = {"Accept": "application/json, text/event-stream"}
    if way == "mcp":
        client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        start = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": client}
        began = requests.post(f"{url}/mcp", json=start, headers=headers, timeout=30)
        headers["Mcp-Session-Id"] = began.headers["Mcp-Session-Id"]
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        requests.post(f"{url}/mcp", json=note, headers=headers, timeout=30)

    for number in range(4):  # the service has two sandboxes
        own = {**body, "id": 10 + number} if way == "mcp" else body
        with pytest.raises(requests.exceptions.ReadTimeout):
            requests.post(f"{url}{path}", json=own, headers=headers, timeout=2)

    started = time.monotonic()
    assert run_code(url, code="print(2)").run_result.stdout == "2\n"
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("more", ["GET /health HTTP/1.1\r\nHost: x\r\n\r\n", "{request}", "x" * 200_000])
def test_a_client_that_hangs_up_behind_further_requests_gives_its_sandbox_back(url: str, more: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"code": "import time\ntime.sleep(50)", "language": "python", "run_timeout": 60})
    request = f"POST /run_code HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    for _ in range(3):  # the service has two sandboxes
        with socket.create_connection((host, int(port))) as client:
            client.sendall((request + more.format(request=request)).encode())
            time.sleep(0.5)

    started = time.monotonic()
    assert run_code(url, code="print(2)").run_result.stdout == "2\n"
    assert time.monotonic() - started < 30


async def test_a_client_that_hangs_up_within_its_request_is_no_error_of_the_service(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with serving(SandboxConfig(), key="") as address:
        host, _, port = address.removeprefix("http://").partition(":")
        for route, sent in itertools.product(("/run_code", "/mcp"), ("", "{")):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"POST {route} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 9\r\n\r\n{sent}".encode())
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()
        await asyncio.sleep(0.5)

    assert "Traceback" not in capfd.readouterr().err

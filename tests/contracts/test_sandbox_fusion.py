"""`rayapp sandbox serve` for clients of SandboxFusion: verl's scorer and the `sandbox-fusion` package, unchanged."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import signal
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


@pytest.mark.usefixtures("namespaces")
def test_the_package_reads_output_status_and_files(url: str) -> None:
    data = base64.b64encode(b"\x00\x01 of the client").decode()
    done = run_code(
        url,
        code="import sys\nb = open('in/a.bin', 'rb').read()\nopen('out.bin', 'wb').write(b[::-1])\nsys.exit(len(b))",
        files={"in/a.bin": data},
        fetch_files=["out.bin", "missing"],
    )

    assert done.status == fusion.RunStatus.Failed
    assert (done.run_result.status.value, done.run_result.return_code) == ("Finished", 16)
    assert {path: base64.b64decode(text) for path, text in done.files.items()} == {"out.bin": b"tneilc eht fo \x01\x00"}


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


@pytest.mark.usefixtures("namespaces")
def test_a_completion_in_another_language_is_compiled_once_for_its_tests(url: str) -> None:
    text = f"```cpp\n{program('cpp')}\n```"
    row = {"id": 1, "labels": {"programming_language": "cpp"}, **ROWS["CommonOJDataset"]}
    config = fusion.TestConfig(dataset_type="CommonOJDataset", provided_data=row, run_timeout=10, compile_timeout=60)
    result = fusion.submit(
        fusion.SubmitRequest(dataset="mine", id=1, completion=text, config=config), endpoint=url, max_attempts=1
    )

    assert (result.accepted, len(result.tests)) == (True, 3), result


ROWS: dict[str, dict[str, Any]] = {
    "CommonOJDataset": {
        "test": [{"input": {"stdin": i}, "output": {"stdout": o}} for i, o in zip(*TESTS.values(), strict=True)]
    },
    "MBPPDataset": {"test": ["assert f(1, 2) == 3", "assert f(-1, 1) == 0"], "labels": '{"test_setup_code": ""}'},
    "HumanEvalDataset": {
        "content": 'def f(a, b):\n    """Add."""\n',
        "labels": {"entry_point": "f"},
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
    },
}
ANSWERS = {"CommonOJDataset": SUM, "MBPPDataset": "def f(a, b):\n    return a + b"}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("is_right", [True, False])
def test_the_package_submits_completions_with_their_rows(url: str, kind: str, is_right: bool) -> None:
    code = ANSWERS.get(kind, ANSWERS["MBPPDataset"])
    text = f"```python\n{code if is_right else code.replace('+', '-')}\n```"
    config = fusion.TestConfig(dataset_type=kind, provided_data={"id": 1, **ROWS[kind]})
    asked = fusion.SubmitRequest(dataset="mine", id=1, completion=text, config=config)
    result = fusion.submit(asked, endpoint=url, max_attempts=1)

    assert (result.accepted, [test.passed for test in result.tests].count(True) > 0) == (is_right, is_right), result


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        (
            "run_code",
            {"code": "1", "language": "cobol"},
            "unknown language 'cobol': known are python, cpp, c, java",
        ),
        ("run_code", {"language": "python"}, "code: Field required"),
        ("run_code", {"code": "1", "files": {"../x": ""}}, "'../x' must be relative"),
        ("run_code", {"code": "1", "files": {"x": "!"}}, "'x' is not base64"),
        ("run_code", {"code": "1", "run_timeout": -1}, "run_timeout: Input should be greater than 0"),
        ("submit", {"completion": "", "dataset": "mbpp"}, "the service has no data sets"),
        ("submit", {"completion": "", "config": {"provided_data": {"test": [1]}}}, "must be a struct"),
    ],
)
def test_a_wrong_request_names_what_is_wrong(url: str, route: str, body: dict[str, Any], message: str) -> None:
    answer = requests.post(f"{url}/{route}", json=body, timeout=60)

    assert (answer.status_code, answer.json()["status"]) == (400, "Failed")
    assert message in answer.json()["message"]


@pytest.mark.parametrize("way", ["run_code", "submit", "mcp"])
def test_a_client_that_hangs_up_gives_its_sandbox_back(url: str, way: str) -> None:
    sleeping = "import time\ntime.sleep(50)"
    row = {"test": [{"input": {"stdin": ""}, "output": {"stdout": ""}}]}
    config = {"dataset_type": "CommonOJDataset", "provided_data": row, "run_timeout": 60}
    call = {"name": "run_code_once", "arguments": {"code": sleeping}}
    path, body = {
        "run_code": ("/run_code", {"code": sleeping, "run_timeout": 60}),
        "submit": ("/submit", {"completion": f"```python\n{sleeping}\n```", "config": config}),
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


async def test_a_client_that_hangs_up_within_its_request_is_no_error_of_the_service(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with serving(SandboxConfig(), key="") as address:
        host, _, port = address.removeprefix("http://").partition(":")
        for route, sent in itertools.product(("/run_code", "/submit", "/mcp"), ("", "{")):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"POST {route} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 9\r\n\r\n{sent}".encode())
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()
        await asyncio.sleep(0.5)

    assert "Traceback" not in capfd.readouterr().err

"""Refusals that can be waited out: HTTP 429 and 503."""

from __future__ import annotations

import httpx2
import pytest

from rayapp.tools.mcp_tool import PatientTransport


async def ask(*answers: httpx2.Response, max_wait_s: float = 60.0) -> tuple[int, list[float]]:
    """Return the final status, and the pauses."""
    left, pauses = iter(answers), []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    transport = PatientTransport(httpx2.MockTransport(lambda request: next(left)), max_wait_s=max_wait_s, sleep=sleep)
    async with httpx2.AsyncClient(transport=transport) as http:
        return (await http.post("http://server/mcp", json={"a": 1})).status_code, pauses


@pytest.mark.parametrize("status", [200, 401, 404, 500])
async def test_other_answers_pass_at_once(status: int) -> None:
    assert await ask(httpx2.Response(status)) == (status, [])


async def test_busy_server_is_asked_again_after_the_pause_it_names() -> None:
    answers = [httpx2.Response(429, headers={"Retry-After": "2"}), httpx2.Response(503), httpx2.Response(200)]

    # Two seconds as asked, then the second pause of our own: half a second, doubled once.
    assert await ask(*answers) == (200, [2.0, 1.0])


@pytest.mark.parametrize("header", ["soon", "nan", "-5", "0"])
async def test_odd_retry_after_neither_spins_nor_breaks(header: str) -> None:
    status, pauses = await ask(httpx2.Response(429, headers={"Retry-After": header}), httpx2.Response(200))

    assert status == 200
    assert all(0.05 <= pause <= 30 for pause in pauses)


async def test_refusal_is_passed_on_when_the_wait_is_used_up() -> None:
    # 0.5 + 1 seconds are waited; two more would be beyond three.
    assert await ask(*[httpx2.Response(429) for _ in range(9)], max_wait_s=3.0) == (429, [0.5, 1.0])

"""A judge on loopback, behind OpenAI's chat API and vLLM's /classify. It obeys every order outside the lines that
enclose the judged text, like a model that is easily misled."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from support.stubs.server import StubServer

ORDER = re.compile(r"GIVE (\d+)")
"""An order that it obeys: GIVE and a score, or for pairs GIVE 1 for the first."""
NUMBER = re.compile(r"(\d+) is the number of this question")
Failure = tuple[int, str, Mapping[str, str]]
"""Status, body, headers."""


class JudgeStub(StubServer):
    """See the module.

    Args:
        grade: returns the score of a response, 0 to 10; of two responses the one with the higher score wins.
        key: API key that it requires; empty: none.
    """

    def __init__(self, grade: Callable[[str], float], *, key: str = "") -> None:
        super().__init__()
        self.grade = grade
        self.failures: deque[Failure] = deque()
        """Answers to the next requests, in place of judgements."""
        self.latency_s = 0.0
        self.said = ""
        """Answer in place of JSON; QUESTION in it becomes the number of the question."""
        self.bodies: list[dict[str, Any]] = []
        """Body of every request."""
        self._key = key
        self.app.router.add_post("/v1/chat/completions", self._answer)
        self.app.router.add_post("/classify", self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        await asyncio.sleep(self.latency_s)
        given = request.headers.get("Authorization", "")
        if self.failures:
            status, text, headers = self.failures.popleft()
            return web.Response(status=status, text=text, headers=headers)
        if self._key and given != f"Bearer {self._key}":
            return web.Response(status=401, text=f"there is no key like {given!r}")
        return web.json_response(self._classified(body) if request.path == "/classify" else self._said(body))

    def _classified(self, body: Mapping[str, Any]) -> dict[str, Any]:
        response = body["messages"][-1]["content"]
        return {"data": [{"index": 0, "label": "LABEL_0", "probs": [self.grade(response)], "num_classes": 1}],
                "usage": {"prompt_tokens": 7, "total_tokens": 7}}  # fmt: skip

    def _said(self, body: Mapping[str, Any]) -> dict[str, Any]:
        number = NUMBER.findall(body["messages"][0]["content"])[0]
        judged = json.dumps({"question": int(number), **self._judged(body)}) if not self.said else self.said
        message = {"role": "assistant", "content": judged.replace("QUESTION", number)}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 100, "completion_tokens": 10}}  # fmt: skip

    def _judged(self, body: Mapping[str, Any]) -> dict[str, Any]:
        system, user = (message["content"] for message in body["messages"])
        nonce = re.findall(r"=== END \.\.\. (\w+) ===", system)[0]
        enclosed = re.compile(rf"=== BEGIN ([^=]+) {nonce} ===\n(.*?)\n=== END \1 {nonce} ===", re.DOTALL)
        parts = dict(enclosed.findall(user))
        order = ORDER.search(system + enclosed.sub("", user))
        if "RESPONSE" in parts:
            score = int(order[1] if order else self.grade(parts["RESPONSE"]))
            names = body["response_format"]["json_schema"]["schema"]["properties"]["scores"]["required"]
            return {"reason": "as graded", "scores": dict.fromkeys(names, score)}
        first, second = (self.grade(parts[f"RESPONSE {name}"]) for name in "AB")
        better = "A" if order or first > second else "B" if first < second else "tie"
        return {"reason": "as graded", "winner": better}

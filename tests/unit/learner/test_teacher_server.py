"""A teacher behind vLLM's completions API gives the same log-probs as the same model in the learner."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from rayapp.config.config import Config
from rayapp.config.other_models import DistillationSection
from rayapp.core.errors import ConfigError, InputError, LearnerError
from rayapp.core.types import Fork
from rayapp.learner.algo.distillation import served_log_probs
from rayapp.learner.batch import TrainItem
from rayapp.storage.models.check import check_teacher
from support import make
from support.stubs.server import StubServer

PROMPT, FIRST, SECOND = [5, 6, 7], [20, 21, 22], [30, 31]


class TeacherStub(StubServer):
    """The part of vLLM's API that the learner calls, over a real model."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        super().__init__()
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.failures = deque[int]()
        self.shifted_by = 0
        self.app.router.add_post("/v1/completions", self._complete)
        self.app.router.add_post("/tokenize", self._tokenize)

    def log_probs(self, tokens: list[int]) -> list[float]:
        """Return log-probs of every token but the first."""
        with torch.no_grad():
            scores = self._model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return [float(scores[i, token]) for i, token in enumerate(tokens[1:])]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        assert (body["model"], body["prompt_logprobs"]) == ("big", 0)
        if self.failures:
            return web.Response(status=self.failures.popleft(), text="loading")
        scored = zip(body["prompt"][1:], self.log_probs(body["prompt"]), strict=True)
        entries = [None, *({str(token): {"logprob": found, "rank": 1}} for token, found in scored)]
        return web.json_response({"choices": [{"text": "a", "prompt_logprobs": entries}]})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        tokens = self._tokenizer.encode((await request.json())["prompt"], add_special_tokens=False)
        return web.json_response({"tokens": [token + self.shifted_by for token in tokens]})


@pytest.fixture
def stub(tiny_model: Path) -> TeacherStub:
    return TeacherStub(tiny_model)


def section_of(url: str) -> DistillationSection:
    return DistillationSection(teacher="big", base_url=f"{url}/v1")


def items() -> list[TrainItem]:
    """One conversation, and one of two branches that share the prompt."""
    plain = make.trajectory(PROMPT + FIRST, len(PROMPT))
    tree = replace(make.trajectory(PROMPT + FIRST + SECOND, len(PROMPT)), forks=(Fork(start=6, after=2),))
    return [
        TrainItem(row=row, group=0, trajectory=t, advantages=np.zeros(t.num_response_tokens, np.float32))
        for row, t in ((4, plain), (9, tree))
    ]


async def asked(url: str) -> dict[int, Any]:
    return await asyncio.to_thread(served_log_probs, items(), section_of(url), 1)


async def test_a_server_gives_the_log_prob_of_every_sampled_token_of_every_branch(stub: TeacherStub) -> None:
    async with stub.running() as url:
        found = await asked(url)

    first, second = stub.log_probs(PROMPT + FIRST)[2:], stub.log_probs(PROMPT + SECOND)[2:]
    np.testing.assert_allclose(found[4], first, atol=1e-6)
    np.testing.assert_allclose(found[9], [*first, *second], atol=1e-6)


async def test_a_server_that_is_started_again_is_waited_for(stub: TeacherStub) -> None:
    stub.failures.append(503)
    async with stub.running() as url:
        assert sorted(await asked(url)) == [4, 9]
    assert not stub.failures


async def test_what_a_server_refuses_ends_the_run_with_its_words(stub: TeacherStub) -> None:
    stub.failures.extend([404] * 3)
    async with stub.running() as url:
        with pytest.raises(LearnerError, match=r"distillation\.base_url: the teacher at .*HTTP 404: loading"):
            await asked(url)


async def test_a_server_that_reads_text_as_other_tokens_is_refused_with_both_names(
    stub: TeacherStub, tiny_model: Path
) -> None:
    async with stub.running() as url:
        sections = {"teacher": "big", "base_url": f"{url}/v1"}
        config = Config.model_validate({"model": {"path": str(tiny_model)}, "distillation": sections})
        await asyncio.to_thread(check_teacher, config)
        stub.shifted_by = 1
        with pytest.raises(
            InputError, match=rf"'big' at {url}/v1 has another tokenizer than model\.path '{tiny_model}"
        ):
            await asyncio.to_thread(check_teacher, config)
    with pytest.raises(InputError, match="can't tokenize text for 'big'"):
        await asyncio.to_thread(check_teacher, config)


def test_a_servers_key_that_is_not_set_is_told_by_the_name_of_its_variable(tiny_model: Path) -> None:
    sections = {"teacher": "big", "base_url": "http://127.0.0.1:9/v1", "api_key_env": "NO_SUCH_KEY"}
    config = Config.model_validate({"model": {"path": str(tiny_model)}, "distillation": sections})

    for ask in (lambda: check_teacher(config), lambda: served_log_probs(items(), config.distillation, 1)):
        with pytest.raises(
            ConfigError, match="the teacher has no key: the environment variable NO_SUCH_KEY is not set"
        ):
            ask()

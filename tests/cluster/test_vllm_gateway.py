"""Agents behind the gateway on the real vLLM: what a session records is what the engine sampled, fork by fork."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from actors.vllm_server import VllmServer
from rayapp.core.trajectories import path_to
from rayapp.core.types import RequestId, SamplingParams
from rayapp.rollout.gateway.session import Session
from support import make
from support.learners import MAX_LOG_PROB_DIFFERENCE, save_llama

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]


@asynccontextmanager
async def serving(
    folder: Path, tokenizer: Any, *, dtype: str, sampling: SamplingParams, **options: Any
) -> AsyncIterator[tuple[VllmServer, Session, openai.AsyncOpenAI]]:
    """Serve one session at a gateway on a vLLM with a small model. Yield the server, the session, and its client."""
    end_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    save_llama(
        folder, dtype=dtype, vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=end_id, pad_token_id=end_id,
    )  # fmt: skip
    config = make.config(
        folder,
        rollout={"max_prompt_tokens": 1000, "max_completion_tokens": 500},
        learner={"max_tokens_per_microbatch": 1500},
        server={"engine_args": {"block_size": 32}, "dtype": dtype},
    )
    server = VllmServer(config, 0)
    try:
        await server.start()
        limits = {"max_tokens": 1500, "max_turns": 20, "request_id": RequestId("group", 1, 0)}
        formats = make.formats(tokenizer, with_parser=False)
        async with make.session(
            tokenizer, server._engine, sampling=sampling, own_formats=formats, **limits, **options
        ) as (gateway, session):
            url = f"{gateway.url_of(session)}/v1"
            yield server, session, openai.AsyncOpenAI(base_url=url, api_key=session.key, max_retries=0)
    finally:
        await server.close()


async def test_turns_and_forks_have_the_log_probs_that_the_engine_gives_their_paths(
    tmp_path: Path, chat_tokenizer: Any
) -> None:
    sampling = SamplingParams(max_tokens=30, seed=3)
    async with serving(tmp_path, chat_tokenizer, dtype="bfloat16", sampling=sampling) as (server, session, client):
        tree, load = session.tree, server._started_engine().load
        history: list[Any] = [{"role": "user", "content": "hello " * 130}]
        for _ in range(3):
            before = load()
            reply = (await client.chat.completions.create(model="any", messages=history)).choices[0].message
            history += [reply, {"role": "user", "content": "and then?"}]
            looked_up, found = (load()[key] - before[key] for key in ("prefix_queries", "prefix_hits"))
            assert len(tree.turns) == 1 or found / looked_up > 0.9
        again = await client.chat.completions.create(model="any", messages=history[:3], n=2)
        anew = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "compacted"}])

        assert len(tree.turns) == 6
        assert len(tree.forks) == 3
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens
        assert anew.choices[0].message.content is not None
        for turn in tree.turns:
            path = path_to(turn.end - 1, tree.forks)
            scored = (await server.prompt_log_probs([tree.trajectory().token_ids[path].tolist()]))[0]
            number = turn.end - turn.start
            difference = np.abs(scored[-number:] - tree.trajectory().rollout_log_probs[turn.start : turn.end]).max()
            assert difference < MAX_LOG_PROB_DIFFERENCE, turn


SCORE = {
    "type": "object",
    "properties": {"score": {"enum": [1, 2, 3]}, "why": {"type": "string", "maxLength": 8}},
    "required": ["score", "why"],
    "additionalProperties": False,
}


async def test_under_a_form_the_log_probs_are_those_of_the_distribution_over_the_recorded_masks(
    tmp_path: Path, chat_tokenizer: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tool: Any = {"type": "function", "function": {"name": "rate", "description": "", "parameters": SCORE}}
    asked: Any = {"model": "any", "messages": [{"role": "user", "content": "rate it"}]}
    sampling = SamplingParams(max_tokens=300, temperature=0.7, seed=3)
    options: Any = {"dtype": "float32", "sampling": sampling, "structured": "guide"}
    async with serving(tmp_path, chat_tokenizer, **options) as (_, session, client):
        chat: Any = client.chat.completions
        formed = await chat.create(**asked, response_format=form_with(SCORE))
        free = await chat.create(**asked, max_tokens=10)
        forced = await chat.create(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
        chosen = await chat.create(**asked, extra_body={"structured_outputs": {"choice": ["left", "right"]}})
        with pytest.raises(openai.BadRequestError, match="engine can't follow this request"):
            await chat.create(**asked, response_format=form_with({"type": "array", "uniqueItems": True}))
        played = session.trajectory()

    # xgrammar lets a string with maxLength hold control characters as they are.
    jsonschema.validate(json.loads(formed.choices[0].message.content, strict=False), SCORE)
    (call,) = forced.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCORE)
    assert chosen.choices[0].message.content in ("left", "right")
    assert free.usage.completion_tokens <= 10

    assert played.allowed is not None
    masks = np.unpackbits(played.allowed.masks.view(np.uint8), axis=1, bitorder="little").astype(np.bool_)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    is_masked = played.allowed.mask_of >= 0
    assert is_masked[~played.response_mask].sum() == 0
    for number, turn in enumerate(played.turns):
        own = slice(turn.start, turn.end)
        assert is_masked[own].all() == (number != 1)  # the second turn is free
        path = path_to(turn.end - 1, played.forks)
        ids = torch.from_numpy(played.token_ids[path].astype(np.int64))[None]
        with torch.no_grad():
            logits = plain(ids).logits[0, -1 - (turn.end - turn.start) : -1] / 0.7
        for place, row in zip(range(turn.start, turn.end), logits, strict=True):
            if is_masked[place]:
                row[~torch.from_numpy(masks[played.allowed.mask_of[place], : row.numel()])] = float("-inf")
        expected = logits.log_softmax(-1).gather(1, ids[0, -logits.shape[0] :, None])[:, 0].numpy()
        np.testing.assert_allclose(played.rollout_log_probs[own], expected, atol=1e-3)


def form_with(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}

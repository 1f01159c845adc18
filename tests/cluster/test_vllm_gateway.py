"""Agents behind the gateway on the real vLLM: what a session records is what the engine sampled, fork by fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from actors.vllm_server import VllmServer
from rayapp.config.config import Config
from rayapp.core.trajectories import path_to
from rayapp.core.types import RequestId, SamplingParams
from rayapp.rollout.agent.chat import load_template
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.server import Gateway
from rayapp.rollout.gateway.session import SessionLimits
from support.learners import save_llama

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

MAX_LOG_PROB_DIFFERENCE = 0.05
"""As in test_vllm_server.py: two orders of summation in bfloat16."""


async def test_turns_and_forks_have_the_log_probs_that_the_engine_gives_their_paths(
    tmp_path: Path, chat_tokenizer: Any
) -> None:
    chat_tokenizer.save_pretrained(tmp_path / "model")
    end_id = chat_tokenizer.eos_token_id
    model = save_llama(
        tmp_path / "model", dtype="bfloat16", vocab_size=len(chat_tokenizer), hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=end_id, pad_token_id=end_id,
    )  # fmt: skip
    values = {
        "model": {"path": str(model)},
        "cluster": {"device": "cpu"},
        "rollout": {"max_prompt_tokens": 1000, "max_completion_tokens": 500},
        "server": {"kv_cache_gib": 0.1, "kv_block_tokens": 32},
    }
    server, gateway = VllmServer(Config.model_validate(values), 0), Gateway(formats_of(chat_tokenizer))
    limits = SessionLimits(max_tokens=1500, max_turns=20)
    try:
        await server.start()
        assert server._engine is not None
        await gateway.start()
        sampling = SamplingParams(max_tokens=30, seed=3)
        with gateway.session(
            engine=server, sampling=sampling, limits=limits, request_id=RequestId("group", 1, 0)
        ) as session:
            client = openai.AsyncOpenAI(base_url=f"{gateway.url_of(session)}/v1", api_key=session.key, max_retries=0)
            tree, load = session.tree, server._engine.load
            history: list[Any] = [{"role": "user", "content": "hello " * 130}]
            for _ in range(3):
                before = load()
                reply = (await client.chat.completions.create(model="any", messages=history)).choices[0].message
                history += [reply, {"role": "user", "content": "and then?"}]
                looked_up, found = (load()[key] - before[key] for key in ("prefix_queries", "prefix_hits"))
                assert len(tree.turns) == 1 or found / looked_up > 0.9
            again = await client.chat.completions.create(model="any", messages=history[:3], n=2)
            anew = await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "compacted"}]
            )

        assert len(tree.turns) == 6
        assert len(tree.forks) == 3
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens
        assert anew.choices[0].message.content is not None
        for turn in tree.turns:
            path = path_to(turn.end - 1, tree.forks)
            found = (await server.prompt_log_probs([tree.trajectory().token_ids[path].tolist()]))[0]
            number = turn.end - turn.start
            difference = np.abs(found[-number:] - tree.trajectory().rollout_log_probs[turn.start : turn.end]).max()
            assert difference < MAX_LOG_PROB_DIFFERENCE, turn
    finally:
        await gateway.close()
        await server.close()


def formats_of(tokenizer: Any) -> Formats:
    return Formats(tokenizer, model="tiny", template=load_template("chatml_hermes"))

"""A group whose prompt has pictures: what the engine is given, and what the trajectories and the group hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rayapp.core.protocols import OnTokens
from rayapp.core.types import Completion, Picture, Prompt, RequestId, Reward, SamplingParams
from rayapp.engine.vllm_pictures import check_expansion, engine_prompt, open_pictures
from rayapp.rollout.agent.chat import ChatFormat
from rayapp.rollout.agents import OneTurn
from rayapp.rollout.group import run_group
from rayapp.rollout.order import GroupRequest
from rayapp.rollout.problem import Problem
from support import make
from support.picture_models import picture

SHOWN = Picture(sha256="ab" * 32, start=1, end=4)
PROMPT = Prompt(task="t", text="?", token_ids=np.array([5, 7, 7, 7, 6], np.int32), media=(SHOWN,))


class Listening:
    """An engine that keeps the sampling options of its requests."""

    def __init__(self) -> None:
        self.seen: list[SamplingParams] = []

    async def generate(
        self,
        request_id: RequestId,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        self.seen.append(sampling)
        return make.completion(9)


class Task:
    name = "t"

    def render(self, tokenizer: Any) -> Prompt:
        return PROMPT


async def test_every_request_and_trajectory_has_the_prompts_pictures_and_the_group_their_bytes() -> None:
    async def score(*_: Any) -> Reward:
        return Reward(value=1.0)

    engine, red = Listening(), picture()
    problem = Problem(prompt=PROMPT, score=score, pictures={SHOWN.sha256: red})
    request = GroupRequest(purpose="group", group_id=0, policy_version=0)
    group, _ = await run_group(
        request, problem, OneTurn(make.Wordless()), sandboxes=None, engine=engine,  # type: ignore[arg-type]
        sampling=SamplingParams(max_tokens=4),
        group_size=2, seed=0, deadline_s=30.0,
    )  # fmt: skip

    assert [(each.media, dict(each.pictures)) for each in engine.seen] == [((SHOWN,), {SHOWN.sha256: red})] * 2
    assert [each.media for each in group.trajectories] == [(SHOWN,)] * 2
    assert group.pictures == {SHOWN.sha256: red}
    shown = await open_pictures(engine.seen[0])
    assert shown[0] is (await open_pictures(engine.seen[1]))[0]
    given = engine_prompt(PROMPT.token_ids.tolist(), engine.seen[0], shown, placeholder=3)
    assert given["prompt_token_ids"] == [5, 3, 6]
    assert given["multi_modal_uuids"] == {"image": [SHOWN.sha256]}
    assert given["multi_modal_data"]["image"][0].size == (56, 56)
    check_expansion(RequestId("group", 0), engine.seen[0], [5, 7, 7, 7, 6], [5, 7, 7, 7, 6])


PARTS_ONLY = """{% for message in messages %}{{ message.role }}:{% for part in message.content %}\
{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def test_a_template_that_writes_only_parts_gets_texts_as_parts(chat_tokenizer: Any) -> None:
    chat = ChatFormat(chat_tokenizer, template=PARTS_ONLY)
    pictured = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}

    text = chat.render([{"role": "system", "content": "Be brief."}, pictured])

    assert text == "system:Be brief.user:<image>Which?assistant:"

"""Pictures in calls of external agents, with the real SDKs: their tokens, places and bytes, and what is refused."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from rayapp.config.sections import ModelSection
from rayapp.core.trajectories import branches
from rayapp.core.types import Picture, RequestId, RolloutStatus, SamplingParams
from rayapp.engine.vllm_pictures import engine_prompt, open_pictures
from rayapp.rollout.gateway import turns
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.server import Gateway
from rayapp.rollout.gateway.session import Session
from rayapp.rollout.group import run_group
from rayapp.rollout.sources import open_sources
from rayapp.storage.base import hash_bytes
from rayapp.storage.media import MOST_PICTURES, compact
from rayapp.storage.models.pictures import PictureProcessor, load_pictures
from rayapp.storage.models.tokenizer import load_tokenizer
from rayapp.testing.engine import ScriptedEngine
from support import make
from support.picture_models import bomb, picture, save_picture_model

RED, BLUE, WIDE = picture(), picture((0, 0, 255)), picture((0, 255, 0), (112, 56))


MARKED = "<|vision_start|><|image_pad|><|vision_end|>"


class Served:
    """A session of a tiny model that reads pictures."""

    def __init__(self, gateway: Gateway, session: Session, engine: ScriptedEngine, tokenizer: Any) -> None:
        self.gateway, self.session, self.engine, self.tokenizer = gateway, session, engine, tokenizer
        self.url = gateway.url_of(session)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.session.key, max_retries=0)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=self.session.key, max_retries=0)

    def shown(self, number: int) -> list[bytes]:
        """Return the bytes of a request's pictures, in the order of their places."""
        sampling = self.engine.requests[number][2]
        return [sampling.pictures[each.sha256] for each in sampling.media]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_picture_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def processor(model: Path) -> PictureProcessor:
    return load_pictures(ModelSection(path=str(model)))


@pytest.fixture
def serve(model: Path, processor: PictureProcessor) -> Any:
    @asynccontextmanager
    async def serving(*script: str | Sequence[int], reads_pictures: bool = True) -> AsyncIterator[Served]:
        tokenizer: Any = load_tokenizer(ModelSection(path=str(model)))
        said = iter(script)
        engine = make.engine(tokenizer, lambda name, ids: next(said))
        formats = Formats(tokenizer, model="tiny", pictures=processor if reads_pictures else None)
        async with make.session(tokenizer, engine, own_formats=formats) as (gateway, session):
            yield Served(gateway, session, engine, tokenizer)

    return serving


def data_uri(encoded: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(encoded).decode()}"


def openais(*parts: str | bytes) -> Any:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_uri(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def anthropics(*parts: str | bytes) -> Any:
    sources = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(part).decode()},
        }
        for part in parts
    ]
    return {"role": "user", "content": sources}


async def test_a_conversation_with_pictures_goes_on_from_the_same_tokens(
    serve: Any, processor: PictureProcessor
) -> None:
    first = openais("And this?", RED, "Say.")
    async with serve("red", "blue, wide") as served, served.openai() as client:
        reply = await client.chat.completions.create(model="any", messages=[first])
        history = [first, reply.choices[0].message, openais(BLUE, WIDE)]
        second = await client.chat.completions.create(model="any", messages=history)
        trajectory = served.session.trajectory()
        asked = [(list(ids), sampling) for _, ids, sampling in served.engine.requests]

    text = (
        "<|im_start|>user\nAnd this?<|vision_start|><|image_pad|><|vision_end|>Say.<|im_end|>\n<|im_start|>assistant\n"
    )
    ids, media = processor.expand(served.tokenizer.encode(text, add_special_tokens=False), [RED], [(56, 56)])
    assert asked[0] == (ids, asked[0][1])
    assert asked[0][1].media == media
    assert second.choices[0].message.content == "blue, wide"
    assert asked[1][0][: len(ids) + 4] == [*ids, *served.tokenizer.encode("red"), served.tokenizer.eos_token_id]
    assert (served.shown(0), served.shown(1)) == ([RED], [RED, BLUE, WIDE])
    assert trajectory.forks == ()
    assert trajectory.media == asked[1][1].media
    assert [trajectory.token_ids[each.start] for each in trajectory.media] == [processor.token_id] * 3
    assert [each.end - each.start for each in trajectory.media] == [4, 4, 8]
    assert not trajectory.response_mask[[each.start for each in trajectory.media]].any()
    given = engine_prompt(asked[1][0], asked[1][1], await open_pictures(asked[1][1]), processor.token_id)
    assert given["prompt_token_ids"] == compact(asked[1][0], trajectory.media, processor.token_id)
    assert [each.size for each in given["multi_modal_data"]["image"]] == [(56, 56), (56, 56), (112, 56)]


async def test_a_picture_of_the_same_size_is_another_conversation(serve: Any) -> None:
    async with serve("red", "blue", "red again") as served, served.openai() as client:
        for shown in (RED, BLUE, RED):
            await client.chat.completions.create(model="any", messages=[openais("Which?", shown)])
        trajectory = served.session.trajectory()

    paths = branches(trajectory.num_tokens, trajectory.forks)
    before = [[each for each in trajectory.media if each.start in path] for path in paths]
    assert [[each.sha256 for each in shown] for shown in before] == [
        [hash_bytes(RED)], [hash_bytes(BLUE)], [hash_bytes(RED)]
    ]  # fmt: skip
    assert len(trajectory.media) == 2
    assert served.session.counts["forks/retry"] == 1


async def test_anthropics_blocks_and_results_of_tools_have_pictures(serve: Any) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": anthropics("seen", BLUE)["content"]}
    history: Any = [
        anthropics(RED, "Look."),
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    async with serve("ok") as served, served.anthropic() as client:
        count = await client.messages.count_tokens(model="any", messages=history)
        await client.messages.create(model="any", max_tokens=20, messages=history)

        assert served.shown(0) == [RED, BLUE]
        assert count.input_tokens == len(served.engine.requests[0][1])


async def test_a_policy_that_samples_a_placeholder_keeps_its_trajectory_and_only_new_conversations(
    serve: Any, processor: PictureProcessor
) -> None:
    first = openais("Which?", RED)
    async with serve([processor.token_id], "red") as served, served.openai() as client:
        reply = await client.chat.completions.create(model="any", messages=[first])
        history = [first, reply.choices[0].message, openais("Sure?")]
        with pytest.raises(openai.BadRequestError, match="takes for a picture") as refused:
            await client.chat.completions.create(model="any", messages=history)
        ended = served.session.trajectory(failure="the agent's program ended with exit code 1")
        await client.chat.completions.create(model="any", messages=[openais("And this?", BLUE)])

    assert refused.value.code == "context_length_exceeded"
    assert (ended.status, ended.num_turns) == (RolloutStatus.TRUNCATED, 1)
    assert served.session.trajectory().status is RolloutStatus.COMPLETED


URL = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
REFUSED: dict[str, tuple[Any, str]] = {
    "an address": ([URL], "nothing is fetched"),
    "a file of OpenAI": ([{"type": "input_image", "file_id": "f"}], "bytes in base64"),
    "no base64": ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}], "not base64"),
    "a damaged picture": (openais(RED[:60])["content"], "can't be decoded"),
    "a bomb": (openais(bomb())["content"], "pixels, more than"),
    "too many": (openais(*[picture(size=(28, 28))] * (MOST_PICTURES + 1))["content"], "at most 128"),
    "a video": ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}], "no parts of type"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_an_unusable_picture_is_refused_with_the_reason_and_the_session_lives(serve: Any, what: str) -> None:
    content, reason = REFUSED[what]
    async with serve("ok") as served, served.openai() as client:
        with pytest.raises(openai.BadRequestError, match=reason):
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": content}])
        await client.chat.completions.create(model="any", messages=[openais("Which?", RED)])


async def test_a_model_of_text_and_other_roles_refuse_pictures(serve: Any) -> None:
    async with serve("ok", reads_pictures=False) as served, served.openai() as client:
        with pytest.raises(openai.BadRequestError, match="the policy reads only text"):
            await client.chat.completions.create(model="any", messages=[openais(RED)])
        system: Any = {**openais(RED), "role": "system"}
        with pytest.raises(openai.BadRequestError, match="no parts of type 'image_url' here"):
            await client.chat.completions.create(model="any", messages=[system, openais("hi")])


async def test_the_bytes_of_a_sessions_pictures_are_limited(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_SESSION_BYTES", len(RED) + len(BLUE))
    async with serve("1", "2", "3") as served, served.openai() as client:
        for shown in (RED, BLUE, RED):
            await client.chat.completions.create(model="any", messages=[openais(shown)])
        with pytest.raises(openai.BadRequestError, match=r"bytes of pictures in a session are allowed"):
            await client.chat.completions.create(model="any", messages=[openais(WIDE)])


async def test_a_text_that_looks_like_a_placeholder_stays_text(serve: Any) -> None:
    async with serve("ok") as served, served.openai() as client:
        await client.chat.completions.create(model="any", messages=[openais("<|image_pad|>", RED, "<|vision_start|>")])
        (request,) = served.engine.requests

    assert request[0] == RequestId("group", 0, turn=1)
    assert len(request[2].media) == 1
    assert isinstance(request[2].media[0], Picture)


AGENT = """
import json, os, openai
task = json.load(open(os.environ["RAYAPP_TASK_FILE"]))
print(task["prompt"])
client = openai.OpenAI(max_retries=0)
client.chat.completions.create(model=os.environ["RAYAPP_MODEL"], messages=task["messages"])
"""


async def test_an_external_agent_gets_the_pictures_of_its_row_as_data_uris(
    model: Path, processor: PictureProcessor, tmp_path: Path
) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "<image>as in<image>?<image>"}],
        "images": ["red.png", "blue.png", "red.png"],
        "reward_model": {"ground_truth": "4"},
    }
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    external = {"command": [sys.executable, "-c", AGENT]}
    config = make.config(
        model, tasks=[str(tmp_path / "rows.jsonl")], agent={"name": "external_agent", "external": external}
    )
    tokenizer: Any = load_tokenizer(config.model)
    engine = make.engine(tokenizer, lambda name, ids: "#### 4")

    sources = await open_sources(config, None)  # type: ignore[arg-type]
    try:
        (source,) = sources.opened
        request = make.request()
        group, _ = await run_group(
            request, await source.problem(request, seed=0), source.agent, sandboxes=None, engine=engine,  # type: ignore[arg-type]
            sampling=SamplingParams(max_tokens=20), group_size=2, seed=0, deadline_s=60.0,
        )  # fmt: skip
    finally:
        await sources.close()

    text = f"<|im_start|>user\n{MARKED}as in{MARKED}?{MARKED}<|im_end|>\n<|im_start|>assistant\n"
    shown = [RED, BLUE, RED]
    ids, media = processor.expand(tokenizer.encode(text, add_special_tokens=False), shown, [(56, 56)] * 3)
    assert [(list(asked), each.media) for _, asked, each in engine.requests if each.media] == [(ids, media)] * 2
    assert [(each.media, each.reward.value) for each in group.trajectories] == [(media, 1.0)] * 2
    assert group.trajectories[0].agent_output == "<image>as in<image>?<image>\n"
    assert group.pictures == {hash_bytes(RED): RED, hash_bytes(BLUE): BLUE}
    assert group.prompt.messages == ({"role": "user", "content": "<image>as in<image>?<image>"},)

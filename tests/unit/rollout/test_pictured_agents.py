"""Tools and environments that return pictures: what the policy reads, and what trajectories and run folders hold."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcp.types import CallToolResult, ImageContent, TextContent
from PIL import Image

from rayapp.config.sections import ModelSection
from rayapp.core.http import TokenBucket
from rayapp.core.types import Prompt, RequestId, Reward, RolloutStatus, SamplingParams, Trajectory
from rayapp.extras.environments.agent import EpisodePlayer, EpisodeTool
from rayapp.extras.environments.files import EnvironmentTask, TrlEnvironment
from rayapp.extras.environments.openenv import _output as observed
from rayapp.extras.environments.trl import TrlEpisodes
from rayapp.rollout.agent.chat import ChatFormat
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.problem import Problem, problem_of_environment
from rayapp.rollout.recorder import AgentLimits, AgentPrompt
from rayapp.runs.layout import PICTURES
from rayapp.runs.trajectories import read_groups, write_trajectories
from rayapp.storage.base import hash_bytes
from rayapp.storage.models.pictures import load_pictures
from rayapp.storage.models.tokenizer import load_tokenizer
from rayapp.tasks.data.pictures import placed
from rayapp.tools.base import ToolBase, ToolOutput, ToolSchema
from rayapp.tools.config import McpToolConfig
from rayapp.tools.mcp_tool import McpTool
from rayapp.tools.toolset import ToolSet
from support import make
from support.hermes import HermesParser
from support.picture_models import TEMPLATES, bomb, picture, save_picture_model

RED, BLUE = picture(), picture((0, 0, 255))
WITH_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + TEMPLATES["qwen2_5_vl"]
LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
ASKED = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Find it."}]}


class Look(ToolBase):
    schema = ToolSchema(name="look")

    def __init__(self, *pictures: bytes) -> None:
        super().__init__({})
        self.pictures = pictures

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        return ToolOutput(text="seen", pictures=self.pictures)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSection:
    return ModelSection(path=str(save_picture_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")))


class Bench:
    """An agent that plays a pictured prompt with the tool `look`."""

    def __init__(self, model: ModelSection, *pictures: bytes, reads_pictures: bool = True) -> None:
        self.tokenizer: Any = load_tokenizer(model)
        tools = ToolSet([Look(*pictures)])
        self.loop = AgentLoop(
            chat=ChatFormat(self.tokenizer, tools.schemas, template=WITH_TOOLS),
            parser=HermesParser(),
            tools=tools,
            limits=AgentLimits(max_response_tokens=1000),
            pictures=load_pictures(model) if reads_pictures else None,
        )

    async def problem(self) -> Problem:
        async def score(*_: Any) -> Reward:
            return Reward(value=1.0)

        shown = [hash_bytes(RED)], {hash_bytes(RED): RED}
        ids, media = await placed(self.loop.pictures, self.loop.chat.prompt_ids([ASKED]), *shown)
        prompt = Prompt(task="t", text="", token_ids=np.array(ids, np.int32), media=media)
        return Problem(prompt=prompt, score=score, pictures={hash_bytes(RED): RED})

    async def play(self, problem: Problem, **asked: Any) -> Trajectory:
        return await self.loop.run(AgentPrompt(token_ids=tuple(problem.prompt.token_ids.tolist())), **asked)

    def said(self, trajectory: Trajectory) -> str:
        return str(self.tokenizer.decode(trajectory.token_ids, skip_special_tokens=False))


async def test_a_tools_picture_is_read_after_its_text_and_kept_once_in_the_run_folder(
    model: ModelSection, tmp_path: Path
) -> None:
    bench = Bench(model, BLUE, RED)
    engine = make.engine(bench.tokenizer, lambda name, ids: LOOK if name.turn == 0 else "blue")

    group, _ = await make.played(await bench.problem(), bench, engine, group_size=2)

    for played in group.trajectories:
        assert [each.sha256 for each in played.media] == [hash_bytes(each) for each in (RED, BLUE, RED)]
        assert "<|im_start|>tool\nseen<|vision_start|><|image_pad|>" in bench.said(played)
        assert played.completion_text == "blue"
        assert not played.response_mask[played.media[1].start : played.media[2].end].any()
    _, ids, sampling = engine.requests[-1]
    assert sampling.media == group.trajectories[0].media
    assert list(ids) == group.trajectories[0].token_ids[: len(ids)].tolist()
    assert sampling.pictures == group.pictures == {hash_bytes(RED): RED, hash_bytes(BLUE): BLUE}
    file = tmp_path / "trajectories" / "step=000001.parquet"
    file.parent.mkdir()
    write_trajectories(file, 1, [group])
    assert {each.name for each in (tmp_path / PICTURES).iterdir()} == group.pictures.keys()
    (read,) = read_groups(file)
    assert [each.media for each in read.trajectories] == [each.media for each in group.trajectories]


async def test_a_policy_that_samples_a_placeholder_keeps_its_trajectory_but_is_not_asked_again(
    model: ModelSection,
) -> None:
    bench = Bench(model)
    drawn = [*bench.tokenizer.encode(LOOK), load_pictures(model).token_id]
    engine = make.engine(bench.tokenizer, lambda *_: drawn)

    group, _ = await make.played(await bench.problem(), bench, engine)

    (played,) = group.trajectories
    assert (played.status, played.reward.value, len(engine.requests)) == (RolloutStatus.TRUNCATED, 1.0, 1)


@pytest.mark.parametrize(("shown", "why"), [(RED[:60], "can't be decoded"), (bomb(), "pixels, more than")])
async def test_the_policy_reads_why_a_tools_picture_cannot_be_shown(
    model: ModelSection, shown: bytes, why: str
) -> None:
    bench = Bench(model, shown)
    said = iter([LOOK, "no"])

    group, _ = await make.played(await bench.problem(), bench, make.engine(bench.tokenizer, lambda *_: next(said)))

    (played,) = group.trajectories
    assert (played.calls[0].failure, len(played.media)) == ("picture", 1)
    assert why in played.calls[0].output


async def test_a_model_of_text_reads_that_pictures_are_left_out(model: ModelSection) -> None:
    bench = Bench(model, BLUE, reads_pictures=False)
    said = iter([LOOK, "no"])
    prompt = AgentPrompt(token_ids=tuple(bench.loop.chat.prompt_ids([{"role": "user", "content": "hi"}])))

    played = await bench.loop.run(
        prompt,
        engine=make.engine(bench.tokenizer, lambda *_: next(said)),
        sampling=SamplingParams(max_tokens=400),
        request_id=RequestId("group", 0),
    )

    assert played.calls[0].output == "seen\n[1 pictures are left out: this model reads only text]"
    assert played.media == ()


async def test_pictures_in_the_results_of_an_mcp_server_follow_its_texts() -> None:
    class Link:
        async def call(self, *_: Any, **__: Any) -> Any:
            shown = ImageContent(type="image", data=base64.b64encode(BLUE).decode(), mime_type="image/png")
            return CallToolResult(content=[shown, TextContent(type="text", text="a screen")])

    info: Any = type("Info", (), {"name": "look", "description": "", "input_schema": {}})
    link: Any = Link()
    tool = McpTool(
        info,
        McpToolConfig(),
        connect=lambda: link,
        shared=link,
        bucket=TokenBucket(rate_per_s=1e6, burst=1, clock=time.monotonic),
    )

    output = await tool.execute(link, {})

    assert (output.text, output.pictures) == ("a screen", (BLUE,))


class Screen:
    """An environment in TRL's form, which shows its state as a picture."""

    reward = 1.0

    def reset(self, **row: Any) -> list[Any]:
        return ["Your screen:", {"type": "image", "image": Image.new("RGB", (56, 56), (0, 0, 255))}]

    def look(self) -> Any:
        """Looks."""
        return RED


async def test_an_environment_begins_and_answers_with_pictures(model: ModelSection) -> None:
    bench = Bench(model)
    environment = TrlEnvironment(environment="trl", name="screen", folder=Path(), factory=f"{__file__}:Screen")
    episodes = TrlEpisodes(environment)
    (schema,) = await episodes.open()
    tools = ToolSet([EpisodeTool(schema, timeout_s=9.0)])
    chat = ChatFormat(bench.tokenizer, tools.schemas, template=WITH_TOOLS)
    player = EpisodePlayer(episodes, replace(bench.loop, tools=tools, chat=chat), max_prompt_tokens=900)
    task = EnvironmentTask(environment=environment, index=0, messages=({"role": "user", "content": "Go. "},))
    said = iter(["x", LOOK, "done"])

    problem = problem_of_environment(task)
    problem = replace(problem, prompt=await player.prompt(problem))
    group, _ = await make.played(problem, player, make.engine(bench.tokenizer, lambda *_: next(said)))

    (played,) = group.trajectories
    assert "Go. Your screen:<|vision_start|><|image_pad|>" in bench.said(played)
    assert [each.end - each.start for each in played.media] == [4, 4]
    assert group.pictures.keys() == {each.sha256 for each in played.media}
    assert group.pictures[hash_bytes(RED)] == RED
    assert played.reward.value == 1.0


def test_a_field_of_an_observation_that_is_a_data_uri_is_a_picture() -> None:
    uri = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    output = observed({"goal": "click", "screenshot": uri})
    assert (output.text, output.pictures) == ("click", (RED,))

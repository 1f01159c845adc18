"""Native tools, tool files, and errors about wrong files."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import ConfigError, InputError, SandboxGoneError
from rayapp.rollout.agent.text import Neutralizer, cut
from rayapp.sandbox.pool.build import open_pool
from rayapp.tools.base import ToolBase, ToolContext, ToolFailedError, ToolOutput, ToolSchema
from rayapp.tools.coding import PythonTool
from rayapp.tools.gsm8k import Gsm8kTool, score_answer
from rayapp.tools.loading import open_tools
from rayapp.tools.toolset import ArgumentChecker, ToolSet
from support.fake_sandboxes import FakeProvider
from support.timing import takes_at_most_s

MakePython = Callable[..., Awaitable[PythonTool]]
DICE = '''
"""A tool of a user: one file, one class."""

from dataclasses import dataclass

from rayapp.tools.base import ToolBase, ToolConfig, ToolOutput, ToolSchema


@dataclass
class State:
    rolls: int = 0


class DiceConfig(ToolConfig):
    prefix: str = ""


class Dice(ToolBase):
    Config = DiceConfig
    schema = ToolSchema(name="roll", description="Rolls.", parameters={
        "type": "object", "properties": {"sides": {"type": "integer"}}, "required": ["sides"]})

    async def create(self, kwargs):
        return State()

    async def execute(self, state, arguments):
        state.rolls += 1
        return ToolOutput(text=f"{self.config.prefix}{arguments['sides']}")

    async def reward(self, state):
        return -0.1 * state.rolls
'''


def tool_file(folder: Path, *entries: str) -> Path:
    path = folder / "tools.yaml"
    path.write_text("tools:\n" + "".join(f"  - {entry}\n" for entry in entries))
    return path


def verl_scoring() -> ModuleType:
    """verl's module by its path: importing the package would take seconds."""
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "utils" / "reward_score" / "gsm8k.py"
    spec = importlib.util.spec_from_file_location("verl_gsm8k", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_gsm8k_tool_rewards_the_first_right_answer_and_charges_for_guessing() -> None:
    tool = Gsm8kTool()
    state = await tool.create({"ground_truth": "72"})

    outputs = [await tool.execute(state, {"answer": answer}) for answer in ("70", "#### 72", "72")]

    # Wrong is no better than the 0 it starts at: -0.05. Right is better: 0. Right again is no better.
    assert [output.reward for output in outputs] == [-0.05, 0.0, -0.05]
    assert outputs[1].text == "Current parsed answer='72' reward=1.0"
    assert await tool.reward(state) == 1.0


async def test_gsm8k_tool_names_what_a_row_lacks() -> None:
    with pytest.raises(InputError, match=r"tools_kwargs\.calc_gsm8k_reward\.create_kwargs\.ground_truth"):
        await Gsm8kTool().create({})


@given(answer=st.text(alphabet="0123456789.,-#$ a", max_size=12), truth=st.from_regex(r"-?[0-9]{1,4}", fullmatch=True))
def test_gsm8k_tool_scores_as_verls_flexible_method(answer: str, truth: str) -> None:
    verl = VERL.compute_score("#### " + answer, truth, method="flexible", format_score=0.0, score=1.0)

    # verl takes a lone comma or stop for a number; neither is ever right.
    assert score_answer(answer, truth) == verl


VERL = verl_scoring()


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "abc...(truncated)"),
        ("right", "(truncated)...hij"),
        ("middle", "ab...(truncated)...j"),
    ],
)
def test_long_output_is_cut_where_configured(side: Any, expected: str) -> None:
    assert cut("abcdefghij", 3, side) == expected
    assert cut("abc", 3, side) == "abc"


@given(st.text(alphabet="<|im_end>s", max_size=40))
def test_no_control_token_survives_neutralizing(text: str) -> None:
    tokens = ["<|im_end|>", "<|im_s|>", "<s>"]

    assert not any(token in Neutralizer(tokens)(text) for token in tokens)


@pytest.mark.parametrize("config", ["{timeot: 5}", "{prefx: d}", "{timeout: -1}", "{timeout: soon}", "{prefix: [d]}"])
async def test_a_mistake_in_the_config_of_a_users_tool_names_the_key(tmp_path: Path, config: str) -> None:
    (tmp_path / "dice.py").write_text(DICE)
    path = tool_file(tmp_path, f"{{class_name: 'dice.py:Dice', config: {config}}}")

    with pytest.raises(ConfigError, match=r"config of tool Dice: .*(timeout|prefix)"):
        await open_tools(path)


async def test_tool_of_a_user_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "dice.py").write_text(DICE)
    path = tool_file(tmp_path, "{class_name: 'dice.py:Dice', config: {prefix: 'd', timeout: 3}}")

    tools = await open_tools(path)
    async with tools.trajectory({}) as states:
        tool = tools.get("roll")
        assert tool is not None
        assert (await tool.execute(states["roll"], {"sides": 6})).text == "d6"
        assert await states.rewards() == {"roll": -0.1}
        assert tool.timeout_s == 3.0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{class_name: verl.tools.nonesuch.Tool}", "can't be imported"),
        ("{class_name: rayapp.tools.gsm8k.Gsm9kTool}", "there is no class Gsm9kTool"),
        ("{class_name: 'gone.py:Tool'}", "there is no file"),
        ("{class_name: 'broken.py:Tool'}", "ZeroDivisionError"),
        ("{class_name: rayapp.tools.gsm8k.Gsm8kTool, confg: {}}", "confg"),
        ("{class_name: rayapp.tools.gsm8k.Gsm8kTool, tool_schema: {type: x}}", "it needs `type: function`"),
        ("{class_name: verl.tools.mcp_search_tool.MCPSearchTool, config: {type: mcp}}", "has no section `mcp`"),
        ("{class_name: rayapp.tools.coding.PythonTool, config: {time: 3}}", "time"),
        ("{class_name: rayapp.tools.coding.PythonTool}", "needs sandboxes, but none"),
        (
            "{class_name: rayapp.tools.mcp_tool.McpTool, config: {ratelimit: 3}, mcp: {mcp_servers_config_path: x}}",
            "rate_limit",
        ),
        ("{class_name: rayapp.tools.mcp_tool.McpTool, mcp: {mcp_servers_config_path: nowhere.json}}", "nowhere.json"),
    ],
)
async def test_wrong_tool_file_says_what_to_change(tmp_path: Path, entry: str, message: str) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")

    with pytest.raises(ConfigError, match=message):
        await open_tools(tool_file(tmp_path, entry))


async def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    entry = "{class_name: verl.tools.gsm8k_tool.Gsm8kTool}"

    with pytest.raises(ConfigError, match="two tools have the name 'calc_gsm8k_reward'"):
        await open_tools(tool_file(tmp_path, entry, entry))


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"multipleOf": 0.1}, float("nan"), "can't be checked: ValueError"),
        ({"multipleOf": 3}, 10**299 * 3 + 1, "is not a multiple of 3"),
        ({"pattern": "^(.*a){15}b$"}, "a" * 2000, "can't be checked: TimeoutError"),
        ({"pattern": "^a+$"}, "aaa!", "does not match"),
        ({"uniqueItems": True}, [{"n": i % 4999} for i in range(5000)], "some items are equal"),
        ({"uniqueItems": True}, [1, True, 0, False, "1", [1], [True], {"a": 1}, {"a": True}, None], ""),
        ({"uniqueItems": True}, [{"a": 1, "b": 2}, {"b": 2.0, "a": 1}], "some items are equal"),
        ({"items": {"type": "integer"}}, ["x"] * 9000, "is not of type 'integer'"),
        ({"type": "string", "nullable": True}, None, ""),
        ({"type": "string"}, None, "None is not of type 'string'"),
        ({"anyOf": [{"const": "a"}, {"enum": [1]}]}, True, "is not valid under any"),
    ],
)
def test_no_argument_breaks_or_holds_the_check_of_a_schema(schema: dict[str, Any], value: object, problem: str) -> None:
    checker = ArgumentChecker({"properties": {"value": schema}})

    with takes_at_most_s(2):
        found = checker.problem({"value": value})

    assert problem in found
    assert bool(problem) == bool(found)


class Tree(BaseModel):
    kind: Literal["leaf", "node"] = "leaf"
    weight: int | None = None
    kids: list[Tree] = []


DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (Tree.model_json_schema(), {"kids": [{"kind": "node", "weight": None}]}, {"kids": [{"kind": "root"}]}),
        ({"properties": {"a": {"$ref": "#/definitions/A"}}, "definitions": {"A": {"const": 1}}}, {"a": 1}, {"a": 2}),
        ({"$id": "http://x/y", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"enum": [1]}}}, {"a": 1},
         {"a": 2}),
        ({"$schema": DRAFT_7, "properties": {"a": {"items": [{"type": "string"}]}}}, {"a": ["x"]}, {"a": [1]}),
    ],
)  # fmt: skip
def test_schemas_of_many_makers_are_checked(schema: dict[str, Any], right: object, wrong: object) -> None:
    checker = ArgumentChecker(schema)

    assert checker.problem(right) == ""
    assert checker.problem(wrong) != ""


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "objekt"}, {"pattern": "("}, {"patternProperties": {"^a": {}}}, {"$ref": "#/$defs/no"}),
        *({"$ref": "#/properties/a"}, {"$ref": "http://127.0.0.1:9/schema"}, {"items": [{"type": "string"}]}),
    ],
)
def test_a_schema_that_is_none_or_can_not_be_checked_in_time_is_refused(schema: dict[str, Any]) -> None:
    class Bad(ToolBase):
        schema = ToolSchema(name="bad", parameters={"type": "object"})

    Bad.schema = ToolSchema(name="bad", parameters={"type": "object", "properties": {"a": schema}})
    with pytest.raises(ConfigError, match="'bad': its parameters can't be used as a JSON schema"):
        ToolSet([Bad()])


@pytest.mark.parametrize("verdict", [float("nan"), 10**400, "good"])
async def test_a_tools_verdict_that_is_no_number_is_the_tools_crash(verdict: Any) -> None:
    class Odd(ToolBase):
        schema = ToolSchema(name="odd")

        async def reward(self, state: Any) -> float | None:
            return verdict  # type: ignore[no-any-return]

    async with ToolSet([Odd()]).trajectory({}) as states:
        with pytest.raises(ToolFailedError, match="tool odd: reward crashed"):
            await states.rewards()


@pytest.fixture
async def python() -> AsyncIterator[MakePython]:
    """Call it with the tool's config; `provider` makes its sandboxes, the local one unless said otherwise."""
    config = SandboxConfig(max_leases=2)
    async with AsyncExitStack() as pools:

        async def tool(provider: FakeProvider | None = None, **options: Any) -> PythonTool:
            sandboxes, _ = await pools.enter_async_context(open_pool(config, "test", local=provider))
            return PythonTool(options, None, ToolContext(sandboxes=sandboxes))

        yield tool


async def say(tool: PythonTool, state: Any, code: str) -> str:
    output: ToolOutput = await tool.execute(state, {"code": code})
    return output.text


async def test_python_tool_keeps_names_over_the_turns_of_one_trajectory(python: MakePython) -> None:
    tool = await python()
    first, second = await tool.create({}), await tool.create({})

    assert await say(tool, first, "x = 'é漢'") == ""
    assert await say(tool, first, "print(x * 2)") == "é漢é漢"
    assert "NameError: name 'x' is not defined" in await say(tool, second, "print(x)")
    assert (await say(tool, first, "1 / 0")).endswith("ZeroDivisionError: division by zero")
    assert await say(tool, first, "print(x)") == "é漢"
    await tool.release(first)
    await tool.release(second)


async def test_python_tool_says_that_code_was_stopped(python: MakePython) -> None:
    tool = await python(timeout=2.5)
    state = await tool.create({})

    text = await say(tool, state, "print('a', flush=True)\nwhile True: pass")

    assert text.startswith("a\n[the code was stopped: timeout, after ")
    assert text.endswith("all names are lost]")
    assert await say(tool, state, "print('b')") == "b"
    await tool.release(state)


async def test_python_tool_without_state_gives_its_sandbox_back_after_each_call(python: MakePython) -> None:
    provider = FakeProvider(respond=lambda code: code.upper())
    tool = await python(provider, stateful=False)
    state = await tool.create({})

    assert [await say(tool, state, "a"), await say(tool, state, "b")] == ["A", "B"]
    assert (len(provider.created), len(provider.living)) == (2, 0)


async def test_python_tool_tries_another_sandbox_while_there_is_nothing_to_lose(python: MakePython) -> None:
    provider = FakeProvider(respond=lambda code: "fine")
    provider.fail_next("run_code", SandboxGoneError("it died"))
    tool = await python(provider)
    state = await tool.create({})

    assert await say(tool, state, "x = 1") == "fine"
    provider.fail_next("run_code", SandboxGoneError("it died"))
    with pytest.raises(SandboxGoneError):
        await say(tool, state, "x")
    assert len(provider.living) == 0

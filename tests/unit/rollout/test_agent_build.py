"""Building an agent loop from settings, and the errors before the first prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayapp.core.errors import ConfigError
from rayapp.rollout.agent.build import open_agent_loop
from rayapp.rollout.recorder import AgentLimits
from support.hermes import HermesParser

LIMITS = AgentLimits(max_response_tokens=100)
TOOLS = "tools:\n  - class_name: verl.tools.gsm8k_tool.Gsm8kTool\n"


@pytest.fixture
def tool_file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.yaml"
    path.write_text(TOOLS)
    return path


async def test_settings_become_a_loop(chat_tokenizer: Any, tool_file: Path) -> None:
    loop = await open_agent_loop(
        chat_tokenizer,
        limits=LIMITS,
        model="tiny",
        tool_file=tool_file,
        chat_template="chatml_hermes",
        make_parser=lambda *args: HermesParser(),
    )

    assert [schema.name for schema in loop.tools.schemas] == ["calc_gsm8k_reward"]
    assert "calc_gsm8k_reward" in loop.chat.render([{"role": "user", "content": "hi"}])
    await loop.tools.close()


async def test_template_without_tools_is_told_before_the_parser_is_made(chat_tokenizer: Any, tool_file: Path) -> None:
    def never(*args: object) -> HermesParser:
        raise AssertionError("the parser was made")

    with pytest.raises(ConfigError, match="the chat template of tiny fails"):
        await open_agent_loop(chat_tokenizer, limits=LIMITS, model="tiny", tool_file=tool_file, make_parser=never)

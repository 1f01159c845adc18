"""The command that a run prints at its end, with which vLLM serves its model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.config import Config
from rayapp.driver.serving import serve_command


@pytest.mark.parametrize(
    ("sections", "flags"),
    [
        ({}, ["--max-model-len 1536", "--dtype auto", "--generation-config vllm"]),
        ({"server": {"tensor_parallel_size": 2}}, ["--tensor-parallel-size 2"]),
        ({"agent": {"name": "tool_agent", "tool_parser": "qwen3_coder"}}, ["--tool-call-parser qwen3_coder"]),
        (
            {"agent": {"chat_template": "chatml_hermes", "chat_template_kwargs": {"enable_thinking": False}}},
            ["templates/chatml_hermes.jinja", "--default-chat-template-kwargs '{\"enable_thinking\": false}'"],
        ),
    ],
)
def test_the_command_has_what_the_policy_was_trained_with(
    sections: dict[str, Any], flags: list[str], tiny_model: Path
) -> None:
    config = Config.model_validate(
        {"model": {"path": str(tiny_model)}, "cluster": {"device": "cpu"}, **sections}
        | {"rollout": {"max_prompt_tokens": 512, "max_completion_tokens": 1024}}
    )

    command = serve_command(config, "outputs/mine/final")

    assert shlex.split(command)[:3] == ["vllm", "serve", "outputs/mine/final"]
    assert all(flag in command for flag in flags), command

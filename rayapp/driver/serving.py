"""The command that serves a run's model with vLLM as the run sampled from it; `rayapp train` prints it at its end."""

from __future__ import annotations

import json
import shlex
from importlib.resources import files
from pathlib import Path

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError
from rayapp.rollout.agent.build import check_parser
from rayapp.storage.models.fetch import with_local_model
from rayapp.storage.models.tokenizer import load_tokenizer


def serve_command(config: Config, model: str) -> str:
    """Return `vllm serve MODEL` with the run's length, dtype, chat template and tool parser."""
    agent, server = config.agent, config.server
    words = ["vllm", "serve", model, "--served-model-name", "policy", "--max-model-len", str(config.max_model_tokens)]
    words += ["--dtype", server.dtype, "--generation-config", "vllm"]  # not the model's own top_k or penalties
    if server.tensor_parallel_size > 1:
        words += ["--tensor-parallel-size", str(server.tensor_parallel_size)]
    if config.model.trust_remote_code:
        words.append("--trust-remote-code")
    if limit := config.model.max_position_embeddings:
        words += ["--hf-overrides", json.dumps({"max_position_embeddings": limit})]
    if agent.chat_template:
        words += ["--chat-template", _template_file(agent.chat_template)]
    if agent.chat_template_kwargs:
        words += ["--default-chat-template-kwargs", json.dumps(agent.chat_template_kwargs)]
    if config.agent_name != "single_turn_agent" and (parser := _parser(config)):
        words += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    return shlex.join(words)


def _template_file(name: str) -> str:
    shipped = files("rayapp.rollout.agent") / "templates" / f"{name}.jinja"
    return str(shipped) if shipped.is_file() else str(Path(name).absolute())


def _parser(config: Config) -> str:
    """Return the parser's name; empty if the chat template has no tools, or vLLM is not installed here."""
    agent = config.agent
    try:
        return check_parser(
            load_tokenizer(with_local_model(config).model, agent.chat_template_kwargs),
            model=config.model.path,
            parser=agent.tool_parser,
            chat_template=agent.chat_template,
        )
    except (ConfigError, ImportError):
        return "" if agent.tool_parser == "auto" else agent.tool_parser

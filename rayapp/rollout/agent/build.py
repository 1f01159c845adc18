"""Makes an `AgentLoop` from settings, and checks that tokenizer, template, parser and tools fit each other.

Each rollout worker makes its loops before its first prompt, so that unusable settings are reported at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rayapp.config.agent import AgentSection
from rayapp.config.sections import ModelSection
from rayapp.core.protocols import SandboxSource
from rayapp.rollout.agent.chat import ChatFormat, load_template
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.recorder import AgentLimits
from rayapp.storage.models.tokenizer import ModelTokenizer, load_tokenizer
from rayapp.tools.base import SampleCall, Tool, ToolCallParser, ToolContext, ToolSchema
from rayapp.tools.loading import open_tools

MakeParser = Callable[[str, Any, Sequence[ToolSchema], SampleCall | None], ToolCallParser]

_ANY_TOOL = ToolSchema(
    name="look_up", description="Looks up.", parameters={"type": "object", "properties": {"word": {"type": "string"}}}
)
log = logging.getLogger(__name__)


def vllm_parser(name: str, tokenizer: Any, tools: Sequence[ToolSchema], sample: SampleCall | None) -> ToolCallParser:
    """Return vLLM's tool parser with this name. Raises ConfigError: there is no such parser, or it can't be used."""
    from rayapp.engine.vllm_tool_parser import load_parser  # imports vLLM, which takes seconds

    given = tokenizer.of_transformers if isinstance(tokenizer, ModelTokenizer) else tokenizer
    return load_parser(name, given, tools, sample)


async def open_loop(
    model: ModelSection,
    agent: AgentSection,
    max_response_tokens: int,
    sandboxes: SandboxSource,
    *,
    brought: Sequence[str] = (),
    made: Sequence[Tool] = (),
    reader: ToolCallParser | None = None,
) -> AgentLoop:
    """Make the agent loop for the settings of section `agent`. Its tools get sandboxes from `sandboxes`.

    Args:
        brought, made: names of tools, and tools, in addition to those in the tool file; see `tools.loading.open_tools`.
        reader: tool call parser for a policy whose prompt lists no tools, as in `open_agent_loop`.
    """
    limits = AgentLimits(
        max_response_tokens=max_response_tokens,
        max_assistant_turns=agent.max_assistant_turns,
        max_calls_per_turn=agent.max_calls_per_turn,
        max_tool_output_chars=agent.max_tool_output_chars,
    )
    tokenizer: Any = load_tokenizer(model, agent.chat_template_kwargs)
    return await open_agent_loop(
        tokenizer,
        limits=limits,
        model=model.path,
        tool_file=agent.tool_file,
        brought=brought,
        made=made,
        reader=reader,
        parser=agent.tool_parser,
        chat_template=agent.chat_template,
        context=ToolContext(sandboxes=sandboxes),
    )


async def open_agent_loop(
    tokenizer: Any,
    *,
    limits: AgentLimits,
    model: str,
    tool_file: str | Path = "",
    brought: Sequence[str] = (),
    made: Sequence[Tool] = (),
    reader: ToolCallParser | None = None,
    parser: str = "auto",
    chat_template: str = "",
    context: ToolContext | None = None,
    make_parser: MakeParser = vllm_parser,
) -> AgentLoop:
    """Make the agent loop of a process. Close it with `await loop.tools.close()`.

    Args:
        model: name of the model, for messages.
        tool_file: path of a tool file (docs/tools.md); empty without one.
        brought, made: names of tools, and tools, in addition to those in the tool file; see `tools.loading.open_tools`.
        reader: tool call parser for a policy whose prompt lists no tools; tool results are then sent as user messages.
            With None, the prompt lists the tools, and the parser `parser` is made.
        parser: vLLM's name of a tool parser, or auto.
        chat_template: a .jinja file or the name of a shipped template; empty for the model's own.
        make_parser: function that makes the parser; tests and benchmarks replace it.
    Raises:
        ConfigError: the tool file is wrong, an MCP server can't be used, the template ignores tools, the parser does
            not exist, or the parser doesn't find a call that the template writes.
    """
    tools = await open_tools(tool_file, context, brought=brought, made=made)
    try:
        template = load_template(chat_template) if chat_template else ""
        chat = ChatFormat(tokenizer, () if reader else tools.schemas, template=template, name=model)
        found = reader or make_parser(parser, tokenizer, tools.schemas, sample_of(chat, parser))
    except BaseException:
        await tools.close()
        raise
    return AgentLoop(chat=chat, parser=found, tools=tools, limits=limits, is_talk=reader is not None)


def check_template(tokenizer: Any, *, model: str, chat_template: str) -> ChatFormat:
    """Check, with one example tool, that the template lists tools. The run's own tools are not made, because they may
    need a service.

    Raises:
        ConfigError: the template ignores tools.
    """
    template = load_template(chat_template) if chat_template else ""
    return ChatFormat(tokenizer, [_ANY_TOOL], template=template, name=model)


def check_parser(tokenizer: Any, *, model: str, parser: str, chat_template: str) -> str:
    """Check the template as `check_template` does, and check the parser. This takes seconds, because it imports vLLM.

    Returns:
        The parser's name.
    Raises:
        ConfigError: the template ignores tools, or the parser can't read the calls that it writes.
    """
    chat = check_template(tokenizer, model=model, chat_template=chat_template)
    found = vllm_parser(parser, tokenizer, [_ANY_TOOL], sample_of(chat, parser))
    return str(getattr(found, "name", parser))


def sample_of(chat: ChatFormat, parser: str) -> SampleCall | None:
    """Return a call, as the template writes it, that the parser must find. If the template writes no calls, log a
    warning and return None.
    """
    if not chat.has_tools:
        return None
    sample = chat.sample_call()
    if sample is None:
        log.warning("the chat template writes no calls, so the tool parser %s can't be checked", parser)
    return sample

"""Makes an `AgentLoop` from settings, and checks that tokenizer, template, parser and tools fit each other.

Each rollout worker makes its loops before its first prompt, so that unusable settings are reported at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayapp.config.agent import AgentSection
from rayapp.config.sections import ModelSection
from rayapp.core.protocols import SandboxSource
from rayapp.rollout.agent.chat import ChatFormat, load_template
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.recorder import AgentLimits
from rayapp.storage.models.pictures import load_pictures, reads_pictures
from rayapp.storage.models.tokenizer import ModelTokenizer, load_tokenizer
from rayapp.tools.base import SampleCall, Tool, ToolCallParser, ToolContext, ToolSchema
from rayapp.tools.loading import open_tools

MakeParser = Callable[[str, Any, Sequence[ToolSchema], SampleCall | None], ToolCallParser]

_ANY_TOOL = ToolSchema(
    name="look_up", description="Looks up.", parameters={"type": "object", "properties": {"word": {"type": "string"}}}
)
log = logging.getLogger(__name__)


def vllm_parser(name: str, tokenizer: Any, tools: Sequence[ToolSchema], sample: SampleCall | None) -> ToolCallParser:
    from rayapp.rollout.agent.vllm_tool_parser import load_parser  # imports vLLM, which takes seconds

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
    """Make the agent loop for the settings of section `agent`, with sandboxes from `sandboxes`. `brought` and `made`
    are tools besides those of the tool file; `reader` as in `open_agent_loop`."""
    limits = AgentLimits(
        max_response_tokens=max_response_tokens,
        max_assistant_turns=agent.max_assistant_turns,
        max_calls_per_turn=agent.max_calls_per_turn,
        max_tool_output_chars=agent.max_tool_output_chars,
    )
    tokenizer: Any = load_tokenizer(model, agent.chat_template_kwargs)
    loop = await open_agent_loop(
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
    return replace(loop, pictures=await asyncio.to_thread(load_pictures, model)) if reads_pictures(model) else loop


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

    With a `reader` (a tool call parser), the prompt lists no tools, and tool results are sent as user messages.
    `chat_template` is a .jinja file or a shipped name; empty: the model's own.
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
    """Check, with one example tool, that the template lists tools. The run's own may need a service."""
    template = load_template(chat_template) if chat_template else ""
    return ChatFormat(tokenizer, [_ANY_TOOL], template=template, name=model)


def check_parser(tokenizer: Any, *, model: str, parser: str, chat_template: str) -> str:
    """Check template and parser (which imports vLLM, for seconds). Return the parser's name."""
    chat = check_template(tokenizer, model=model, chat_template=chat_template)
    found = vllm_parser(parser, tokenizer, [_ANY_TOOL], sample_of(chat, parser))
    return str(getattr(found, "name", parser))


def sample_of(chat: ChatFormat, parser: str) -> SampleCall | None:
    """Return a call, as the template writes it, that the parser must find; None, with a warning, if it writes none."""
    if not chat.has_tools:
        return None
    sample = chat.sample_call()
    if sample is None:
        log.warning("the chat template writes no calls, so the tool parser %s can't be checked", parser)
    return sample

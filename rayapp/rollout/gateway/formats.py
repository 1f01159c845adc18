"""Prepares and caches the chat template and the tool parser for each set of tools that agents bring."""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rayapp.config.agent import AgentSection
from rayapp.config.sections import ModelSection
from rayapp.core.errors import ConfigError
from rayapp.rollout.agent.build import MakeParser, sample_of, vllm_parser
from rayapp.rollout.agent.calls import PARSING
from rayapp.rollout.agent.chat import ChatFormat, load_template
from rayapp.rollout.agents import NoCalls
from rayapp.rollout.gateway.conversation import Key, RefusedError, Said
from rayapp.storage.models.pictures import PictureProcessor, load_pictures, reads_pictures
from rayapp.storage.models.tokenizer import load_tokenizer
from rayapp.tools.base import ToolCallParser, ToolSchema

_MOST_KEPT, _MOST_KEPT_CHARS = 64, 8 << 20  # of sets of tools in the cache, and of characters of their JSON
# Number of new objects before a collection, and of collections before that of an older generation (Python: 700, 10,
# 10).
_GARBAGE_THRESHOLDS = (20_000, 20, 20)
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Format:
    """Chat template and tool parser for conversations with one set of tools."""

    key: Key
    chat: ChatFormat
    parser: ToolCallParser


class Formats:
    """Makes a `Format` for each set of tools, for one model, and caches it. `template` is Jinja text (empty: the
    tokenizer's own). ConfigError: the model has no chat template that can be used."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        model: str,
        parser: str = "hermes",
        template: str = "",
        make_parser: MakeParser = vllm_parser,
        pictures: PictureProcessor | None = None,
    ) -> None:
        self._tokenizer, self._model, self._parser = tokenizer, model, parser
        self.pictures = pictures  # None if the model reads only text
        self._template, self._make_parser = template, make_parser
        self._made: OrderedDict[Key, Format] = OrderedDict()
        self.plain = Format(key=(), chat=ChatFormat(tokenizer, (), template=template, name=model), parser=NoCalls())

    @classmethod
    def of(cls, model: ModelSection, agent: AgentSection) -> Formats:
        template = load_template(agent.chat_template) if agent.chat_template else ""
        tokenizer: Any = load_tokenizer(model, agent.chat_template_kwargs)
        pictures = load_pictures(model) if reads_pictures(model) else None
        return cls(tokenizer, model=model.path, parser=agent.tool_parser, template=template, pictures=pictures)

    async def of_call(self, tools: Sequence[ToolSchema], variables: Mapping[str, Any] = _NONE) -> Format:
        """Return the format for these tools and variables of the template. RefusedError: it can't be."""
        read = {name: value for name, value in variables.items() if self.plain.chat.may_read(name)}
        if not tools and not read:
            return self.plain
        told = [(tool.name, tool.description, tool.parameters) for tool in tools]
        key: Key = (json.dumps(told) if tools else "", json.dumps(read, sort_keys=True) if read else "")
        if (found := self._made.get(key)) is not None:
            self._made.move_to_end(key)
            return found
        # Run in the thread of the parsers: importing vLLM takes seconds, and parsers keep state.
        found = await asyncio.get_running_loop().run_in_executor(PARSING, self._make, key, tuple(tools), read)
        self._made[key] = found
        while len(self._made) > _MOST_KEPT or sum(len(str(made)) for made in self._made) > _MOST_KEPT_CHARS:
            self._made.popitem(last=False)
        return found

    def _make(self, key: Key, tools: tuple[ToolSchema, ...], variables: Mapping[str, Any]) -> Format:
        try:
            told = [self._harmless(tool) for tool in tools]
            harmless = self.plain.chat.harmless(variables)
            chat = ChatFormat(self._tokenizer, told, template=self._template, name=self._model, variables=harmless)
            if not tools:
                return Format(key, chat, NoCalls())
            parser = self._make_parser(self._parser, self._tokenizer, told, sample_of(chat, self._parser))
        except Exception as error:  # boundary: a template or parser may raise anything
            raise RefusedError(
                "invalid", f"the chat template can't render this request's tools and template variables: {error}"
            ) from error
        _collect_less_garbage()
        return Format(key, chat, parser)

    def _harmless(self, tool: ToolSchema) -> ToolSchema:
        told = self.plain.chat.harmless(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        )
        return ToolSchema(**told)


def _collect_less_garbage() -> None:
    """Run Python's garbage collector less often: vLLM's and transformers' nearly a million objects are never freed.

    With Python's thresholds, scanning all of them takes a third of a call's time. Only objects in cycles are freed
    later.
    """
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # libraries that count objects at exit would report frozen ones
    gc.set_threshold(*_GARBAGE_THRESHOLDS)


def rendered(chat: ChatFormat, messages: Sequence[Said]) -> list[int]:
    """Return the ids of a whole conversation in the model's template, up to the beginning of the policy's turn."""
    try:
        return chat.prompt_ids([chat.harmless(message) for message in as_template_reads(messages)])
    except Exception as error:  # boundary: a template is a program that may raise anything
        raise _unwritten(error) from error


def continued(chat: ChatFormat, sampled_ids: Sequence[int], reply: Said, messages: Sequence[Said]) -> list[int]:
    """Return the token ids of the messages that follow a sampled turn."""
    told = as_template_reads([reply, *messages])[1:]
    try:
        return chat.continuation_ids(sampled_ids, told)
    except Exception as error:  # boundary: a template is a program that may raise anything
        raise _unwritten(error) from error


def _unwritten(error: Exception) -> RefusedError:
    why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return RefusedError("invalid", f"the chat template can't write these messages: {why:.300}")


def as_template_reads(messages: Sequence[Said]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, with the calls' arguments as data. Call ids have nine letters and digits, as
    Mistral's templates require."""
    ids, names, told = dict[str, str](), dict[str, str](), list[dict[str, Any]]()
    for said in messages:
        message: dict[str, Any] = {"role": said.role, "content": said.content}
        for call in said.calls:
            ids[call.id], names[call.id] = f"call{len(ids):05d}", call.name
            function = {"name": call.name, "arguments": call.parsed}
            message.setdefault("tool_calls", []).append({"id": ids[call.id], "type": "function", "function": function})
        if said.role == "tool":
            call_id = said.call_id
            message |= {"name": names.get(call_id, "unknown"), "tool_call_id": ids.get(call_id, "call00000")}
        told.append(message)
    return told

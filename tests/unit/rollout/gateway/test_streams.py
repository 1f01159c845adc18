"""Streams that begin while the turn is sampled: whatever the policy writes, the pieces are the whole reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.core.types import RequestId, SamplingParams
from rayapp.rollout.agent.chat import load_template
from rayapp.rollout.gateway import listening
from rayapp.rollout.gateway.conversation import Ask, Said
from rayapp.rollout.gateway.limits import SessionLimits
from rayapp.rollout.gateway.session import Session
from rayapp.rollout.gateway.streams import Live
from rayapp.tools.base import ToolSchema
from support import make

HI: Any = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "echo", "arguments": {"word": "a"}}\n</tool_call>'
ECHO = ToolSchema(name="echo")
THOUGHTS_TEXT_AND_CALL = f"<think>\nI look.\n</think>\n\nI look it up. é✓ \n{CALL}"


def session_of(formats: Any, engine: Any) -> Session:
    limits, sampling = SessionLimits(max_tokens=4000, max_turns=50), SamplingParams(max_tokens=4000)
    request_id = RequestId("group", 0, 0)
    return Session(formats=formats, engine=engine, sampling=sampling, limits=limits, request_id=request_id)


@pytest.fixture
def serve(chat_tokenizer: Any) -> Callable[..., Any]:
    @asynccontextmanager
    async def serving(said: str, token_s: float = 0.002) -> AsyncIterator[tuple[str, Session]]:
        engine = make.engine(chat_tokenizer, lambda name, ids: said, token_s=token_s)
        async with make.session(chat_tokenizer, engine, max_tokens=4000, max_turns=50) as (gateway, session):
            yield gateway.url_of(session), session

    return serving


async def test_chat_sends_thoughts_and_text_token_by_token_and_the_calls_at_the_end(serve: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {}}}}
    async with serve(THOUGHTS_TEXT_AND_CALL) as (url, session):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.key, max_retries=0)
        asked: Any = {"model": "policy", "messages": HI, "tools": [tool]}
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(**asked)

    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    thoughts = [each.reasoning_content for each in deltas if getattr(each, "reasoning_content", None)]
    texts = [each.content for each in deltas if each.content]
    assert "".join(thoughts) == whole.choices[0].message.reasoning_content == "I look."
    assert "".join(texts) == whole.choices[0].message.content == "\n\nI look it up. é✓"
    assert len(thoughts) > 1
    assert len(texts) > 4
    assert [call.function.name for each in deltas for call in each.tool_calls or ()] == ["echo"]
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


async def test_messages_and_responses_send_the_same_turn_in_their_events(serve: Any) -> None:
    async with serve(THOUGHTS_TEXT_AND_CALL) as (url, session):
        claude = anthropic.AsyncAnthropic(base_url=url, api_key=session.key, max_retries=0)
        tool: Any = {"name": "echo", "input_schema": {"type": "object"}}
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        events = []
        async with claude.messages.stream(
            model="policy", max_tokens=2000, messages=HI, tools=[tool], thinking=thinking
        ) as stream:
            events = [event.type async for event in stream]
            message = await stream.get_final_message()
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.key, max_retries=0)
        function: Any = {"type": "function", "name": "echo", "parameters": {"type": "object"}, "strict": False}
        async with client.responses.stream(model="policy", input="hi", tools=[function]) as told:
            kinds = [event.type async for event in told]
            response = await told.get_final_response()

    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert [message.content[0].thinking, message.content[1].text] == ["I look.", "\n\nI look it up. é✓"]  # type: ignore[union-attr]
    assert message.content[2].input == {"word": "a"}  # type: ignore[union-attr]
    assert message.usage.output_tokens > 20
    assert events.count("text") > 4
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "\n\nI look it up. é✓"
    assert kinds.count("response.output_text.delta") > 4
    assert kinds.count("response.reasoning_summary_text.delta") > 1


async def test_the_first_piece_comes_while_the_rest_is_sampled_and_a_client_that_leaves_ends_the_turn(
    serve: Any,
) -> None:
    async with serve("word " * 400, token_s=0.05) as (url, session):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.key, max_retries=0)
        stream = await client.chat.completions.create(model="policy", messages=HI, stream=True)
        pieces = []
        async for chunk in stream:
            pieces.append(chunk.choices[0].delta.content)
            if len(pieces) > 4:
                break
        assert session.tree.turns == []
        await stream.close()
        async with asyncio.timeout(60):
            while session._running:
                await asyncio.sleep(0.01)

    assert "".join(pieces).startswith("word")


async def test_a_client_that_does_not_read_its_stream_is_cut_off(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "SEND_TIMEOUT_S", 0.3)
    async with serve("word " * 3000, token_s=0.0) as (url, session):
        host, port = url.split("/")[2].split(":")
        body = b'{"stream": true, "messages": [{"role": "user", "content": "hi"}]}'
        reader, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.get_extra_info("socket").setsockopt(1, 8, 1)  # SO_RCVBUF: the kernel takes little for it
        head = f"POST /{session.id}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {session.key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            while not session._running:
                await asyncio.sleep(0.01)
            while session._running:
                await asyncio.sleep(0.05)
        writer.close()


WORDS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "<thi", " ", "\n", "é", "✓", "a", "STOP", "ST",
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    said=st.lists(st.sampled_from(WORDS), max_size=8).map("".join),
    has_tools=st.booleans(),
    stop=st.sampled_from([(), ("STOP",), ("<", "a ")]),
    is_opened=st.booleans(),
)
def test_the_pieces_of_any_turn_begin_its_reply(
    chat_tokenizer: Any, said: str, has_tools: bool, stop: tuple[str, ...], is_opened: bool
) -> None:
    template = load_template("chatml_hermes") + ("<think>\n" if is_opened else "")

    async def asked() -> None:
        session = session_of(
            make.formats(chat_tokenizer, template), make.engine(chat_tokenizer, lambda name, ids: said)
        )
        live = Live()
        ask = Ask(messages=(Said(role="user", text="hi"),), tools=(ECHO,) if has_tools else (), stop=stop)
        reply = await session.ask(ask, live)
        live.wake()
        sent = {"text": "", "thoughts": ""}
        for piece in await live.pieces(1):
            sent[piece.kind] += piece.text
        assert reply.choices[0].text.startswith(sent["text"])
        assert reply.choices[0].thoughts.startswith(sent["thoughts"])

    asyncio.run(asked())

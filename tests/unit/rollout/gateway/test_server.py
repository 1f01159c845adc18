"""The gateway over HTTP with the real SDKs: it serves their requests, and they can read its replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import httpx
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rayapp.config.agent import EndpointSection
from rayapp.core.errors import ConfigError
from rayapp.core.types import Completion, RequestId, SamplingParams
from rayapp.rollout.gateway import server
from rayapp.rollout.gateway.forms import too_large
from rayapp.rollout.gateway.forwarding import Forwarder
from rayapp.rollout.gateway.server import Gateway
from rayapp.rollout.gateway.session import Session
from rayapp.testing.engine import ScriptedEngine
from support import make

SCHEMA = {"type": "object", "properties": {"t": {"type": "string"}}}
OPENAI_TOOL: Any = {"type": "function", "function": {"name": "echo", "description": "d", "parameters": SCHEMA}}
ANTHROPIC_TOOL: Any = {"name": "echo", "description": "d", "input_schema": SCHEMA}
HI: Any = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "echo", "arguments": {"t": "a"}}\n</tool_call>'


@dataclass
class Served:
    """A session that is served."""

    gateway: Gateway
    session: Session
    engine: ScriptedEngine
    tokenizer: Any

    @property
    def url(self) -> str:
        return self.gateway.url_of(self.session)

    def openai(self, key: str = "") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key or self.session.key, max_retries=0)

    def anthropic(self, key: str = "") -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=key or self.session.key, max_retries=0)

    def read(self, number: int) -> str:
        return str(self.tokenizer.decode(self.engine.requests[number][1], skip_special_tokens=False))


@pytest.fixture
def serve(chat_tokenizer: Any) -> Any:
    @asynccontextmanager
    async def serving(*script: str | Sequence[int], **limits: int) -> AsyncIterator[Served]:
        said: Iterator[Any] = iter(script)
        engine = make.engine(chat_tokenizer, lambda name, ids: next(said))
        async with make.session(chat_tokenizer, engine, **limits) as (gateway, session):
            yield Served(gateway, session, engine, chat_tokenizer)

    return serving


async def test_openais_chat_has_tools_usage_and_goes_on(serve: Any) -> None:
    async with serve("<think>hm</think>let me " + CALL, "done") as served, served.openai() as client:
        first = await client.chat.completions.create(model="any", messages=HI, tools=[OPENAI_TOOL], temperature=0.2)
        message = first.choices[0].message
        (call,) = message.tool_calls or ()
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "A"}
        second = await client.chat.completions.create(
            model="any", messages=[*HI, message, result], tools=[OPENAI_TOOL], max_completion_tokens=40
        )

        assert (first.choices[0].finish_reason, message.content, first.model) == ("tool_calls", "let me", "any")
        assert message.model_extra["reasoning_content"] == "hm"
        assert (call.function.name, json.loads(call.function.arguments)) == ("echo", {"t": "a"})
        assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "done")
        assert served.session.tree.forks == []
        first_size, second_size = (len(request[1]) for request in served.engine.requests)
        assert second.usage.prompt_tokens_details.cached_tokens == first_size + first.usage.completion_tokens
        assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (second_size, len("done") + 1)
        # The run's temperature, at which the policy is trained; the agent's number of tokens.
        assert [(asked[2].temperature, asked[2].max_tokens) for asked in served.engine.requests][1] == (1.0, 40)


async def test_openais_choices_stop_and_length(serve: Any) -> None:
    async with serve("one STOP no", "two", "x" * 50) as served, served.openai() as client:
        many = await client.chat.completions.create(model="any", messages=HI, n=2, stop="STOP")
        cut = await client.chat.completions.create(model="any", messages=HI, max_tokens=5)

        assert [choice.message.content for choice in many.choices] == ["one ", "two"]
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("xxxxx", "length")


async def test_anthropics_messages_have_tools_thoughts_and_go_on(serve: Any) -> None:
    async with serve("<think>hm</think>let me " + CALL, "done") as served, served.anthropic() as client:
        asked: Any = {"model": "claude", "max_tokens": 100, "tools": [ANTHROPIC_TOOL], "system": "Be brief."}
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        first = await client.messages.create(messages=HI, thinking=thinking, **asked)
        result: Any = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "A"}  # type: ignore[union-attr]
        history: Any = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await client.messages.create(messages=history, **asked)

        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert (first.stop_reason, first.content[-1].input) == ("tool_use", {"t": "a"})  # type: ignore[union-attr]
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "done")  # type: ignore[union-attr]
        assert served.session.tree.forks == []
        assert second.usage.cache_read_input_tokens == first.usage.input_tokens + first.usage.output_tokens
        count = await client.messages.count_tokens(
            model="claude", messages=HI, system="Be brief.", tools=[ANTHROPIC_TOOL]
        )
        assert count.input_tokens == len(served.engine.requests[0][1])


async def test_openais_responses_have_tools_and_go_on_by_items_or_by_id(serve: Any) -> None:
    tool: Any = {"type": "function", "name": "echo", "parameters": SCHEMA, "strict": False}
    async with serve("let me " + CALL, "done", "again") as served, served.openai() as client:
        first = await client.responses.create(model="m", instructions="Be brief.", input="hi", tools=[tool])
        call = first.output[-1]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "A"}  # type: ignore[union-attr]
        items: Any = [*HI, *first.output, result]
        second = await client.responses.create(model="m", instructions="Be brief.", input=items, tools=[tool])
        items += [*second.output, {"role": "user", "content": "more"}]
        third = await client.responses.create(model="m", instructions="Be brief.", input=items, tools=[tool])
        with pytest.raises(openai.BadRequestError, match="send the whole conversation as `input`"):
            await client.responses.create(model="m", input="more", previous_response_id=third.id)

        assert [item.type for item in first.output] == ["message", "function_call"]
        assert (first.output_text, second.output_text, third.output_text) == ("let me", "done", "again")
        assert served.session.tree.forks == []
        assert third.usage.input_tokens == len(served.engine.requests[2][1])


async def test_a_key_opens_its_own_session_and_nothing_else_and_none_that_is_over(serve: Any) -> None:
    async with serve("yes") as served:
        sampling, limits = served.session.sampling, served.session.limits
        given = {"engine": served.engine, "sampling": sampling, "limits": limits}
        with served.gateway.session(**given, request_id=RequestId("group", 1)) as neighbour:
            for key in ("wrong", neighbour.key):
                with pytest.raises(openai.AuthenticationError, match="does not open this session"):
                    await served.openai(key).chat.completions.create(model="any", messages=HI)
                with pytest.raises(anthropic.AuthenticationError, match="does not open this session"):
                    await served.anthropic(key).messages.create(model="any", max_tokens=5, messages=HI)
        url = f"{served.gateway.url_of(neighbour)}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key=neighbour.key, max_retries=5)
        with pytest.raises(openai.APIStatusError, match="this session is over: its trajectory has ended") as refused:
            await client.chat.completions.create(model="any", messages=HI)
        assert refused.value.status_code == 410, "clients don't retry it"
        assert served.engine.requests == []
        assert [model.id async for model in served.openai().models.list()] == ["policy"]
        async with aiohttp.ClientSession() as http:
            for path in ("", "/", "/metrics", f"/{served.session.id}", f"/{served.session.id}/v1/files"):
                async with http.get(served.gateway.url + path) as answer:
                    assert answer.status == 404


async def test_what_is_not_offered_is_refused_in_the_apis_form(serve: Any) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "required"}, "tool_choice is not supported while the policy is trained on its answers"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty 0.5"),
        ({"top_logprobs": 2}, "top_logprobs 2 is not supported"),
        ({"n": 0}, "n must be an integer of at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must have its bytes in base64"),
        ({"messages": [{"role": "robot", "content": ""}]}, "role must be system, developer, user, assistant or tool"),
        ({"messages": []}, "the last message must have the role user or tool"),
        ({"tools": [{"type": "web_search"}]}, "only tools of type function"),
    ]
    async with serve() as served, served.openai() as client:
        for fields, problem in refused:
            with pytest.raises(openai.BadRequestError) as told:
                await client.chat.completions.create(**{"model": "any", "messages": HI} | fields)
            assert problem in told.value.message
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await served.anthropic().messages.create(
                model="any", max_tokens=5, messages=HI, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}
            )
        assert served.engine.requests == []


HALF = "a tool printed \ud83d"
UNREADABLE: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": HALF, "function": {"name": HALF, "arguments": HALF}}]},
            {"role": "tool", "tool_call_id": HALF, "content": HALF},
            {"role": "user", "content": [{"type": "text", "text": HALF}]},
        ],
        "stop": [HALF],
        "tools": [{"type": "function", "function": {"name": HALF, "parameters": {"properties": {HALF: {}}}}}],
    },
    "responses": {"input": HALF, "instructions": HALF, "tools": [{"type": "function", "name": "x", "strict": HALF}]},
    "messages": {
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": HALF, "input": {HALF: HALF}}]},
            {"role": "user", "content": HALF},
        ],
        "system": HALF,
        "tools": [{"name": HALF, "input_schema": {"properties": [1]}}],
    },
}


@pytest.mark.parametrize("path", UNREADABLE)
async def test_half_an_emoji_and_nonsense_in_tools_never_fail_the_trajectory(serve: Any, path: str) -> None:
    statuses = list[int]()
    async with serve("yes", "yes") as served:
        headers = {"Authorization": f"Bearer {served.session.key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for body in (UNREADABLE[path], {k: v for k, v in UNREADABLE[path].items() if k != "tools"}):
                async with http.post(f"{served.url}/v1/{path}", json=body) as answer:
                    statuses.append(answer.status)
        assert set(statuses) <= {200, 400}
        assert statuses[-1] == 200
        assert not served.session.trouble.done()


async def test_fields_without_effect_are_named_in_the_reply_and_those_that_change_sampling_are_refused(
    serve: Any,
) -> None:
    changing: list[dict[str, Any]] = [
        {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"guided_json": {}, "ignore_eos": True},
        {"chat_template_kwargs": {"tools": False}}, {"stop": ["x"] * 17}, {"stop": "x" * 201},
        {"parallel_tool_calls": "no"},
    ]  # fmt: skip
    async with serve("yes") as served:
        chat = served.openai().chat.completions
        for fields in changing:
            with pytest.raises(openai.BadRequestError):
                await chat.create(model="any", messages=HI, extra_body=fields)
        assert served.engine.requests == []
        extra = {"max_completion_tokens": None, "ignore_eos": False, "of_next_year": 1, "user": "me"}
        plain: Any = {"temperature": 0.2, "reasoning_effort": "low", "max_tokens": 5}
        told = await chat.with_raw_response.create(model="any", messages=HI, extra_body=extra, **plain)
        (model,) = [each async for each in served.openai().models.list()]
        assert await served.openai().models.retrieve(model.id) == model
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            await served.openai().models.retrieve("gpt")

    assert told.headers["x-rayapp-not-followed"] == "of_next_year, temperature, reasoning_effort"
    assert served.engine.requests[0][2].max_tokens == 5


async def test_limits_are_told_in_words_that_agents_look_for(serve: Any) -> None:
    async with serve("one", max_turns=1) as served, served.openai() as client:
        await client.chat.completions.create(model="any", messages=HI)
        with pytest.raises(openai.BadRequestError) as turns:
            await client.chat.completions.create(model="any", messages=HI)
    long: Any = [{"role": "user", "content": "x" * 400}]
    async with serve(max_tokens=300) as served:
        with pytest.raises(openai.BadRequestError) as tokens:
            await served.openai().chat.completions.create(model="any", messages=long)
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await served.anthropic().messages.create(model="any", max_tokens=5, messages=long)

    assert (turns.value.code, tokens.value.code) == ("turn_limit_reached", "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b"[" * 200_000, 400),
        (json.dumps({"messages": [{"role": "user", "content": {"a": 1}}]}).encode(), 400),
        (json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}).encode(), 400),
        (b" " * (server.MAX_BODY_BYTES + 1), 413),
    ],
)
async def test_a_body_that_is_nonsense_or_too_large_is_refused_and_the_session_goes_on(
    serve: Any, body: bytes, status: int
) -> None:
    async with serve("yes") as served:
        headers = {"Authorization": f"Bearer {served.session.key}"}
        url = f"{served.url}/v1/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as client, client.post(url, data=body) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["message"]
        assert (await served.openai().chat.completions.create(model="any", messages=HI)).choices[0].message.content


class Waits:
    """An engine that answers when the test allows it."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.asked, self.may = asyncio.Event(), asyncio.Event()
        self.given_up = asyncio.Event()

    async def generate(
        self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams, on_tokens: Any = None
    ) -> Completion:
        self.asked.set()
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        return await self.engine.generate(request_id, prompt_ids, sampling)


async def test_a_dropped_connection_gives_its_turn_up_and_a_retry_is_served(serve: Any) -> None:
    async with serve("yes") as served, served.openai() as client:
        served.session.engine = waits = Waits(served.engine)
        call = asyncio.create_task(client.chat.completions.create(model="any", messages=HI))
        await waits.asked.wait()
        call.cancel()
        await waits.given_up.wait()

        waits.may.set()
        reply = await client.chat.completions.create(model="any", messages=HI)

        assert reply.choices[0].message.content == "yes"
        assert len(served.session.tree.turns) == 1


class TimesOutOnce(httpx.AsyncHTTPTransport):
    """Lets the first request time out as soon as the engine samples for it."""

    def __init__(self, is_sampled: asyncio.Event) -> None:
        super().__init__()
        self._is_sampled, self._is_first = is_sampled, True

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not self._is_first:
            return await super().handle_async_request(request)
        self._is_first = False
        request.headers["x-stainless-read-timeout"] = "0.000000001"  # seconds: over when the server looks
        call = asyncio.create_task(super().handle_async_request(request))
        await self._is_sampled.wait()
        call.cancel()
        await asyncio.wait({call})
        raise httpx.ReadTimeout("the first call takes too long")


async def test_a_call_that_an_sdk_sends_again_after_its_time_out_gets_the_answer_of_the_first(serve: Any) -> None:
    async with serve("yes", "a second sample") as served, served.openai() as client:
        served.session.engine = waits = Waits(served.engine)
        patient = client.with_options(http_client=httpx.AsyncClient(transport=TimesOutOnce(waits.asked)), max_retries=1)
        call = asyncio.create_task(patient.chat.completions.create(model="any", messages=HI))
        async with asyncio.timeout(60):
            while not (served.session._unanswered or served.session.counts["repeated"]):  # the retry may be faster
                await asyncio.sleep(0.01)
        waits.may.set()
        reply = await call

        assert reply.choices[0].message.content == "yes"
        assert [turn.text for turn in served.session.tree.turns] == ["yes"]
        assert not waits.given_up.is_set()
        assert served.session.trajectory().agent_counts["repeated"] == 1


@pytest.fixture
def other_model(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Another model behind the same APIs, and the client of a session for it."""

    @asynccontextmanager
    async def opened(**section: Any) -> AsyncIterator[tuple[Forwarder, ScriptedEngine]]:
        engine = make.engine(chat_tokenizer, lambda name, ids: "a title", token_s=0.001)
        plain = make.formats(chat_tokenizer, with_parser=False)
        async with make.session(chat_tokenizer, engine, own_formats=plain, max_tokens=9000) as (gateway, session):
            monkeypatch.setenv("HELPERS_KEY", session.key)
            base_url = f"{gateway.url_of(session)}/v1"
            given = {"base_url": base_url, "model": "helper", "api_key_env": "HELPERS_KEY", **section}
            forwarder = Forwarder(EndpointSection(**given))
            try:
                yield forwarder, engine
            finally:
                await forwarder.close()

    return opened


async def test_another_model_answers_calls_under_its_name_in_every_api_and_they_are_not_recorded(
    serve: Any, other_model: Any
) -> None:
    async with (
        serve("the answer", max_turns=2) as served,
        served.openai() as client,
        served.anthropic() as other,
        other_model() as (forwarder, _),
    ):
        served.session.forwarder = forwarder
        title = await client.chat.completions.create(model="small", messages=HI)
        stream = await client.chat.completions.create(model="small", messages=HI, stream=True)
        streamed = [piece.choices[0].delta.content or "" async for piece in stream if piece.choices]
        response = await client.responses.create(model="small", input="hi")
        message = await other.messages.create(model="small", max_tokens=40, messages=HI)
        size = await other.messages.count_tokens(model="small", messages=HI)
        answer = await client.chat.completions.create(model="policy", messages=HI)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="small", messages=HI, temperature=-1)
        with pytest.raises(openai.BadRequestError, match="turns under other models' names"):
            for _ in range(3):
                await client.chat.completions.create(model="small", messages=HI)
        played = served.session.trajectory()

    assert title.choices[0].message.content == response.output_text == message.content[0].text == "a title"
    assert ("".join(streamed), len([each for each in streamed if each]) > 1) == ("a title", True)
    assert size.input_tokens > 0
    assert title.model == "helper"  # the model's own name at the endpoint
    assert answer.choices[0].message.content == "the answer"
    assert [turn.text for turn in played.turns] == ["the answer"]
    assert played.agent_counts == {"side_calls": 9, "endpoint_errors": 1}


async def test_an_endpoint_that_fails_is_an_error_of_the_call_and_keeps_its_key(
    serve: Any, other_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def echoing(request: web.Request) -> web.Response:
        if "v3" in request.path:
            return web.Response(status=302, headers={"Location": "http://elsewhere/"})
        headers = {"Retry-After": "7", "Set-Cookie": "secret"}
        return web.json_response({"error": {"message": request.headers["Authorization"]}}, status=429, headers=headers)

    app = web.Application()
    app.router.add_post("/{any:.*}", echoing)
    async with serve() as served, served.openai() as client, TestServer(app) as stub, other_model() as (forwarder, _):
        url = str(stub.make_url("/v1"))
        served.session.forwarder = Forwarder(forwarder._section.model_copy(update={"base_url": url}))
        with pytest.raises(openai.RateLimitError) as busy:
            await client.chat.completions.create(model="small", messages=HI)
        await served.session.forwarder.close()
        for base_url, problem in (
            (url.replace("v1", "v3"), "answered with status 302"),
            ("http://127.0.0.1:9/v1", "gave no answer"),
            ("run://helper", "served only in a training run"),
        ):
            served.session.forwarder = Forwarder(forwarder._section.model_copy(update={"base_url": base_url}))
            with pytest.raises(openai.InternalServerError, match=problem):
                await client.chat.completions.create(model="small", messages=HI)
            await served.session.forwarder.close()

    assert "Bearer [key]" in busy.value.message
    assert busy.value.response.headers["retry-after"] == "7"
    assert "set-cookie" not in busy.value.response.headers
    assert served.session.trajectory().agent_counts["endpoint_errors"] == 4
    monkeypatch.delenv("HELPERS_KEY")
    with pytest.raises(ConfigError, match="endpoint has no key: the environment variable HELPERS_KEY is not set"):
        Forwarder(forwarder._section)


async def test_the_end_of_the_session_ends_calls_that_wait_for_another_model(serve: Any, other_model: Any) -> None:
    async with serve() as served, served.openai() as client, other_model() as (forwarder, engine):
        served.session.forwarder, engine.generate = forwarder, (waits := Waits(engine)).generate
        call = asyncio.create_task(client.chat.completions.create(model="small", messages=HI))
        await waits.asked.wait()
        served.session.end()
        await asyncio.wait_for(waits.given_up.wait(), 60)
        with pytest.raises(openai.APIConnectionError):
            await call
        with pytest.raises(openai.APIStatusError, match="this session is over"):
            await client.chat.completions.create(model="small", messages=HI)


async def test_a_wish_for_a_form_is_dropped_and_counted_where_the_run_says_so(serve: Any) -> None:
    async with serve("no JSON", "no call") as served, served.openai() as client:
        served.session.structured = "free"
        chat = client.chat.completions.with_raw_response
        asked: Any = {"model": "any", "messages": HI}
        told = await chat.create(**asked, response_format={"type": "json_object"})
        await chat.create(**asked, tools=[OPENAI_TOOL], tool_choice="required")

        assert told.headers["x-rayapp-not-followed"] == "response_format"
        assert [params.structured_outputs for *_, params in served.engine.requests] == [{}, {}]
        assert served.session.trajectory().agent_counts["structured_dropped"] == 2


async def test_a_form_guides_the_sampling_where_the_run_says_so_unless_the_engine_could_not_bear_it(serve: Any) -> None:
    called = '[{"name": "look", "arguments": {"t": "a\tb"}}]'  # xgrammar may allow a tab as it is
    async with serve('{"a": 1}', called, "free") as served, served.openai() as client:
        served.session.structured = "guide"
        chat = client.chat.completions
        asked: Any = {"model": "any", "messages": HI}
        formed = await chat.create(**asked, response_format={"type": "json_object"})
        forced = await chat.create(**asked, tools=[OPENAI_TOOL], tool_choice="required")
        await chat.create(**asked)
        schema = {"type": "array", "items": {"type": "string", "maxLength": 100}, "maxItems": 100}
        form: Any = {"type": "json_schema", "json_schema": {"name": "wide", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match="response_format: this constraint is too large for the"):
            await chat.create(**asked, response_format=form)

        assert formed.choices[0].message.content == '{"a": 1}'
        (call,) = forced.choices[0].message.tool_calls or ()
        assert json.loads(call.function.arguments) == {"t": "a\tb"}
        sampling = [params for *_, params in served.engine.requests]
        assert [bool(params.structured_outputs) for params in sampling] == [True, True, False]
        assert all(params.wants_allowed for params in sampling)
        assert served.session.trajectory().agent_counts["structured_guided"] == 2


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        ({"regex": r"\d{4}-\d{2}-\d{2}( [a-z]+,?)*"}, ""),
        ({"regex": "((a{100}){100}){100}"}, "the maximum is 4,096"),
        ({"regex": "[a-z]{1,5000}"}, "the maximum is 4,096"),
        ({"regex": r"\{5000\}[(]{2}"}, ""),
        ({"regex": "(((a*)*b)*c)*"}, "unlimited repetitions nested in each other"),
        ({"regex": "(" * 100_000}, ""),
        ({"choice": ["yes", "no"]}, ""),
        ({"grammar": "root ::= [a]{9999}"}, "the maximum is 4,096"),
        ({"grammar": "x" * 20_000}, "16,384 are allowed"),
        ({"json": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 200}}}}, ""),
        ({"json": {"patternProperties": {"a{9999}": {}}}}, "the maximum is 4,096"),
        ({"json": {"enum": list(range(9999))}}, "the maximum is 4,096"),
        ({"json": '{"minItems": 9999}'}, "the maximum is 4,096"),
        ({"json": "no JSON"}, ""),
        ({"structural_tag": '{"structures": [{"schema": {"pattern": "a{9999}"}}]}'}, "the maximum is 4,096"),
        ({"json": {"items": {"items": {"maxItems": 100}, "maxItems": 100}, "maxItems": 100}}, "the maximum is 4,096"),
    ],
)  # fmt: skip
def test_a_form_is_refused_by_the_number_of_its_states(form: dict[str, Any], fault: str) -> None:
    assert fault in too_large(form)
    assert bool(too_large(form)) == bool(fault)


async def test_a_stream_that_waits_long_begins_with_comments_and_tells_errors_as_events(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PATIENCE_S", 0.01)
    async with serve() as served, served.openai() as client:
        served.session.engine = Waits(served.engine)
        stream = await client.chat.completions.create(model="any", messages=HI, stream=True)
        served.session.end()
        with pytest.raises(openai.APIError, match="this session is over"):
            async for _ in stream:
                pass

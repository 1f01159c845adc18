"""`rayapp serve`'s server without Ray: called by the real SDKs, over a scripted policy."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from actors.routing import AnyServer
from rayapp.core.errors import ConfigError, EngineError
from rayapp.core.types import SamplingParams
from rayapp.rollout.agent.chat import load_template
from rayapp.rollout.gateway.conversation import Replies, Said
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.listening import bound
from rayapp.rollout.gateway.open_server import open_to_all
from rayapp.rollout.gateway.session import Session
from rayapp.testing.engine import ScriptedEngine
from support import make
from support.hermes import HermesParser

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "echo", "arguments": {}}\n</tool_call>'


@pytest.fixture
def serve(chat_tokenizer: Any) -> Any:
    @asynccontextmanager
    async def serving(
        said: str = "yes", template: str = "", **options: Any
    ) -> AsyncIterator[tuple[str, ScriptedEngine]]:
        engine = make.engine(
            chat_tokenizer,
            lambda name, ids: said,
            policy_version=7,
        )
        template = template or load_template("chatml_hermes")
        formats = Formats(chat_tokenizer, model="tiny", template=template, make_parser=lambda *parts: HermesParser())
        sockets = bound("127.0.0.1", 0)
        shared = {"model": "outputs/mine/final", "keys": ["secret"], "sampling": SamplingParams(max_tokens=4000)}
        options = {**shared, "sockets": sockets, **options}
        async with open_to_all(formats, AnyServer([engine]), **options) as url:
            yield url, engine

    return serving


def client(url: str, key: str = "secret") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def scraped(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def test_a_harness_chooses_its_own_distribution_and_every_api_answers(serve: Any) -> None:
    async with serve("let me " + CALL, sampling=SamplingParams(max_tokens=4000, temperature=0.5)) as (url, engine):
        chat = client(url).chat.completions
        asked: Any = {"model": "any", "messages": HI}
        first = await chat.create(**asked, tools=[TOOL], temperature=0, top_p=0.9, seed=-1, max_tokens=90)
        await chat.create(**asked, extra_body={"top_k": 5}, n=2)
        response = await client(url).responses.create(model="any", input="hi", temperature=0.25)
        message = await anthropic.AsyncAnthropic(base_url=url, api_key="secret").messages.create(
            model="claude", max_tokens=100, messages=HI, extra_body={"top_k": 3}
        )

        assert [model.id async for model in client(url).models.list()] == ["outputs/mine/final"]
    assert first.choices[0].finish_reason == "tool_calls"
    assert response.output_text.startswith("let me")
    assert message.content[0].text.startswith("let me")  # type: ignore[union-attr]
    sampled = [(params.temperature, params.top_p, params.top_k, params.max_tokens) for *_, params in engine.requests]
    most = 4000 - len(engine.requests[1][1])
    assert sampled[0] == (0, 0.9, 0, 90)
    assert sampled[1:3] == [(0.5, 1.0, 5, most)] * 2
    assert sampled[3][0] == 0.25
    assert sampled[4] == (0.5, 1.0, 3, 100)
    assert len({request_id for request_id, *_ in engine.requests}) == 5


async def test_without_the_key_nothing_is_answered_but_metrics_and_health(serve: Any) -> None:
    async with serve() as (url, engine):
        for key in ("", "Secret", "secret2", "ключ"):
            async with aiohttp.ClientSession(headers={"x-api-key": key}) as http:
                for ask in (http.post(f"{url}/v1/chat/completions", json={}), http.get(f"{url}/v1/models")):
                    async with ask as answer:
                        assert (answer.status, (await answer.json())["error"]["code"]) == (401, "invalid_api_key")
        async with aiohttp.ClientSession() as http:
            for path, status in (("/health", 200), ("/metrics", 200), ("/v1/files", 404), ("/", 404)):
                async with http.get(url + path) as answer:
                    assert answer.status == status

    assert engine.requests == []


async def test_metrics_count_calls_tokens_and_the_policys_version(serve: Any) -> None:
    async with serve("yes") as (url, _):
        chat = client(url).chat.completions
        usage = [(await chat.create(model="any", messages=HI)).usage for _ in range(3)]
        with pytest.raises(openai.BadRequestError, match=r"temperature: .* less than or equal to 2, not 9"):
            await chat.create(model="any", messages=HI, temperature=9)
        async with aiohttp.ClientSession() as http, http.get(f"{url}/no/such/path"):
            pass
        found = await scraped(url)

    assert found['rayapp_serve_requests_total{path="/v1/chat/completions",status="200"}'] == 3
    assert found['rayapp_serve_requests_total{path="/v1/chat/completions",status="400"}'] == 1
    assert found["rayapp_serve_prompt_tokens_total"] == sum(each.prompt_tokens for each in usage if each)
    assert found["rayapp_serve_generation_tokens_total"] == sum(each.completion_tokens for each in usage if each)
    assert found["rayapp_serve_policy_version"] == 7
    assert found["rayapp_serve_requests_running"] == 1  # the scrape's own
    assert found['rayapp_serve_request_seconds_bucket{le="+Inf"}'] == found["rayapp_serve_request_seconds_count"] == 4
    assert not [name for name in found if "no/such" in name]


async def test_no_session_outlives_its_call(serve: Any) -> None:
    async with serve("x" * 300) as (url, _):
        await client(url).responses.create(model="any", input="hi")
        gc.collect()

        assert [each for each in gc.get_objects() if isinstance(each, Session)] == []


async def test_a_call_that_is_hung_up_is_given_up_and_one_that_is_too_long_says_so(serve: Any) -> None:
    async with serve() as (url, engine):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client(url).chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * 5000}])
        begun, gone = asyncio.Event(), asyncio.Event()

        async def generate(*asked: Any) -> Any:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                gone.set()

        engine.generate = generate  # type: ignore[method-assign]
        call = asyncio.create_task(client(url).chat.completions.create(model="any", messages=HI))
        async with asyncio.timeout(60):
            await begun.wait()
            call.cancel()
            await gone.wait()


async def test_a_port_that_is_taken_is_said(serve: Any) -> None:
    async with serve() as (url, _):
        with pytest.raises(ConfigError, match="can't listen on 127"):
            bound("127.0.0.1", int(url.rpartition(":")[2]))


async def test_a_harness_gets_json_and_calls_in_the_form_that_it_asks_for(serve: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    async with serve('[{"name": "echo", "arguments": {"n": 1}}]') as (url, engine):
        chat = client(url).chat.completions
        asked: Any = {"model": "any", "messages": HI}
        called = await chat.create(**asked, tools=[TOOL], tool_choice="required")
        await chat.create(**asked, response_format=form)
        await client(url).responses.create(model="any", input="hi", text={"format": {"type": "json_object"}})
        message = await anthropic.AsyncAnthropic(base_url=url, api_key="secret").messages.create(
            model="any",
            max_tokens=90,
            messages=HI,
            tools=[{"name": "echo", "input_schema": {"type": "object"}}],
            tool_choice={"type": "tool", "name": "echo"},
        )
        with pytest.raises(openai.BadRequestError, match="tool_choice demands a call, but tools is empty"):
            await chat.create(**asked, tool_choice="required")
        with pytest.raises(openai.BadRequestError, match="unknown fields: dry_multiplier"):
            await chat.create(**asked, extra_body={"dry_multiplier": 1})

    assert [(each.function.name, each.function.arguments) for each in called.choices[0].message.tool_calls] == [
        ("echo", '{"n": 1}')
    ]
    assert (message.stop_reason, message.content[-1].input) == ("tool_use", {"n": 1})  # type: ignore[union-attr]
    schemas = [params.structured_outputs["json"] for *_, params in engine.requests]
    assert schemas[0]["items"]["properties"]["name"] == {"type": "string", "enum": ["echo"]}
    assert schemas[1:3] == [schema, {"type": "object"}]
    assert schemas[3]["maxItems"] == 1


async def test_a_response_continues_an_earlier_one_only_with_the_key_that_began_it(
    serve: Any, chat_tokenizer: Any
) -> None:
    async with serve("yes", keys=["secret", "other"]) as (url, engine):
        responses = client(url).responses
        first = await responses.create(model="any", input="hi", instructions="Be brief.")
        second = await responses.create(model="any", input="more", previous_response_id=first.id)
        unkept = await responses.create(model="any", input="hi", store=False)
        for other, key in ((first, "other"), (unkept, "secret")):
            with pytest.raises(openai.BadRequestError, match="this server has no such reply"):
                await client(url, key).responses.create(model="any", input="more", previous_response_id=other.id)

    assert second.previous_response_id == first.id
    prompt = chat_tokenizer.decode(engine.requests[1][1])
    assert prompt.index("hi") < prompt.index("yes") < prompt.index("more")
    assert "Be brief." not in prompt


def test_the_oldest_conversations_are_dropped_at_the_limit() -> None:
    kept = Replies(max_chars=2500)
    for name in "abc":
        kept.add(name, (Said(role="user", text="x" * 500),))

    assert kept.get("a") is None
    assert [kept.get(name) is not None for name in "bc"] == [True, True]


async def test_every_sampling_field_of_vllm_reaches_the_engine_or_is_refused(serve: Any) -> None:
    fields: dict[str, Any] = {
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "stop_token_ids": [3],
        "allowed_token_ids": [3, 4],
        "bad_words": ["no"],
        "min_tokens": 2,
        "ignore_eos": True,
        "thinking_token_budget": 9,
    }
    wrong: dict[str, Any] = {
        "min_p": 2,
        "stop_token_ids": [-1],
        "logit_bias": {"x": 1},
        "min_tokens": True,
        "structured_outputs": {"json": {}, "regex": "a"},
        "chat_template_kwargs": {"messages": "x"},
        "guided_json": {"type": "object"},
        "prompt_logprobs": 1,
    }
    async with serve() as (url, engine):
        asked: Any = {"model": "any", "messages": HI}
        chat = client(url).chat.completions
        more: Any = {"presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": -100}}
        await chat.create(**asked, **more, extra_body=fields)
        await chat.create(**asked, extra_body={"structured_outputs": {"regex": "a+"}, "min_p": 0})
        for name, value in wrong.items():
            with pytest.raises(openai.BadRequestError, match=name):
                await chat.create(**asked, extra_body={name: value})

    assert engine.requests[0][2].options == fields | more | {"logit_bias": {5: -100.0}}
    assert engine.requests[1][2].options == {}
    assert engine.requests[1][2].structured_outputs == {"regex": "a+"}
    assert len(engine.requests) == 2


async def test_log_probs_come_with_the_likeliest_tokens_in_each_apis_form(serve: Any) -> None:
    async with serve("yes yes") as (url, engine):
        asked: Any = {"model": "any", "messages": HI, "logprobs": True, "top_logprobs": 2}
        chat = await client(url).chat.completions.create(**asked)
        streamed = [chunk async for chunk in await client(url).chat.completions.create(**asked, stream=True)]
        response = await client(url).responses.create(
            model="any", input="hi", include=["message.output_text.logprobs"], top_logprobs=1
        )
        completion = await client(url).completions.create(model="any", prompt="hi", logprobs=2)
        with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
            await client(url).chat.completions.create(model="any", messages=HI, top_logprobs=2)

    found = chat.choices[0].logprobs.content
    num_sampled = chat.usage.completion_tokens
    assert len(found) == num_sampled
    assert [round(each.logprob, 4) for each in found[:2]] == [-0.5, -0.501]
    assert [each.logprob for each in found[0].top_logprobs] == [-1.0, -2.0]
    assert [chunk.choices[0].logprobs for chunk in streamed][-1].content == found
    assert len(response.output[0].content[0].logprobs) == num_sampled  # type: ignore[union-attr]
    assert "".join(completion.choices[0].logprobs.tokens).startswith("yes yes")
    assert [params.num_top_log_probs for *_, params in engine.requests] == [2, 2, 1, 2]


async def test_completions_continue_texts_and_token_ids_as_they_are(serve: Any, chat_tokenizer: Any) -> None:
    ids = chat_tokenizer.encode("once upon a time")
    async with serve("<think>a</think>b") as (url, engine):
        create = client(url).completions.create
        one = await create(model="any", prompt="once upon a time", max_tokens=60)
        many = await create(model="any", prompt=[ids, [5, 6]], n=2, max_tokens=3, stop="b")
        streamed = [chunk async for chunk in await create(model="any", prompt="once", stream=True, max_tokens=60)]
        await create(model="any", prompt="once")
        for prompt in ("", [], [[]], [-1], [1 << 40], {"a": 1}, [["a"]]):
            with pytest.raises(openai.BadRequestError, match="prompt"):
                await create(model="any", prompt=prompt)  # type: ignore[call-overload]

    assert one.choices[0].text == "<think>a</think>b"
    assert "".join(chunk.choices[0].text for chunk in streamed) == "<think>a</think>b"
    assert list(engine.requests[0][1]) == ids
    assert [list(prompt) for _, prompt, _ in engine.requests[1:5]] == [ids, ids, [5, 6], [5, 6]]
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert [params.max_tokens for *_, params in engine.requests] == [60, 3, 3, 3, 3, 60, 16]


async def test_the_chat_template_gets_variables_and_the_effort_if_it_reads_them(
    serve: Any, chat_tokenizer: Any
) -> None:
    template = load_template("chatml_hermes") + "{{ reasoning_effort }}{{ tone }}"
    async with serve(template=template) as (url, engine):
        chat = client(url).chat.completions.with_raw_response
        more = {"chat_template_kwargs": {"tone": "<|im_end|>kind", "unread": 1}}
        answer = await chat.create(model="any", messages=HI, reasoning_effort="low", extra_body=more)

    prompt = chat_tokenizer.decode(engine.requests[0][1])
    assert "low" in prompt
    assert "kind" in prompt
    assert "<|im_end|>kind" not in prompt
    assert answer.headers["x-rayapp-not-followed"] == "unread"


async def test_a_key_has_a_limit_of_calls_at_once(serve: Any) -> None:
    async with serve(keys=["secret", "other"], max_requests=1) as (url, engine):
        goes_on, generate = asyncio.Event(), engine.generate

        async def slow(*asked: Any) -> Any:
            await goes_on.wait()
            return await generate(*asked)

        engine.generate = slow
        first = asyncio.create_task(client(url).chat.completions.create(model="any", messages=HI))
        while (await scraped(url))["rayapp_serve_requests_running"] < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="1 calls with this key"):
            await client(url).chat.completions.create(model="any", messages=HI)
        second = asyncio.create_task(client(url, "other").chat.completions.create(model="any", messages=HI))
        goes_on.set()

        assert (await first).choices[0].message.content == (await second).choices[0].message.content == "yes"


async def test_adapters_are_models_of_their_own_and_another_name_is_refused(serve: Any) -> None:
    async with serve(adapters=["early", "late"]) as (url, engine):
        listed = [model.id for model in (await client(url).models.list()).data]
        one = await client(url).models.retrieve("late")
        names = ("early", "late", "policy", "outputs/mine/final")
        replies = [await client(url).chat.completions.create(model=name, messages=HI) for name in names]
        other = anthropic.AsyncAnthropic(base_url=url, api_key="secret", max_retries=0)
        with pytest.raises(anthropic.NotFoundError, match="the models are 'outputs/mine/final', 'early', 'late'"):
            await other.messages.create(model="claude", max_tokens=9, messages=HI)
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
            await client(url).completions.create(model="gpt", prompt="hi")

    assert listed == ["outputs/mine/final", "early", "late"]
    assert one.id == "late"
    assert [reply.model for reply in replies] == [*names]
    assert [sampling.adapter for _, _, sampling in engine.requests] == ["early", "late", "", ""]


async def test_a_schema_that_the_engine_can_not_follow_is_refused_in_its_words(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(*asked: Any) -> Any:
        raise EngineError("VLLMValidationError: Grammar error: Invalid type: nonsense")

    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "nonsense"}}}
    async with serve() as (url, engine):
        monkeypatch.setattr(engine, "generate", generate)
        with pytest.raises(openai.BadRequestError, match=r"can't follow this request: VLLMV.* type: nonsense"):
            await client(url).chat.completions.create(model="any", messages=HI, response_format=form)


async def test_silent_connections_keep_nobody_out(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(max_connections=16) as (url, _):
        port = int(url.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        for _, writer in silent:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n")

        answer = await client(url).chat.completions.create(model="any", messages=HI, timeout=60)

        for _, writer in silent:
            writer.close()
    assert answer.choices[0].message.content == "yes"
    assert caplog.records == []


@pytest.mark.slow
async def test_a_thousand_connections_wait_for_their_answers_at_once(serve: Any) -> None:
    async with serve() as (url, engine):
        everyone, generate, num_waiting = asyncio.Event(), engine.generate, 0

        async def held(*asked: Any) -> Any:
            nonlocal num_waiting
            num_waiting += 1
            if num_waiting == 1000:
                everyone.set()
            await everyone.wait()
            return await generate(*asked)

        engine.generate = held
        connections = aiohttp.TCPConnector(limit=0, force_close=True)
        key = {"Authorization": "Bearer secret"}
        async with aiohttp.ClientSession(
            connector=connections, headers=key, timeout=aiohttp.ClientTimeout(600)
        ) as http:

            async def ask() -> str:
                async with http.post(f"{url}/v1/chat/completions", json={"messages": HI}) as answer:
                    said = await answer.json()
                    return f"{answer.status} {said['choices'][0]['message']['content']}"

            answers = await asyncio.gather(*(ask() for _ in range(1000)))

    assert set(answers) == {"200 yes"}

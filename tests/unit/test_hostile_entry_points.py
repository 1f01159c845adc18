"""Every place where foreign bytes enter an event loop: hostile ones never block it for long, and leave no memory
behind.

Servers are attacked on every route in their code: a route without hostile bodies here fails. Bytes that come in another
way have a row in `REPLIES`. `DECODES` names each module that decodes bytes or starts a server: a new one fails.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import gc
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from starlette.routing import Mount, Route

from rayapp.config.sandbox import LocalConfig, SandboxConfig
from rayapp.config.sections import ModelSection
from rayapp.core.errors import RewardFailedError, SandboxError, ToolUnavailableError, UnusableWorkError
from rayapp.core.types import ExecOutcome, ExecResult, Group, SamplingParams, StopCause
from rayapp.extras.environments.openenv import OpenEnvEpisode
from rayapp.extras.judges.questions import read_answer as read_answer_of_judge
from rayapp.extras.repositories.hidden_tests import all_hold, read_hidden_tests
from rayapp.extras.repositories.task import as_answer, changed_files, read_answer
from rayapp.extras.service.app import _application, serving
from rayapp.extras.service.mcp_tools import ServerLimits
from rayapp.extras.view.run import ViewedRun
from rayapp.extras.view.server import make_app
from rayapp.rollout.agent.chat import ChatFormat, load_template
from rayapp.rollout.external_agent import _answer_in
from rayapp.rollout.external_program import remove_folder
from rayapp.runs.source import open_source
from rayapp.runs.trajectories import write_trajectories
from rayapp.sandbox.verdict.results import failure
from rayapp.storage.models.pictures import load_pictures
from rayapp.tasks.code.conditions import holds as condition_holds
from rayapp.tasks.text_process import holds
from rayapp.tools.base import ToolFailedError
from rayapp.tools.toolset import ArgumentChecker, read_arguments
from support import make
from support.picture_models import bomb, picture, save_picture_model
from support.runs import hostile_group
from support.timing import nothing_holds_the_loop

LOOP_HOLD_S = 0.3
"""Seconds for which one client may block all others."""
MAX_GROWTH_MIB = 24
"""Growth of the process in a round of an attack that it has seen before."""
NUM_AT_ONCE, NUM_TRIES = 3, 4
HALF = "\ud83d"


async def _attack_once(once: Callable[[], Awaitable[object]], num_at_once: int) -> None:
    """Make one attack several times at once; retry if the loop was blocked for another reason.

    On a busy machine the system may let the loop's thread wait while other threads compute. An attack that blocks the
    loop does so in every try.
    """
    for tries_left in reversed(range(NUM_TRIES)):
        try:
            async with nothing_holds_the_loop(LOOP_HOLD_S, time.process_time, doing=repr(once)[:500]):
                await asyncio.gather(*(once() for _ in range(num_at_once)))
            return
        except AssertionError:
            if not tries_left:
                raise


def used_mib() -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process(os.getpid()).memory_info().rss) / (1 << 20)


async def attack(attacks: Sequence[Callable[[], Awaitable[object]]], *, num_at_once: int = NUM_AT_ONCE) -> None:
    """Make each attack several times at once, in rounds, until a round leaves no memory behind.

    The allocator keeps pieces of early rounds, by chance up to 30 MiB. A leak grows in every round.
    """
    used, grown = 0.0, list[float]()
    while not grown or grown[-1] > MAX_GROWTH_MIB:
        assert len(grown) <= NUM_TRIES, grown
        for once in attacks:
            await _attack_once(once, num_at_once)
        before, used = used, used_mib()
        grown.append(used - before)


# Bodies ------------------------------------------------------------------------------------------------------------


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def saying(*said: str, **fields: Any) -> bytes:
    return body(messages=[{"role": "user", "content": text} for text in said], **fields)


def pictured(pictures: Sequence[bytes]) -> Any:
    """Return a content with pictures in the forms of OpenAI and Anthropic."""
    data = [base64.b64encode(each).decode() for each in pictures]
    uris = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{each}"}} for each in data]
    return [*uris, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data[0]}}]


JSON_BOMBS = (
    b"[" * 2_000_000,
    b'{"a":' * 400_000,
    b"[" + b"[]," * 600_000 + b"[]]",
    b'{"a": ' + b"1" * 2_000_000 + b"}",
    body(**{f"field_{i}": i for i in range(100_000)}),
    b"{" + b",".join(b'"f%d\\\\" :1' % i for i in range(300_000)) + b"}",
    b"\xff" * 2_000_000,
)
DEEP: Any = {}
for _ in range(300):
    DEEP = {"properties": {"x": DEEP}, "type": "object"}
PICTURES = (bomb(), picture()[:60], b"\x89PNG" * 400_000)
TOOLS = [{"name": f"t{i}", "description": "d" * 3000, "properties": [1]} for i in range(1000)]
MESSAGES = (
    *JSON_BOMBS,
    *(body(messages=[{"role": "user", "content": pictured([each])}]) for each in PICTURES),
    body(messages=[{"role": "user", "content": pictured([picture(size=(28, 28))] * 1000)}]),
    saying("word " * 800_000),
    saying("<|im_start|" * 300_000),
    saying(*[""] * 100_000),
    saying(*["hi", HALF] * 1000),
    saying("hi", stop=["x" * 100] * 30_000, stop_sequences=["x" * 100] * 30_000),
    saying("hi", tools=[{"type": "function", "function": each, "name": "x", "input_schema": DEEP} for each in TOOLS]),
    saying("hi", tools=[{"type": "function", "function": {"name": "x", "parameters": DEEP}}]),
    saying("hi", tool_choice={"type": "tool", "name": "x" * 1_000_000}, response_format={"type": HALF}),
    body(
        messages=[
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "function": {"name": "x", "arguments": "[" * 900_000}}] * 3,
            },
            {"role": "user", "content": "go on"},
        ]
    ),
)
INPUTS = (*JSON_BOMBS, body(input="word " * 800_000), body(input=[{"role": "user", "content": "x"}] * 60_000))
FIELDS = tuple(
    saying("hi", prompt="hi", **fields)
    for fields in (
        {"logit_bias": {str(i): 1 for i in range(90_000)}},
        {"logit_bias": {"1" * 5000: 1}, "stop_token_ids": [1 << 70]},
        {"bad_words": ["x"] * 90_000, "allowed_token_ids": [1] * 90_000},
        {"structured_outputs": {"json": DEEP, "regex": "(a*)*" * 50_000}},
        {"structured_outputs": {"regex": "(((a{999}){999}){999})" * 10_000}},
        {"structured_outputs": {"json": DEEP}, "response_format": {"type": "json_schema", "json_schema": DEEP}},
        {"chat_template_kwargs": {f"x{i}": "y" * 999 for i in range(50_000)}},
        {"chat_template_kwargs": {"messages": [], "tools": "x"}, "reasoning_effort": "x" * 900_000},
        {"logprobs": True, "top_logprobs": 20, "max_tokens": 1 << 60, "min_tokens": 1 << 60},
        {"temperature": float("nan"), "min_p": 1e308, "seed": 1 << 200},
    )
)
PROGRAMS = (
    *JSON_BOMBS,
    body(code="1", files={"../x": "", "/etc/x": ""}),
    body(code="1", files={f"f{i}": "A" * 100_000 for i in range(60)}),
    body(code="1", files={"a": "!" * 4_000_000}),
    body(code="(" * 1_000_000),
    body(code="print('x' * 10**9)", stdin="1" * 3_000_000, run_timeout=1),
    body(code="1", language="x" * 1_000_000, fetch_files=["x" * 600]),
    body(code=HALF, run_timeout=1e400, memory_limit_MB=10**30),
)
QUERIES = (
    "",
    "?q=" + "(a%2B)%2B" * 500,
    "?q=" + "a" * 60_000,
    *(f"?step=1&group=0&index={one}&other_step=1&other_group=0&other_index={one + 1}" for one in (0, 2)),
)
VIEWED = ("config", "panels", "facets", "groups", "group", "trajectory", "picture")
BODIES: dict[str, dict[str, Sequence[bytes | str]]] = {
    "gateway": {
        "/{session}/v1/chat/completions": (*MESSAGES, *FIELDS),
        "/{session}/v1/responses": INPUTS,
        "/{session}/v1/messages": MESSAGES,
        "/{session}/v1/messages/count_tokens": MESSAGES[6:9],
        "/{session}/v1/models": QUERIES,
        "/{session}/v1/models/{model}": QUERIES,
    },
    "sandbox service": {
        "/mcp": JSON_BOMBS,
        "/run_code": PROGRAMS,
        "/health": QUERIES,
    },
    "view": {
        "/": QUERIES,
        "/static": QUERIES,
        **{
            f"/api/runs{rest}": QUERIES
            for rest in (
                "",
                *(f"/{{run}}/{name}" for name in VIEWED),
            )
        },
    },
}


# Servers -----------------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """A server under attack."""

    routes: set[str]
    ask: Callable[[str, bytes | str], Awaitable[object]]
    """Function of a route's path and a body or query that sends a request."""


async def ask(url: str, headers: Mapping[str, str], path: str, given: bytes | str) -> None:
    """Send a request as a hostile program may: in few calls, so that our own loop computes little for it."""
    server = urlsplit(url)
    reader, writer = await asyncio.open_connection(server.hostname, server.port)
    path, method = (path, "POST") if isinstance(given, bytes) else (path + given, "GET")
    sent = given if isinstance(given, bytes) else b""
    told = {"host": server.netloc, "connection": "close", "content-length": str(len(sent)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    with suppress(ConnectionError):
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + sent)
        await writer.drain()
        assert await reader.read(1 << 20)
    writer.close()


def aiohttp_routes(app: Any) -> set[str]:
    return {resource.canonical for resource in app.router.resources()}


@asynccontextmanager
async def gateway(tokenizer: Any, folder: Path) -> AsyncIterator[Asked]:
    engine, limits = make.engine(tokenizer, lambda name, ids: "yes"), {"max_tokens": 32_768, "max_turns": 20}
    sampling, formats = SamplingParams(max_tokens=9), make.formats(tokenizer)
    formats.pictures = load_pictures(ModelSection(path=str(save_picture_model(folder, "qwen2_5_vl"))))
    async with make.session(tokenizer, engine, sampling=sampling, own_formats=formats, **limits) as (served, session):
        headers = {"x-api-key": session.key}

        async def asked(path: str, given: bytes | str) -> None:
            await ask(served.url, headers, path.format(session=session.id, model="m" * 3000), given)
            # The attack does not fail the trajectory.
            assert not session.trouble.done()

        yield Asked(aiohttp_routes(served._listening._runner.app), asked)


@asynccontextmanager
async def sandbox_service(tokenizer: Any, folder: Path) -> AsyncIterator[Asked]:
    config = SandboxConfig(providers=(LocalConfig(max_sandboxes=1),))
    async with serving(config, key="k") as address:
        headers = {
            "e2b-api-key": "k",
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
        }
        none: Any = None
        app = _application(none, ServerLimits(), none, none, "127.0.0.1")
        yield Asked({each.path for each in app.routes if isinstance(each, Route)}, partial(ask, address, headers))


def _degenerate(group: Group) -> Group:
    """Return the group with completions that are expensive to compare line by line and word by word."""
    texts = ("a\nb\n" * 750, "b\na\na\n" * 500, "\n".join(["x y " * 250] * 700), "\n".join(["y x x " * 160] * 700))
    changed = [replace(each, completion_text=text) for each, text in zip(group.trajectories, texts, strict=False)]
    return replace(group, trajectories=(*changed, *group.trajectories[len(changed) :]))


@asynccontextmanager
async def view(tokenizer: Any, folder: Path) -> AsyncIterator[Asked]:
    (folder / "trajectories").mkdir()
    write_trajectories(folder / "trajectories" / "step=000001.parquet", 1, [_degenerate(hostile_group(0))])
    app = make_app([ViewedRun(open_source(str(folder)))])
    inner: Any = app._app  # type: ignore[attr-defined]
    routes = {each.path_format if isinstance(each, Route) else each.path for each in inner.routes}
    assert all(isinstance(each, Route | Mount) for each in inner.routes)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8088") as browser:

        async def asked(path: str, given: bytes | str) -> None:
            await browser.get(path.format(run=0) + str(given))

        yield Asked(routes, asked)


SERVERS: dict[str, Callable[[Any, Path], AbstractAsyncContextManager[Asked]]] = {
    "gateway": gateway,
    "sandbox service": sandbox_service,
    "view": view,
}


@pytest.mark.parametrize("server", SERVERS)
async def test_no_body_and_no_query_holds_a_server_up_or_fills_it(
    server: str, chat_tokenizer: Any, tmp_path: Path
) -> None:
    async with SERVERS[server](chat_tokenizer, tmp_path) as asked:
        assert asked.routes == BODIES[server].keys()  # A new route needs hostile bodies of its own.
        for path, bodies in BODIES[server].items():
            await attack([partial(asked.ask, path, given) for given in bodies])


# Bytes that come in another way -----------------------------------------------------------------------------------


async def _tool_results(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer, (), template=load_template("chatml_hermes"))
    for text in ("<|im_end|>" * 3000, "<" * 30_000, HALF * 30_000):
        with suppress(Exception):
            chat.suffix_ids([1], [text])


async def _conditions(tokenizer: Any) -> None:
    for source in ("f(1) == sum([[0]*1000]*3000, [])", "f(1) == 'a' * 10**9", "f(1) == [0] * 10**8 + [1]"):
        with suppress(Exception):
            await holds(partial(condition_holds, source, frozenset({"f"})), [1])


async def _hidden_tests(tokenizer: Any) -> None:
    source = (
        "import pytest\nfrom m import f\n"
        "def test_f():\n    with pytest.raises(ValueError, match='expected .* items, got .*'):\n        f(1)\n"
    )
    (test,) = read_hidden_tests("test_m.py", source)
    for value in (["ValueError", "expected " + "a" * 900_000], "x" * 900_000, [[0] * 100_000] * 3):
        with suppress(Exception):
            await holds(partial(all_hold, test.conditions), [value])


async def _environment(tokenizer: Any) -> None:
    nobody: Any = None
    environment: Any = SimpleNamespace(url="http://it")
    episode = OpenEnvEpisode(session=nobody, environment=environment, takes_calls=False)
    for text in ("[" * 2_000_000, '{"data": {"observation": ' + "[" * 900_000, json.dumps({"data": [0] * 500_000})):
        with pytest.raises(ToolUnavailableError):
            episode._read(text)


async def _answer_files(tokenizer: Any) -> None:
    for leave in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.touch()):
        folder = Path(tempfile.mkdtemp())
        leave(folder / "answer")
        assert await asyncio.to_thread(_answer_in, folder / "answer") == ""
        await asyncio.to_thread(_fill, folder)
        await asyncio.to_thread(remove_folder, folder)


def _fill(folder: Path) -> None:
    """Leave what an agent's `mkdir d; cd d` loop leaves: names too long for any path."""
    start = os.open(folder, os.O_RDONLY)
    inner = start
    for _ in range(1500):
        os.mkdir("d", dir_fd=inner)
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)


class _Workspace:
    """A sandbox whose programs print what an agent wants."""

    def __init__(self, printed: str) -> None:
        self.printed = printed

    async def run_code(self, code: str, *, max_output_bytes: int, **options: Any) -> ExecResult:
        if len(self.printed) > max_output_bytes:
            return failure("", "ns", stopped_for=StopCause.OUTPUT)
        return replace(failure("", "ns"), outcome=ExecOutcome.OK, stdout=self.printed)


async def _work(tokenizer: Any) -> None:
    for printed in (
        *("[" * size + "[]," * size + "[]" + "]" * size for size in (1, 600_000)),
        json.dumps({"problem": "", "files": {f"{i}": "" for i in range(130_000)}}),
        json.dumps({"problem": "", "files": [HALF] * 150_000}),
    ):
        workspace: Any = _Workspace(printed)
        with suppress(UnusableWorkError, SandboxError):
            read_answer(as_answer(await changed_files(workspace, {})))
    assert read_answer("[" * 900_000) is None


async def _arguments(tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"pattern": "(x+)+y"}}}
    checker = ArgumentChecker(schema)
    for text in (
        *(each.decode(errors="replace") for each in JSON_BOMBS),
        json.dumps({"a": [[0]] * 2000, "b": "x" * 99}),
    ):
        with suppress(ToolFailedError):
            checker.problem(read_arguments(text))


async def _judges(tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"reason": {"type": "string"}}, "additionalProperties": False}
    for text in (
        "```json\n" * 100_000,
        "<think>" * 100_000,
        json.dumps({f"{i}": i for i in range(100_000)}),
        "[" * 900_000,
    ):
        with suppress(RewardFailedError):
            read_answer_of_judge(text, schema)
        await asyncio.sleep(0)


REPLIES: dict[str, Callable[[Any], Awaitable[None]]] = {
    "results of tools in a prompt": _tool_results,
    "conditions of rows": _conditions,
    "reports of hidden tests": _hidden_tests,
    "replies of an environment": _environment,
    "answer files and folders of agents": _answer_files,
    "files that agents changed": _work,
    "arguments of tool calls": _arguments,
    "answers of judges": _judges,
}


@pytest.mark.parametrize("reply", REPLIES)
async def test_no_reply_holds_the_loop_up_or_fills_the_process(reply: str, chat_tokenizer: Any) -> None:
    await attack([partial(REPLIES[reply], chat_tokenizer)], num_at_once=1)

"""External agents: real programs and functions that call a scripted policy over HTTP, from the task to the verdict."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest

from rayapp.config.config import Config
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import ConfigError, EngineError, InputError, StaleVersionError
from rayapp.core.types import (
    AgentStart,
    Completion,
    Group,
    GroupSummary,
    RequestId,
    RolloutStatus,
    SamplingParams,
    Trajectory,
)
from rayapp.rollout.agent.chat import load_template
from rayapp.rollout.external_agent import ExternalAgent
from rayapp.rollout.external_program import AgentCall, Tail
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.limits import SessionLimits
from rayapp.rollout.problem import Problem, problem_of_row, problem_of_task, prompted
from rayapp.runs.trajectories import read_groups, write_trajectories
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.data.data_row import DataRow
from rayapp.tasks.verdict import PLAIN
from rayapp.testing.engine import ScriptedEngine
from support import make
from support.fake_sandboxes import FakeProvider
from support.timing import lives, until

PROGRAM = textwrap.dedent(
    """
    import json, os, socket, sys, urllib.error, urllib.request
    ASKS = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def post(url, key, body):
        headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
        try:
            with ASKS.open(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=240) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def ask(*messages):
        told = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
        asked = {"model": os.environ["RAYAPP_MODEL"], "messages": told}
        answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"], asked)[1]
        return answer["choices"][0]["message"]["content"]
    """
)
ROW = DataRow(
    messages=({"role": "user", "content": "6 x 7?"},),
    data_source="openai/gsm8k",
    ground_truth="42",
    agent_name="single_turn_agent",
)
TASK = make.double_task(tests=("0", "-3", "rng.randint(100, 999)"), files={"notes/read.me": "twice is 2 *"})


@dataclass
class Played:
    group: Group
    summary: GroupSummary

    @property
    def first(self) -> Trajectory:
        return self.group.trajectories[0]


@dataclass
class Bench:
    tokenizer: Any
    script: Callable[[RequestId, Sequence[int]], str | Sequence[int]]

    def engine(self) -> ScriptedEngine:
        return make.engine(self.tokenizer, self.script)

    @asynccontextmanager
    async def agent(
        self,
        entry: Callable[[AgentCall], Awaitable[Any]] | None = None,
        *,
        max_turns: int = 9,
        sandboxes: Any = None,
        files: dict[str, str] | None = None,
        **external: Any,
    ) -> AsyncIterator[ExternalAgent]:
        given = {"entry": "tests:unused"} if entry is not None else {}
        section = {"name": "external_agent", "max_assistant_turns": max_turns, "external": {**given, **external}}
        config = Config.model_validate({"agent": section, "rollout": {"max_completion_tokens": 4000}})
        formats = make.formats(self.tokenizer)
        limits = SessionLimits(max_tokens=config.max_model_tokens, max_turns=config.agent.max_assistant_turns)
        agent = ExternalAgent(config.agent.external, limits, formats, entry, sandboxes=sandboxes, files=files or {})
        await agent._gateway.start()
        try:
            yield agent
        finally:
            await agent.close()

    async def play(
        self, problem: Problem, agent: ExternalAgent, sandboxes: Any, *, engine: Any = None, **options: Any
    ) -> Played:
        asked, engine = await prompted(problem, agent), engine or self.engine()
        return Played(*await make.played(asked, agent, engine, sandboxes=sandboxes, **options))

    async def row(self, agent: ExternalAgent, **options: Any) -> Played:
        async with open_pool(SandboxConfig(), "t", local=FakeProvider()) as (sandboxes, _):
            return await self.play(problem_of_row(ROW, AnswerRewards()), agent, sandboxes, **options)


@pytest.fixture
def bench(chat_tokenizer: Any) -> Callable[..., Bench]:
    def make(*turns: str) -> Bench:
        def script(request_id: RequestId, ids: Sequence[int]) -> str:
            # Turn 0 takes the place in the cohort; its completion is not used.
            number = request_id.turn
            return turns[min(number, len(turns)) - 1] if number else "unread"

        return Bench(chat_tokenizer, script)

    return make


BESIDE, INSIDE = False, True


@pytest.fixture(params=[BESIDE, INSIDE], ids=["beside the worker", "in a sandbox"])
def place(request: pytest.FixtureRequest) -> bool:
    """Where an agent's program runs."""
    if request.param is INSIDE:
        request.getfixturevalue("namespaces")
    return bool(request.param)


@asynccontextmanager
async def running(
    bench: Bench, text: str, place: bool, *, config: SandboxConfig | None = None, **external: Any
) -> AsyncIterator[tuple[ExternalAgent, Any]]:
    """Yield an agent whose program is this text, and a pool of sandboxes, by default the local provider's."""
    given = {"command": ["python3", "agent.py", "{prompt}"], "timeout_s": 60.0, **external}
    files = {"agent.py": PROGRAM + textwrap.dedent(text)}
    async with (
        open_pool(config or SandboxConfig(), "t") as (sandboxes, _),
        bench.agent(sandboxes=sandboxes, files=files, inside=place, **given) as agent,
    ):
        yield agent, sandboxes


async def row_played(bench: Bench, text: str, place: bool, **options: Any) -> Played:
    """Let a program play the data row."""
    async with running(bench, text, place, **options) as (agent, sandboxes):
        played = await bench.play(problem_of_row(ROW, AnswerRewards()), agent, sandboxes)
        assert not agent._gateway._sessions
        return played


async def test_a_program_plays_a_data_row_and_the_rows_rule_scores_what_the_policy_said_last(
    bench: Any, place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the trainer's")
    monkeypatch.setenv("HF_TOKEN", "the trainer's")
    text = """
        told = json.load(open(os.environ["RAYAPP_TASK_FILE"]))
        first = {"role": "assistant", "content": ask(sys.argv[1])}
        ask(sys.argv[1], first, "sure?")
        print(told["task"], told["prompt"] == sys.argv[1], os.getcwd() == os.path.realpath(os.environ["HOME"]))
        print(sorted(os.environ))
        """
    played = await row_played(bench("let me think", "#### 42"), text, place, env={"OWN": "1"})

    assert (played.first.reward.value, played.first.status) == (1.0, RolloutStatus.COMPLETED)
    assert played.first.agent_output.startswith("openai/gsm8k True True\n")
    assert "'OWN'" in played.first.agent_output
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PYTHONPATH"):
        assert name not in played.first.agent_output
    assert [turn.text for turn in played.first.turns] == ["let me think", "#### 42"]
    path = tmp_path / "step=000001.parquet"
    write_trajectories(path, 1, [played.group])
    (read,) = read_groups(path)
    assert read.trajectories[0].agent_output == played.first.agent_output
    assert read.prompt.token_ids.size == 0


async def test_a_task_gives_its_files_and_scores_the_file_that_the_agent_names(bench: Any, place: bool) -> None:
    text = """
        said = ask(open("notes/read.me").read())
        open("solution.py", "w").write("def double(x):\\n    return " + said)
        """
    b: Bench = bench("2 * x", "x ** 2")
    async with running(b, text, place, answer_file="solution.py") as (agent, sandboxes):
        played = await b.play(problem_of_task(TASK, PLAIN), agent, sandboxes, group_size=2)

    assert played.summary.rewards.tolist() == [1.0, 1.0], played.first.reward.detail
    assert played.group.trajectories[0].completion_text == "def double(x):\n    return 2 * x"
    assert played.group.prompt.text.count("twice the integer") == 1


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("ask('hi'); sys.exit('no luck')", "the agent's program ended with exit code 1: no luck"),
        # The first process of a sandbox can't be killed by a signal of its own, so its filter ends it by SIGSYS.
        ("ask('hi'); os.kill(os.getpid(), 9)", "the agent's program ended with exit code -(9|31): "),
        ("pass", "the agent ended without calling the policy"),
    ],
)
async def test_a_program_that_fails_is_a_failed_rollout_without_a_reward(
    bench: Any, place: bool, text: str, detail: str
) -> None:
    played = await row_played(bench("#### 42"), text, place)

    assert played.first.status is RolloutStatus.ERROR_TASK
    assert re.fullmatch(detail, played.first.reward.detail)
    assert not played.first.reward.valid
    assert played.summary.valid.tolist() == [False]


async def test_a_program_that_fails_after_a_limit_is_scored_by_the_answer_that_it_left(bench: Any, place: bool) -> None:
    text = "ask('hi'); open('answer.txt', 'w').write('#### 42'); ask('and?')"
    played = await row_played(bench("I write it."), text, place, answer_file="answer.txt", max_turns=1)

    assert (played.first.status, played.first.reward.value) == (RolloutStatus.MAX_TURNS, 1.0)


async def test_a_program_that_fails_by_itself_is_scored_where_its_failures_are_the_policys(bench: Any) -> None:
    b: Bench = bench("no JSON")
    scored = await row_played(b, "ask('hi'); raise ValueError('no JSON')", BESIDE, on_failure="score")
    silent = await row_played(b, "raise ValueError", BESIDE, on_failure="score")

    assert (scored.first.reward.valid, scored.first.reward.value) == (True, 0.0)
    assert "ValueError: no JSON" in scored.first.agent_output
    assert not silent.first.reward.valid


@pytest.mark.parametrize(
    "leave",
    [
        "os.mkfifo('answer.txt')",
        "os.symlink('/etc/passwd', 'answer.txt')",
        "os.mkdir('answer.txt')",
        "[(os.mkdir('d'), os.chdir('d')) for _ in range(3000)]",
        "os.mkdir('shut'); open('shut/file', 'w'); os.chmod('shut', 0)",
    ],
)
async def test_whatever_an_agent_leaves_in_its_folder_is_no_answer_and_is_removed(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    played = await row_played(bench("#### 42"), f"ask('hi'); {leave}", BESIDE, answer_file="answer.txt")

    assert (played.first.reward.valid, played.first.completion_text) == (True, "")
    assert list(scratch.iterdir()) == []


async def test_time_that_is_up_ends_all_processes_whatever_session_they_are_in_and_what_is_there_is_scored(
    bench: Any,
) -> None:
    text = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(600)"], start_new_session=True)
        ask("hi")
        print(os.getpid(), child.pid, flush=True)
        child.wait()
        """
    played = await row_played(bench("#### 42"), text, BESIDE, timeout_s=10.0)

    assert (played.first.status, played.first.reward.value) == (RolloutStatus.MAX_TURNS, 1.0)
    pids = [int(pid) for pid in played.first.agent_output.split()]
    assert [lives(pid) for pid in pids] == [False, False]


@pytest.mark.usefixtures("namespaces")
async def test_time_that_is_up_ends_a_program_in_its_sandbox_too(bench: Any) -> None:
    played = await row_played(bench("#### 42"), "ask('hi')\nimport time; time.sleep(600)", INSIDE, timeout_s=10.0)

    assert (played.first.status, played.first.reward.value) == (RolloutStatus.MAX_TURNS, 1.0)


WORKER = """
import asyncio, os, sys
from pathlib import Path
from rayapp.rollout.external_program import Tail, environment, run_program
folder = Path(sys.argv[1])
program = "echo $$ > pids; setsid sh -c 'echo $$ >> pids; touch ready; sleep 600' & sleep 600"
asyncio.run(run_program(["sh", "-c", program], folder=folder, env=environment(folder, {}), output=Tail(99)))
"""


async def test_a_worker_killed_with_sigkill_takes_its_agents_with_it(tmp_path: Path) -> None:
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, str(tmp_path), cwd=Path.cwd())
    await until((tmp_path / "ready").exists)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    worker.kill()
    await worker.wait()
    await until(lambda: not any(map(lives, pids)))

    assert len(pids) == 2


async def test_an_async_function_plays_with_the_sdk_and_its_helpers_are_branches_of_one_rollout(bench: Any) -> None:
    async def agent(call: AgentCall) -> str:
        async with openai.AsyncOpenAI(base_url=call.openai_base_url, api_key=call.api_key) as client:

            async def ask(text: str) -> str:
                messages: Any = [*call.messages, {"role": "user", "content": text}]
                reply = await client.chat.completions.create(model=call.model, messages=messages)
                return reply.choices[0].message.content or ""

            said = await asyncio.gather(*(ask(name) for name in ("one", "two", "three")))
            return f"#### {sum(map(int, said))}"

    b: Bench = bench("14")
    async with b.agent(agent) as external:
        played = await b.row(external, group_size=3)

    assert played.summary.rewards.tolist() == [1.0] * 3
    assert played.first.completion_text == "#### 42"
    assert len(played.first.forks) == 2
    assert played.first.num_response_tokens == 3 * 3
    assert played.first.reward.terms["num_turns"] == 3.0


async def test_a_function_that_raises_returns_nonsense_or_ends_its_process_is_a_failed_rollout(bench: Any) -> None:
    async def raises(call: AgentCall) -> str:
        raise KeyError("no such thing")

    async def leaves(call: AgentCall) -> str:
        raise SystemExit(3)

    async def nonsense(call: AgentCall) -> int:
        return 42

    b: Bench = bench("14")
    for entry, detail in (
        (raises, "the agent failed: KeyError"),
        (leaves, "SystemExit: 3"),
        (nonsense, "the agent's function returned a int, but must"),
    ):
        async with b.agent(entry) as external:
            played = await b.row(external)
        assert played.first.status is RolloutStatus.ERROR_TASK
        assert detail in played.first.reward.detail


class Fails:
    """An engine that serves turn 0 and then fails."""

    def __init__(self, error: EngineError) -> None:
        self.error = error

    async def generate(
        self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams, on_tokens: Any = None
    ) -> Completion:
        raise self.error


async def test_an_engine_that_fails_ends_the_agent_at_once_and_is_told_as_for_any_agent(bench: Any) -> None:
    b: Bench = bench("unused")
    forever = "import time\ntry: ask('hi')\nfinally: time.sleep(600)"
    async with running(b, forever, BESIDE) as (agent, _):
        played = await b.row(agent, engine=Fails(EngineError("out of memory")))
        with pytest.raises(StaleVersionError):
            await b.row(agent, engine=Fails(StaleVersionError("it has version 3")))

    assert (played.first.status, played.first.reward.detail) == (RolloutStatus.ERROR_ENGINE, "out of memory")


async def test_a_file_that_leads_out_of_the_agents_folder_is_not_written(bench: Any, place: bool) -> None:
    b: Bench = bench("x")
    start = AgentStart(messages=ROW.messages, files={"../../escaped": "x"})
    problem = replace(problem_of_row(ROW, AnswerRewards()), agent_start=start)
    async with running(b, "", place) as (agent, sandboxes):
        first = (await b.play(problem, agent, sandboxes)).first

    assert first.status is RolloutStatus.ERROR_TASK
    assert ("can't be written" if place else "leads out of the agent's folder") in first.reward.detail


def test_the_end_of_what_a_program_writes_is_kept() -> None:
    tail = Tail(10)
    for _ in range(1000):
        tail.add("äöü\n".encode() * 100)

    assert tail.text == "(truncated)..." + ("äöü\n" * 3)[-10:]
    assert tail.last_line == "äöü"


def test_arguments_are_filled_in_once() -> None:
    call = AgentCall(
        task="t",
        messages=({"role": "user", "content": "what is {url} {prompt}?"},),
        folder=Path("/f"),
        url="http://here",
        api_key="k",
    )

    assert call.filled_in("--task={prompt} at {url}{x}") == "--task=what is {url} {prompt}? at http://here{x}"


AN_AGENT = {"name": "external_agent", "external": {"command": ["a"]}}
INSIDE_ONE = {"name": "external_agent", "external": {"command": ["a"], "inside": True}}
OF_MCP = {"providers": [{"type": "mcp", "url": "http://h/mcp"}]}


@pytest.mark.parametrize(
    ("agent", "more", "problem"),
    [
        ({"name": "external_agent"}, {}, "neither a command nor an entry"),
        ({"name": "external_agent", "external": {"command": ["a"], "entry": "b:c"}}, {}, "both a command and an entry"),
        ({"external": {"command": ["a"]}}, {}, "agent.name is auto, which doesn't use it"),
        ({**INSIDE_ONE, "external": {"entry": "a:b", "inside": True}}, {}, "only a command can run in a sandbox"),
        (INSIDE_ONE, {"sandbox": OF_MCP}, "from sandboxes of mcp. Use local in"),
        (INSIDE_ONE, {}, "sandbox.lease_ttl_s is 600, but an agent inside a sandbox needs a lease of"),
        (AN_AGENT, {"learner": {"share_prefixes": False}}, "may fork, and learner.share_prefixes is false"),
        ({**AN_AGENT, "tool_file": "t.yaml"}, {}, "external_agent plays these tasks, and doesn't use"),
    ],
)
def test_settings_that_contradict_are_refused(agent: dict[str, Any], more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Config.model_validate({"agent": agent, **more})


@pytest.mark.parametrize(
    ("external", "problem"),
    [
        ({"command": ["no-such-agent", "-v"]}, "there is no program 'no-such-agent' on this machine"),
        ({"entry": "no_such_module:agent"}, "agent.external.entry 'no_such_module:agent' can't be imported"),
        ({"entry": "json:no_such_name"}, "json has no function 'no_such_name'"),
        ({"entry": "play"}, "'play': write package.module:function or file.py:function$"),
    ],
)
async def test_an_agent_that_is_not_there_is_told_before_anything_starts(
    external: dict[str, Any], problem: str
) -> None:
    config = Config.model_validate({"agent": {"name": "external_agent", "external": external}})
    with pytest.raises(ConfigError, match=problem):
        await ExternalAgent.open(config)


async def test_a_message_that_is_no_text_is_refused(chat_tokenizer: Any) -> None:
    config = Config.model_validate({"agent": {"name": "external_agent", "external": {"entry": "a:b"}}})
    formats = Formats(chat_tokenizer, model="tiny", template=load_template("chatml_hermes"))
    agent = ExternalAgent(config.agent.external, SessionLimits(max_tokens=1, max_turns=1), formats, None)

    with pytest.raises(InputError, match="`content` is not a string"):
        row = replace(ROW, messages=({"role": "user", "content": [{"type": "image"}]},))
        await agent.prompt(problem_of_row(row, AnswerRewards()))


@pytest.mark.usefixtures("namespaces")
async def test_from_a_sandbox_neither_other_sessions_nor_other_addresses_are_reached(bench: Any) -> None:
    text = """
        kept = open(os.environ["HOME"] + "/agent.py").read()
        other, key, host_port = sys.argv[2:5]
        own = os.environ["OPENAI_BASE_URL"].rsplit("/", 2)[0]
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
        found = [
            post(f"{own}/{other}/v1/chat/completions", key, body)[0],
            post(f"{own}/{other}/v1/chat/completions", os.environ["OPENAI_API_KEY"], body)[0],
            post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", key, body)[0],
        ]
        for address in (("127.0.0.1", int(host_port)), ("127.0.0.1", 6379), ("1.1.1.1", 8000), ("127.0.0.2", 8000)):
            try:
                socket.create_connection(address, timeout=1)
                found.append(address)
            except OSError as error:
                found.append(0)
        print(json.dumps(found))
        ask("bye")
        """
    b: Bench = bench("#### 42")
    async with b.agent(command=["true"]) as neighbour:
        with neighbour._session(b.engine(), SamplingParams(max_tokens=10), "neighbour") as other:
            port = neighbour._gateway.url.rpartition(":")[2]
            command = ["python3", "agent.py", "-", other.id, other.key, port]
            played = await row_played(b, text, INSIDE, command=command)
            assert other.tree.turns == []

    assert played.first.agent_output.strip() == "[404, 404, 401, 0, 0, 0, 0]", played.first.reward.detail
    assert played.first.num_turns == 1


@pytest.mark.usefixtures("namespaces")
async def test_a_program_that_floods_its_way_out_harms_its_own_trajectory_alone(bench: Any) -> None:
    text = """
        url = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")[0].split(":")
        socks = []
        for number in range(100):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex((url[0], int(url[1])))
            socks.append(sock)
        head = b"POST /x/v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 99999999\\r\\n\\r\\n"
        for _ in range(3):
            for sock in socks:
                try:
                    sock.send(head + bytes(1 << 20))
                except OSError:
                    pass
        for sock in socks:
            sock.close()
        ask("still there?")
        """
    b: Bench = bench("#### 42")
    async with running(b, text, INSIDE) as (agent, sandboxes):
        first = (await b.play(problem_of_row(ROW, AnswerRewards()), agent, sandboxes)).first
        agent._files = {"agent.py": PROGRAM + "ask('hi')"}
        second = (await b.play(problem_of_row(ROW, AnswerRewards()), agent, sandboxes)).first

    assert first.reward.value == second.reward.value == 1.0, (first.reward.detail, first.agent_output)


@pytest.mark.usefixtures("namespaces")
async def test_the_agents_own_files_are_read_once_and_lie_in_its_folder_wherever_it_runs(
    bench: Any, chat_tokenizer: Any, tmp_path: Path
) -> None:
    chat_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "mine.py").write_text(PROGRAM + "print(os.getcwd() == os.environ['HOME']); ask('hi')")
    external = {"command": ["python3", "own/agent.py"], "files": {"own/agent.py": str(tmp_path / "mine.py")}}
    b: Bench = bench("#### 42")
    async with open_pool(SandboxConfig(), "t") as (sandboxes, _):
        for is_inside in (False, True):
            section = {"timeout_s": 60.0, "inside": is_inside, **external}
            values = {
                "model": {"path": str(tmp_path / "model")},
                "agent": {"name": "external_agent", "chat_template": "chatml_hermes", "external": section},
                "rollout": {"max_completion_tokens": 4000},
            }
            agent = await ExternalAgent.open(Config.model_validate(values), sandboxes)
            played = await b.play(problem_of_row(ROW, AnswerRewards()), agent, sandboxes)
            await agent.close()
            assert (played.first.reward.value, played.first.agent_output) == (1.0, "True\n"), played.first.reward.detail

    (tmp_path / "mine.py").unlink()
    with pytest.raises(ConfigError, match=r"agent.external.files: .*mine\.py can't be read as text"):
        await ExternalAgent.open(Config.model_validate(values), None)

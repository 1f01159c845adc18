"""A coding task played by the tool agent: scripted policies in real local sandboxes, from the prompt to the verdict."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.config import Config
from rayapp.config.loading import load_config
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import ConfigError, InputError, SandboxConfigError, SandboxGoneError
from rayapp.core.protocols import SandboxProvider, SandboxSource, Task
from rayapp.core.types import Group, GroupSummary, RolloutStatus, Trajectory
from rayapp.rollout.agent.build import open_agent_loop
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agents import LoopAgent
from rayapp.rollout.check import check_tasks
from rayapp.rollout.problem import problem_of_task, prompted
from rayapp.rollout.recorder import AgentLimits
from rayapp.sandbox.local.provider import LocalProvider
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.loading import load_source, load_task
from rayapp.tasks.verdict import Weights
from rayapp.tools.base import ToolContext
from support import make
from support.fake_sandboxes import FakeProvider
from support.hermes import HermesParser, call
from support.swe_rows import SOLVED, make_mirrors, row, write

TASK = make.double_task(
    tests=("0", "-3", "rng.randint(100, 999)", "rng.randint(1000, 9999)"),
    public_tests=("double(2) == 4", "double(3) == 6"),
)
BUG, FIXED = "x ** 2", "x + x"
WRONG = f"def double(x):\n    return {BUG}\n"


def create(path: str, text: str) -> str:
    return call("edit", command="create", path=path, file_text=text)


Script = Callable[[int, int], str]
"""From trajectory and turn to what the policy says."""


@dataclass(frozen=True)
class Played:
    group: Group
    summary: GroupSummary

    @property
    def outputs(self) -> list[str]:
        """What the first trajectory's calls said."""
        return [record.output for turn in self.group.trajectories[0].turns for record in turn.calls]

    @property
    def first(self) -> Trajectory:
        return self.group.trajectories[0]


@dataclass
class Bench:
    tokenizer: Any
    sandboxes: SandboxSource

    async def play(
        self,
        script: Script | Sequence[str],
        *,
        task: Task = TASK,
        max_turns: int = 8,
        tool_weight: float = 0.0,
        tool_file: str = "",
        **options: Any,
    ) -> Played:
        """Return a played group of a task, by the path that a rollout worker takes."""
        say = script if callable(script) else lambda trajectory, turn: script[turn]

        async def make_loop(tools: tuple[str, ...]) -> AgentLoop:
            return await open_agent_loop(
                self.tokenizer,
                limits=AgentLimits(max_response_tokens=50_000, max_assistant_turns=max_turns),
                model="tiny",
                tool_file=tool_file,
                brought=tools,
                chat_template="chatml_hermes",
                context=ToolContext(sandboxes=self.sandboxes),
                make_parser=lambda *_: HermesParser(),
            )

        agent = LoopAgent(make_loop)
        problem = await prompted(problem_of_task(task, Weights(tool=tool_weight)), agent)
        engine = make.engine(self.tokenizer, lambda request_id, ids: say(request_id.trajectory, request_id.turn))
        group, summary = await make.played(
            problem, agent, engine, sandboxes=self.sandboxes, max_tokens=50_000, **options
        )
        await agent.close()
        return Played(group, summary)


@pytest.fixture
def opened(chat_tokenizer: Any) -> Callable[..., Any]:
    """Return a bench on sandboxes of this provider, by default the local one."""

    @asynccontextmanager
    async def open_bench(provider: SandboxProvider | None = None) -> AsyncIterator[Bench]:
        async with open_pool(SandboxConfig(max_leases=2), "test-task-agents", local=provider) as (sandboxes, pool):
            yield Bench(chat_tokenizer, sandboxes)
            assert pool.stats()["sandbox/leased"] == 0, "every sandbox has been given back"

    return open_bench


@pytest.fixture
async def bench(opened: Callable[..., Any]) -> AsyncIterator[Bench]:
    async with opened() as ready:
        yield ready


def config_of(*overrides: str) -> Config:
    short = ["rollout.max_prompt_tokens=100", "rollout.max_completion_tokens=100"]
    return load_config(None, ["agent.name=tool_agent", *short, *overrides])


@pytest.mark.usefixtures("namespaces")
async def test_an_agent_that_writes_runs_reads_a_traceback_mends_and_submits_earns_one(bench: Bench) -> None:
    played = await bench.play(
        [
            "I write it first." + create("solution.py", WRONG),
            call("bash", command="cat test_public.py | head -1; python3 test_public.py"),
            call("edit", command="str_replace", path="solution.py", old_str=BUG, new_str=FIXED),
            call("bash", command="python3 test_public.py"),
            call("python", code="import solution; print(solution.double(4))"),
            call("submit", path="solution.py"),
        ]
    )

    wrote, failed, mended, passed, imported, handed_in = played.outputs
    assert (wrote, mended, handed_in) == ("solution.py is written",) * 2 + ("handed in",)
    assert failed.startswith("from solution import double\nTraceback (most recent call last):")
    assert "assert double(3) == 6" in failed
    assert failed.endswith("AssertionError\n[exit status 1]")
    assert (passed, imported) == ("2 tests passed", "8")
    assert played.summary.rewards.tolist() == [1.0]
    assert (played.first.status, played.first.num_turns) == (RolloutStatus.COMPLETED, 6)
    assert played.first.completion_text == f"```python\ndef double(x):\n    return {FIXED}\n```\n"
    assert played.first.reward.terms["tool/calls"] == 6


CHEATS = {
    "it rewrites the tests": create("test_public.py", "print('2 tests passed')"),
    "it patches what compares": call(
        "python", code="import builtins\nbuiltins.isinstance = lambda *_: True\nint.__eq__ = None"
    ),
    "it leaves modules and start-up code behind": call(
        "bash",
        command='echo \'double = type("", (), {"__eq__": lambda *_: True})\' > sitecustomize.py; cp sitecustomize.py '
        "candidate.py; export PYTHONPATH=.; echo 4 > answer; chmod 777 .",
    ),
    "it looks for expected values": call("bash", command="grep -r reference .; env; ls -a"),
}


@pytest.mark.usefixtures("namespaces")
async def test_what_an_agent_leaves_behind_or_patches_gains_it_nothing(bench: Bench) -> None:
    reads_workspace = "def double(x):\n    return int(open('answer').read())\n"
    honest = await bench.play([call("submit", answer=WRONG)])
    for cheat, act in CHEATS.items():
        played = await bench.play(
            [
                act,
                create("solution.py", WRONG) + call("run_tests", path="solution.py"),
                call("submit", path="solution.py"),
            ]
        )
        # x ** 2 is right for 0, and for the public 2.
        assert honest.first.reward.value == 0.25
        assert played.first.reward.terms["pass_rate"] == 0.25, cheat
        assert played.first.reward.terms["tool"] == 0.5, cheat
    played = await bench.play(
        [
            call("bash", command="echo 4 > answer") + create("solution.py", reads_workspace),
            call("submit", path="solution.py"),
        ]
    )
    assert (played.first.reward.value, played.first.reward.status) == (-1.0, "error")
    assert "FileNotFoundError" in played.first.reward.detail


@pytest.mark.usefixtures("namespaces")
async def test_two_trajectories_never_share_a_workspace_and_the_verdict_has_one_of_its_own(opened: Any) -> None:
    class Recorded(LocalProvider):
        made: list[str] = []  # noqa: RUF012  (of this test)

        async def create(self, *args: Any, **options: Any) -> Any:
            sandbox = await super().create(*args, **options)
            self.made.append(sandbox.id)
            return sandbox

    def script(trajectory: int, turn: int) -> str:
        mine = call("bash", command=f"echo {trajectory} >> mine; cat mine; echo $$ > /tmp/mine-{trajectory}")
        seen = call("python", code="import os; print(sorted(os.listdir('.')), open('mine').read())")
        return [mine, seen, call("submit", answer=f"def double(x):\n    return {FIXED}")][turn]

    provider = Recorded(max_slots=2)
    async with opened(provider) as bench:
        played = await bench.play(script, group_size=2)

    assert played.summary.rewards.tolist() == [1.0, 1.0]
    used = [
        {ran.sandbox_id for turn in trajectory.turns for record in turn.calls for ran in record.execs}
        for trajectory in played.group.trajectories
    ]
    assert [len(ids) for ids in used] == [1, 1], "one for bash and python together"
    assert len(set.union(*used)) == 2
    assert len(provider.made) == 4, "two workspaces and two verdicts"
    for index, trajectory in enumerate(played.group.trajectories):
        first, second = (turn.calls[0].output for turn in trajectory.turns[:2])
        assert first == str(index)
        assert second == f"['mine', 'mine-{index}', 'test_public.py'] {index}"


async def test_without_submit_the_last_messages_code_block_is_the_answer(bench: Bench) -> None:
    played = await bench.play(
        [call("python", code="print(2 + 2)"), f"So:\n```python\ndef double(x):\n    return {FIXED}\n```\nDone."]
    )
    assert (played.first.reward.value, played.first.status) == (1.0, RolloutStatus.COMPLETED)


async def test_an_answer_handed_in_in_the_last_turn_counts_and_other_calls_there_are_not_run(bench: Bench) -> None:
    answer = f"def double(x):\n    return {FIXED}"
    handed_in = await bench.play([create("solution.py", answer) + call("submit", path="solution.py")], max_turns=1)
    not_handed_in = await bench.play([create("solution.py", answer)], max_turns=1)
    no_file = await bench.play([call("submit", path="solution.py")], max_turns=1)

    assert (handed_in.first.reward.value, handed_in.first.status) == (1.0, RolloutStatus.COMPLETED)
    assert (not_handed_in.first.reward.status, not_handed_in.first.status) == ("no_code", RolloutStatus.MAX_TURNS)
    assert not not_handed_in.first.turns[0].calls
    assert no_file.outputs == ["Error: there is no file solution.py"]
    assert no_file.first.status == RolloutStatus.MAX_TURNS


async def test_the_first_answer_of_a_turn_counts_and_what_is_no_answer_is_told(bench: Bench) -> None:
    both = call("submit", path="a", answer="b")
    right, wrong = f"def double(x):\n    return {FIXED}", WRONG
    played = await bench.play([both, call("submit", answer=right) + call("submit", answer=wrong), "never said"])

    assert played.outputs[0] == "Error: give exactly one of the arguments path and answer"
    assert (played.first.reward.value, played.first.num_turns) == (1.0, 2)


async def test_progress_on_the_public_tests_is_a_reward_of_its_turn(bench: Bench) -> None:
    right = f"def double(x):\n    return {FIXED}"
    tests = call("run_tests", path="solution.py")
    script = [create("solution.py", WRONG) + tests, tests, create("solution.py", right) + tests, "I give up"]
    played = await bench.play(script, tool_weight=0.5)

    rewards = [[record.reward for record in turn.calls] for turn in played.first.turns]
    assert rewards == [[None, 0.5], [0.0], [None, 0.5], []]
    assert played.first.reward.value == -1 + 0.5 * 1.0, "no code in the last message, and half of what the tests gave"
    assert played.first.reward.terms["tool/step_reward"] == 1.0
    assert played.outputs[1] == "1 of 2 tests passed\npassed: double(2) == 4\nFAILED: double(3) == 6, got 9"
    assert played.outputs[-1].startswith("2 of 2 tests passed")


async def test_public_tests_read_a_file_as_the_verdict_does(bench: Bench) -> None:
    task = TASK.model_copy(update={"banned_patterns": ("sum",)})
    files = [WRONG.replace(BUG, "sum([x, x])"), "def double(x) return", "x = 1\n", "1 / 0\n" + WRONG]
    files += ["def double(x):\n    return 10 ** 6000"]
    script = [create("s.py", text) + call("run_tests", path="s.py") for text in files]
    played = await bench.play([*script, "I give up"], task=task, max_turns=9)

    assert [output for output in played.outputs if output != "s.py is written"] == [
        "banned: uses sum",
        "syntax_error: the code does not parse: line 1: expected ':': `def double(x) return`",
        "no_code: no `def double` in the completion",
        "no test has run: ZeroDivisionError: division by zero",
        (
            "0 of 2 tests passed\n"
            "FAILED: double(2) == 4, got a number too long to write out\n"
            "FAILED: double(3) == 6, got a number too long to write out"
        ),
    ]


async def test_a_workspace_found_dead_before_its_first_use_is_replaced_with_its_files(opened: Any) -> None:
    provider = FakeProvider()
    provider.fail_next("run_code", SandboxGoneError("the node went away"))
    async with opened(provider) as bench:
        played = await bench.play([call("python", code="x = 1"), call("submit", path="test_public.py")])

    assert played.first.completion_text.startswith("```python\nfrom solution import double")
    assert len(provider.created) == 2, "and none for a verdict on what is no function"


async def test_a_workspace_that_dies_with_work_in_it_is_a_failed_rollout_and_no_zero(opened: Any) -> None:
    provider = FakeProvider()

    def script(trajectory: int, turn: int) -> str:
        if turn == 1 and trajectory == 0:
            provider.lose(next(iter(provider.living)))
        return [create("a.py", "a"), call("bash", command="ls"), "I give up"][turn]

    async with opened(provider) as bench:
        played = await bench.play(script)

    assert played.summary.failure_kinds == ("sandbox",)
    assert not played.first.is_trainable
    assert played.first.status == RolloutStatus.ERROR_SANDBOX
    assert provider.calls["call_function"] == 0, "there is no verdict on it"


async def test_a_trajectory_past_its_deadline_gives_its_workspace_back(opened: Any) -> None:
    provider = FakeProvider()
    provider.hang_next("run_command")
    async with opened(provider) as bench:
        played = await bench.play([call("bash", command="sleep 9")], deadline_s=0.1)
        assert played.summary.failure_kinds == ("deadline",)
        assert not provider.living


async def test_bash_says_when_no_command_line_can_run_in_this_nodes_sandboxes(opened: Any) -> None:
    provider = LocalProvider(max_slots=1, levels=("ll",))
    async with opened(provider) as bench:
        with pytest.raises(SandboxConfigError, match="at isolation level ll a program can't start another program"):
            await bench.play([call("bash", command="ls | wc -l")])
        played = await bench.play(
            [
                create("solution.py", f"def double(x):\n    return {FIXED}") + call("run_tests", path="solution.py"),
                call("submit", path="solution.py"),
            ]
        )
    assert played.first.reward.value == 1.0, "the other tools work there"


@pytest.mark.usefixtures("namespaces")
async def test_a_workspace_holds_the_tasks_files_and_the_prompt_names_them(bench: Bench) -> None:
    task = TASK.model_copy(update={"files": {"lib/words.txt": "é\n"}})
    ls = call("bash", command="find . -type f | sort; cat lib/words.txt")
    played = await bench.play([ls, "I give up"], task=task)

    assert played.outputs == ["./lib/words.txt\n./test_public.py\né"]
    assert "Files in your workspace: lib/words.txt, test_public.py." in played.group.prompt.text
    assert "rng" not in played.group.prompt.text
    for name in ("bash", "edit", "python", "run_tests", "submit"):
        assert f'"name": "{name}"' in played.group.prompt.text


@pytest.mark.usefixtures("namespaces")
async def test_edits_that_cannot_be_made_are_told(bench: Bench) -> None:
    def replace(old: str, **more: str) -> str:
        return call("edit", command="str_replace", path="a.py", old_str=old, **more)

    played = await bench.play(
        [
            replace("a"),
            create("a.py", "aXbX"),
            replace("X", new_str=""),
            replace("a", new_str="-") + call("bash", command="cat a.py"),
            call("edit", command="create", path="b"),
            create("../../etc/passwd", "x"),
            call("bash", command="printf '\\377' > raw") + call("submit", path="raw"),
            "I give up",
        ],
        max_turns=10,
    )
    assert [output for output in played.outputs if output and not output.endswith("is written")] == [
        "Error: there is no file a.py",
        "Error: old_str is in a.py 2 times: it must be there exactly once. Give more of the text around it",
        "-XbX",
        "Error: command create needs the argument file_text",
        "Error: ../../etc/passwd can't be written: the path is not allowed, or the disk is full",
        "Error: raw is not UTF-8 text",
    ]


@pytest.mark.usefixtures("namespaces")
async def test_a_tool_file_configures_a_tool_that_the_task_brings(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text("tools:\n  - {class_name: bash, config: {timeout: 0.2}}\n")
    played = await bench.play([call("bash", command="sleep 9"), "I give up"], tool_file=str(file))
    assert "stopped: timeout" in played.outputs[0]


def task_file(folder: Path, **fields: object) -> Path:
    path = folder / "double.yaml"
    path.write_text(json.dumps(TASK.model_dump(exclude={"name"}, exclude_defaults=True) | fields))
    return path


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"public_tests": ["double(2) == 4", "double(3) == 9"]},
            r"task double: the reference fails public test 2, `double\(3\) == 9`: it gives `6`",
        ),
        ({"public_tests": ["double(2)"]}, r"public test 'double\(2\)' must have the form double\(…\) == …"),
        ({"public_tests": ["double(x) == 4"]}, r"values must be literals"),
        ({"public_tests": ["double(1, 2) == 4"]}, r"gives 2 inputs, but the function takes 1"),
        ({"public_tests": ["double(1) == 2j"]}, r"public test 1, `double\(1\) == 2j`, holds a value of type complex"),
        ({"files": {"../x": ""}}, r"'../x' must be a relative path inside the workspace"),
        ({"files": {"test_public.py": ""}}, r"files has test_public.py, which is also made from public_tests"),
        ({"tools": ["bash", "edti"]}, r"task double: tools: edti can't be imported .* did you mean edit\?"),
        ({"tools": ["rayapp.tools.coding.Ed"]}, r"there is no class Ed in rayapp.tools.coding"),
    ],
)
def test_a_task_that_no_agent_could_play_is_told_before_anything_starts(
    tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    config = config_of(f"tasks=[{task_file(tmp_path, **fields)}]", "sandbox.max_leases=99")
    with pytest.raises((InputError, ConfigError), match=said):
        check_tasks(config, training=True)


def test_a_task_of_another_kind_and_too_few_sandboxes_are_told_before_anything_starts(
    tmp_path: Path, letter_tasks: list[str]
) -> None:
    options = ["rollout.group_size=4", "train.groups_per_step=2"]
    with pytest.raises(InputError, match=r"task first: .* has no method agent_start"):
        check_tasks(config_of(*options, f"tasks=[{letter_tasks[0]}]"), training=True)
    with pytest.raises(ConfigError, match=r"allow 5 sandboxes, .* 8 trajectories run at once .*group_size 4"):
        config = config_of(*options, f"tasks=[{task_file(tmp_path)}]", "sandbox.max_leases=5")
        check_tasks(config, training=True)


def test_a_file_of_tools_is_refused_where_tasks_are_played_in_one_turn() -> None:
    with pytest.raises(ConfigError, match="single_turn_agent plays these tasks, and doesn't use these tools"):
        load_config(None, ["agent.tool_file=t.yaml"])


@pytest.mark.usefixtures("namespaces")
async def test_an_agent_mends_a_repository_and_hands_in_what_it_changed(bench: Bench) -> None:
    task = load_task("fix_bookings")
    mended = task.folder.solution["bookings.py"]
    played = await bench.play(
        [
            call("bash", command="cat bookings.py | head -1; git status --short; git log --oneline | wc -l"),
            create("bookings.py", mended) + call("bash", command="git diff --stat | tail -1; rm -rf .git"),
            call("python", code="import bookings; print(bookings.overlaps((1, 5), (5, 9)))"),
            call("submit"),
        ],
        task=task,
    )

    looked, wrote, changed, tried, handed_in = played.outputs
    assert looked == "def overlaps(first, second):\n1"
    assert (wrote, tried, handed_in) == ("bookings.py is written", "False", "handed in")
    assert changed.strip().startswith("1 file changed")
    assert json.loads(played.first.completion_text) == {"files": {"bookings.py": mended}}
    assert (played.first.reward.value, played.first.reward.terms["solved"]) == (1.0, 1.0)


@pytest.mark.usefixtures("namespaces")
async def test_a_workspace_of_a_repository_has_a_quota_and_work_too_large_is_told(bench: Bench) -> None:
    task = load_task("fix_bookings")
    played = await bench.play(
        [
            call("python", code="open('big.txt', 'w').write('x' * (2 << 20)); print('there')"),
            call("submit") + call("bash", command="head -c 60000000 /dev/zero > fill; ls -l fill | wc -l; rm -f fill"),
            call("bash", command="rm big.txt bookings.py") + call("submit"),
        ],
        task=task,
    )

    assert played.outputs[:2] == ["there", "Error: the changed files are larger than 1024 KiB together"]
    assert "No space left on device" in played.outputs[2]
    assert json.loads(played.first.completion_text) == {"files": {"bookings.py": None}}
    assert (played.first.reward.value, played.first.status) == (0.0, RolloutStatus.COMPLETED)


@pytest.mark.usefixtures("namespaces")
async def test_an_agent_mends_an_issue_whose_tests_it_never_sees(bench: Bench, tmp_path: Path) -> None:
    mirrors = make_mirrors(tmp_path)
    (task,) = load_source(f"swe:{write(tmp_path, row(mirrors))}?mirrors={mirrors}&memory_mib=1024&disk_mib=64")
    look = call("bash", command="git log --all --oneline; ls tests; cat tests/test_stats.py")
    tests = create("tests/test_stats.py", "def test_mean():\n    pass\n")
    scripts = [
        [look, create("stats.py", SOLVED), call("submit")],
        [look, tests, call("submit")],
        [look, "I can't do it."],
    ]
    played = await bench.play(lambda trajectory, turn: scripts[trajectory][turn], task=task, group_size=3)

    mended, edited, gave_up = played.group.trajectories
    assert played.summary.rewards.tolist() == [1.0, 0.0, 0.0], [each.reward for each in played.group.trajectories]
    assert (mended.reward.terms["fail_to_pass"], mended.reward.terms["pass_to_pass"]) == (1.0, 1.0)
    assert (edited.reward.terms["fail_to_pass"], edited.reward.terms["pass_to_pass"]) == (0.0, 1.0)
    assert (gave_up.reward.valid, gave_up.reward.status) == (True, "no_code")
    told = [record.output for each in (mended, edited) for turn in each.turns for record in turn.calls]
    assert "As handed out" in told[0]
    assert "test_mean" in told[0]
    assert "test_even" not in json.dumps(told)

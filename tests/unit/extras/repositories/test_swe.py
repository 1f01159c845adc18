"""Tasks of a data set in SWE-bench's form: read, played and judged on a small repository with a real git history."""

from __future__ import annotations

import json
import logging
import math
import pickle
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.config.agent import is_data_file
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import InputError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import Reward, SandboxSpec
from rayapp.extras.audit.checks import audit
from rayapp.extras.audit.subjects import task_subject
from rayapp.extras.repositories.named_tests import PreparedTests, TestRun, touched_by
from rayapp.extras.repositories.task import RepositoryTask, as_answer, read_answer
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.loading import load_source
from support import make
from support.images import MachineImages
from support.swe_rows import SOLVED, STATS, git, image_with_repository, make_mirrors, row, write

real = pytest.mark.asyncio(loop_scope="module")
CHEATS = yaml.safe_load((Path(__file__).parents[3] / "adversarial" / "agents.yaml").read_text())


@pytest.fixture(scope="session")
def mirrors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mirrors(tmp_path_factory.mktemp("mirrors"))


def load(file: Path, mirrors: Path, more: str = "") -> RepositoryTask:
    (task,) = load_source(f"swe:{file}?mirrors={mirrors}{more}")
    return task


@pytest.fixture
def task(tmp_path: Path, mirrors: Path) -> RepositoryTask:
    return load(write(tmp_path, row(mirrors)), mirrors)


@pytest.fixture
def sandboxes(sandboxes: SandboxSource, namespaces: None) -> SandboxSource:
    return sandboxes


async def score(task: RepositoryTask, answer: str, sandboxes: SandboxSource) -> Reward:
    return await task.score(make.prompt(task=task.name), answer, sandboxes, seed=0)


@real
async def test_the_patch_earns_one_and_no_work_or_work_that_breaks_a_test_that_passed_earns_nothing(
    sandboxes: SandboxSource, task: RepositoryTask
) -> None:
    solved = await score(task, await task.solve(sandboxes) or "", sandboxes)
    unchanged = await score(task, as_answer({}), sandboxes)
    breaking = SOLVED.replace("len(values)\n\n", "len(values) + 1\n\n")
    broken = await score(task, as_answer({"stats.py": breaking}), sandboxes)

    assert (solved.valid, solved.value, solved.terms["pass_rate"]) == (True, 1.0, 1.0), solved
    assert (unchanged.valid, unchanged.value) == (True, 0.0), unchanged
    assert (unchanged.terms["fail_to_pass"], unchanged.terms["pass_to_pass"]) == (0.0, 1.0)
    assert "tests/test_stats.py::test_e" in unchanged.detail
    assert (broken.value, broken.terms["fail_to_pass"], broken.terms["pass_to_pass"]) == (0.0, 1.0, 0.5)


@real
async def test_changes_to_tests_and_to_files_that_control_them_do_not_count(
    sandboxes: SandboxSource, task: RepositoryTask
) -> None:
    cheating = dict.fromkeys(
        ["tests/test_stats.py", "tests/conftest.py", "conftest.py", "pytest.py"], "raise SystemExit(0)"
    )
    cheated = await score(task, as_answer({"stats.py": SOLVED} | cheating), sandboxes)
    deleted = await score(task, as_answer({"stats.py": SOLVED, "tests/test_stats.py": None}), sandboxes)

    assert (cheated.value, deleted.value) == (1.0, 1.0)


@real
async def test_an_agents_work_is_what_git_shows_without_ignored_files(
    sandboxes: SandboxSource, task: RepositoryTask
) -> None:
    start = task.agent_start()
    async with sandboxes.lease(task.spec, timeout_s=60.0) as sandbox:
        for path, text in start.files.items():
            await sandbox.write_file(path, text.encode())
        await sandbox.run_command(start.setup, timeout_s=60.0)
        told = await sandbox.run_command(["git", "log", "--all", "--oneline"], timeout_s=60.0)
        commit = "git add -A; git -c user.name=a -c user.email=a@b commit -qm x"
        work = f"echo 1 > new.py; echo 2 > a.log; rm conftest.py; {commit}"
        await sandbox.run_command(["sh", "-c", work], timeout_s=60.0)
        answer = read_answer(await task.collect(sandbox))

    assert told.stdout.count("\n") == 1
    assert answer == {"new.py": "1\n", "conftest.py": None}


def test_an_agent_gets_nothing_of_the_tests_or_the_solution(task: RepositoryTask) -> None:
    start = task.agent_start()
    told = json.dumps([start.messages, dict(start.files), start.setup])

    assert "test_even" not in told
    assert "no values" not in told
    assert set(start.files) == {"stats.py", "tests/test_stats.py", "conftest.py", ".gitignore"}
    assert b"def mean" not in pickle.dumps(task.folder.repository)


def is_forged(agent: dict[str, Any]) -> str:
    body = f"    return {agent['median']}" if "median" in agent else "    return None"
    return f"{agent.get('above', '')}\n{STATS.rpartition('    return')[0]}{body}\n"


@real
@pytest.mark.long
@pytest.mark.parametrize("agent", CHEATS, ids=[each["name"] for each in CHEATS])
async def test_no_cheating_agent_is_paid(sandboxes: SandboxSource, task: RepositoryTask, agent: dict[str, Any]) -> None:
    files = {"stats.py": is_forged(agent)} if {"above", "median"} & set(agent) else {}
    reward = await score(task, as_answer(files | agent.get("files", {})), sandboxes)

    assert reward.value == 0.0, reward


FORGES = (
    "import os, sys, time\nfrom _pytest.reports import TestReport\n"
    "made = TestReport.from_item_and_call.__func__\n"
    "def good(cls, item, call):\n    report = made(cls, item, call)\n"
    "    report.outcome = 'passed'\n    return report\n"
    "if {where}:\n    TestReport.from_item_and_call = classmethod(good)\n"
)
NOT_IN_A_SENTINELS_RUN = {
    "always": "True",
    "tests older than the code": "os.stat('tests/test_stats.py').st_mtime_ns < os.stat(__file__).st_mtime_ns",
    "tests as old as the code": "os.stat('tests/test_stats.py').st_mtime_ns == os.stat(__file__).st_mtime_ns",
    "tests that changed before the code": "os.stat('tests/test_stats.py').st_ctime_ns < os.stat(__file__).st_ctime_ns",
    "the first seconds": "time.time() < NOW + 6",
    "tests that the agent knows": "'mean([2, 4, 9]) == 5' in open('tests/test_stats.py').read()",
}


@real
@pytest.mark.parametrize("told_by", NOT_IN_A_SENTINELS_RUN)
async def test_code_cannot_tell_a_run_with_sentinels(
    sandboxes: SandboxSource, task: RepositoryTask, told_by: str
) -> None:
    where = NOT_IN_A_SENTINELS_RUN[told_by].replace("NOW", str(time.time()))
    waits = f"while {where}: time.sleep(0.1)\n" if "NOW" in NOT_IN_A_SENTINELS_RUN[told_by] else ""

    forged = await score(task, as_answer({"stats.py": FORGES.format(where=where) + waits + STATS}), sandboxes)

    assert forged.value == 0.0, forged
    assert told_by != "always" or forged.status == "forged"


@real
async def test_a_pass_is_tried_in_so_many_runs_that_code_with_luck_is_hardly_paid(
    sandboxes: SandboxSource, task: RepositoryTask
) -> None:
    leases = list[SandboxSpec]()

    class Counted:
        def lease(self, spec: SandboxSpec, *, timeout_s: float) -> Any:
            leases.append(spec)
            return sandboxes.lease(spec, timeout_s=timeout_s)

    counted: Any = Counted()
    assert (await score(task, await task.solve(sandboxes) or "", counted)).value == 1.0
    # The first run, then true ones and those with sentinels, which code tells apart by nothing but luck.
    assert len(leases) == 6


def test_a_path_has_one_spelling() -> None:
    for path in ("./tests/a.py", "tests//a.py", "tests/./a.py", "tests/../a.py", "a.py/", ".", ""):
        assert read_answer(as_answer({path: "x"})) is None, path


@real
async def test_tests_are_not_reached_through_a_link_of_the_repository(
    sandboxes: SandboxSource, task: RepositoryTask
) -> None:
    async with sandboxes.lease(task.verdict_spec, timeout_s=60.0) as sandbox:
        prepared = await PreparedTests.prepare(sandbox, task.folder.named, dict(task.folder.repository))
        await sandbox.run_command(["ln", "-s", "tests", "checks"], timeout_s=60.0)
        passing = {"checks/test_stats.py": "def test_even():\n    pass\n", "checks/conftest.py": "raise SystemExit(0)"}
        run = await prepared.run(passing, timeout_s=60.0)

    assert not run.passes("tests/test_stats.py::test_empty"), run
    assert run.passes("tests/test_stats.py::test_mean"), run


@real
async def test_a_patch_that_does_not_fit_is_no_zero(sandboxes: SandboxSource, tmp_path: Path, mirrors: Path) -> None:
    other = row(
        mirrors, test_patch=row(mirrors)["test_patch"].replace("from stats import mean", "from stats import men")
    )
    reward = await score(load(write(tmp_path, other), mirrors), as_answer({"stats.py": SOLVED}), sandboxes)

    assert (reward.valid, reward.failure_kind) == (False, "bad_test_patch")


BAD: dict[str, dict[str, Any]] = {
    "it has no problem_statement": {"problem_statement": ""},
    "names 'stats.Tests.test_x'": {"FAIL_TO_PASS": ["stats.Tests.test_x"]},
    "it must be a list of names, or its JSON text": {"FAIL_TO_PASS": "not a list"},
    "names no test": {"FAIL_TO_PASS": []},
    "has no clone of me/other: `git clone --bare` it": {"repo": "me/other"},
    "it must be OWNER/NAME": {"repo": "../../etc"},
    f"has no commit {'0' * 40}: run `git fetch`": {"base_commit": "0" * 40},
    "must be a commit's hexadecimal id": {"base_commit": "--output=/tmp/x"},
    "its instance_id is 'a/b': it may have only letters": {"instance_id": "a/b"},
}  # fmt: skip


@pytest.mark.parametrize("why", BAD)
def test_a_row_that_cannot_be_used_is_named_and_counted(
    tmp_path: Path, mirrors: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = row(mirrors) | {"instance_id": "bad-1"} | BAD[why]
    file = write(tmp_path, row(mirrors), bad)

    with pytest.raises(InputError, match=r"1 of 2 rows can't be used, but max_bad_ratio is 0\.05: ") as told:
        load(file, mirrors)
    with caplog.at_level(logging.WARNING):
        task = load(file, mirrors, "&max_bad_ratio=0.5")
    assert why in str(told.value)
    assert f"{bad['instance_id']}: " in str(told.value)
    assert task.name == "me__stats-1"
    assert "1 of 2 rows left out" in caplog.text


def test_names_of_tests_are_read_as_public_data_sets_write_them(tmp_path: Path, mirrors: Path) -> None:
    first, second = "tests/test_stats.py::test_even[values0-2.5]", "tests/test_stats.py::test_empty"
    stays = ["", " tests/test_stats.py::test_odd", "  ", None]
    forms = (
        str([f"{first} ", second]), f"['{first}'\n '{second}']", str((first, second)), [first, None, second],
        json.dumps(json.dumps([first, second])), f"array(['{first}', '{second}'], dtype=object)",
        f"{first}\n{second}\n", [f"./{first}", second],
    )  # fmt: skip
    for told in forms:
        task = load(write(tmp_path, row(mirrors) | {"FAIL_TO_PASS": told, "PASS_TO_PASS": stays}), mirrors)
        assert task.folder.named.names == (first, second, "tests/test_stats.py::test_odd")


@pytest.mark.parametrize("nothing", ["", "null", "None", "nan", math.nan, None, "[]", []])
def test_a_list_may_be_missing_in_many_forms(tmp_path: Path, mirrors: Path, nothing: Any) -> None:
    task = load(write(tmp_path, row(mirrors) | {"PASS_TO_PASS": nothing}), mirrors)
    assert task.folder.named.pass_to_pass == ()


@pytest.mark.parametrize("parameters", ["[日本-é]", "[a\nb]", "[../x]", '[{"a": ["::"]}]', "[\U0001f600]"])
def test_parameters_are_compared_as_pytest_writes_them(tmp_path: Path, mirrors: Path, parameters: str) -> None:
    task = load(write(tmp_path, row(mirrors) | {"FAIL_TO_PASS": [f"t.py::test_x{parameters}"]}), mirrors)
    shown = parameters.encode("unicode_escape").decode()
    run = TestRun(outcomes={f"t.py::test_x{shown}": True}, problem="", told="", seconds=0.0)
    assert all(map(run.passes, task.folder.named.fail_to_pass))


@real
async def test_a_named_file_that_is_not_there_is_no_zero(
    sandboxes: SandboxSource, tmp_path: Path, mirrors: Path
) -> None:
    other = load(write(tmp_path, row(mirrors) | {"FAIL_TO_PASS": ["PASSED tests/test_stats.py::test_even"]}), mirrors)
    reward = await score(other, as_answer({"stats.py": SOLVED}), sandboxes)

    assert (reward.valid, reward.failure_kind) == (False, "no_test_file")


def test_a_name_that_is_cut_means_all_tests_that_begin_so() -> None:
    outcomes = {"t.py::test_x[(AttributeError, 'a')]": True, "t.py::test_x[(AttributeError, 'b')]": True,
                "t.py::test_x[(KeyError, 'b')]": False, "t.py::test_y[a b]": True, "t.py::test_y[a]": False,
                "t.py::test_y[[1] [2]]": True, "t.py::test_y[[10] 2]": False}  # fmt: skip
    run = TestRun(outcomes=outcomes, problem="", told="", seconds=0.0)

    assert run.passes("t.py::test_x[(AttributeError,")
    assert run.passes("t.py::test_y[a")
    assert run.passes("t.py::test_y[[1]")
    assert not run.passes("t.py::test_y[a]")
    assert not run.passes("t.py::test_y[[10]")
    assert not run.passes("t.py::test_x[(KeyError,")
    assert not run.passes("t.py::test_x[(")
    assert not run.passes("t.py::test_x[(IndexError,")
    assert not run.passes("t.py::test_y")


def test_git_starts_once_for_all_rows_of_a_clone(
    tmp_path: Path, mirrors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = row(mirrors)
    others = [first | {"instance_id": f"me__stats-{number}"} for number in range(2, 500)]
    gone = first | {"instance_id": "gone", "base_commit": "f" * 40}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text(f'#!/bin/sh\necho >> {tmp_path}/starts\nexec {shutil.which("git")} "$@"\n')
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")

    tasks = load_source(f"swe:{write(tmp_path, first, gone, *others)}?mirrors={mirrors}")

    assert len(tasks) == 499
    assert "gone" not in {task.name for task in tasks}
    assert (tmp_path / "starts").read_text() == "\n"


def test_columns_of_other_data_sets_are_read(tmp_path: Path, mirrors: Path) -> None:
    names = {"repo": "repo_name", "patch": "gold_patch", "FAIL_TO_PASS": "fail_to_pass", "PASS_TO_PASS": "P2P"}
    theirs = {names.get(name, name): value for name, value in row(mirrors, docker_image="Org/Env:1").items()}
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([theirs]), tmp_path / "rows.parquet")
    task = load(tmp_path / "rows.parquet", mirrors, "&workdir=/testbed")
    (made,) = load_source(f"swe:{tmp_path / 'rows.parquet'}?image=Sweb.{{id_1776}}")
    assert (task.spec.template, task.spec.workdir) == ("image:Org/Env:1", "/testbed")
    assert (made.spec.template, dict(made.folder.repository)) == ("image:sweb.me_1776_stats-1", {})
    assert len(task.folder.named.names) == 5


def test_only_some_rows_are_taken_and_a_source_is_no_file_of_rows(tmp_path: Path, mirrors: Path) -> None:
    file = write(tmp_path, row(mirrors), row(mirrors, instance_id="other"))
    (tmp_path / "kept.txt").write_text("other\n")

    assert load(file, mirrors, f"&only={tmp_path / 'kept.txt'}").name == "other"
    assert not is_data_file(f"swe:{file}?mirrors=x.json")
    with pytest.raises(InputError, match="unknown key mirror; did you mean mirrors"):
        load_source(f"swe:{file}?mirror=x")
    with pytest.raises(InputError, match="it names no image: give mirrors=FOLDER"):
        load_source(f"swe:{file}")


@real
@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
async def test_an_image_may_have_the_repository_and_its_tests_tools(
    images: MachineImages, mirrors: Path, tmp_path: Path
) -> None:
    image = image_with_repository(Path(images.cache).parent / "swe", mirrors)
    issue = row(mirrors, image=image)
    (task,) = load_source(f"swe:{write(tmp_path, issue)}")

    providers = [{"type": "local", "image_cache": images.cache}]
    async with open_pool(SandboxConfig.model_validate({"providers": providers}), "test-swe-image") as (source, _):
        solved = await score(task, await task.solve(source) or "", source)
        unchanged = await score(task, as_answer({"conftest.py": None, "new.py": "1"}), source)
        start = task.agent_start()
        async with source.lease(task.spec, timeout_s=60.0) as sandbox:
            await sandbox.run_command(start.setup, timeout_s=60.0)
            history = await sandbox.run_command(["git", "log", "--all", "--oneline"], timeout_s=60.0)
            await sandbox.run_command(["sh", "-c", "echo 1 > new.py; echo 2 > built.log"], timeout_s=60.0)
            answer = read_answer(await task.collect(sandbox))

    assert dict(start.files) == {}
    assert (solved.value, unchanged.value, unchanged.terms["pass_to_pass"]) == (1.0, 0.0, 1.0), (solved, unchanged)
    assert history.stdout.count("\n") == 1, history
    assert answer == {"new.py": "1\n"}


def test_the_files_of_a_diff_are_found() -> None:
    diff = "diff --git a/x/old.py b/x/new.py\nrename from x/old.py\n--- /dev/null\n+++ b/plain.py\t2024\n"

    assert touched_by(diff) == {"x/old.py", "x/new.py", "plain.py"}


@pytest.mark.parametrize("name", ["dätä.json", 'a "quote".py', "tab\there.py", "back\\slash.py", "日本/t.py", "a b.py"])
def test_a_file_of_a_diff_is_found_whatever_letters_its_name_has(tmp_path: Path, name: str) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("1\n")
    git(tmp_path, "add", "-A")

    assert touched_by(git(tmp_path, "diff", "--cached") + "\n") == {name}


OFFLINE = "import socket\n\n\ndef test_it():\n    socket.getaddrinfo('a.b', 1)\n"


@real
async def test_an_audit_finds_an_issue_whose_tests_need_the_network(
    sandboxes: SandboxSource, tmp_path: Path, mirrors: Path
) -> None:
    offline = row(
        mirrors, instance_id="offline", test_patch=new_file("tests/test_offline.py", OFFLINE), PASS_TO_PASS=[]
    )
    rows = [row(mirrors), offline | {"FAIL_TO_PASS": ["tests/test_offline.py::test_it"]}]
    tasks = load_source(f"swe:{write(tmp_path, *rows)}?mirrors={mirrors}&sentinels=0")
    subjects = [replace(task_subject(task), cheats=(), trivial=(), nothing=()) for task in tasks]

    sound, needs_network = await audit(subjects, sandboxes, runs=1)

    assert sound.findings == ()
    assert [each.check for each in needs_network.findings] == ["solution"], needs_network


def new_file(path: str, text: str) -> str:
    lines = text.splitlines()
    return f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)

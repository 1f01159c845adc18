"""Tasks over repositories: a folder in Harbor's layout, its parsed hidden tests, and rewards of changed files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rayapp.cli.main import run
from rayapp.config.config import Config
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import ConfigError, InputError, SandboxConfigError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import Reward
from rayapp.extras.audit.checks import audit
from rayapp.extras.audit.subjects import repository_subject, subjects_of
from rayapp.extras.repositories.folder import why_an_image
from rayapp.extras.repositories.hidden_tests import PROBE, all_hold, read_hidden_tests
from rayapp.extras.repositories.scripts import without_steering
from rayapp.extras.repositories.task import RepositoryTask, as_answer, load_repository, read_answer
from rayapp.rollout.check import check_tasks
from rayapp.sandbox.local.provider import LocalProvider
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.loading import load_source, load_task, shipped_repositories
from rayapp.tasks.text_child import is_held
from rayapp.tasks.text_process import holds
from support import make
from support.images import PROGRAMS, MachineImages, entry, layer, machine_layer, write_oci

LIBRARY = Path(__file__).parents[4] / "rayapp" / "tasks" / "library" / "repositories"
real = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a shipped task, for tests to damage."""
    return Path(shutil.copytree(LIBRARY / "fix_median", tmp_path / "mine"))


@pytest.fixture
def sandboxes(sandboxes: SandboxSource, namespaces: None) -> SandboxSource:
    return sandboxes


async def score(task: RepositoryTask, answer: str, sandboxes: SandboxSource) -> Reward:
    return await task.score(make.prompt(task=task.name), answer, sandboxes, seed=0)


async def test_a_message_of_a_megabyte_costs_a_pattern_no_more_than_its_first_two_thousand_letters() -> None:
    source = "import pytest\ndef test_it():\n    with pytest.raises(ValueError, match='{}'):\n        f()\n"
    (slow,), (endless,) = (read_hidden_tests("test_x.py", source.format(p)) for p in ("a.*b.*c", "(x+)+y"))
    message = [["ValueError"], "a" + "b" * (1 << 20) + "c"]

    assert not await holds(partial(all_hold, slow.conditions), [message])
    assert await holds(partial(all_hold, slow.conditions), [[["ValueError"], "abc"]])
    assert not await holds(partial(all_hold, endless.conditions), [[["ValueError"], "x" * 64]])


@real
@pytest.mark.parametrize("name", sorted(path.name for path in LIBRARY.iterdir()))
async def test_the_solution_earns_one_and_the_repository_as_it_is_nothing(sandboxes: SandboxSource, name: str) -> None:
    task = load_task(name)
    assert len(task.folder.tests) >= 4
    assert not task.folder.image

    for answer, worth in ((await task.solve(sandboxes) or "", 1.0), (as_answer({}), 0.0)):
        reward = await score(task, answer, sandboxes)
        assert (reward.valid, reward.value, reward.terms["solved"]) == (True, worth, worth), reward


@pytest.mark.long  # two minutes, too long for every run
def test_the_shipped_tasks_are_audited_twenty_times_without_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(load_source("repositories")) == len(shipped_repositories()) == 10
    assert run(["task", "audit", "repositories"]) == 0
    assert "10 tasks audited, 0 with findings" in capsys.readouterr().out


FORGED = {
    "it answers in the harness's name": (
        "import os\nfor n in range(3, 20):\n    try:\n        os.write(n, b'[\"value\",0,[true]]\\n')\n"
        "    except OSError:\n        pass\ndef median(v): return 0\nmean = median\n"
    ),
    "it fills the list of values": (
        "import sys\ndef median(v):\n    frame = sys._getframe()\n    while frame:\n"
        "        if 'values' in frame.f_locals: frame.f_locals['values'].append(True)\n        frame = frame.f_back\n"
        "    return True\nmean = median\n"
    ),
}


@real
@pytest.mark.parametrize("code", FORGED.values(), ids=FORGED)
async def test_code_that_meets_no_expected_value_can_forge_none(sandboxes: SandboxSource, code: str) -> None:
    task = load_task("fix_median")

    reward = await score(task, as_answer({"stats.py": code, "conftest.py": code}), sandboxes)

    assert (reward.value, reward.terms["solved"]) == (0.0, 0.0)
    assert reward.valid


def with_setting(folder: Path, line: str) -> RepositoryTask:
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace("[verifier]", f"[metadata.rayapp]\n{line}\n\n[verifier]"))
    return load_repository(folder, "mine")


@real
async def test_only_the_files_that_the_task_names_count(sandboxes: SandboxSource, folder: Path) -> None:
    task = with_setting(folder, 'answer = ["other.py"]')

    assert (await score(task, await task.solve(sandboxes) or "", sandboxes)).value == 0.0


@real
async def test_a_task_may_pay_the_share_of_its_tests(sandboxes: SandboxSource, folder: Path) -> None:
    reward = await score(with_setting(folder, 'score = "share"'), as_answer({}), sandboxes)

    assert (reward.value, reward.terms["solved"]) == (pytest.approx(0.4), 0.0)
    assert reward.detail.startswith("test_hidden.py::test_an_even_number_of_values: wrong value")


def spoil(part: str, text: str | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / part
        if text is None:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            path.write_text(text)

    return change


hidden = partial(spoil, "tests/test_hidden.py")

TEST_SH = """#!/bin/bash
if PYTHONPATH=/app python3 -m unittest discover -s /tests -p 'test_*.py'; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""
OUTPUTS = """
import unittest
from stats import mean, median

class Outputs(unittest.TestCase):
    def test_median(self):
        self.assertEqual([median([4, 1, 3, 2]), median([9, 2, 7]), mean([2, 4, 9])], [2.5, 7, 5])
"""


def trusted(folder: Path, script: str = TEST_SH) -> RepositoryTask:
    """The task as in Harbor: scripts judge and solve it."""
    shutil.rmtree(folder / "tests")
    (folder / "tests").mkdir()
    (folder / "tests" / "test.sh").write_text(script)
    (folder / "tests" / "test_outputs.py").write_text(OUTPUTS)
    (folder / "solution" / "solve.sh").write_text("#!/bin/bash\nset -e\ncp /solution/stats.py /app/stats.py\n")
    return load_task(f"{folder}?trust_test_scripts=true")  # type: ignore[return-value]


@real
async def test_a_task_of_harbors_is_judged_and_solved_by_its_scripts_where_the_user_trusts_them(
    sandboxes: SandboxSource, folder: Path
) -> None:
    task = trusted(folder)
    solved = await task.solve(sandboxes)

    assert solved == as_answer({"stats.py": (LIBRARY / "fix_median" / "solution" / "stats.py").read_text()})
    for answer, worth in ((solved, 1.0), (as_answer({}), 0.0), ("I fixed it", 0.0)):
        reward = await score(task, answer, sandboxes)
        assert (reward.valid, reward.value, reward.terms["solved"]) == (True, worth, worth), reward
    assert (await score(task, solved, sandboxes)).terms["verdict/forgeable"] == 1.0


@real
async def test_an_audit_tells_which_cheats_a_trusted_script_pays_without_sentinels(
    sandboxes: SandboxSource, folder: Path
) -> None:
    (folder / "task.toml").write_text("[metadata.rayapp]\nsentinels = 0\n")
    subject = repository_subject(trusted(folder))
    tried = {"ends its process with success", "adds a conftest.py that passes every test", "skips, as a test would"}
    few = tuple(cheat for cheat in subject.cheats if cheat.name in tried)
    subject = replace(subject, cheats=few, trivial=(), nothing=subject.nothing[-1:])
    (report,) = await audit([subject], sandboxes, runs=1)

    assert (report.solution, report.cheats) == ("1/1", "2/3")
    assert [f"{each.check}: {each.detail}" for each in report.findings] == [
        "cheat: an answer that ends its process with success earns 1",
        "cheat: an answer that skips, as a test would earns 1",
    ]


@real
@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt; exit 3", 0.25),
        ("""echo '{"reward": 0.5, "style": 3}' > /logs/verifier/reward.json""", 0.5),
        ("""echo '{"accuracy": true}' > /logs/verifier/reward.json""", 1.0),
        ("""echo '{"speed": 1, "style": 1}' > /logs/verifier/reward.json""", "bad_reward"),
        ("echo 0.25 > /logs/verifier/reward.json", 0.25),
        ("printf '\\357\\273\\2770.25' > /logs/verifier/reward.json", 0.25),
        ("""echo '"0.25"' > /logs/verifier/reward.json""", 0.25),
        ("""echo '{"reward": "0.5", "style": 3}' > /logs/verifier/reward.json""", 0.5),
        ("""echo '{"reward": null}' > /logs/verifier/reward.json""", "bad_reward"),
        ("echo '[1]' > /logs/verifier/reward.json", "bad_reward"),
        ("echo 2 > /logs/verifier/reward.txt", "bad_reward"),
        ("echo nan > /logs/verifier/reward.txt", "bad_reward"),
        ("touch /logs/verifier/reward.txt", "bad_reward"),
        ("true", "no_reward"),
        ("echo 1 > reward.txt; echo 1 > /logs/reward.txt", "no_reward"),
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", "no_reward"),
        ("echo 1 > /logs/verifier/reward$1.json", "no_reward"),
        ("echo 1 > /logs/verifier/reward.txt; while :; do :; done", 0.0),
        ("[ -x run.sh ] && [ $GRADE = strict ] && ./run.sh > /logs/verifier/reward.txt", 1.0),
    ],
)
async def test_what_a_script_wrote_is_a_reward_or_none_but_never_a_zero_by_default(
    sandboxes: SandboxSource, folder: Path, script: str, found: float | str
) -> None:
    (folder / "task.toml").write_text('[verifier]\ntimeout_sec = 2.5\nenv = { GRADE = "strict" }\n')
    task = trusted(folder, f"#!/bin/sh\n{script}\n")
    reward = await score(task, as_answer({"run.sh": "#!/bin/sh\necho 1\n"}), sandboxes)

    assert (reward.value if reward.valid else reward.failure_kind) == found, reward


@real
@pytest.mark.parametrize("spoils", [
    "os.mkdir('/logs/verifier/reward.txt')", "os.symlink('/dev/null', '/logs/verifier/reward.txt')",
    "os.rename('/logs/verifier', '/logs/v')",
])  # fmt: skip
async def test_code_that_keeps_a_script_from_its_reward_is_not_spared_the_zero(
    sandboxes: SandboxSource, folder: Path, spoils: str
) -> None:
    reward = await score(trusted(folder), as_answer({"stats.py": f"import os\n{spoils}\n"}), sandboxes)

    assert (reward.valid, reward.value, reward.status) in ((True, 0.0, "no_reward"), (True, 0.0, "bad_reward")), reward


@real
async def test_tests_and_solution_are_nowhere_in_an_agents_sandbox(sandboxes: SandboxSource, folder: Path) -> None:
    task = trusted(folder)
    start = task.agent_start()
    look = "ls -A /app/ /tests/ /solution/ /logs/; touch /app/new.py /app/shut; chmod 0 /app/shut"
    async with sandboxes.lease(task.spec, timeout_s=60.0) as sandbox:
        for path, text in start.files.items():
            await sandbox.write_file(path, text.encode())
        await sandbox.run_command(start.setup, timeout_s=10.0)
        listed = await sandbox.run_command(("bash", "-c", look), timeout_s=10.0)

        assert listed.stdout.split() == ["/app/:", ".git", ".harbor", "stats.py", "test_stats.py"]
        assert await task.collect(sandbox) == as_answer({"new.py": ""})


def test_files_that_steer_a_test_runner_stay_as_they_were_unless_the_task_names_them() -> None:
    base = {"a.py": "1", "tox.ini": "old", "json.py": "of the task", "code/a.py": "", "lib/pytest.ini": "old"}
    changed = {
        "a.py": "2", "tox.ini": "new", "json.py": "mended", "conftest.py": "", "b/sitecustomize.py": "",
        "unittest/__init__.py": "", "iniconfig.py": "", "lib/json.py": "", "code/b.py": "",
        "pyproject.toml": "wanted", ".harbor/tests/x": "",
    }  # fmt: skip

    kept, left_out = without_steering(base, changed, ("Add a pyproject.toml.",))

    assert left_out == [
        ".harbor/tests/x", "b/sitecustomize.py", "conftest.py", "iniconfig.py", "lib/pytest.ini", "tox.ini",
        "unittest/__init__.py",
    ]  # fmt: skip
    assert kept == {
        "a.py": "2", "tox.ini": "old", "json.py": "mended", "lib/pytest.ini": "old", "lib/json.py": "",
        "code/b.py": "", "pyproject.toml": "wanted",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (spoil("environment/Dockerfile", "FROM python:3\nRUN x\nWORKDIR /srv\n"), "`RUN x`"),
        (spoil("environment/docker-compose.yaml", ""), "it has a docker-compose.yaml"),
        (spoil("tests/test.sh", "#!/bin/bash\n\napt-get update\n"), "tests/test.sh, line 3, `apt-get update`: sand"),
        (spoil("tests/test.sh", "#!/bin/bash\nuvx pytest /tests\n"), "line 2, `uvx pytest /tests`: sandboxes have no"),
        (spoil("tests/test.sh", "#!/usr/bin/env -S elvish -norc\necho 1\n"), "line 1, .*: this node has no elvish"),
    ],
)
def test_a_script_that_local_sandboxes_can_not_honour_is_refused_by_its_line(
    folder: Path, change: Callable[[Path], None], why: str
) -> None:
    trusted(folder)
    change(folder)
    config = {"tasks": [f"{folder}?trust_test_scripts=true"], "agent": {"name": "tool_agent"}}

    with pytest.raises(ConfigError, match=f"task mine needs sandboxes of .*{why}.*local provider"):
        check_tasks(Config.model_validate(config), training=True, has_tokenizer=False)


def test_a_verifier_with_an_image_of_its_own_needs_that_for_verdicts_alone(folder: Path) -> None:
    (folder / "task.toml").write_text('[verifier]\nenvironment_mode = "separate"\n[environment]\nmemory = "2G"\n')
    trusted(folder)
    (folder / "tests" / "Dockerfile").write_text("FROM python:3\nRUN pip install pytest\nCOPY . /tests/\n")
    task = load_repository(folder, "mine", trusts_script=True)

    assert (task.spec.template, task.verdict_spec.template) == ("", "image:build:mine-tests")
    assert (task.spec.memory_mib, task.folder.timeout_s) == (2048, 600.0)


@real
@pytest.mark.parametrize("trusts_script", [False, True])
async def test_where_code_can_write_no_files_a_repository_is_refused_and_never_worth_nothing(
    folder: Path, trusts_script: bool
) -> None:
    task = trusted(folder) if trusts_script else load_repository(folder, "mine")
    provider = LocalProvider(levels=("ll",))
    with pytest.raises(SandboxConfigError, match=r"at isolation level ll, code can't write files"):
        await provider.create(task.verdict_spec, labels={}, ttl_s=60.0, timeout_s=30.0)
    await provider.close()


@pytest.mark.parametrize("files", ["[]", '{"../a": ""}', '{"/a": ""}', '{"a": 1}', "{"])
def test_a_text_that_hands_nothing_in_is_no_answer(files: str) -> None:
    assert [read_answer(text) for text in ("", "I fixed it", "{}", f'{{"files": {files}}}')] == [None] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil("instruction.md", " "), "instruction.md is empty"),
        (spoil("task.toml", None), "it has no task.toml"),
        (spoil("tests", None), "it has no tests"),
        (spoil("task.toml", "[verifier"), "task.toml is not TOML"),
        (spoil("task.toml", "[verifier]\ntimeout_sec = -1"), "task.toml: .*timeout_sec"),
        (spoil("task.toml", "[metadata.rayapp]\nscores = 1"), "task.toml: .*scores"),
        (hidden("def check(): ..."), "it has no hidden tests"),
        (hidden("def test_x(:"), "tests/test_hidden.py is not Python"),
        (
            hidden("def test_x():\n    for a in [1]:\n        assert a == 1"),
            "line 3: an assert or a pytest call inside",
        ),
        (hidden("def test_x():\n    assert f(1)"), "line 2: an assert must compare with a literal"),
        (hidden("def test_x(tmp_path):\n    assert f(1) == 2"), "line 1: marks, fixtures"),
        (hidden("def test_x():\n    f(1)"), "line 1: the test asserts nothing"),
        (hidden("def test_x():\n    assert f(1) == g(2)"), "one side of an assert"),
    ],
)
def test_a_folder_that_can_not_be_used_is_refused_by_name(
    folder: Path, change: Callable[[Path], None], message: str
) -> None:
    change(folder)

    with pytest.raises(InputError, match=message) as told:
        load_repository(folder, "mine")
    assert str(told.value).startswith("task mine: ")


@pytest.mark.parametrize("name", ["test.sh", "test_outputs.py"])
def test_a_test_script_is_refused_with_its_risk_and_the_way_to_accept_it(folder: Path, name: str) -> None:
    trusted(folder)
    if name == "test.sh":
        (folder / "tests" / "test_outputs.py").unlink()

    with pytest.raises(InputError, match=r"tests/test.sh is not used: .* could forge the reward") as told:
        load_task(str(folder))
    assert "write the task's name as FOLDER?trust_test_scripts=true; audit the task first" in str(told.value)
    with pytest.raises(InputError, match=r"unknown option 'trust=1': a task folder has only trust_test_scripts=true"):
        load_task(f"{folder}?trust=1")


def test_a_script_that_nothing_can_start_or_that_wants_a_variable_of_this_machine_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"tests/test\.sh can't start: its first line names no program"):
        trusted(folder, "echo 1 > /logs/verifier/reward.txt\n")
    (folder / "task.toml").write_text('[verifier.env]\nOPENAI_API_KEY = "${OPENAI_API_KEY}"\n')
    with pytest.raises(InputError, match=r"verifier.env.OPENAI_API_KEY takes its value from an environment variable"):
        trusted(folder)


def test_no_expected_value_is_in_what_runs_inside() -> None:
    (test,) = read_hidden_tests(
        "test_x.py",
        "import pytest\nfrom m import f\n\ndef test_all():\n    x = f(1)\n"
        "    assert x == 4711\n    assert 'wanted' in f(2)\n"
        "    assert f(3) == pytest.approx(0.123)\n    with pytest.raises(KeyError, match='missing'):\n        f(4)\n",
    )

    assert not [
        secret for secret in ("4711", "wanted", "0.123", "KeyError", "missing", "pytest") if secret in test.source
    ]
    passes = partial(all_hold, test.conditions)
    assert is_held(passes, [4711, "is wanted", 0.1230000001, [["KeyError", "LookupError"], "it is missing"]])
    assert not is_held(passes, [4711, "is wanted", 0.124, [["KeyError"], "missing"]])
    assert not is_held(passes, [4711, "is wanted", 0.123, [[], ""]])
    for forged in ([True, True, True, True], [], None, [4711], {"a": 1}, [4711, None, "x", 1]):
        assert not is_held(passes, forged)


def test_an_assert_in_a_block_of_raises_is_compared_with_its_own_value() -> None:
    (test,) = read_hidden_tests(
        "test_x.py",
        "import pytest\ndef test_it():\n    x = [1]\n    with pytest.raises(IndexError):\n"
        "        assert x[0] == 1\n        x[5]\n",
    )
    values: list[object] = []

    exec(test.source, {PROBE: values.append})

    assert is_held(partial(all_hold, test.conditions), values)


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("FROM python:3-slim\nWORKDIR /app\nCOPY . /app\nENV A=1\n", ""),
        ("# any\nFROM ubuntu:24.04\nCOPY . .\n", ""),
        ("", ""),
        ("FROM python:3-slim\nRUN apt-get update && \\\n    apt-get install -y gcc\n", "line 2, `RUN apt-get update"),
        ("FROM node:20\n", "line 1, `FROM node:20`: it is not plain Python"),
        ("FROM python:2.7\n", "line 1, `FROM python:2.7`: this node has Python 3"),
        ("FROM debian\nCOPY --from=build /x /y\n", "line 2, `COPY --from=build /x /y`"),
    ],
)
def test_a_dockerfile_is_honoured_without_building_or_told_by_its_line(dockerfile: str, why: str) -> None:
    found = why_an_image(dockerfile)

    assert found.startswith(why)
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("dockerfile", "toml", "template", "workdir", "env"),
    [
        ("FROM node:20\nWORKDIR /srv\nENV A=1 B='x y'\nENV C d e\nCOPY . .\n", "", "image:node:20", "/srv",
         {"A": "1", "B": "x y", "C": "d e"}),
        ("FROM node:20\nRUN npm ci\n", "", "image:build:mine", "", {}),
        ("", "[environment]\ndocker_image = 'a/b:1'\nworkdir = '/w'\n", "image:a/b:1", "/w", {}),
        ("FROM a AS x\nFROM b\nCOPY --from=x /y /y\n", "", "image:build:mine", "", {}),
        ("FROM python:3\nWORKDIR /srv\nCOPY . .\n", "", "", "", {}),
        ("FROM python:3\nWORKDIR /srv\nCOPY . /data\n", "", "image:build:mine", "/srv", {}),
        ("FROM node:20\nCOPY . /data\nWORKDIR /srv\n", "", "image:build:mine", "/srv", {}),
    ],
)  # fmt: skip
def test_an_image_is_taken_as_it_is_or_has_to_be_built(
    folder: Path, dockerfile: str, toml: str, template: str, workdir: str, env: dict[str, str]
) -> None:
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "task.toml").write_text(toml)

    spec = load_repository(folder, "mine").spec

    assert (spec.template, spec.workdir, dict(spec.env)) == (template, workdir, env)


@real
@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("trusts_script", [False, True])
async def test_where_an_image_has_the_repository_its_files_are_the_start_of_agents_and_verdicts(
    images: MachineImages, folder: Path, trusts_script: bool
) -> None:
    built = {"stats.py": "x = 1\n", "built.txt": "by RUN\n", "old.txt": "", "more/mine.txt": "left as it is\n"}
    programs = machine_layer(with_python=True, programs=(*PROGRAMS, "find", "sha256sum", "git"))
    image = Path(images.cache).parent / f"built-{trusts_script}"
    app = layer(entry("app"), entry("app/more"), *(entry(f"app/{path}", text) for path, text in built.items()))
    write_oci(image, [programs, app], config={"WorkingDir": "/", "Env": ["PATH=/usr/local/bin:/usr/bin"]})
    (folder / "task.toml").write_text(f"[environment]\ndocker_image = 'oci:{image}'\n")
    environment, tests = folder / "environment", folder / "tests"
    (environment / "Dockerfile").write_text("FROM python:3\nWORKDIR /app\nCOPY . .\nRUN rm test_stats.py; make\n")
    (environment / "picture").write_bytes(b"\xff\xfe")
    (tests / "test_hidden.py").write_text(
        "import os\n\n\ndef test_files():\n"
        "    assert sorted(os.listdir()) == ['built.txt', 'more', 'stats.py']\n"
        "    assert open('built.txt').read() + open('more/mine.txt').read() == 'mended\\nleft as it is\\n'\n"
    )
    (tests / "test.sh").write_text(
        '#!/bin/sh\ncase "$(echo $(ls; cat built.txt more/mine.txt))" in\n'
        '"built.txt more stats.py mended left as it is") echo 1 ;; *) echo 0 ;; esac > /logs/verifier/reward.txt\n'
    )
    task = load_repository(folder, "mine", trusts_script=trusts_script)

    providers = [{"type": "local", "image_cache": images.cache}]
    async with open_pool(SandboxConfig.model_validate({"providers": providers}), "test-image") as (source, _):
        start = task.agent_start()
        async with source.lease(task.spec, timeout_s=60.0) as sandbox:
            await sandbox.run_command(start.setup, timeout_s=60.0)
            listed = await sandbox.run_command(["ls"], timeout_s=60.0)
            untouched = read_answer(await task.collect(sandbox))
            await sandbox.run_command(["sh", "-c", "echo mended > built.txt; rm old.txt"], timeout_s=60.0)
            answer = await task.collect(sandbox)
        mended, nothing = [await score(task, each, source) for each in (answer, as_answer({}))]

    assert (dict(start.files), listed.stdout.split()) == ({}, ["built.txt", "more", "old.txt", "stats.py"])
    assert untouched == {}
    assert read_answer(answer) == {"built.txt": "mended\n", "old.txt": None}
    assert (mended.value, nothing.value) == (1.0, 0.0), (mended, nothing)


def test_a_task_that_needs_an_image_is_refused_where_no_provider_has_it(folder: Path) -> None:
    (folder / "environment" / "Dockerfile").write_text("FROM python:3-slim\nRUN pip install numpy\n")

    def check(**provider: object) -> None:
        agent, sandbox = {"name": "tool_agent"}, {"providers": [provider]}
        config = Config.model_validate({"tasks": [str(folder)], "agent": agent, "sandbox": sandbox})
        check_tasks(config, training=True, has_tokenizer=False)

    with pytest.raises(ConfigError, match=r"image:build:mine .*line 2, `RUN pip .*`docker build"):
        check(type="local")
    with pytest.raises(ConfigError, match=r"e2b has no template .* name it in sandbox.providers\[\].images: \{mine"):
        check(type="e2b")
    check(type="e2b", images={"mine": "my-template"}, max_sandboxes=64)


def test_a_folder_of_task_folders_is_all_of_them(tmp_path: Path) -> None:
    for name in ("fix_median", "add_to_roman"):
        shutil.copytree(LIBRARY / name, tmp_path / name)

    for source in (str(tmp_path), f"{tmp_path}?trust_test_scripts=true"):
        assert [task.name for task in load_source(source)] == ["add_to_roman", "fix_median"]
    with pytest.raises(InputError, match="holds no task: neither it nor a folder in it"):
        load_source(str(tmp_path / "fix_median" / "tests"))


async def findings(sandboxes: SandboxSource, task: RepositoryTask) -> list[str]:
    """`check: detail` of an audit without cheats and guesses."""
    (report,) = await audit([replace(repository_subject(task), cheats=(), trivial=())], sandboxes, runs=1)
    return [f"{each.check}: {each.detail}" for each in report.findings]


@real
@pytest.mark.parametrize("leak", ["tests/test_hidden.py", "solution/stats.py"])
async def test_an_audit_tells_a_leak_in_the_repository_itself(
    sandboxes: SandboxSource, folder: Path, leak: str
) -> None:
    (folder / "environment" / ".cache").mkdir()
    (folder / "environment" / ".cache" / "old.txt").write_text((folder / leak).read_text())

    (told,) = await findings(sandboxes, load_repository(folder, "mine"))

    assert told.startswith("oracle: ")
    assert ".cache/old.txt in the agent's workspace contains text" in told


@real
async def test_an_audit_tells_a_solution_whose_tests_take_most_of_their_time(
    sandboxes: SandboxSource, folder: Path
) -> None:
    (folder / "tests" / "test_hidden.py").write_text(
        "from stats import mean\n\n"
        "def test_slow():\n    __import__('time').sleep(1.2)\n    assert mean([1, 3]) == 2\n\n"
        "def test_as_slow():\n    __import__('time').sleep(1.2)\n    assert mean([1, 5]) == 3\n"
    )
    toml = folder / "task.toml"
    toml.write_text(re.sub(r"timeout_sec = \S+", "timeout_sec = 4.5", toml.read_text()))

    found = await findings(sandboxes, load_repository(folder, "mine"))

    assert any(line.startswith("slow: the verdict on the solution takes") for line in found), found


@real
async def test_an_audit_goes_on_after_tasks_that_can_not_be_run_here(sandboxes: SandboxSource, tmp_path: Path) -> None:
    for name in ("a_image", "b_broken", "c_sound"):
        shutil.copytree(LIBRARY / "fix_median", tmp_path / name)
        (tmp_path / name / "instruction.md").write_text(f"Mend stats.py of {name}.")
    (tmp_path / "a_image" / "environment" / "Dockerfile").write_text("FROM python:3\nRUN pip install numpy\n")
    shutil.rmtree(tmp_path / "b_broken" / "tests")

    subjects = await subjects_of([str(tmp_path)], AnswerRewards(), cache=tmp_path)
    few = [replace(subject, cheats=(), trivial=()) for subject in subjects]
    image, broken, sound = await audit(few, sandboxes, runs=1)

    assert [finding.check for finding in image.findings + broken.findings] == ["verdict", "verdict"]
    assert "its Dockerfile, line 2, `RUN pip install numpy`: rayapp builds no images" in image.findings[0].detail
    assert "tests" in broken.findings[0].detail
    assert (sound.task, sound.solution, sound.findings) == ("c_sound", "1/1", ())

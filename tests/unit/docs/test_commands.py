"""Every command of README.md and docs/*.md: parsed by the program's own parser, and run here or by the named test.

A command that can't run here names the reason: a cluster, a key, a GPU, or a network. A command without a test or a
reason fails.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest
import typer.main

from rayapp.cli import main
from rayapp.config.loading import load_config

ROOT = Path(__file__).parents[3]
PROGRAMS = ("rayapp", "make", "vllm", "python", "ray", "kubectl", "helm", "docker", "prometheus", "export")
PLACES = {
    "CONFIG": "configs/coding_cpu.yaml",
    "RUN": "outputs/coding_cpu",
    "FOLDER": "outputs/coding_cpu/final",
    "JOB": "coding_cpu-20261121-080000",
    "NAME": "coding_cpu",
    "FILE": "configs/coding_cpu.yaml",
}
"""Values for the placeholders that a reader fills in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """One command of a guide."""

    where: str
    text: str
    """As it is written."""
    words: tuple[str, ...]
    """Program first, placeholders filled in."""

    @property
    def line(self) -> str:
        return shlex.join(self.words)


def documented() -> list[Documented]:
    """Every command of README.md and docs/*.md, each once."""
    found: dict[str, Documented] = {}
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for text in _texts(file.read_text()):
            for words in _commands(text):
                command = Documented(where=file.name, text=text, words=words)
                found.setdefault(command.line, command)
    return list(found.values())


def _texts(markdown: str) -> Iterator[str]:
    """Lines of shell blocks, indented lines, and code in the text."""
    rest = markdown
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL):
        rest = rest.replace(block, "")
        if language in {"", "bash", "sh"}:
            yield from block.replace("\\\n", " ").splitlines()
    for line in rest.splitlines():
        if line.startswith("    "):
            yield line.strip()
    for span in re.findall(r"`([^`\n]+)`", rest):
        if len(span.split()) > 1:
            yield span


def _commands(text: str) -> Iterator[tuple[str, ...]]:
    for part in re.split(r"\s&&\s", text):
        first_choice = re.sub(r"(?<=\w)\|[\w|]+", "", part)
        with_options = re.sub(r"\[(--[^\]]*)\]", r"\1", first_choice)
        try:
            words = shlex.split(with_options.replace("$PWD", "/work-folder"), comments=True)
        except ValueError:
            continue
        words = [PLACES.get(word, word) for word in words if word not in {"...", "…"}]
        while words and re.fullmatch(r"[A-Z][A-Z_0-9]*=\S*", words[0]):
            words.pop(0)
        if ">" in words:
            words = words[: words.index(">")]
        if words and Path(words[0]).name in PROGRAMS:
            yield (Path(words[0]).name, *words[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How a command that begins with this text is checked."""

    begins: str
    test: str = ""
    """Test that runs it with its own arguments."""
    why_not: str = ""


ELSEWHERE = (
    How(
        begins="python -m verl.trainer.main_ppo",
        why_not="trains with verl; tests/contracts/test_sandbox_fusion.py scores",
    ),
    How(begins="rayapp train --verl", test="tests/unit/extras/verl/test_verl.py"),
    How(begins="rayapp train configs/coding_cpu.yaml --smoke", test="tests/e2e/test_smoke.py"),
    How(begins="python -m scripts.fit_table", test="tests/unit/learner/test_memory_plan.py"),
    How(begins="rayapp images pull", test="tests/unit/cli/test_images.py"),
    How(begins="rayapp images prune", test="tests/unit/cli/test_images.py"),
    How(begins="rayapp train configs/coding_8gpu.yaml", why_not="needs 8 GPUs; the config is loaded here"),
    How(begins="rayapp train my_run.yaml", test="tests/unit/extras/verl/test_verl.py"),
    How(begins="rayapp train", test="tests/e2e/test_resume.py"),
    How(begins="rayapp eval", test="tests/e2e/test_object_storage.py"),
    How(begins="rayapp sft", test="tests/e2e/test_sft.py"),
    How(begins="rayapp config show", test="tests/unit/docs/test_tutorial.py"),
    How(begins="rayapp data rows", test="tests/unit/tasks/test_data_prepare.py"),
    How(begins="rayapp score rewards.py", test="tests/unit/cli/test_try.py"),
    How(begins="rayapp try tool", test="tests/unit/cli/test_try.py"),
    How(begins="rayapp data from-run", test="tests/unit/runs/test_selecting.py"),
    How(begins="rayapp submit", test="tests/cluster/test_jobs.py"),
    How(begins="rayapp score", test="tests/contracts/test_score_command.py"),
    How(begins="rayapp task audit", test="tests/unit/extras/audit/test_audit.py"),
    How(begins="rayapp view", test="tests/unit/extras/view/test_view_server.py"),
    How(begins="rayapp sandbox reap", test="tests/unit/cli/test_sandbox_reap.py"),
    How(begins="rayapp sandbox run", test="tests/unit/cli/test_sandbox.py"),
    How(begins="rayapp sandbox serve", test="tests/contracts/test_mcp_server.py"),
    How(begins="rayapp data prepare gsm8k --out", why_not="needs the Hugging Face hub"),
    How(begins="rayapp data prepare geometry3k", why_not="needs the Hugging Face hub and a bucket"),
    How(begins="rayapp data prepare gsm8k --source /data/raw", test="tests/unit/tasks/test_data_prepare.py"),
    How(begins="rayapp data view", test="tests/unit/tasks/test_pictures.py"),
    How(begins="rayapp data prepare humaneval", test="tests/unit/tasks/test_code_data.py"),
    How(begins="rayapp data prepare taco", test="tests/unit/tasks/test_code_data.py"),
    How(begins="rayapp data prepare codecontests --language", test="tests/unit/tasks/test_code_data.py"),
    How(begins="rayapp config import-verl", test="tests/unit/extras/verl/test_verl.py"),
    How(begins="rayapp model fetch", test="tests/unit/storage/test_models_fetch_and_check.py"),
    How(begins="rayapp plan", test="tests/unit/learner/test_memory_plan.py"),
    How(begins="rayapp doctor", test="tests/unit/cli/test_doctor.py"),
    How(begins="vllm serve", why_not="starts an engine; tests/unit/driver/test_serving.py parses the flags with vLLM"),
    How(begins="make", why_not="installs the environment that this test runs in, or runs all tests"),
    How(begins="ray start", test="tests/cluster/test_jobs.py"),
    How(begins="ray job", test="tests/cluster/test_jobs.py"),
    How(begins="kubectl", why_not="needs a Kubernetes cluster; tests/unit/cli/test_kuberay.py checks the manifests"),
    How(begins="helm", why_not="needs a Kubernetes cluster; the chart is rendered in tests/unit/cli/test_kuberay.py"),
    How(begins="docker", why_not="needs Docker; tests/e2e/test_image.py builds the image with buildah"),
    How(begins="prometheus", test="tests/cluster/test_live_run.py"),
    How(begins="export", why_not="sets a variable of the reader's shell"),
    How(begins="python benchmarks/", why_not="measures for minutes on a quiet machine"),
    How(begins="python -m benchmarks.", why_not="measures for minutes on a quiet machine"),
    How(begins="python -m benchmarks", why_not="measures for minutes on a quiet machine"),
    How(begins="python -m pytest", why_not="runs tests"),
    How(begins="python -m scripts.agent_frameworks", test="tests/e2e/test_agent_frameworks.py"),
    How(begins="python -m scripts.check_wheel", test="tests/unit/test_wheel.py"),
    How(begins="python -m scripts.config_docs", test="tests/unit/docs/test_configure.py"),
    How(begins="python -m support.family_check", test="tests/cluster/test_vllm_families.py"),
    How(begins="python -m scripts.house", test="tests/unit/test_house.py"),
    How(begins="python -m scripts.model_table", test="tests/unit/docs/test_models.py"),
    How(begins="python -m scripts.monitoring.write", test="tests/unit/actors/test_monitoring.py"),
    How(begins="python -m rayapp train", test="tests/cluster/test_jobs.py"),
    How(begins="python -c pass", why_not="says what a measurement compares with"),
)


def _arguments(command: Documented) -> list[str] | None:
    """Return the arguments of our program; None for other programs' commands."""
    words = list(command.words)
    if words[0] == "rayapp":
        return words[1:]
    return words[3:] if words[:3] == ["python", "-m", "rayapp"] else None


COMMANDS = documented()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the checkout that commands may write to: it holds the run `outputs/coding_cpu`."""
    from support.synthetic_run import write_run

    for name in ("configs", "rayapp"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_run(tmp_path / "outputs" / "coding_cpu", num_trajectories=32, per_step=16)
    monkeypatch.chdir(tmp_path)
    return tmp_path


HERE: dict[str, Callable[[Path], bool]] = {
    "rayapp config show configs/coding_cpu.yaml": lambda desk: True,
    "rayapp config show configs/coding_warmup_cpu.yaml rollout.group_size=8": lambda desk: True,
    "rayapp data prepare gsm8k --source rayapp/tasks/data/library --out data/gsm8k": (
        lambda desk: (desk / "data/gsm8k/train.parquet").is_file()
    ),
}
"""Commands that this test runs, with the condition that must hold afterwards."""


@pytest.mark.parametrize("line", HERE)
def test_commands_that_take_a_second_are_run(line: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in {command.line for command in COMMANDS}, "no guide has it any more"
    assert main.run(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert HERE[line](desk)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.where}: {command.line[:60]}")
def test_every_command_is_run_here_or_by_a_test_or_says_why_not(command: Documented) -> None:
    if command.line in HERE or _is_a_name(command):
        return
    how = next((how for how in ELSEWHERE if f"{command.line} ".startswith(how.begins.rstrip() + _end(how))), None)
    assert how is not None, f"{command.where}: add {command.line!r} to HERE or ELSEWHERE"
    assert how.why_not or (ROOT / how.test).is_file(), f"{how.test} is gone"


def test_every_entry_is_of_a_command_that_a_guide_has() -> None:
    for how in ELSEWHERE:
        assert any(command.line.startswith(how.begins) for command in COMMANDS), f"no guide has {how.begins!r}"
        text = (ROOT / how.test).read_text() if how.test else ""
        unsaid = [word for word in how.begins.split()[1:] if word.isalpha() and word not in text]
        assert how.why_not or not unsaid, f"{how.test} does not run {how.begins!r}"


def _end(how: How) -> str:
    """Return the end of the pattern: the name of a folder or package may continue, any other word must end."""
    return "" if how.begins.endswith(("/", ".")) else " "


@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if _arguments(command) is not None],
    ids=lambda command: f"{command.where}: {command.line[:60]}",
)
def test_every_command_of_ours_is_one_that_the_program_reads(command: Documented) -> None:
    arguments = _arguments(command)
    assert arguments is not None
    try:
        parsed = parse(arguments)
    except click.MissingParameter:
        assert _is_a_name(command), f"{command.where}: {command.text} lacks an argument"
        return
    check_configuration(parsed)


def _is_a_name(command: Documented) -> bool:
    """True for `rayapp view` in a sentence, which names a command and is not one."""
    words = command.words
    return words[0] in {"rayapp", "ray"} and len(words) <= 3 and not any("." in word or "=" in word for word in words)


@cache
def program() -> click.Command:
    made: click.Command = typer.main.get_command(main.app)
    return made


def parse(arguments: list[str]) -> click.Context:
    """Return the command's context, as click makes it. Raises click.UsageError; runs nothing."""
    command = program()
    context: click.Context | None = None
    name = "rayapp"
    while True:
        context = command.make_context(name, list(arguments), parent=context)
        if not isinstance(command, click.Group):
            return context
        name, found, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command = found


def check_configuration(context: click.Context) -> None:
    """Check that the files in a command exist, and that the keys it sets are keys of ours."""
    overrides, config = context.params.get("overrides"), context.params.get("config")
    if overrides is None or context.params.get("verl"):
        return  # no configuration of ours; verl's keys are in tests/unit/extras/verl/test_verl.py
    file = ROOT / str(config) if config is not None and str(config).startswith("configs/") else None
    assert file is None or file.is_file(), f"there is no {config}"
    load_config(file, list(overrides or ()))

"""Every command of ours in README.md and docs/*.md is one that the program reads, and its files and keys are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import typer.main

from rayapp.cli import main
from rayapp.config.loading import load_config

ROOT = Path(__file__).parents[3]
PLACES = {
    "CONFIG": "configs/coding_cpu.yaml",
    "RUN": "outputs/coding_cpu",
    "FOLDER": "outputs/coding_cpu/final",
    "JOB": "coding_cpu-20261121-080000",
    "NAME": "coding_cpu",
    "FILE": "configs/coding_cpu.yaml",
}
"""Values for the placeholders that a reader fills in."""


def documented() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield where a command of ours stands, and its words: program first, placeholders filled in."""
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for words in sorted({words for text in _texts(file.read_text()) for words in _commands(text)}):
            yield file.name, words


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
        if words and Path(words[0]).name == "rayapp":
            yield ("rayapp", *words[1:])
        elif words[:2] == ["python", "-m"]:
            yield tuple(words)


COMMANDS = list(documented())
IDS = [f"{where}: {shlex.join(words)[:60]}" for where, words in COMMANDS]


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=IDS)
def test_every_command_of_ours_is_one_that_the_program_reads(where: str, words: tuple[str, ...]) -> None:
    if words[0] == "python" and words[2] != "rayapp":
        ours = words[2].partition(".")[0] in ("scripts", "benchmarks", "support")
        assert not ours or find_spec(words[2]), f"{where}: there is no module {words[2]}"
        return
    arguments = words[1:] if words[0] == "rayapp" else words[3:]
    try:
        parsed = parse(arguments)
    except click.MissingParameter:
        assert _is_a_name(words), f"{where}: {shlex.join(words)} lacks an argument"
        return
    check_configuration(parsed)


def _is_a_name(words: tuple[str, ...]) -> bool:
    """True for `rayapp view` in a sentence, which names a command and is not one."""
    return words[0] == "rayapp" and len(words) <= 3 and not any("." in word or "=" in word for word in words)


@cache
def program() -> click.Command:
    made: click.Command = typer.main.get_command(main.app)
    return made


def parse(arguments: Sequence[str]) -> click.Context:
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

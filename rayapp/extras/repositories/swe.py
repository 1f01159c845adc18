"""Data sets in SWE-bench's form as repository tasks: a repository at a commit, an issue, and tests that must pass.

    swe:rows.parquet?mirrors=/data/mirrors          the repositories' files come from clones on every machine
    swe:rows.jsonl                                  each row's image has the repository in its working folder
    swe:rows.jsonl?image=sweb.eval.{instance_id}    the image's name is made from the row

The issue's text is the agent's instruction. The tests (`named_tests.py`) and the solution stay in this process until a
verdict.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import subprocess
import tarfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rayapp.config.agent import SWE
from rayapp.core.errors import InputError
from rayapp.core.validation import explain
from rayapp.extras.repositories.folder import Own, TaskFolder
from rayapp.extras.repositories.named_tests import PYTHONS, NamedTests, pytest_files, with_escaped_id
from rayapp.extras.repositories.scripts import SOLVE
from rayapp.extras.repositories.task import RepositoryTask
from rayapp.sandbox.images import PREFIX
from rayapp.tasks.data.files import json_rows

_log = logging.getLogger(__name__)
# Field -> its column's names in public data sets, of which the first with a value counts.
COLUMNS = {
    "instance_id": ("instance_id", "id", "task_id"),
    "repo": ("repo", "repo_name", "repository"),
    "base_commit": ("base_commit", "base_sha", "commit"),
    "problem_statement": ("problem_statement", "issue", "problem"),
    "patch": ("patch", "gold_patch", "golden_patch", "solution_patch"),
    "test_patch": ("test_patch", "tests_patch"),
    "fail_to_pass": ("FAIL_TO_PASS", "fail_to_pass", "F2P", "f2p"),
    "pass_to_pass": ("PASS_TO_PASS", "pass_to_pass", "P2P", "p2p"),
    "image": ("image", "docker_image", "image_name", "image_tag"),
    "workdir": ("workdir", "working_dir"),
}
_REQUIRED = ("instance_id", "problem_statement", "fail_to_pass")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
_REPO = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_TEST = re.compile(r"(?!/)(?![^:]*\.\./)[^:\0\n]+\.py(?:::[^\0\n]+)+")
_MAX_REPOSITORY_BYTES = 128 << 20
_GIT_TIMEOUT_S = 120.0
_SHOWN = 5  # Bad rows that a message names.
PATCH = "solution.patch"  # Name of the solution's diff in a task's folder `solution`.
_APPLY = f"#!/bin/sh\ngit apply --whitespace=nowarn /solution/{PATCH}\n"


class SweOptions(BaseModel):
    """Options after the `?` of a source `swe:FILE?NAME=VALUE`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    mirrors: Path | None = None
    """Folder of clones, bare or not. A clone's folder is OWNER/NAME, OWNER__NAME or NAME, with or without .git. If not
    given, the images must have the repositories."""
    image: str = ""
    """Template for the name of each row's image, used instead of the row's column. It may contain {instance_id},
    {repo}, {owner}, {name}, {version} and {id_1776} (the id as SWE-bench writes it in names of images). `none`: no
    image; sandboxes of the local provider have this machine's system."""
    workdir: str = Field("", pattern="^(/.*)?$")
    """Folder of the repository in the images. If empty, it is the row's, or else the image's working folder."""
    python: str = ""
    """Interpreter that runs the tests. If empty, it is that of SWE-bench's or R2E's environment in the image, or else
    python3."""
    timeout_s: float = Field(1800.0, gt=0)
    """Time limit in seconds for one run of the tests."""
    memory_mib: int = Field(4096, ge=64)
    disk_mib: int = Field(2048, ge=16)
    sentinels: int = Field(12, ge=0, le=64)
    """Maximum number of tests that get a wrong expectation in a second run, which finds forged passes. 0 leaves the
    second run out."""
    max_bad_ratio: float = Field(0.05, ge=0, le=1)
    """Maximum fraction of rows that can't be used. If there are more such rows, the source is refused."""
    only: Path | None = None
    """File with the instance ids of the rows to use, one per line, as `rayapp task audit --kept` writes it."""


@dataclass(frozen=True, slots=True)
class MirrorFiles(Mapping[str, str]):
    """Text files of a commit, read from a local clone at the first use. Pickles hold only path and commit."""

    mirror: str
    commit: str

    def __getitem__(self, path: str) -> str:
        return _files_at(self.mirror, self.commit)[path]

    def __iter__(self) -> Iterator[str]:
        return iter(_files_at(self.mirror, self.commit))

    def __len__(self) -> int:
        return len(_files_at(self.mirror, self.commit))


@lru_cache(maxsize=8)
def _files_at(mirror: str, commit: str) -> dict[str, str]:
    """Return path -> text of a commit's text files. Raises InputError: git can't read it, or it is too large."""
    data = _git(mirror, "archive", "--format=tar", commit)
    if len(data) > _MAX_REPOSITORY_BYTES:
        raise InputError(
            f"{mirror} at {commit}: the files have more than {_MAX_REPOSITORY_BYTES >> 20} MiB. Name an image that has "
            "them: image=NAME"
        )
    found: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            if file is None:
                continue
            try:
                found[member.name] = file.read().decode()
            except UnicodeDecodeError:
                continue
    return found


def _git(mirror: str, *words: str, stdin: bytes = b"") -> bytes:
    try:
        ran = subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", mirror, *words],
            input=stdin,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise InputError(
            "git is not installed on this machine, but the option `mirrors` needs it. Install git"
        ) from None
    except subprocess.TimeoutExpired:
        raise InputError(f"{mirror}: git {words[0]} took more than {_GIT_TIMEOUT_S:g} s") from None
    if ran.returncode:
        raise InputError(f"{mirror}: git {words[0]} failed: {ran.stderr.decode(errors='replace').strip()[-200:]}")
    return ran.stdout


def load_swe(source: str) -> tuple[RepositoryTask, ...]:
    """Return the tasks of a file in SWE-bench's form, in order, without rows that can't be used.

    Raises InputError: the file or an option can't be used, or too many rows can't.
    """
    file, _, query = source.removeprefix(SWE).partition("?")
    try:
        options = SweOptions.model_validate(dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))))
    except ValidationError as error:
        raise InputError(f"{source}: {explain(error, SweOptions)}") from error
    except ValueError as error:
        raise InputError(f"{source}: write options as ?NAME=VALUE&NAME=VALUE: {error}") from None
    wanted = _wanted(options.only)
    tasks: dict[str, RepositoryTask] = {}
    bad: list[str] = []
    rows = _rows(Path(file))
    for number, row in enumerate(rows, start=1):
        fields = {name: _first(row, columns) for name, columns in COLUMNS.items()}
        name = str(fields["instance_id"] or f"row {number}")
        if wanted is not None and name not in wanted:
            continue
        try:
            if name in tasks:
                raise InputError("an earlier row has this instance_id")
            tasks[name] = _task(fields | {"version": row.get("version")}, options)
        except InputError as error:
            bad.append(f"{name}: {error}")
    for name, why in _without_commit(tasks).items():
        del tasks[name]
        bad.append(f"{name}: {why}")
    _judge_rows(source, bad, len(tasks), options.max_bad_ratio)
    return tuple(tasks.values())


def _wanted(file: Path | None) -> frozenset[str] | None:
    try:
        return None if file is None else frozenset(file.read_text().split())
    except OSError as error:
        raise InputError(f"only={file} can't be read: {error}") from error


def _judge_rows(source: str, bad: list[str], num_good: int, max_bad_ratio: float) -> None:
    named = "; ".join(bad[:_SHOWN]) + (f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else "")
    total = len(bad) + num_good
    if not num_good:
        raise InputError(f"{source}: no row can be used{f': {named}' if bad else ''}")
    if len(bad) > max_bad_ratio * total:
        raise InputError(
            f"{source}: {len(bad)} of {total} rows can't be used, but max_bad_ratio is {max_bad_ratio:g}: {named}"
        )
    if bad:
        _log.warning("%s: %d of %d rows left out: %s", source, len(bad), total, named)


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        raise InputError(f"{SWE}{path}: the file must be .parquet, .jsonl or .json")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
            return rows
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"{SWE}{path} can't be read: {error}") from error
    return json_rows(content, path)


def _first(row: Mapping[str, Any], columns: tuple[str, ...]) -> Any:
    return next((row[column] for column in columns if row.get(column) not in (None, "")), None)


def _task(fields: Mapping[str, Any], options: SweOptions) -> RepositoryTask:
    """Return the task of a row. Raises InputError."""
    for name in _REQUIRED:
        if fields[name] is None:
            raise InputError(f"it has no {' or '.join(COLUMNS[name][:2])}")
    name = str(fields["instance_id"])
    if _NAME.fullmatch(name) is None:
        raise InputError(f"its instance_id is {name[:80]!r}: it may have only letters, digits, dots, - and _")
    image = _image(fields, options)
    if not image and options.mirrors is None:
        raise InputError(
            "it names no image: give mirrors=FOLDER, a folder of clones, or image=NAME, where NAME may contain "
            "{instance_id}"
        )
    repository: Mapping[str, str] = {} if options.mirrors is None else _mirror_files(fields, options.mirrors)
    named = _named_tests(fields, options, brings_pytest=not image)
    if named.brings_pytest:
        pytest_files()  # raise now if pytest is missing
    patch = _text(fields, "patch")
    return RepositoryTask(
        folder=TaskFolder(
            name=name,
            instruction=_text(fields, "problem_statement").strip(),
            repository=repository,
            tests=(),
            script=None,
            named=named,
            solution={SOLVE: _APPLY, PATCH: patch} if patch else {},
            own=Own(sentinels=options.sentinels),
            image=image,
            images={image: "its row names it"} if image else {},
            workdir="",
            image_workdir=(options.workdir or _text(fields, "workdir")) if image else "",
            env=(),
            timeout_s=options.timeout_s,
            memory_mib=options.memory_mib,
            disk_mib=options.disk_mib,
        )
    )


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str | None):
        raise InputError(f"its {name} is a {type(value).__name__}, not a text")
    return value or ""


def _image(fields: Mapping[str, Any], options: SweOptions) -> str:
    if options.image == "none":
        return ""
    if not options.image:
        image = _text(fields, "image")
        return image if not image or image.startswith(PREFIX) else f"{PREFIX}{image}"
    name, repo = str(fields["instance_id"]), str(fields["repo"] or "")
    known = {
        "instance_id": name,
        "id_1776": name.replace("__", "_1776_"),
        "repo": repo,
        "version": fields["version"] or "",
    }
    known |= {"owner": repo.partition("/")[0], "name": repo.rpartition("/")[2]}
    try:
        made = options.image.format_map(known)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise InputError(
            f"image={options.image}: the name can't be formed ({error}). It may use the fields {', '.join(known)}"
        ) from None
    bare = made.removeprefix(PREFIX)
    # Names in a registry are in lower case. Keep the case of folders and archives.
    return f"{PREFIX}{bare if bare.startswith(('oci:', 'archive:', 'build:')) else bare.lower()}"


def _mirror_files(fields: Mapping[str, Any], mirrors: Path) -> MirrorFiles:
    repo, commit = _text(fields, "repo"), _text(fields, "base_commit")
    if _REPO.fullmatch(repo) is None or ".." in repo:
        raise InputError(f"its repo is {repo!r}: it must be OWNER/NAME")
    if _COMMIT.fullmatch(commit) is None:
        raise InputError(f"its base_commit is {commit!r}: it must be a commit's hexadecimal id")
    names = (repo, repo.replace("/", "__"), repo.rpartition("/")[2])
    places = [mirrors / f"{name}{end}" for name in dict.fromkeys(names) for end in ("", ".git")]
    mirror = next((place for place in places if place.is_dir()), None)
    if mirror is None:
        raise InputError(f"mirrors={mirrors} has no clone of {repo}: `git clone --bare` it to {mirrors / names[1]}.git")
    return MirrorFiles(str(mirror.resolve()), commit)


def _without_commit(tasks: Mapping[str, RepositoryTask]) -> dict[str, str]:
    """Return name -> reason for tasks whose commit is missing in its clone. git starts once for each clone."""
    of_mirror: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name, task in tasks.items():
        if isinstance(files := task.folder.repository, MirrorFiles):
            of_mirror[files.mirror][name] = files.commit
    found: dict[str, str] = {}
    for mirror, commits in of_mirror.items():
        asked = "".join(f"{commit}^{{tree}}\n" for commit in commits.values())
        try:
            said = _git(mirror, "cat-file", "--batch-check=%(objecttype)", stdin=asked.encode()).decode().splitlines()
        except InputError as error:
            found |= dict.fromkeys(commits, str(error))
            continue
        found |= {
            name: f"{mirror} has no commit {commit}: run `git fetch` in it"
            for (name, commit), kind in zip(commits.items(), said, strict=True)
            if kind != "tree"
        }
    return found


def _named_tests(fields: Mapping[str, Any], options: SweOptions, *, brings_pytest: bool) -> NamedTests:
    row = str(fields["instance_id"])
    must_pass, must_stay = (_names(fields[name], name, row) for name in ("fail_to_pass", "pass_to_pass"))
    if not must_pass:
        raise InputError("its FAIL_TO_PASS names no test")
    return NamedTests(
        patch=_text(fields, "test_patch"),
        fail_to_pass=must_pass,
        pass_to_pass=tuple(name for name in must_stay if name not in set(must_pass)),
        pythons=(options.python,) if options.python else PYTHONS,
        brings_pytest=brings_pytest,
    )


def _list_of(text: str) -> Any:
    """Return a list from its text as JSON, Python, numpy or lines; None for no list."""
    if text.strip().lower() in ("", "null", "none", "nan"):
        return []
    for read in (json.loads, _python_list):
        try:
            found = read(text)
            return _list_of(found) if isinstance(found, str) else found
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    lines = text.strip().splitlines()
    return lines if all(_TEST.fullmatch(line.strip()) for line in lines) else None


def _python_list(text: str) -> Any:
    # numpy writes no commas, so that Python would join neighbouring texts to one.
    text = re.sub(r"^\s*array\((.*?)(?:,\s*dtype=[^\])]*)?\)\s*$", r"\1", text, flags=re.DOTALL)
    value = ast.literal_eval(text)
    if not isinstance(value, list | tuple | set) or not all(isinstance(each, str) for each in value):
        return value
    tokens = tokenize.generate_tokens(io.StringIO(text.strip()).readline)
    return [ast.literal_eval(token.string) for token in tokens if token.type == tokenize.STRING]


def _names(value: Any, column: str, row: str) -> tuple[str, ...]:
    """Return the names of a list, or of a list as text of JSON, Python or numpy, without blanks and empty names."""
    # A missing value is NaN in pandas' JSON.
    names = _list_of(value) if isinstance(value, str) else [] if value != value else value or []
    if isinstance(names, list | tuple):
        names = ["" if name is None else name for name in names]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"its {column.upper()} is {value!r:.80}: it must be a list of names, or its JSON text")
    stripped = [with_escaped_id(name.strip().removeprefix("./")) for name in names]
    names = [name for name in stripped if name]
    if num_empty := len(stripped) - len(names):
        _log.warning("%s: %s has %d empty names, which are left out", row, column.upper(), num_empty)
    if other := next((name for name in names if _TEST.fullmatch(name) is None), ""):
        raise InputError(
            f"its {column.upper()} names {other[:80]!r}: only tests of pytest can run, as tests/test_x.py::test_y"
        )
    return tuple(dict.fromkeys(names))

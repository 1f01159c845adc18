"""`rayapp data prepare`: maps raw examples to train.parquet and test.parquet in verl's schema, and uploads them.

Bad rows are named and counted; a code problem is bad if its own solution fails its tests in a sandbox. Nothing is
written to the target before all rows are mapped; the manifest is written last.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rayapp.config.agent import CodeSection
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import InputError
from rayapp.core.protocols import SandboxSource
from rayapp.sandbox.pool.build import open_pool
from rayapp.storage.folders import put_folder
from rayapp.storage.opening import open_storage
from rayapp.tasks.answer_rules import CODE_SOURCES
from rayapp.tasks.code.hidden_cases import Comparison
from rayapp.tasks.code.languages import language_of
from rayapp.tasks.code.scoring import CodeProblem
from rayapp.tasks.data.downloads import Examples, OwnColumns, load_splits
from rayapp.tasks.data.pictures import PictureFiles
from rayapp.tasks.data.rows import DATASETS, IN_LANGUAGES, ONE_FILE_IS_TEST, Mapper, Row

_log = logging.getLogger(__name__)
ROWS_PER_GROUP = 1024  # a reader keeps whole groups in memory
_CHECKED_AT_ONCE = 32
_SANDBOXES = SandboxConfig(min_ready=0)
_REFERENCE_RULES = CodeSection(max_tests=0, test_timeout_s=20.0)
OWN_SOURCE = "own"  # data_source of rows that only the user's own reward function scores
_MOST_NAMED = 20  # bad rows; further ones are only counted
# Function that says, for each row, why the reference solution fails its tests; empty if it passes.
Check = Callable[[Sequence[Row]], list[str]]
Progress = Callable[[str, int, int], None]  # split, rows done, all rows


@dataclass(slots=True, kw_only=True)
class SplitReport:
    split: str
    num_written: int = 0
    bad: list[str] = field(default_factory=list)  # `line 17: reason`, or `row 16: reason` if the source has no lines
    # Entries like `line 9 repeats line 3`: an earlier row or the train split has the prompt.
    repeats: list[str] = field(default_factory=list)

    def refuse(self, where: str, why: str) -> None:
        """Count a bad row, and log it unless many were logged before."""
        self.bad.append(f"{where}: {why}")
        if len(self.bad) <= _MOST_NAMED:
            _log.warning("%s split, %s can't be mapped: %s", self.split, where, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Arguments of `prepare`: `Preparation(name="gsm8k", source="openai/gsm8k", out="s3://bucket/gsm8k")`."""

    name: str
    source: str
    out: str
    limit: int | None = None  # from each split
    max_bad_ratio: float = 0.01  # in a split
    overwrite: bool = False
    revision: str = ""  # on the hub; empty for the newest
    data_source: str = ""  # selects the scoring rule; empty: the data set's hub id
    # Language in which rows ask for programs, without solutions in others; empty: each example's own, or Python.
    language: str = ""
    check_references: bool = True  # run the reference solutions of code problems on their tests
    own: OwnColumns | None = None  # for a user's own examples
    test_ratio: float = 0.0  # of the train split, if the source has no test split

    @property
    def mapping(self) -> tuple[str, str | None, Mapper]:
        """Default data_source, configuration on the hub, and mapper."""
        return (OWN_SOURCE, None, self.own) if self.own is not None else DATASETS[self.name]


async def prepare(job: Preparation, progress: Progress = lambda *_: None) -> list[SplitReport]:
    """Map the source's rows and write the files to `job.out`. StorageExistsError: it holds other content."""
    if job.own is None and job.name not in DATASETS:
        raise InputError(f"data set {job.name!r} is not known. Choose one of {', '.join(DATASETS)}")
    if language_of(job.language) is not None and job.name not in IN_LANGUAGES:
        raise InputError(
            f"--language {job.language} can't be used with {job.name}: only {', '.join(IN_LANGUAGES)} "
            "ask for programs in other languages than Python"
        )
    async with open_storage(job.out) as storage:
        # Check the target first: otherwise a wrong key would fail the command only after an hour of mapping.
        await storage.check()
        with tempfile.TemporaryDirectory(prefix="rayapp-data-") as scratch:
            reports = await _mapped(job, Path(scratch), progress)
            await put_folder(Path(scratch) / "out", storage, overwrite=job.overwrite)
    return reports


async def _mapped(job: Preparation, scratch: Path, progress: Progress) -> list[SplitReport]:
    comparison = CODE_SOURCES.get(job.mapping[0])
    if comparison is None or not job.check_references:
        return await asyncio.to_thread(_map_all, job, scratch, progress, lambda rows: [""] * len(rows))
    async with open_pool(_SANDBOXES, f"data-{os.getpid()}") as (sandboxes, _):
        check = partial(_check_references, sandboxes, asyncio.get_running_loop(), comparison)
        return await asyncio.to_thread(_map_all, job, scratch, progress, check)


def _map_all(job: Preparation, scratch: Path, progress: Progress, check: Check) -> list[SplitReport]:
    hub_id, configuration, mapper = job.mapping
    file_split = "test" if job.name in ONE_FILE_IS_TEST else "train"
    splits = load_splits(
        job.source,
        hub_configuration=configuration,
        revision=job.revision,
        file_split=file_split,
        cache=scratch / "cache",
    )
    if file_split not in splits:
        raise InputError(f"source {job.source!r} has no {file_split} split; there are: {', '.join(splits) or 'none'}")
    if job.test_ratio and "test" not in splits:
        splits = _with_test_split(splits["train"], mapper, job.test_ratio)
    (scratch / "out").mkdir()
    mapper = _embedding(mapper, job.source, scratch / "cache")
    reports = []
    seen: dict[str, str] = {}
    for split, examples in splits.items():
        report = SplitReport(split=split)
        for line, why in examples.bad:
            report.refuse(f"line {line}", why)
        num_taken = min(len(examples.rows), job.limit) if job.limit is not None else len(examples.rows)
        taken = examples.taken(range(num_taken)) if num_taken < len(examples.rows) else examples
        asked = partial(_in_language, mapper, job.language) if job.language else mapper
        rows = _noting_repeats(
            _map_split(taken, asked, report, job.data_source or hub_id, progress), report, taken, seen
        )
        _write(_checked(rows, report, check, taken), scratch / "out" / f"{split}.parquet")
        _check(job, report)
        reports.append(report)
    return reports


def _embedding(mapper: Mapper, source: str, cache: Path) -> Mapper:
    """Return the mapper with the bytes of pictures in place of their paths, which are relative to the source."""
    path, files = Path(source).expanduser(), PictureFiles(cache)
    folder = path.parent if path.is_file() else path
    return lambda example, index, split, name: files.embedded(mapper(example, index, split, name), folder)


def _with_test_split(examples: Examples, mapper: Mapper, ratio: float) -> dict[str, Examples]:
    # All rows with the same prompt are in the same split, in their order.
    groups: dict[str, list[int]] = {}
    for index, example in enumerate(examples.rows):
        try:
            key = _prompt_key(mapper(example, index, "train", OWN_SOURCE))
        except Exception:  # boundary: a row may hold anything; it is counted as bad when it is mapped
            key = f"bad {index}"
        groups.setdefault(key, []).append(index)
    order = list(groups.values())
    random.Random(0).shuffle(order)
    wanted, test = max(1, round(ratio * len(examples.rows))), set[int]()
    for group in order:
        if len(test) + len(group) <= wanted:
            test |= set(group)
    train = [index for index in range(len(examples.rows)) if index not in test]
    return {"train": replace(examples.taken(train), bad=examples.bad), "test": examples.taken(sorted(test))}


def _prompt_key(row: Row) -> str:
    # Blanks, letters' case and width make no other prompt; other pictures do.
    prompt = [
        {**message, "content": unicodedata.normalize("NFKC", str(message["content"])).casefold().split()}
        for message in row["prompt"]
    ]
    return json.dumps([prompt, row.get("images")], sort_keys=True, default=str)


def _noting_repeats(
    rows: Iterator[Row], report: SplitReport, examples: Examples, seen: dict[str, str]
) -> Iterator[Row]:
    for row in rows:
        where, key = f"{report.split} {examples.where(row['extra_info']['index'])}", _prompt_key(row)
        digest = hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()
        if seen.setdefault(digest, where) != where:
            report.repeats.append(f"{where} repeats the prompt of {seen[digest]}")
        yield row


def _in_language(
    mapper: Mapper, language: str, example: Mapping[str, Any], index: int, split: str, data_source: str
) -> Row:
    own = example.get("language")
    if language_of(own) != language_of(language) and isinstance(example.get("solutions"), str):
        example = {**example, "solutions": "[]"}  # its solutions are in another language
    return mapper({**example, "language": language}, index, split, data_source)


def _map_split(
    examples: Examples, mapper: Mapper, report: SplitReport, data_source: str, progress: Progress
) -> Iterator[Row]:
    for index, example in enumerate(examples.rows):
        try:
            row = mapper(example, index, report.split, data_source)
        except InputError as error:
            report.refuse(examples.where(index), str(error))
        except Exception as error:  # boundary: a row may hold anything; continue with the next row
            report.refuse(examples.where(index), f"{type(error).__name__}: {error}")
        else:
            report.num_written += 1
            yield row
        progress(report.split, index + 1, len(examples.rows))


def _checked(rows: Iterator[Row], report: SplitReport, check: Check, examples: Examples) -> Iterator[Row]:
    while batch := list(islice(rows, _CHECKED_AT_ONCE)):
        for row, problem in zip(batch, check(batch), strict=True):
            if problem:
                report.num_written -= 1
                report.refuse(examples.where(row["extra_info"]["index"]), f"its reference fails its tests: {problem}")
            else:
                yield row


def _check_references(
    sandboxes: SandboxSource, loop: asyncio.AbstractEventLoop, comparison: Comparison, rows: Sequence[Row]
) -> list[str]:
    async def problem(row: Row) -> str:
        reference = row["extra_info"].get("reference")
        if not reference:
            return ""
        code = CodeProblem(
            ground_truth=row["reward_model"]["ground_truth"], comparison=comparison, rules=_REFERENCE_RULES
        )
        verdict = await code.score(await code.fenced(reference), sandboxes, seed=0)
        return "" if verdict.valid and verdict.value == 1.0 else verdict.detail or verdict.status

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(problem, rows))

    return asyncio.run_coroutine_threadsafe(all_of_them(), loop).result()


def _write(rows: Iterator[Row], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, schema = None, None
    try:
        while group := list(islice(rows, ROWS_PER_GROUP)):
            schema = schema or _schema(group)
            writer = writer or pq.ParquetWriter(path, schema, compression="zstd")
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
    finally:
        if writer is not None:
            writer.close()


def _schema(rows: Sequence[Row]) -> Any:
    # Images get a fixed type, because a missing path has no type.
    import pyarrow as pa

    schema = pa.Table.from_pylist(rows).schema
    if "images" not in rows[0]:
        return schema
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return schema.set(schema.get_field_index("images"), pa.field("images", pa.list_(image)))


def _doubt(job: Preparation) -> str:
    if job.own is None:
        return f"Check that {job.source!r} is {job.name}"
    return "Check the columns and --data-source"


def _check(job: Preparation, report: SplitReport) -> None:
    total = len(report.bad) + report.num_written
    if len(report.bad) / max(1, total) > job.max_bad_ratio:
        raise InputError(
            f"{report.split} split: {len(report.bad)} of {total} rows can't be mapped, more than the "
            f"{job.max_bad_ratio:.1%} that are allowed. First: {report.bad[0]}. {_doubt(job)}, or raise "
            "--max-bad-ratio. Nothing was written."
        )
    if not report.num_written:
        raise InputError(f"{report.split} split of {job.source!r} has no usable rows. Nothing was written.")

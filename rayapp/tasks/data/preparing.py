"""`rayapp data prepare`: raw examples to train.parquet and test.parquet in verl's schema, then to where they belong.

    source -> rows (those that can't be mapped are named and counted) -> parquet files in a scratch folder -> put_folder

Nothing is written to the target before every row is mapped; its manifest comes last.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rayapp.core.errors import InputError
from rayapp.storage.folders import put_folder
from rayapp.storage.opening import open_storage
from rayapp.tasks.data.rows import DATASETS, Mapper, Row
from rayapp.tasks.data.sources import load_splits

_log = logging.getLogger(__name__)
ROWS_PER_GROUP = 1024
"""Rows of a parquet row group: what a reader holds at once."""
_MOST_NAMED = 20
"""Bad rows that are named one by one; the rest is counted."""
Progress = Callable[[str, int, int], None]
"""Called with split, rows done, rows in all."""


@dataclass(slots=True, kw_only=True)
class SplitReport:
    """How many rows of one split were mapped, and which were not."""

    split: str
    num_written: int = 0
    bad: list[str] = field(default_factory=list)
    """`row 17: why`, one each."""

    @property
    def bad_ratio(self) -> float:
        return len(self.bad) / max(1, len(self.bad) + self.num_written)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What `prepare` is asked to do.

    Example: `Preparation(name="gsm8k", source="openai/gsm8k", out="s3://bucket/gsm8k")`.
    """

    name: str
    source: str
    out: str
    limit: int | None = None
    """Rows taken of each split; None is all."""
    max_bad_ratio: float = 0.01
    """Share of a split's rows that may fail to map."""
    overwrite: bool = False
    revision: str = ""
    """Revision of a source on the hub; empty is its newest."""
    data_source: str = ""
    """Scoring goes by it; empty is the data set's hub id, whatever the source is."""


async def prepare(job: Preparation, progress: Progress = lambda *_: None) -> list[SplitReport]:
    """Map the source's rows and put the files where they belong.

    Raises:
        InputError: the source can't be read, has no rows, or too many that can't be mapped.
        StorageError: the target can't be written; `StorageExistsError` when it holds other content.
    """
    if job.name not in DATASETS:
        raise InputError(f"data set {job.name!r}: there are {', '.join(DATASETS)}")
    async with open_storage(job.out) as storage:
        # Check the target before the work: an hour of mapping must not end at a wrong key.
        await storage.check()
        with tempfile.TemporaryDirectory(prefix="rayapp-data-") as scratch:
            reports = await asyncio.to_thread(_map_all, job, Path(scratch), progress)
            await put_folder(Path(scratch) / "out", storage, overwrite=job.overwrite)
    return reports


def _map_all(job: Preparation, scratch: Path, progress: Progress) -> list[SplitReport]:
    hub_id, configuration, mapper = DATASETS[job.name]
    splits = load_splits(job.source, hub_configuration=configuration, revision=job.revision, cache=scratch / "cache")
    if "train" not in splits:
        raise InputError(f"source {job.source!r} has no train split; there are: {', '.join(splits) or 'none'}")
    (scratch / "out").mkdir()
    reports = []
    for split, examples in splits.items():
        taken = examples.select(range(min(len(examples), job.limit))) if job.limit is not None else examples
        report = SplitReport(split=split)
        rows = _map_split(taken, mapper, report, job.data_source or hub_id, progress)
        _write(rows, scratch / "out" / f"{split}.parquet")
        _check(job, report)
        reports.append(report)
    return reports


def _map_split(
    examples: Any, mapper: Mapper, report: SplitReport, data_source: str, progress: Progress
) -> Iterator[Row]:
    for index, example in enumerate(examples):
        try:
            row = mapper(example, index, report.split, data_source)
        except InputError as error:
            report.bad.append(f"row {index}: {error}")
            if len(report.bad) <= _MOST_NAMED:
                _log.warning("%s split, row %d can't be mapped: %s", report.split, index, error)
        else:
            report.num_written += 1
            yield row
        progress(report.split, index + 1, len(examples))


def _write(rows: Iterator[Row], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, schema = None, None
    try:
        while group := list(islice(rows, ROWS_PER_GROUP)):
            schema = schema or _schema(group[0])
            writer = writer or pq.ParquetWriter(path, schema, compression="zstd")
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
    finally:
        if writer is not None:
            writer.close()


def _schema(row: Row) -> Any:
    """Arrow types of a split: those of its first row, but for images, where a missing path would have no type."""
    import pyarrow as pa

    schema = pa.Table.from_pylist([row]).schema
    if "images" not in row:
        return schema
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return schema.set(schema.get_field_index("images"), pa.field("images", pa.list_(image)))


def _check(job: Preparation, report: SplitReport) -> None:
    if report.bad_ratio > job.max_bad_ratio:
        total = len(report.bad) + report.num_written
        raise InputError(
            f"{report.split} split: {len(report.bad)} of {total} rows can't be mapped, more than the "
            f"{job.max_bad_ratio:.1%} that are allowed. First: {report.bad[0]}. Is {job.source!r} really {job.name}? "
            "If it is, raise --max-bad-ratio. Nothing was written."
        )
    if not report.num_written:
        raise InputError(f"{report.split} split of {job.source!r} has no rows. Nothing was written.")

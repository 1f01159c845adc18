"""One row per group of a run in DuckDB, kept up with the files: what the table of groups is filtered and sorted by.

    step=000007.parquet --narrow columns--> per-group numbers --> table `groups`
    step=000008.parquet --'                                       (about 200 bytes a group; texts and tokens stay put)

`refresh` is called by the server's one background thread and takes in a bounded batch a call, newest steps first, so
that the first page of a huge run doesn't wait for all of it. Queries may run beside it from any thread.
A file that can't be read is a problem that the page shows, never the end of the view.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayapp.runs.trajectories import SCHEMA_VERSION, VERSION_KEY
from rayapp.runs.view.source import SCALARS, RunSource, StepFile

MAX_FILES_PER_REFRESH = 64
MAX_ROWS_PER_REFRESH = 100_000
MAX_REFUSED_PER_REFRESH = 3
"""Files that a storage fails to give before it is left alone until the next look: each may cost a whole timeout."""
FIRST_ROWS = 4096
"""Rows after which the first batch ends: enough for a first page, read before anybody is told the address."""
_PREVIEW_CHARS = 800
"""End of a prompt that is kept: what the user asked is near it."""
_COLUMNS = ("step", "group_id", *SCALARS)

_CREATE = """
create table groups (
    file varchar, step integer, group_id bigint, source varchar, task varchar, prompt_id varchar, preview varchar,
    num_trajectories integer, num_valid integer,
    reward_mean double, reward_std double, reward_min double, reward_max double, pass_rate double, solved double,
    num_prompt_tokens integer, response_tokens_mean double, response_tokens_max integer, num_turns_max integer,
    statuses varchar[], reward_statuses varchar[], failures varchar[], tool_failed double, tool_calls double,
    min_policy_version integer, max_policy_version integer, time_generate_s double, time_score_s double
)
"""
# min/max/avg leave out what is null: rewards that are not valid are in no number of the group.
_AGGREGATE = f"""
insert into groups
select file, step, group_id, any_value(source), any_value(task), left(md5(any_value(prompt)), 12),
    right(any_value(prompt), {_PREVIEW_CHARS}), count(*), count(*) filter (valid),
    avg(reward) filter (valid), stddev_pop(reward) filter (valid), min(reward) filter (valid),
    max(reward) filter (valid), avg(pass_rate) filter (valid), avg(solved) filter (valid),
    any_value(num_prompt_tokens), avg(num_response_tokens), max(num_response_tokens), max(num_turns),
    list_sort(list_distinct(list(status))), list_sort(list_distinct(list(reward_status))),
    list_sort(list_distinct(list(failure_kind) filter (failure_kind <> ''))),
    coalesce(sum(tool_failed), 0), coalesce(sum(tool_calls), 0),
    min(min_policy_version), max(max_policy_version), max(time_generate_s), sum(time_score_s)
from rows group by file, step, group_id
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How much of the run the index holds."""

    revision: int
    """Grows with every change, so that a page knows whether to ask again."""
    num_files: int
    num_pending: int
    problems: tuple[str, ...]
    """One line for each file that can't be read."""


class GroupIndex:
    """The groups of one run.

    Args:
        source: the run; only its trajectory files are read here.
    """

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._database = duckdb.connect(":memory:")
        self._database.execute("set autoinstall_known_extensions = false; set autoload_known_extensions = false")
        self._database.execute(_CREATE)
        self._known: dict[str, StepFile] = {}
        self._problems: dict[str, str] = {}
        self._to_try_again: set[str] = set()
        """Files that the storage did not give: unlike a damaged file, one of these may be whole."""
        self._num_pending = 0
        self._revision = 0
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Take in what is new, at most a batch; True when more is waiting that can be had at once.

        Raises:
            StorageUnreachableError: the folder can't be listed.
        """
        with self._lock:
            files = self._source.step_files()
            self._forget({file.path: file for file in files})
            pending = [file for file in files if file.path not in self._known]
            # Those that failed before come last: one that is forbidden must not keep the others out.
            pending.sort(key=lambda file: file.path in self._to_try_again)
            self._take_in(pending, MAX_ROWS_PER_REFRESH if self._known else FIRST_ROWS)
            left = {file.path for file in pending if file.path not in self._known}
            self._num_pending = len(left)
            return bool(left - self._to_try_again)

    def _forget(self, now: dict[str, StepFile]) -> None:
        """Drop files that are gone or have other content: a resumed run takes steps again."""
        for path, known in list(self._known.items()):
            if now.get(path) != known:
                self._cursor().execute("delete from groups where file = $file", {"file": path})
                del self._known[path]
                self._problems.pop(path, None)
                self._revision += 1
        for path in [path for path in self._to_try_again if path not in now]:
            self._to_try_again.discard(path)
            self._problems.pop(path, None)

    def _take_in(self, pending: list[StepFile], max_rows: int) -> None:
        """Read files until the batch is full, then store their groups in one statement."""
        tables: list[Any] = []
        num_refused, problems = 0, dict(self._problems)
        for file in pending[:MAX_FILES_PER_REFRESH]:
            self._known[file.path] = file
            self._problems.pop(file.path, None)
            try:
                tables.append(read_narrow(self._source, file))
                self._to_try_again.discard(file.path)
            except (pa.ArrowException, ValueError) as error:
                # A file never fails the page: it may be half copied, or from a version to come.
                self._note(file, error)
            except OSError as error:
                self._note(file, error)
                self._to_try_again.add(file.path)
                del self._known[file.path]
                num_refused += 1
            if sum(table.num_rows for table in tables) >= max_rows or num_refused >= MAX_REFUSED_PER_REFRESH:
                break
        if tables:
            cursor = self._cursor()
            cursor.register("rows", pa.concat_tables(tables))
            cursor.execute(_AGGREGATE)
        self._revision += bool(tables) or self._problems != problems

    def _note(self, file: StepFile, error: Exception) -> None:
        self._problems[file.path] = f"{file.path.rsplit('/', 1)[-1]} can't be read: {error}"

    def query(self, sql: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        """Rows of a query over `groups`. The SQL is ours; what a person typed comes in as parameters only."""
        cursor = self._cursor().execute(sql, parameters)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def progress(self) -> Progress:
        return Progress(
            revision=self._revision,
            num_files=len(self._known),
            num_pending=self._num_pending,
            problems=tuple(self._problems.values()),
        )

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        """DuckDB's connections serve one thread at a time; cursors of it serve many."""
        return self._database.cursor()


def read_narrow(source: RunSource, file: StepFile) -> Any:
    """The scalar columns of a step as an arrow table, with `pass_rate`, `solved` and tool counts out of the terms.

    Raises:
        ValueError: another schema version, or a column is missing.
    """
    with source.files.open_input_file(file.path) as handle:
        parquet = pq.ParquetFile(handle, read_dictionary=["prompt", "task"])
        check_schema(parquet.schema_arrow)
        names = parquet.schema_arrow.names
        counted, sourced = "num_response_tokens" in names, "source" in names
        optional = ["num_response_tokens" if counted else "response_mask", *(["source"] * sourced)]
        table = parquet.read([*_COLUMNS, *optional])
    if not sourced:
        table = table.append_column("source", pa.array([""] * table.num_rows))
    if not counted:
        lengths = _true_counts(table["response_mask"].combine_chunks())
        table = table.drop_columns("response_mask").append_column("num_response_tokens", lengths)
    terms = table["reward_terms"]
    for column, term in {
        "pass_rate": "pass_rate",
        "solved": "solved",
        "tool_failed": "tool/failed",
        "tool_calls": "tool/calls",
    }.items():
        table = table.append_column(column, pc.map_lookup(terms, term, "first").cast(pa.float64()))
    table = table.drop_columns("reward_terms").append_column("file", pa.array([file.path] * table.num_rows))
    table = table.set_column(table.column_names.index("prompt"), "prompt", table["prompt"].cast(pa.string()))
    if file.purpose == "eval":
        shown = pc.subtract(-1, table["group_id"]).cast(pa.int64())
        table = table.set_column(table.column_names.index("group_id"), "group_id", shown)
    # Tables are put together, and versions have the columns in other orders.
    return table.select(sorted(table.column_names))


def check_schema(schema: Any) -> None:
    """Raises ValueError unless this version can read the file."""
    found = (schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if found != SCHEMA_VERSION:
        raise ValueError(f"trajectory schema {found}, and this version reads {SCHEMA_VERSION}; use a newer rayapp")
    missing = [name for name in _COLUMNS if name not in schema.names]
    if missing:
        raise ValueError(f"columns are missing: {', '.join(missing)}")


def _true_counts(masks: Any) -> Any:
    """(rows,) how many values of each list are true; files of older versions don't say."""
    parents = pc.list_parent_indices(masks).filter(pc.list_flatten(masks))
    counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(parents).to_pylist()}
    return pa.array([counts.get(row, 0) for row in range(len(masks))], pa.int32())

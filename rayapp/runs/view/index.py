"""One row per group of a run in DuckDB, kept up to date with the files: for filters and sorting of the groups' table.

    step=000007.parquet --narrow columns--> per-group numbers --> table `groups`
    step=000008.parquet --'                                       (about 200 bytes a group; no texts and tokens)

The server's one background thread calls `refresh`, which reads a bounded batch, newest steps first, so that the first
page of a huge run doesn't wait for all of it. Any thread may query meanwhile. A file that can't be read becomes a
problem shown on the page; the viewer goes on.

`TextSearch` finds the groups that hold a text, in prompts, completions, turns, tool results and details. Texts are not
indexed: each step's file is read once per searched text, newest steps first, and the result is cached. A long search
returns its results so far, and continues when it is requested again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayapp.runs.trajectories import schema_fault
from rayapp.runs.view.source import SCALARS, RunSource, StepFile, shown_id

MAX_FILES_PER_REFRESH = 64
MAX_ROWS_PER_REFRESH = 100_000
MAX_REFUSED_PER_REFRESH = 3
"""Files refused by the storage after which a refresh stops: each refusal may cost a whole timeout."""
FIRST_ROWS = 4096
"""Rows of the first batch: enough for a first page, read before the address is printed."""
_PREVIEW_CHARS = 800
"""Number of characters kept from a prompt's end, where the user's request is."""
_COLUMNS = ("step", "group_id", "source", *SCALARS)

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
# min/max/avg ignore null: so invalid rewards don't count in any of the group's numbers.
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
    """State of the index."""

    revision: int
    """Number that increases with every change, so that the page knows when to reload."""
    num_files: int
    num_pending: int
    problems: tuple[str, ...]
    """One line for each unreadable file."""


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
        """Files that the storage refused: unlike damaged files, they may be intact."""
        self._num_pending = 0
        self._revision = 0
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Read new files, at most a batch; return True if more files are waiting.

        Raises:
            StorageUnreachableError: the folder can't be listed.
        """
        with self._lock:
            files = self._source.step_files()
            self._forget({file.path: file for file in files})
            pending = [file for file in files if file.path not in self._known]
            # Files that failed before come last: a forbidden one must not hold up the others.
            pending.sort(key=lambda file: file.path in self._to_try_again)
            self._take_in(pending, MAX_ROWS_PER_REFRESH if self._known else FIRST_ROWS)
            left = {file.path for file in pending if file.path not in self._known}
            self._num_pending = len(left)
            return bool(left - self._to_try_again)

    def _forget(self, now: dict[str, StepFile]) -> None:
        """Drop files that are gone or have changed: a resumed run repeats steps."""
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
                # Note the error instead of failing the page: the file may be partly copied, or from a later version.
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
        """Run a query over `groups`. The SQL text is fixed; user input is passed only as parameters."""
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
        """Return a cursor for this thread: DuckDB's connections serve one thread, cursors of one serve many."""
        return self._database.cursor()


def read_narrow(source: RunSource, file: StepFile) -> Any:
    """Read the scalar columns of a step as an arrow table, with `pass_rate`, `solved` and tool counts from the terms.

    Raises:
        ValueError: another schema version, or a column is missing.
    """
    with source.files.open_input_file(file.path) as handle:
        table = _opened(handle, read_dictionary=["prompt", "task"]).read(_COLUMNS)
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
    return table


def _opened(handle: Any, **options: Any) -> pq.ParquetFile:
    """Open a file of trajectories. Raises ValueError if this version can't read it."""
    parquet = pq.ParquetFile(handle, **options)
    if fault := schema_fault(parquet.schema_arrow):
        raise ValueError(f"it {fault}")
    return parquet


BUDGET_S = 4.0
"""Longest reading time of one answer, in seconds; cached results are free."""
MOST_REMEMBERED = 20_000
_TEXTS = ("prompt", "completion", "reward_detail")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Results of a search so far."""

    groups: tuple[str, ...]
    """Groups as `step:group`, named as in the index."""
    num_searched: int
    num_files: int


class TextSearch:
    """Searches of one run.

    Args:
        clock: seconds; replaced in tests.
    """

    def __init__(self, source: RunSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._seen: OrderedDict[tuple[str, str, tuple[int, int]], tuple[str, ...]] = OrderedDict()

    def find(self, text: str) -> SearchResult:
        """Return the groups whose texts contain this one, ignoring case."""
        files, started = self._source.step_files(), self._clock()
        groups: list[str] = []
        num_searched = 0
        for file in files:
            key = (text.lower(), file.path, file.stamp)
            found = self._seen.get(key)
            if found is None:
                if self._clock() - started > BUDGET_S:
                    break
                found = self._seen[key] = tuple(self._in_file(file, text))
                if len(self._seen) > MOST_REMEMBERED:
                    self._seen.popitem(last=False)
            groups += found
            num_searched += 1
        return SearchResult(groups=tuple(groups), num_searched=num_searched, num_files=len(files))

    def _in_file(self, file: StepFile, text: str) -> Iterator[str]:
        try:
            table = read_texts(self._source, file)
        except (OSError, pa.ArrowException, ValueError):
            return  # the index has already reported that this file can't be read
        mask = None
        for name in table.column_names:
            if name != "group_id":
                hit = pc.fill_null(pc.match_substring(table[name], text, ignore_case=True), False)
                mask = hit if mask is None else pc.or_(mask, hit)
        for group_id in pc.unique(table["group_id"].filter(mask)).to_pylist() if mask is not None else ():
            yield f"{file.step}:{shown_id(group_id, file.purpose)}"


def read_texts(source: RunSource, file: StepFile) -> Any:
    """Return all texts of a step: a row per trajectory, and one per turn and tool result."""
    with source.files.open_input_file(file.path) as handle:
        table = _opened(handle).read(["group_id", *_TEXTS, "turns"])
    parts = [table.drop_columns("turns"), *_of_turns(table["group_id"], table["turns"].combine_chunks())]
    return pa.concat_tables(parts, promote_options="default")


def _of_turns(ids: Any, turns: Any) -> Iterator[Any]:
    """Yield the text of each turn, and the arguments and result of each call, as columns beside the group's id."""
    owners, flat = pc.take(ids, pc.list_parent_indices(turns)), pc.list_flatten(turns)
    yield pa.table({"group_id": owners, "completion": pc.struct_field(flat, "text")})
    calls = pc.struct_field(flat, "calls")
    of_call, each = pc.take(owners, pc.list_parent_indices(calls)), pc.list_flatten(calls)
    for field in ("arguments", "output"):
        yield pa.table({"group_id": of_call, "completion": pc.struct_field(each, field)})

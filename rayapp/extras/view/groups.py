"""The table of groups: DuckDB over the run's trajectory files as they are.

    step=000007.parquet --.
    step=000008.parquet --'--> table `groups`: one row per group, no texts and tokens --> filters and sorting as SQL

The table is computed from the scalar columns at the first query, and again when the run has written or removed a file.
Prompts are read for the rows of one page only. A file that can't be read is left out and named on the page.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as pads

from rayapp.core.errors import InputError
from rayapp.runs.source import RunSource, StepFile
from rayapp.runs.trajectories import SCHEMA, schema_fault

MAX_ROWS = 200
RETRY_S = 30.0  # Seconds after which files that the storage refused are tried again; damaged ones are not.
_PREVIEW_CHARS = 800  # Characters read from a prompt's end, where the user's request is.
_COLUMNS = [
    "step", "group_id", "source", "task", "reward", "reward_terms", "reward_status", "valid", "failure_kind", "status",
    "num_prompt_tokens", "num_response_tokens", "num_turns", "min_policy_version", "max_policy_version",
    "time_generate_s", "time_score_s",
]  # fmt: skip
_PARQUET = pads.ParquetFileFormat(
    default_fragment_scan_options=pads.ParquetFragmentScanOptions(page_checksum_verification=True)
)
# min, max and avg ignore null: so invalid rewards don't count in any of the group's numbers. Evaluations have ids from
# -1 down, because their ids begin at 0 in each step.
_AGGREGATE = """
create or replace table groups as
select step, group_id, any_value(source) as source, any_value(task) as task, count(*) as num_trajectories,
    count(*) filter (valid) as num_valid, avg(reward) filter (valid) as reward_mean,
    stddev_pop(reward) filter (valid) as reward_std, min(reward) filter (valid) as reward_min,
    max(reward) filter (valid) as reward_max, avg(reward_terms['pass_rate']) filter (valid) as pass_rate,
    avg(reward_terms['solved']) filter (valid) as solved, any_value(num_prompt_tokens) as num_prompt_tokens,
    avg(num_response_tokens) as response_tokens_mean, max(num_response_tokens) as response_tokens_max,
    max(num_turns) as num_turns_max, list_sort(list_distinct(list(status))) as statuses,
    list_sort(list_distinct(list(reward_status))) as reward_statuses,
    list_sort(list_distinct(list(failure_kind) filter (failure_kind <> ''))) as failures,
    coalesce(sum(reward_terms['tool/failed']), 0) as tool_failed,
    coalesce(sum(reward_terms['tool/calls']), 0) as tool_calls, min(min_policy_version) as min_policy_version,
    max(max_policy_version) as max_policy_version, max(time_generate_s) as time_generate_s,
    sum(time_score_s) as time_score_s
from (from train union all select * replace (-1 - group_id as group_id) from eval) group by step, group_id
"""
SORTABLE = (
    "step", "group_id", "source", "task", "num_trajectories", "reward_mean", "reward_std", "reward_min", "reward_max",
    "pass_rate", "solved", "response_tokens_mean", "response_tokens_max", "num_turns_max", "tool_failed",
    "time_generate_s", "time_score_s", "num_valid",
)  # fmt: skip
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>")


class Groups:
    """The groups of one run. Any thread may query."""

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._database = duckdb.connect(":memory:")
        self._database.execute("set autoinstall_known_extensions = false; set autoload_known_extensions = false")
        self._fragments: dict[StepFile, Any] = {}
        self._problems: dict[StepFile, str] = {}
        self._refused: set[StepFile] = set()  # Files that the storage refused; unlike damaged ones, they may be intact.
        self._state: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    @property
    def problems(self) -> list[str]:
        return list(self._problems.values())

    def query(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Run a query over `groups`. Its text is fixed; user input is passed only as parameters."""
        with self._lock:
            self._refresh()
        # DuckDB's connections serve one thread, cursors of one serve many.
        cursor = self._database.cursor().execute(sql, dict(parameters or {}))
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], str]:
        """Return the ends of the prompts of groups, by step and group."""
        wanted = {(row["step"], row["group_id"]) for row in rows}
        with self._lock:
            found: dict[tuple[int, int], str] = {}
            for file, fragment in self._fragments.items():
                ids = [shown_id(group, file.purpose) for step, group in wanted if step == file.step]
                table = fragment.to_table(columns=["group_id", "prompt"], filter=pads.field("group_id").isin(ids))
                found |= {
                    (file.step, shown_id(row["group_id"], file.purpose)): row["prompt"][-_PREVIEW_CHARS:]
                    for row in (table.to_pylist() if ids else ())
                }
        return found

    def _refresh(self) -> None:
        files = self._source.step_files()
        state = (tuple(files), time.monotonic() // RETRY_S if self._refused else 0)
        if state == self._state:
            return
        kept = set(files) - self._refused
        self._fragments = {file: one for file, one in self._fragments.items() if file in kept}
        self._problems = {file: text for file, text in self._problems.items() if file in kept}
        self._refused = set()
        new = [file for file in files if file not in self._fragments and file not in self._problems]
        with ThreadPoolExecutor(8, thread_name_prefix="files") as threads:
            list(threads.map(self._open, new))
        try:
            self._compute()
        except (duckdb.Error, OSError, pa.ArrowException):
            # Some file is damaged: find out which ones, one after the other.
            for file in list(self._fragments):
                self._open(file, reads_all=True)
            self._compute()
        self._state = (tuple(files), time.monotonic() // RETRY_S if self._refused else 0)

    def _open(self, file: StepFile, *, reads_all: bool = False) -> None:
        """Open a file, or note why it can't be read: it may be partly copied, or from a later version."""
        try:
            fragment = _PARQUET.make_fragment(file.path, self._source.files)
            if fault := schema_fault(fragment.physical_schema):
                raise ValueError(f"it {fault}")
            if reads_all:
                fragment.to_table(columns=_COLUMNS)
            self._fragments[file] = fragment
        except (pa.ArrowException, ValueError, OSError) as error:
            self._fragments.pop(file, None)
            self._problems[file] = f"{file.path.rsplit('/', 1)[-1]} can't be read: {error}"
            if isinstance(error, OSError):
                self._refused.add(file)

    def _compute(self) -> None:
        cursor = self._database.cursor()
        schema = pa.schema([SCHEMA.field(name) for name in _COLUMNS])
        for purpose in ("train", "eval"):
            own = [one for file, one in self._fragments.items() if file.purpose == purpose]
            cursor.register(purpose, pads.FileSystemDataset(own, schema, _PARQUET, self._source.files))
        cursor.execute(_AGGREGATE)


def shown_id(group_id: int, purpose: str) -> int:
    """Return a group's id on the page, or its id in the file if given the id on the page."""
    return -1 - group_id if purpose == "eval" else group_id


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """Optional conditions, all of which must hold. Rewards compare with the group's mean."""

    step_min: int | None = None
    step_max: int | None = None
    source: str | None = None
    task: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    reward_status: str | None = None  # Reward status that a trajectory of the group has.
    status: str | None = None  # Status that a trajectory of the group has.
    failure: str | None = None
    signal: str | None = None  # some: rewards differ, so the group has a signal; none: they are all equal or invalid.
    tool_failed: str | None = None  # some: a tool call of the group failed; none: none did.
    purpose: str | None = None  # train, or eval for evaluations.

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> GroupFilter:
        """Parse the query of a page's address. Raises InputError."""
        texts = {field.name: given.get(field.name, "").strip() for field in fields(cls)}
        return cls(**{name: _value(name, text) for name, text in texts.items() if text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    sort: str = "step"
    descending: bool = True
    offset: int = 0
    limit: int = 50

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Page:
        sort = given.get("sort", "") or "step"
        if sort not in SORTABLE:
            raise InputError(f"groups can't be sorted by {sort!r}; columns: {', '.join(SORTABLE)}")
        offset, limit = (_number(name, given.get(name) or default) for name, default in (("offset", 0), ("limit", 50)))
        descending = given.get("order", "desc") != "asc"
        return cls(sort=sort, descending=descending, offset=max(0, offset), limit=min(MAX_ROWS, max(1, limit)))


def find_groups(groups: Groups, chosen: GroupFilter, page: Page) -> dict[str, Any]:
    """Return {"total": number of matching groups, "rows": rows of the page}."""
    where, parameters = _where(chosen)
    total = groups.query(f"select count(*) as total from groups {where}", parameters)[0]["total"]
    direction = "desc" if page.descending else "asc"
    # The end of the order keeps pages stable: rows with equal values could otherwise move between pages.
    order = f"order by {page.sort} {direction} nulls last, step {direction}, group_id"
    sql = f"select * from groups {where} {order} limit $limit offset $offset"
    rows = groups.query(sql, {**parameters, "limit": page.limit, "offset": page.offset})
    prompts = groups.prompts(rows)
    for row in rows:
        row["preview"] = preview(prompts.get((row["step"], row["group_id"]), ""))
    return {"total": total, "rows": rows}


def facets(groups: Groups) -> dict[str, Any]:
    sql = (
        "select min(step) as first, max(step) as last, count(*) as groups, coalesce(sum(num_trajectories), 0) as "
        "trajectories, coalesce(bool_or(group_id < 0), false) as evaluated, coalesce(sum(tool_calls), 0) > 0 as tools "
        "from groups"
    )
    found = groups.query(sql)[0]

    def values(column: str) -> list[str]:
        rows = groups.query(f"select distinct {column} as value from groups order by value")
        return [row["value"] for row in rows if row["value"]]

    return found | {
        "steps": [found["first"], found["last"]],
        "sources": values("source"),
        "tasks": values("task"),
        "statuses": values("unnest(statuses)"),
        "reward_statuses": values("unnest(reward_statuses)"),
        "failures": values("unnest(failures)"),
    }


def neighbours(groups: Groups, step: int, group_id: int) -> dict[str, dict[str, Any] | None]:
    """Return the groups before and after one, in prompt order: {"previous": {"step", "group_id"}, "next": …}."""
    # A step holds groups in the order of their ids, but replaced prompts make ids and steps overlap: compare both.
    found: dict[str, dict[str, Any] | None] = {}
    for name, (sign, order) in {"previous": ("<", "desc"), "next": (">", "asc")}.items():
        sql = (
            f"select step, group_id from groups where (step, group_id) {sign} ($step, $group) "
            f"and (group_id < 0) = ($group < 0) order by step {order}, group_id {order} limit 1"
        )
        found[name] = next(iter(groups.query(sql, {"step": step, "group": group_id})), None)
    return found


def preview(prompt: str, max_chars: int = 160) -> str:
    """Return the user's last message, on one line; for a prompt without roles, its end."""
    parts = [part.strip() for part in _SPECIAL_TOKEN.split(prompt)]
    asked = [part for part in parts if part.startswith("user")]
    following = [after for before, after in pairwise(parts) if before == "user"]
    text = (asked[-1].removeprefix("user") or " ".join(following[-1:])) if asked else " ".join(parts)
    words = " ".join(text.split())
    if len(words) <= max_chars:
        return words
    return f"{words[:max_chars]}…" if asked else f"…{words[-max_chars:]}"


_CONDITIONS = {
    "step_min": "step >= $step_min",
    "step_max": "step <= $step_max",
    "source": "source = $source",
    "task": "task = $task",
    "reward_min": "reward_mean >= $reward_min",
    "reward_max": "reward_mean <= $reward_max",
    "reward_status": "list_contains(reward_statuses, $reward_status)",
    "status": "list_contains(statuses, $status)",
    "failure": "list_contains(failures, $failure)",
}
_CHOICES = {
    "signal": {"some": "reward_std > 1e-9", "none": "coalesce(reward_std, 0) <= 1e-9"},
    "tool_failed": {"some": "tool_failed > 0", "none": "tool_failed = 0"},
    "purpose": {"train": "group_id >= 0", "eval": "group_id < 0"},
}


def _where(chosen: GroupFilter) -> tuple[str, dict[str, Any]]:
    given = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    parameters = {name: value for name, value in given.items() if value is not None and name in _CONDITIONS}
    conditions = [_CONDITIONS[name] for name in parameters]
    conditions += [choices[given[name]] for name, choices in _CHOICES.items() if given[name] is not None]
    return (f"where {' and '.join(conditions)}" if conditions else ""), parameters


def _value(name: str, text: str) -> Any:
    if name in _CHOICES and text not in _CHOICES[name]:
        raise InputError(f"{name} must be {' or '.join(_CHOICES[name])}, not {text!r}")
    if name.startswith("step_"):
        return _number(name, text)
    if name in ("reward_min", "reward_max"):
        try:
            return float(text)
        except ValueError:
            raise InputError(f"{name} must be a number, not {text!r}") from None
    return text


def _number(name: str, text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name} must be a whole number, not {text!r}") from None

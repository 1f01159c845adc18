"""Which groups hold a text: prompts, completions, every turn, tool results and details, read when somebody asks.

Texts are in no index: a step's file is read once for each text that is looked for, newest steps first, and what was
found is remembered. A search that would take long answers with what it has, and goes on where it stopped when it is
asked again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayapp.runs.view.source import RunSource, StepFile, shown_id

BUDGET_S = 4.0
"""Longest time that one answer takes to read; what is remembered costs nothing."""
MOST_REMEMBERED = 20_000
_TEXTS = ("prompt", "completion", "reward_detail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has seen."""

    groups: tuple[str, ...]
    """`step:group`, as the index names them."""
    num_searched: int
    num_files: int


class TextSearch:
    """Searches of one run.

    Args:
        clock: seconds; the tests' own.
    """

    def __init__(self, source: RunSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._seen: OrderedDict[tuple[str, str, tuple[int, int]], tuple[str, ...]] = OrderedDict()

    def find(self, text: str) -> Found:
        """Groups whose texts contain this one, whatever its case."""
        files, started = self._source.step_files(), self._clock()
        groups: list[str] = []
        num_searched = 0
        for file in files:
            key = (text.lower(), file.path, file.stamp)
            if key not in self._seen:
                if self._clock() - started > BUDGET_S:
                    break
                self._seen[key] = tuple(self._in_file(file, text))
                if len(self._seen) > MOST_REMEMBERED:
                    self._seen.popitem(last=False)
            groups += self._seen[key]
            num_searched += 1
        return Found(groups=tuple(groups), num_searched=num_searched, num_files=len(files))

    def _in_file(self, file: StepFile, text: str) -> Iterator[str]:
        try:
            table = read_texts(self._source, file)
        except (OSError, pa.ArrowException, ValueError):
            return  # the index has told that it can't be read
        mask = None
        for name in table.column_names:
            if name != "group_id":
                hit = pc.fill_null(pc.match_substring(table[name], text, ignore_case=True), False)
                mask = hit if mask is None else pc.or_(mask, hit)
        for group_id in pc.unique(table["group_id"].filter(mask)).to_pylist() if mask is not None else ():
            yield f"{file.step}:{shown_id(group_id, file.purpose)}"


def read_texts(source: RunSource, file: StepFile) -> Any:
    """All texts of a step: a row per trajectory, and one per turn and tool result."""
    with source.files.open_input_file(file.path) as handle:
        parquet = pq.ParquetFile(handle)
        names = set(parquet.schema_arrow.names)
        wanted = [name for name in ("group_id", *_TEXTS, "turns") if name in names]
        table = parquet.read(wanted)
    parts = [table.select([name for name in wanted if name != "turns"])]
    if "turns" in names:
        parts += _of_turns(table["group_id"], table["turns"].combine_chunks())
    return pa.concat_tables(parts, promote_options="default")


def _of_turns(ids: Any, turns: Any) -> Iterator[Any]:
    """What was said in each turn, and what each call asked and was answered, as columns beside their group's id."""
    owners, flat = pc.take(ids, pc.list_parent_indices(turns)), pc.list_flatten(turns)
    yield pa.table({"group_id": owners, "completion": pc.struct_field(flat, "text")})
    calls = pc.struct_field(flat, "calls")
    of_call, each = pc.take(owners, pc.list_parent_indices(calls)), pc.list_flatten(calls)
    for field in ("arguments", "output"):
        yield pa.table({"group_id": of_call, "completion": pc.struct_field(each, field)})

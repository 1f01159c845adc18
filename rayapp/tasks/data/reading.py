"""Training data: rows of parquet files in verl's schema, in an order that depends on seed and epoch alone.

    paths (several, local or s3://) -> row groups -> prompts measured once, overlong ones dropped -> row(position)

`row(n)` is the n-th row of the run, over all epochs: a resumed run goes on at any n without a saved state. Holds at
most two windows of rows (see `order.py`), never the whole data set.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, count
from pathlib import Path
from typing import Any

from rayapp.core.errors import InputError
from rayapp.tasks.data.data_row import DataRow, parse_messages, parse_row
from rayapp.tasks.data.files import RowGroup, fetch_files, open_files, read_group, read_groups
from rayapp.tasks.data.order import Window, row_order, windows
from rayapp.tasks.data.prompts import Truncation, cut_prompt
from rayapp.tasks.data.truths import KindOf, check_truths

Encode = Callable[[Sequence[Mapping[str, Any]], str], Sequence[int]]
"""Messages and the row's agent_name to the prompt's token ids, with the template and what tools that agent has."""
CheckAgent = Callable[[str, str], None]
"""Raises InputError for an agent_name that can't be played; takes the name, and file and row for the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How rows are chosen and ordered. Names as in verl where verl has them."""

    seed: int = 0
    shuffle: bool = True
    """False: the order of the files, as for validation."""
    max_prompt_tokens: int | None = None
    """Longest prompt; None measures nothing."""
    filter_overlong_prompts: bool = True
    """Drop prompts above the maximum, counted in `num_overlong`; False: do as `truncation` says."""
    truncation: Truncation = "error"
    window_rows: int = 65_536


class TrainingData:
    """An endless sequence of rows; make one with `open_data`."""

    def __init__(
        self,
        groups: Sequence[RowGroup],
        options: ReadOptions,
        encode: Encode | None = None,
        check_agent: CheckAgent | None = None,
        truth_kind: KindOf | None = None,
    ) -> None:
        if options.max_prompt_tokens is not None and encode is None:
            raise InputError("max_prompt_tokens needs a tokenizer to measure prompts with")
        self._groups = groups
        self._options = options
        self._encode = encode
        if check_agent is not None:
            _check_agents(groups, check_agent)
        if truth_kind is not None:
            check_truths(groups, truth_kind)
        self._kept = [self._measure(group) for group in groups]
        self._sizes = [len(kept) for kept in self._kept]
        self.num_overlong = sum(group.num_rows for group in groups) - len(self)
        if not len(self):
            raise InputError(
                f"all {self.num_overlong} prompts are longer than max_prompt_length={options.max_prompt_tokens}; "
                "raise it"
            )
        self._windows = lru_cache(maxsize=2)(self._plan)
        self._loaded = lru_cache(maxsize=2)(self._load)

    def __len__(self) -> int:
        """Rows of one epoch."""
        return sum(self._sizes)

    def row(self, position: int) -> DataRow:
        """The row at `position` of the run; position `len(self)` is the first of the second epoch.

        Raises:
            InputError: its values are of the wrong type, or its prompt is too long.
        """
        epoch, offset = divmod(position, len(self))
        plan = self._windows(epoch)
        window = plan[bisect_right([window.start for window in plan], offset) - 1]
        order, tables = self._loaded(epoch, window)
        return self._parse(window, tables, order[offset - window.start])

    def rows(self, start: int = 0) -> Iterator[DataRow]:
        """Rows from `start` on, without end."""
        return (self.row(position) for position in count(start))

    def _plan(self, epoch: int) -> list[Window]:
        options = self._options
        return windows(
            self._sizes, window_rows=options.window_rows, seed=options.seed, epoch=epoch, shuffle=options.shuffle
        )

    def _load(self, epoch: int, window: Window) -> tuple[list[int], list[Any]]:
        order = row_order(window, seed=self._options.seed, epoch=epoch, shuffle=self._options.shuffle)
        return order, [read_group(self._groups[group]) for group in window.groups]

    def _parse(self, window: Window, tables: Sequence[Any], index: int) -> DataRow:
        starts = list(accumulate((self._sizes[group] for group in window.groups), initial=0))
        which = bisect_right(starts, index) - 1
        group = window.groups[which]
        at = self._kept[group][index - starts[which]]
        where = _where(self._groups[group], at)
        row = parse_row(tables[which].slice(at, 1).to_pylist()[0], where)
        return self._with_prompt(row, where)

    def _with_prompt(self, row: DataRow, where: str) -> DataRow:
        if self._encode is None:
            return row
        ids = self._encode_row(row.messages, row.agent_name, where)
        limit = self._options.max_prompt_tokens
        if limit is not None:
            ids = cut_prompt(ids, limit, self._options.truncation, where)
        return replace(row, prompt_ids=tuple(ids))

    def _measure(self, group: RowGroup) -> Sequence[int]:
        """Rows of the group that are used. Measured before the run, which must know the length of an epoch and must not
        stop at its thousandth step over a prompt."""
        options = self._options
        if options.max_prompt_tokens is None:
            return range(group.num_rows)
        is_cut = not options.filter_overlong_prompts and options.truncation != "error"
        kept = []
        for index, row in enumerate(read_group(group, ("prompt", "agent_name")).to_pylist()):
            where = _where(group, index)
            messages = parse_messages(row["prompt"], where)
            ids = () if is_cut else self._encode_row(messages, row.get("agent_name") or "", where)
            if len(ids) <= options.max_prompt_tokens:
                kept.append(index)
            elif not options.filter_overlong_prompts:
                cut_prompt(ids, options.max_prompt_tokens, "error", where)
        return kept

    def _encode_row(self, messages: Sequence[Mapping[str, Any]], agent_name: str, where: str) -> Sequence[int]:
        assert self._encode is not None
        try:
            return self._encode(messages, agent_name)
        except (TypeError, KeyError, ValueError) as error:
            raise InputError(f"{where}: its prompt can't be rendered: {error}") from error


async def open_data(
    uris: Sequence[str],
    options: ReadOptions,
    *,
    cache: Path,
    encode: Encode | None = None,
    check_agent: CheckAgent | None = None,
    truth_kind: KindOf | None = None,
) -> TrainingData:
    """Fetch, check and measure the files.

    Args:
        uris: parquet files in verl's schema, local or s3://.
        cache: folder for copies of remote files.
        encode: needed to measure prompts and for `DataRow.prompt_ids`.
        check_agent: asked about every agent_name in the files.
        truth_kind: asked about every data_source in the files; every row's ground_truth is checked by its answer.
    Raises:
        InputError: a file or a prompt can't be used; the message names it.
        StorageError: a remote file can't be fetched.
    """

    paths = await fetch_files(uris, cache)
    return await asyncio.to_thread(lambda: TrainingData(open_files(paths), options, encode, check_agent, truth_kind))


def _check_agents(groups: Sequence[RowGroup], check: CheckAgent) -> None:
    """Check every agent_name before the first step; that reads one small column."""
    seen: set[str | None] = set()
    for group, table in read_groups(groups, ("agent_name",)):
        names = table.column("agent_name").to_pylist() if table.num_columns else []
        for index, name in enumerate(names):
            if name not in seen:
                seen.add(name)
                check(name or "", _where(group, index))


def _where(group: RowGroup, index: int) -> str:
    return f"{group.path}, row {group.first_row + index}"

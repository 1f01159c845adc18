"""Training data: rows of data files in verl's schema, in an order that depends only on seed, epoch and files.

`row(n)` is the n-th row of the run, over all epochs: a resumed run continues at any n without saved state. Row groups
are shuffled, then the rows within *windows* of whole row groups (65,536 rows by default). At most two windows are in
memory. Options have verl's names.
"""

from __future__ import annotations

import asyncio
import logging
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Literal

from rayapp.core.errors import InputError
from rayapp.core.types import Media
from rayapp.storage.base import hash_bytes
from rayapp.tasks.data.data_row import DataRow, KindOf, check_truths, parse_messages, parse_row
from rayapp.tasks.data.files import RowGroup, as_parquet, fetch_files, open_files, read_group, read_groups
from rayapp.tasks.data.pictures import COLUMNS as PICTURES
from rayapp.tasks.data.pictures import Pictured, PictureRows, with_parts

log = logging.getLogger(__name__)
_MOST_NAMED = 20
_PICTURED_ROWS = 1024
"""Maximum rows of a window if rows have pictures, which are read into memory with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Row groups that are in memory together, and whose rows are shuffled together."""

    start: int  # of the window's first row in the epoch
    groups: tuple[int, ...]
    num_rows: int


def windows(group_sizes: Sequence[int], *, window_rows: int, seed: int, epoch: int, shuffle: bool) -> list[Window]:
    """Return the epoch's windows in order, of at most `window_rows` rows or one larger row group; `group_sizes` are
    numbers of used rows."""
    order = [group for group, size in enumerate(group_sizes) if size]
    if shuffle:
        random.Random(f"data-groups:{seed}:{epoch}").shuffle(order)
    found: list[Window] = []
    start, held, num_rows = 0, list[int](), 0
    for group in order:
        if held and num_rows + group_sizes[group] > window_rows:
            found.append(Window(start=start, groups=tuple(held), num_rows=num_rows))
            start, held, num_rows = start + num_rows, [], 0
        held.append(group)
        num_rows += group_sizes[group]
    if held:
        found.append(Window(start=start, groups=tuple(held), num_rows=num_rows))
    return found


def row_order(window: Window, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Return the order of the window's rows. Row 0 is the first row of the window's first group."""
    order = list(range(window.num_rows))
    if shuffle:
        random.Random(f"data-rows:{seed}:{epoch}:{window.start}").shuffle(order)
    return order


Truncation = Literal["error", "left", "right", "middle"]


def cut_prompt(ids: Sequence[int], max_tokens: int, truncation: Truncation, where: str) -> Sequence[int]:
    """Return at most `max_tokens` of `ids`: cut at the left, right or middle; `error` raises."""
    if len(ids) <= max_tokens:
        return ids
    match truncation:
        case "left":
            return ids[-max_tokens:]
        case "right":
            return ids[:max_tokens]
        case "middle":
            head = max_tokens // 2
            return [*ids[:head], *ids[len(ids) - (max_tokens - head) :]]
    raise InputError(
        f"{where}: its prompt has {len(ids)} tokens, but rollout.max_prompt_tokens is {max_tokens}. "
        "Raise rollout.max_prompt_tokens, set data.filter_overlong_prompts, or set data.truncation to left, right or "
        "middle."
    )


# Messages and agent_name -> the prompt's token ids, by the chat template with the agent's tools.
Encode = Callable[[Sequence[Mapping[str, Any]], str], Sequence[int]]
CheckAgent = Callable[[str, str], None]  # (agent_name, file and row for messages); InputError if there is no such agent


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    seed: int = 0
    shuffle: bool = True  # False keeps the order of the files, e.g. for validation
    max_prompt_tokens: int | None = None  # None disables the check
    # Drop longer prompts and count them in `num_overlong`; False applies `truncation`.
    filter_overlong_prompts: bool = True
    truncation: Truncation = "error"
    window_rows: int = 65_536


class TrainingData:
    """The rows of a run, as an endless sequence. Make it with `open_data`."""

    def __init__(
        self,
        groups: Sequence[RowGroup],
        options: ReadOptions,
        encode: Encode | None = None,
        check_agent: CheckAgent | None = None,
        truth_kind: KindOf | None = None,
        pictures: PictureRows | None = None,
    ) -> None:
        if options.max_prompt_tokens is not None and encode is None:
            raise InputError(
                "max_prompt_tokens is set, but prompts can't be measured without the argument `encode`. Pass both or "
                "none"
            )
        self._groups = groups
        self._options = options
        self._encode = encode
        self._pictures = pictures
        if encode is not None and pictures is None and (shown := [each for each in groups if each.has_pictures]):
            raise InputError(
                f"{shown[0].name}: its rows have images, but the model reads only text. Choose a model that reads "
                "pictures (docs/pictures.md), leave those rows out, or drop the column `images` if the text says "
                "enough without them."
            )
        self.has_pictures = any(group.has_pictures for group in groups)
        if self.has_pictures:
            self._options = replace(options, window_rows=min(options.window_rows, _PICTURED_ROWS))
        self.bad: list[str] = []
        """Rows that are left out because of their pictures, each with the file, row and reason."""
        if check_agent is not None:
            _check_agents(groups, check_agent)
        # Languages other than Python; none without `truth_kind`.
        self.languages = check_truths(groups, truth_kind) if truth_kind is not None else frozenset()
        self._kept = [self._measure(group) for group in groups]
        self._sizes = [len(kept) for kept in self._kept]
        self.num_overlong = sum(group.num_rows for group in groups) - len(self) - len(self.bad)
        self._tell_bad()
        if not len(self):
            raise InputError(
                f"all {self.num_overlong} prompts are longer than rollout.max_prompt_tokens = "
                f"{options.max_prompt_tokens}. Raise this key."
            )
        self._windows = lru_cache(maxsize=2)(self._plan)
        self._loaded = lru_cache(maxsize=2)(self._load)

    def _tell_bad(self) -> None:
        for why in self.bad[:_MOST_NAMED]:
            log.warning("left out: %s", why)
        if len(self.bad) > _MOST_NAMED:
            log.warning("%d rows are left out because of their pictures", len(self.bad))
        if self.bad and not len(self):
            raise InputError(f"all rows that are not too long have pictures that can't be used. First: {self.bad[0]}")

    def __len__(self) -> int:
        """Return the number of rows of one epoch."""
        return sum(self._sizes)

    def row(self, position: int) -> DataRow:
        """Return the row at `position` of the run; position `len(self)` is the first row of the second epoch."""
        epoch, offset = divmod(position, len(self))
        plan = self._windows(epoch)
        window = plan[bisect_right([window.start for window in plan], offset) - 1]
        order, tables = self._loaded(epoch, window)
        return self._parse(window, tables, order[offset - window.start])

    def rows(self, start: int = 0) -> Iterator[DataRow]:
        """Return an endless iterator over the rows, from position `start` on."""
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
        where = self._groups[group].where(at)
        raw = tables[which].slice(at, 1).to_pylist()[0]
        row = parse_row(raw, where)
        if self._encode is None:
            return row
        shown = self._shown(row.messages, raw, self._groups[group], where)
        row = replace(row, messages=shown.messages, pictures={hash_bytes(each): each for each in shown.encoded})
        ids, media = self._encode_row(shown, row.agent_name, where)
        limit = self._options.max_prompt_tokens
        if limit is not None:
            ids = cut_prompt(ids, limit, "error" if media else self._options.truncation, where)
        return replace(row, prompt_ids=tuple(ids), media=media)

    def _shown(
        self, messages: tuple[Mapping[str, Any], ...], raw: Mapping[str, Any], group: RowGroup, where: str
    ) -> Pictured:
        if self._pictures is None or not group.has_pictures:
            try:
                return Pictured(with_parts(messages, 0))
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
        return self._pictures.read(messages, raw, group.path.parent, where)

    def _measure(self, group: RowGroup) -> Sequence[int]:
        # The group's rows that are used. Prompts are measured before the run: the length of an epoch has to be known,
        # and an overlong prompt must not stop the run after hours.
        options = self._options
        if options.max_prompt_tokens is None:
            return range(group.num_rows)
        is_cut = not options.filter_overlong_prompts and options.truncation != "error" and not group.has_pictures
        kept = []
        columns = ("prompt", "agent_name", *(PICTURES if group.has_pictures else ()))
        for index, row in enumerate(read_group(group, columns).to_pylist()):
            where = group.where(index)
            messages = parse_messages(row["prompt"], where)
            ids: Sequence[int] = ()
            try:
                if not is_cut:
                    shown = self._shown(messages, row, group, where)
                    ids, _ = self._encode_row(shown, row.get("agent_name") or "", where)
            except InputError as error:
                if not group.has_pictures:
                    raise
                self.bad.append(str(error))
                continue
            if len(ids) <= options.max_prompt_tokens:
                kept.append(index)
            elif not options.filter_overlong_prompts:
                cut_prompt(ids, options.max_prompt_tokens, "error", where)
        return kept

    def _encode_row(self, row: Pictured, agent_name: str, where: str) -> tuple[Sequence[int], Media]:
        assert self._encode is not None
        try:
            ids = self._encode(row.messages, agent_name)
        except (TypeError, KeyError, ValueError) as error:
            raise InputError(f"{where}: its prompt can't be rendered: {error}") from error
        if not row.encoded:
            return ids, ()
        assert self._pictures is not None
        return self._pictures.place(ids, row, where)


async def open_data(
    uris: Sequence[str],
    options: ReadOptions,
    *,
    cache: Path,
    encode: Encode | None = None,
    check_agent: CheckAgent | None = None,
    truth_kind: KindOf | None = None,
    pictures: PictureRows | None = None,
) -> TrainingData:
    """Fetch and check the data files, and measure their prompts with `encode`, which also fills `DataRow.prompt_ids`.

    `check_agent` is called for every agent_name, `truth_kind` for every data_source: every ground_truth must have its
    form. An InputError names the file or prompt that can't be used.
    Without `pictures`, which reads them, rows with pictures are refused if there is an `encode`.
    """

    paths = await fetch_files(uris, cache)

    def opened() -> TrainingData:
        groups = open_files([as_parquet(path, cache) for path in paths])
        return TrainingData(groups, options, encode, check_agent, truth_kind, pictures)

    return await asyncio.to_thread(opened)


def _check_agents(groups: Sequence[RowGroup], check: CheckAgent) -> None:
    seen: set[str | None] = set()
    for group, table in read_groups(groups, ("agent_name",)):
        names = table.column("agent_name").to_pylist() if table.num_columns else []
        for index, name in enumerate(names):
            if name not in seen:
                seen.add(name)
                check(name or "", group.where(index))

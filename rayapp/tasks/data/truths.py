"""Checks what rows are scored by, before a run: `data_source` and `reward_model.ground_truth` of all rows of all files.

Column by column with pyarrow: a million rows take about a second. Code problems are read one by one. A row that can't
be scored would end the run at its step, and every resume of it at the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rayapp.core.errors import InputError
from rayapp.tasks.answer_rules import TruthKind
from rayapp.tasks.code.formats import as_json, read_tests
from rayapp.tasks.data.files import RowGroup, is_text, plain, read_groups

KindOf = Callable[[str], TruthKind]
"""Data source -> the form that its rows' ground_truth must have. Raises InputError where no rule scores them."""
_WANTED = {"text": "a text or a whole number", "targets": "a struct whose `target` is a text or a list of texts"}


def check_truths(groups: Sequence[RowGroup], kind_of: KindOf) -> None:
    """Look at all rows.

    Raises:
        InputError: the first row that can't be scored, with its file.
    """
    kinds: dict[str, TruthKind] = {}
    for group, table in read_groups(groups, ("data_source", "reward_model.ground_truth")):
        if group.num_rows:
            _check_group(group, table, kinds, kind_of)


def _check_group(group: RowGroup, table: Any, kinds: dict[str, TruthKind], kind_of: KindOf) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    sources = pc.cast(table.column("data_source").combine_chunks(), pa.large_string())
    truths = pc.struct_field(table.column("reward_model").combine_chunks(), "ground_truth")
    _refuse(group, pc.or_kleene(pc.is_null(sources), pc.equal(sources, "")), "it has no data_source")
    _refuse(group, pc.is_null(truths), "reward_model has no ground_truth")
    for source in pc.unique(sources).to_pylist():
        of_source = pc.equal(sources, source)
        first = f"{group.path}, row {group.first_row + pc.index(of_source, True).as_py()}"
        if source not in kinds:
            try:
                kinds[source] = kind_of(source)
            except InputError as error:
                raise InputError(f"{first}: {error}") from error
        kind = kinds[source]
        if kind == "tests":
            _check_tests(group, truths, of_source)
        elif kind != "any" and not _is_right(truths.type, kind):
            raise InputError(f"{first}: the ground_truth of {source} must be {_WANTED[kind]}; it is {truths.type}")
        if kind == "targets":
            missing = _without_target(pc.struct_field(truths, "target"))
            _refuse(group, pc.and_(of_source, missing), "its ground_truth has no target")


def _check_tests(group: RowGroup, truths: Any, of_source: Any) -> None:
    """Read every code problem, row by row: some tens of megabytes of tests a second."""
    for index, is_mine in enumerate(of_source.to_pylist()):
        if is_mine:
            try:
                read_tests(as_json(truths[index].as_py()))
            except InputError as error:
                raise InputError(f"{group.path}, row {group.first_row + index}: no code problem: {error}") from error


def _refuse(group: RowGroup, mask: Any, why: str) -> None:
    import pyarrow.compute as pc

    index = pc.index(mask, True).as_py()
    if index >= 0:
        raise InputError(f"{group.path}, row {group.first_row + index}: {why}")


def _is_right(kind: Any, wanted: TruthKind) -> bool:
    from pyarrow import types

    kind = plain(kind)
    if wanted == "text":
        return is_text(kind) or bool(types.is_integer(kind))
    if not types.is_struct(kind) or kind.get_field_index("target") < 0:
        return False
    target = kind.field("target").type
    return is_text(target.value_type if _is_list(target) else target)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind))


def _without_target(targets: Any) -> Any:
    """True for each row without a target: null, an empty list, or a list with a null in it."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if not _is_list(targets.type):
        return pc.is_null(targets)
    with_null = pc.filter(pc.list_parent_indices(targets), pc.is_null(pc.list_flatten(targets)))
    rows = pa.array(np.arange(len(targets)), with_null.type)
    is_empty = pc.fill_null(pc.equal(pc.list_value_length(targets), 0), True)
    return pc.or_(is_empty, pc.is_in(rows, value_set=with_null))

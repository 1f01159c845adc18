"""Parses a row in verl's schema into a `DataRow`, and checks before a run that all rows of all files can be scored.

The check reads columns with pyarrow: a million rows take about a second. Without it, a row that can't be scored would
end the run at its step, and every resumed run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayapp.core.errors import InputError
from rayapp.core.types import Media
from rayapp.tasks.answer_rules import TruthKind
from rayapp.tasks.code.formats import as_json, read_tests
from rayapp.tasks.code.languages import Language
from rayapp.tasks.data.files import RowGroup, is_text, plain, read_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """One prompt, and the data that its reward needs."""

    messages: tuple[Mapping[str, Any], ...]  # each with role and content
    data_source: str
    ground_truth: Any  # `reward_model.ground_truth`; for GSM8K a string
    # Arguments for each tool, e.g. {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2"}}}.
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra_info: Mapping[str, Any] = field(default_factory=dict)  # custom reward functions get it
    agent_name: str = ""
    prompt_ids: tuple[int, ...] = ()  # truncated if the options say so; empty without an encoder
    media: Media = ()  # pictures among `prompt_ids`
    pictures: Mapping[str, bytes] = field(default_factory=dict)  # SHA-256 -> encoded bytes


def parse_row(raw: Mapping[str, Any], where: str) -> DataRow:
    """Parse a row of a parquet file in verl's schema. `where` names file and row in messages."""
    reward = _mapping(raw.get("reward_model"), "reward_model", where)
    if reward.get("ground_truth") is None:
        raise InputError(f"{where}: reward_model has no ground_truth")
    extra = _without_none(_mapping(raw.get("extra_info") or {}, "extra_info", where))
    source = raw.get("data_source")
    if not isinstance(source, str) or not source:
        raise InputError(f"{where}: data_source must be a non-empty text, not {source!r:.60}")
    return DataRow(
        messages=parse_messages(raw.get("prompt"), where),
        data_source=source,
        ground_truth=reward["ground_truth"],
        tools_kwargs=_mapping(extra.get("tools_kwargs", {}), "extra_info.tools_kwargs", where),
        extra_info=extra,
        agent_name=raw.get("agent_name") or "",
    )


def parse_messages(prompt: object, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        raise InputError(f"{where}: prompt must be a non-empty list of messages, not {prompt!r:.60}")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"{where}: each message must be an object with a string `role`, not {message!r:.60}")
        if not isinstance(message.get("content"), str | list):
            raise InputError(
                f"{where}: a message's content must be a string or a list of parts, not {message.get('content')!r:.60}"
            )
    return tuple(_without_none(message) for message in prompt)


def _mapping(value: object, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {name} must be a struct, not {value!r:.60}")
    return value


def _without_none(value: Any) -> Any:
    """Remove None: in parquet, every row has the keys of all rows."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


KindOf = Callable[[str], TruthKind]  # form of a data source's ground_truth; InputError if no rule scores it
_WANTED = {"text": "a text or a whole number", "targets": "a struct whose `target` is a text or a list of texts"}


def check_truths(groups: Sequence[RowGroup], kind_of: KindOf) -> frozenset[Language]:
    """Return the languages other than Python in which rows ask for programs. An InputError names the first row that
    can't be scored."""
    kinds: dict[str, TruthKind] = {}
    languages: set[Language] = set()
    for group, table in read_groups(groups, ("data_source", "reward_model.ground_truth")):
        if group.num_rows:
            languages |= _check_group(group, table, kinds, kind_of)
    return frozenset(languages)


def _check_group(group: RowGroup, table: Any, kinds: dict[str, TruthKind], kind_of: KindOf) -> set[Language]:
    import pyarrow as pa
    import pyarrow.compute as pc

    sources = pc.cast(table.column("data_source").combine_chunks(), pa.large_string())
    truths = pc.struct_field(table.column("reward_model").combine_chunks(), "ground_truth")
    _refuse(group, pc.or_kleene(pc.is_null(sources), pc.equal(sources, "")), "it has no data_source")
    _refuse(group, pc.is_null(truths), "reward_model has no ground_truth")
    languages: set[Language] = set()
    for source in pc.unique(sources).to_pylist():
        of_source = pc.equal(sources, source)
        first = group.where(pc.index(of_source, True).as_py())
        if source not in kinds:
            try:
                kinds[source] = kind_of(source)
            except InputError as error:
                raise InputError(f"{first}: {error}") from error
        kind = kinds[source]
        if kind == "tests":
            languages |= _check_tests(group, truths, of_source)
        elif kind != "any" and not _is_right(truths.type, kind):
            raise InputError(f"{first}: the ground_truth of {source} must be {_WANTED[kind]}; it is {truths.type}")
        if kind == "targets":
            missing = _without_target(pc.struct_field(truths, "target"))
            _refuse(group, pc.and_(of_source, missing), "its ground_truth has no target")
    return languages


def _check_tests(group: RowGroup, truths: Any, of_source: Any) -> set[Language]:
    """Check code problems row by row: tens of megabytes of tests per second."""
    languages: set[Language] = set()
    for index, is_mine in enumerate(of_source.to_pylist()):
        if is_mine:
            try:
                language = read_tests(as_json(truths[index].as_py())).language
            except InputError as error:
                raise InputError(f"{group.where(index)}: not a code problem: {error}") from error
            languages |= {language} if language is not None else set()
    return languages


def _refuse(group: RowGroup, mask: Any, why: str) -> None:
    import pyarrow.compute as pc

    index = pc.index(mask, True).as_py()
    if index >= 0:
        raise InputError(f"{group.where(index)}: {why}")


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
    """Return a mask of targets that are null, an empty list, or a list that contains null."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if not _is_list(targets.type):
        return pc.is_null(targets)
    with_null = pc.filter(pc.list_parent_indices(targets), pc.is_null(pc.list_flatten(targets)))
    rows = pa.array(np.arange(len(targets)), with_null.type)
    is_empty = pc.fill_null(pc.equal(pc.list_value_length(targets), 0), True)
    return pc.or_(is_empty, pc.is_in(rows, value_set=with_null))

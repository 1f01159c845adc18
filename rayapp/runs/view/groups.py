"""The table of groups: filters and sorting as SQL. Pure except for the query it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from rayapp.core.errors import InputError
from rayapp.runs.view.index import GroupIndex

MAX_ROWS = 200
SORTABLE = (
    "step",
    "group_id",
    "source",
    "task",
    "num_trajectories",
    "reward_mean",
    "reward_std",
    "reward_min",
    "reward_max",
    "pass_rate",
    "solved",
    "response_tokens_mean",
    "response_tokens_max",
    "num_turns_max",
    "tool_failed",
    "time_generate_s",
    "time_score_s",
    "num_valid",
)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """Optional conditions, all of which must hold. Rewards compare with the group's mean.

    Example: `GroupFilter(task="sort_numbers", reward_max=0.0, reward_status="timeout")`.
    """

    step_min: int | None = None
    step_max: int | None = None
    source: str | None = None
    task: str | None = None
    prompt_id: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    reward_status: str | None = None
    """At least one trajectory of the group has this reward status."""
    status: str | None = None
    """At least one trajectory of the group has this status."""
    failure: str | None = None
    signal: str | None = None
    """`some`: rewards differ, so the group has a signal; `none`: they are all equal or invalid."""
    tool_failed: str | None = None
    """`some`: at least one tool call of the group failed; `none`: none did."""
    purpose: str | None = None
    """`train`, or `eval` for evaluations."""
    text: str | None = None
    """Text in the prompt, a completion, a turn, a tool result or a detail, ignoring case; see `index.py`."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> GroupFilter:
        """Parse the query of a page's address.

        Raises:
            InputError: an invalid value.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = given.get(field.name, "").strip()
            if text:
                values[field.name] = _value(field.name, text)
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Range and order of the table's rows."""

    sort: str = "step"
    descending: bool = True
    offset: int = 0
    limit: int = 50

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Page:
        """Parse the query of a page's address. Raises InputError: no such column, or not a number."""
        sort = given.get("sort", "") or "step"
        if sort not in SORTABLE:
            raise InputError(f"groups can't be sorted by {sort!r}; columns: {', '.join(SORTABLE)}")
        offset, limit = (_number(name, given.get(name) or default) for name, default in (("offset", 0), ("limit", 50)))
        return cls(
            sort=sort,
            descending=given.get("order", "desc") != "asc",
            offset=max(0, offset),
            limit=min(MAX_ROWS, max(1, limit)),
        )


def find_groups(
    index: GroupIndex, chosen: GroupFilter, page: Page, *, among: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return {"total": number of matching groups, "rows": rows of the page}.

    Args:
        among: `step:group` of groups that hold the searched text; None: no text is searched.
    """
    where, parameters = _where(chosen, among)
    total = index.query(f"select count(*) as total from groups {where}", parameters)[0]["total"]
    direction = "desc" if page.descending else "asc"
    # The end of the order keeps pages stable: rows with equal values could otherwise move between pages.
    order = f"order by {page.sort} {direction} nulls last, step {direction}, group_id"
    sql = f"select * exclude (file) from groups {where} {order} limit $limit offset $offset"
    rows = index.query(sql, {**parameters, "limit": page.limit, "offset": page.offset})
    for row in rows:
        row["preview"] = preview(row["preview"])
    return {"total": total, "rows": rows}


def facets(index: GroupIndex) -> dict[str, Any]:
    """Return the values to choose from in each filter."""
    span = index.query("select min(step) as first, max(step) as last, count(*) as groups from groups", {})[0]
    unnested = "select distinct unnest({}) as value from groups order by value"
    return {
        "steps": [span["first"], span["last"]],
        "groups": span["groups"],
        "trajectories": index.query("select coalesce(sum(num_trajectories), 0) as n from groups", {})[0]["n"],
        "sources": _values(index, "select distinct source as value from groups where source <> '' order by value"),
        "tasks": _values(index, "select distinct task as value from groups order by value"),
        "statuses": _values(index, unnested.format("statuses")),
        "reward_statuses": _values(index, unnested.format("reward_statuses")),
        "failures": _values(index, unnested.format("failures")),
        "evaluated": index.query("select count(*) filter (group_id < 0) as n from groups", {})[0]["n"] > 0,
        "tools": index.query("select coalesce(sum(tool_calls), 0) as n from groups", {})[0]["n"] > 0,
    }


def same_prompt(index: GroupIndex, prompt_id: str, limit: int = 500, *, is_eval: bool = False) -> list[dict[str, Any]]:
    """Return groups of one prompt over the run, oldest first; of training or of evaluations."""
    columns = "step, group_id, task, reward_mean, reward_std, pass_rate, solved, num_trajectories"
    sql = (
        f"select {columns} from groups where prompt_id = $prompt_id and (group_id < 0) = $is_eval "
        "order by step, group_id limit $limit"
    )
    return index.query(sql, {"prompt_id": prompt_id, "is_eval": is_eval, "limit": limit})


def neighbours(index: GroupIndex, step: int, group_id: int) -> dict[str, dict[str, Any] | None]:
    """Return the groups before and after one, in prompt order: {"previous": {"step", "group_id"}, "next": …}."""
    # A step holds groups in the order of their ids, but replaced prompts make ids and steps overlap: compare both.
    found: dict[str, dict[str, Any] | None] = {}
    for name, (sign, order) in {"previous": ("<", "desc"), "next": (">", "asc")}.items():
        sql = (
            f"select step, group_id from groups where (step, group_id) {sign} ($step, $group) "
            f"and (group_id < 0) = ($group < 0) order by step {order}, group_id {order} limit 1"
        )
        found[name] = next(iter(index.query(sql, {"step": step, "group": group_id})), None)
    return found


def preview(prompt: str, max_chars: int = 160) -> str:
    """Return the last message of the user, on one line; for a prompt without roles, its end.

    Example: "<|im_start|>user\nSort it<|im_end|>\n<|im_start|>assistant\n" -> "Sort it".
    """
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
    "prompt_id": "prompt_id = $prompt_id",
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


def _where(chosen: GroupFilter, among: Sequence[str] | None) -> tuple[str, dict[str, Any]]:
    given = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    parameters = {name: value for name, value in given.items() if value is not None and name in _CONDITIONS}
    conditions = [_CONDITIONS[name] for name in parameters]
    conditions += [choices[given[name]] for name, choices in _CHOICES.items() if given[name] is not None]
    if among is not None:
        conditions.append("concat(step, ':', group_id) in (select unnest($among))")
        parameters["among"] = list(among)
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


def _values(index: GroupIndex, sql: str) -> list[str]:
    return [row["value"] for row in index.query(sql, {})]

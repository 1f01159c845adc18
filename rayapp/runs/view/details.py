"""One group, one trajectory: read from the step's file when somebody opens it, never before.

Called by the server. Texts leave here as they are, cut to what a page can hold; escaping is the page's business, which
sets text and never markup.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayapp.core.errors import InputError
from rayapp.runs.view.source import FOLDERS, SCALARS, RunSource, recorded_group
from rayapp.runs.view.tokens import Tokenizer, token_texts

MAX_TEXT_CHARS = 60_000
MAX_TOKENS = 40_000
MAX_TRAJECTORIES = 256
_GROUP_COLUMNS = ("index", "prefill", "completion", "reward_detail", *SCALARS)
_TOKEN_COLUMNS = ("token_ids", "response_mask", "rollout_log_probs")
FORKS = "forks"
"""Optional column: where tokens don't go on from those before them."""
RECORDED_TURNS = "turns"
"""Column with the tool calls of each turn, for episodes of the agent loop."""
LEARNER_LOG_PROBS = "learner_log_probs"
"""Optional column: with it tokens can be coloured by what the engine and the learner disagree on."""


def read_group(source: RunSource, step: int, group_id: int) -> list[dict[str, Any]]:
    """The trajectories of a group without their tokens, by index.

    Raises:
        InputError: there is no such group, or its file can't be read.
    """
    rows = _read(source, step, group_id, [], (*_GROUP_COLUMNS, "num_response_tokens"))
    if not rows:
        raise InputError(f"step {step} has no group {group_id}")
    return [_cut_row(row) for row in sorted(rows, key=lambda row: row["index"])[:MAX_TRAJECTORIES]]


def read_trajectory(
    source: RunSource, step: int, group_id: int, index: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """One trajectory with its turns.

    Raises:
        InputError: there is no such trajectory, or its file can't be read.
    """
    more = (*_TOKEN_COLUMNS, FORKS, LEARNER_LOG_PROBS, RECORDED_TURNS, "num_response_tokens")
    rows = _read(source, step, group_id, [("index", "=", index)], (*_GROUP_COLUMNS, *more))
    if not rows:
        raise InputError(f"step {step} has no trajectory {index} in group {group_id}")
    row = rows[0]
    tokens = {name: row.pop(name, None) for name in (*_TOKEN_COLUMNS, FORKS, LEARNER_LOG_PROBS)}
    recorded = [_cut_turn(turn) for turn in row.pop(RECORDED_TURNS, None) or []]
    turns = turns_of(tokens, tokenizer) if tokenizer is not None else untokenized(row, recorded)
    calls_at = {turn["start"]: turn["calls"] for turn in recorded}
    for turn in turns:
        turn["calls"] = calls_at.get(turn["first_token"], [])
    return _cut_row(row) | {
        "num_tokens": len(tokens["token_ids"]),
        "has_learner_log_probs": tokens[LEARNER_LOG_PROBS] is not None,
        "is_tokenized": tokenizer is not None,
        "turns": turns,
    }


def turns_of(tokens: dict[str, Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What was read and what was sampled, in turn. A stretch of the mask between two forks is a turn.

    Example: mask FFTTFT -> kinds prompt, sampled, read, sampled; of the sampled ones also every token.
    """
    ids = tokens["token_ids"][:MAX_TOKENS]
    texts = token_texts(tokenizer, ids)
    learner = tokens.get(LEARNER_LOG_PROBS)
    turns: list[dict[str, Any]] = []
    starts = [fork["start"] for fork in tokens.get(FORKS) or []]

    def stretch_of(position: int) -> tuple[bool, int]:
        return bool(tokens["response_mask"][position]), bisect_right(starts, position)

    for (sampled, _), stretch in groupby(range(len(ids)), key=stretch_of):
        positions = list(stretch)
        first, end = positions[0], positions[-1] + 1
        turn: dict[str, Any] = {
            "kind": "sampled" if sampled else "read" if turns else "prompt",
            "text": cut("".join(texts[first:end])),
            "first_token": first,
            "num_tokens": end - first,
        }
        if sampled:
            turn |= {"ids": ids[first:end], "texts": [text[:2000] for text in texts[first:end]]}
            turn["log_probs"] = tokens["rollout_log_probs"][first:end]
            turn["learner_log_probs"] = learner[first:end] if learner is not None else None
        turns.append(turn)
    return turns


def untokenized(row: dict[str, Any], recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns as texts, where no tokenizer is at hand: the prompt, and what was recorded of each turn."""
    prompt = {"kind": "prompt", "text": cut(row["prompt"]), "first_token": 0, "num_tokens": row["num_prompt_tokens"]}
    single = {"start": row["num_prompt_tokens"], "end": None, "text": cut(row["completion"])}
    return [prompt] + [
        {
            "kind": "sampled",
            "text": turn["text"],
            "first_token": turn["start"],
            "num_tokens": turn["end"] - turn["start"] if turn["end"] is not None else row.get("num_response_tokens"),
        }
        for turn in recorded or [single]
    ]


def _cut_turn(turn: dict[str, Any]) -> dict[str, Any]:
    calls = [
        call | {name: cut(call[name] or "") for name in ("name", "arguments", "output", "failure")}
        for call in turn["calls"] or []
    ]
    return turn | {"text": cut(turn["text"] or ""), "calls": calls}


def cut(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """The beginning of a text, and how much of it is left out."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}\n… {len(text) - max_chars:,} more characters"


def _cut_row(row: dict[str, Any]) -> dict[str, Any]:
    terms = dict(row["reward_terms"] or [])
    texts = {name: cut(row[name] or "") for name in ("prompt", "prefill", "completion", "reward_detail")}
    return row | texts | {"reward_terms": terms}


def _read(
    source: RunSource, step: int, group_id: int, filters: list[Any], columns: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Rows of a group; only the parts of its file that can hold them are read."""
    purpose, recorded_id = recorded_group(group_id)
    filters = [("group_id", "=", recorded_id), *filters]
    path = f"{source.root}/{FOLDERS[purpose]}/step={step:06d}.parquet"
    try:
        names = set(pq.read_schema(path, filesystem=source.files).names)
        wanted = [column for column in columns if column in names]
        # partitioning=None: "step=000007.parquet" looks like a folder of a partitioned data set.
        table = pq.read_table(path, filesystem=source.files, columns=wanted, filters=filters, partitioning=None)
    except FileNotFoundError:
        raise InputError(f"step {step} has no trajectories here") from None
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} can't be read: {error}") from None
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows

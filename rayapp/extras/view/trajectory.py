"""One group or one trajectory for the page, read from the step's file when a user opens it.

Texts are unescaped, because the page inserts them as text, never as markup. Advantages are recomputed from the recorded
rewards: for GRPO they follow from the group alone; for others the page shows the reward minus the mean, with a note.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from rayapp.core.errors import InputError
from rayapp.extras.view.groups import shown_id
from rayapp.runs.layout import PARQUET, step_name
from rayapp.runs.source import FOLDERS, Purpose, RunSource

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Advantages of a group: rewards 1 and 0 have mean 0.5, deviation 0.7071, values (0.7071, -0.7071) in grpo."""

    label: str
    values: tuple[float | None, ...]  # None for a trajectory that is left out of the loss.


def group_advantages(rewards: Sequence[float], valid: Sequence[bool], algorithm: Mapping[str, Any]) -> Advantages:
    """Compute (r - mean) / (std + 1e-6) like verl's grpo, with the sample standard deviation, or r - mean (Dr. GRPO).

    A group with one valid trajectory has mean 0 and deviation 1 in verl, so its advantage is its reward.
    """
    of_valid = [reward for reward, is_valid in zip(rewards, valid, strict=True) if is_valid]
    is_grpo = algorithm.get("adv_estimator", "grpo") == "grpo"
    mean = fmean(of_valid) if len(of_valid) > 1 or (of_valid and not is_grpo) else 0.0
    divides = is_grpo and algorithm.get("norm_adv_by_std", True)
    scale = (stdev(of_valid) if len(of_valid) > 1 else 1.0) + _EPSILON if divides else 1.0
    values = tuple((r - mean) / scale if is_valid else None for r, is_valid in zip(rewards, valid, strict=True))
    return Advantages(label="advantage (grpo)" if is_grpo else "reward − group mean", values=values)


# A character has at most four bytes, in the worst case a token each; longer sequences are not text.
_MAX_TOKENS_OF_A_CHARACTER = 12
_REPLACEMENT = "\ufffd"


class TokenDecoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def token_texts(tokenizer: TokenDecoder, ids: Sequence[int]) -> list[str]:
    """Return (T,) the text that each token adds: a character of three byte tokens gives ["", "", "€"]."""
    texts: list[str] = []
    start = read = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:read], skip_special_tokens=False)
        whole = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        is_torn = whole.endswith(_REPLACEMENT) and end < len(ids) and end - start < _MAX_TOKENS_OF_A_CHARACTER
        texts.append("" if is_torn else whole[len(before) :])
        if not is_torn:
            start, read = read, end
    return texts


def load_tokenizer(source: RunSource, model_path: str, chosen: Path | None) -> Any | None:
    """Load the chosen tokenizer, the final model's, or the initial model's; None without one.

    Raises InputError: the chosen one can't be read.
    """
    if chosen is not None:
        file = chosen / "tokenizer.json" if chosen.is_dir() else chosen
        try:
            return _parse(file.read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"--tokenizer {chosen}: {error}. Give a Hugging Face folder with tokenizer.json") from None
    candidates = (source.read_bytes("final/tokenizer.json"), _local(Path(model_path) / "tokenizer.json"))
    return next((_parse(data) for data in candidates if data), None)


def _local(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _parse(data: bytes) -> Any:
    from tokenizers import Tokenizer as Fast

    try:
        return Fast.from_str(data.decode())
    except Exception as error:  # boundary: the library raises bare Exception
        raise ValueError(f"it is not a tokenizer.json: {error}") from None


MAX_TEXT_CHARS = 60_000
MAX_TOKENS = 40_000
MAX_TRAJECTORIES = 256
MAX_PICTURES = 64
_GROUP_COLUMNS = (
    "index", "prefill", "completion", "reward_detail", "task", "prompt", "reward", "reward_terms", "reward_status",
    "valid", "failure_kind", "status", "num_prompt_tokens", "num_response_tokens", "num_turns", "min_policy_version",
    "max_policy_version", "time_generate_s", "time_score_s", "media",
)  # fmt: skip
_TOKEN_COLUMNS = ("token_ids", "response_mask", "rollout_log_probs")
FORKS, AGENT_OUTPUT, RECORDED_TURNS, LEARNER_LOG_PROBS = "forks", "agent_output", "turns", "learner_log_probs"


def read_group(source: RunSource, step: int, group_id: int) -> list[dict[str, Any]]:
    """Return a group's trajectories without their tokens, by index. Raises InputError."""
    rows = _read(source, step, group_id, [], _GROUP_COLUMNS)
    if not rows:
        raise InputError(f"step {step} has no group {group_id}")
    return [_cut_row(row) for row in sorted(rows, key=lambda row: row["index"])[:MAX_TRAJECTORIES]]


def read_trajectory(
    source: RunSource, step: int, group_id: int, index: int, tokenizer: TokenDecoder | None
) -> dict[str, Any]:
    """Return one trajectory with its turns. Raises InputError."""
    more = (*_TOKEN_COLUMNS, FORKS, LEARNER_LOG_PROBS, RECORDED_TURNS, AGENT_OUTPUT)
    rows = _read(source, step, group_id, [("index", "=", index)], (*_GROUP_COLUMNS, *more))
    if not rows:
        raise InputError(f"step {step} has no trajectory {index} in group {group_id}")
    row = rows[0]
    tokens = {name: row.pop(name) for name in (*_TOKEN_COLUMNS, FORKS, LEARNER_LOG_PROBS)}
    recorded = [_cut_turn(turn) for turn in row.pop(RECORDED_TURNS)]
    turns = turns_of(tokens, tokenizer) if tokenizer is not None else untokenized(row, recorded)
    calls_at = {turn["start"]: turn["calls"] for turn in recorded}
    for turn in turns:
        turn["calls"] = calls_at.get(turn["first_token"], [])
    return _cut_row(row) | {
        AGENT_OUTPUT: cut(row[AGENT_OUTPUT] or ""),
        "num_forks": len(tokens[FORKS]),
        "num_tokens": len(tokens["token_ids"]),
        "has_learner_log_probs": tokens[LEARNER_LOG_PROBS] is not None,
        "is_tokenized": tokenizer is not None,
        "turns": turns,
    }


def turns_of(tokens: dict[str, Any], tokenizer: TokenDecoder) -> list[dict[str, Any]]:
    """Split a trajectory into read and sampled parts, in order. A stretch of the mask between two forks is a turn.

    Example: mask FFTTFT -> kinds prompt, sampled, read, sampled; sampled parts also list every token.
    """
    ids = tokens["token_ids"][:MAX_TOKENS]
    texts = token_texts(tokenizer, ids)
    learner = tokens[LEARNER_LOG_PROBS]
    turns: list[dict[str, Any]] = []
    starts = [fork["start"] for fork in tokens[FORKS]]

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
    """Return turns as texts without a tokenizer: the prompt, and the recorded text of each turn."""
    prompt = {"kind": "prompt", "text": cut(row["prompt"]), "first_token": 0, "num_tokens": row["num_prompt_tokens"]}
    single = {"start": row["num_prompt_tokens"], "end": None, "text": cut(row["completion"])}
    return [prompt] + [
        {
            "kind": "sampled",
            "text": turn["text"],
            "first_token": turn["start"],
            "num_tokens": turn["end"] - turn["start"] if turn["end"] is not None else row["num_response_tokens"],
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
    return text if len(text) <= max_chars else f"{text[:max_chars]}\n… {len(text) - max_chars:,} more characters"


def _cut_row(row: dict[str, Any]) -> dict[str, Any]:
    terms = dict(row["reward_terms"] or [])
    texts = {name: cut(row[name] or "") for name in ("prompt", "prefill", "completion", "reward_detail")}
    shown = dict.fromkeys(picture["sha256"] for picture in row.pop("media", None) or ())
    return row | texts | {"reward_terms": terms, "pictures": list(shown)[:MAX_PICTURES]}


def _read(
    source: RunSource, step: int, group_id: int, filters: list[Any], columns: tuple[str, ...]
) -> list[dict[str, Any]]:
    purpose: Purpose = "eval" if group_id < 0 else "train"
    filters = [("group_id", "=", shown_id(group_id, purpose)), *filters]
    path = f"{source.root}/{FOLDERS[purpose]}/{step_name(step, PARQUET)}"
    try:
        # partitioning=None: "step=000007.parquet" looks like a folder of a partitioned data set.
        there = set(pq.read_schema(path, filesystem=source.files).names)  # older files have no media
        wanted = [name for name in columns if name in there or name != "media"]
        table = pq.read_table(path, filesystem=source.files, columns=wanted, filters=filters, partitioning=None)
    except FileNotFoundError:
        raise InputError(f"step {step} has no recorded trajectories") from None
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} can't be read: {error}") from None
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows

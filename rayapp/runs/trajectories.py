"""Trajectory files: `trajectories/step=NNNNNN.parquet` for training steps, `evaluations/step=…` for evaluations.

One row per trajectory, by a versioned schema (docs/run-folder.md); `read_groups` restores the exact `Group`s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayapp.core.errors import InputError
from rayapp.core.files import aside
from rayapp.core.types import (
    AllowedTokens,
    CallRecord,
    ExecRecord,
    ExpertArray,
    FloatArray,
    Fork,
    Group,
    Media,
    Picture,
    Prompt,
    Reward,
    RolloutStatus,
    Trajectory,
    TurnRecord,
    VersionSpan,
)
from rayapp.runs.layout import PICTURES
from rayapp.storage.media import write_pictures

SCHEMA_VERSION = "1"
VERSION_KEY = b"rayapp.schema_version"
# A row group is small, so that one trajectory of a large step is read without many others' tokens.
ROWS_PER_ROW_GROUP = 512
_NOTHING: Mapping[int, FloatArray] = {}

_TEXT, _INT, _FLOAT = pa.string(), pa.int32(), pa.float64()


def _all(kind: pa.DataType, *names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, kind) for name in names]


_EXEC = pa.struct([*_all(_TEXT, "sandbox_id", "provider", "outcome"), *_all(_FLOAT, "started_at_s", "duration_s")])
_CALL = pa.struct(
    [
        *_all(_TEXT, "name", "arguments", "output", "failure"),
        *_all(_FLOAT, "reward", "started_at_s", "duration_s", "waited_s"),
        ("execs", pa.list_(_EXEC)),
        ("pictures", pa.list_(_TEXT)),
    ]
)
_SPAN = pa.struct(_all(_INT, "policy_version", "num_tokens"))
_TURN = pa.struct(
    [
        *_all(_INT, "start", "end"),
        *_all(_TEXT, "text", "finish_reason"),
        ("policy_version", _INT),
        *_all(_FLOAT, "started_at_s", "queued_s", "generate_s"),
        ("calls", pa.list_(_CALL)),
        ("version_spans", pa.list_(_SPAN)),
    ]
)
_FORK = pa.struct(_all(_INT, "start", "after"))
_EXPERTS = pa.struct([("shape", pa.list_(_INT)), ("bytes", pa.large_binary())])
_PICTURE = pa.struct([("sha256", _TEXT), *_all(_INT, "start", "end")])
_ALLOWED = pa.struct([("num_masks", _INT), ("masks", pa.large_binary()), ("mask_of", pa.list_(_INT))])
SCHEMA = pa.schema(
    [
        ("step", _INT),
        ("group_id", pa.int64()),
        ("index", _INT),
        *_all(_TEXT, "source", "task", "prompt", "messages", "ground_truth", "extra_info", "prefill"),
        ("stop", pa.list_(_TEXT)),
        *_all(_INT, "num_prompt_tokens", "num_response_tokens"),
        ("completion", _TEXT),
        ("token_ids", pa.list_(_INT)),
        ("response_mask", pa.list_(pa.bool_())),
        *_all(pa.list_(pa.float32()), "rollout_log_probs", "learner_log_probs"),
        ("reward", _FLOAT),
        ("reward_terms", pa.map_(_TEXT, _FLOAT)),
        *_all(_TEXT, "reward_status", "reward_detail"),
        ("valid", pa.bool_()),
        *_all(_TEXT, "failure_kind", "status"),
        *_all(_INT, "num_turns", "min_policy_version", "max_policy_version"),
        *_all(_FLOAT, "time_generate_s", "time_score_s"),
        ("turns", pa.list_(_TURN)),
        ("forks", pa.list_(_FORK)),
        ("agent_output", _TEXT),
        ("routed_experts", _EXPERTS),
        ("allowed", _ALLOWED),
        ("media", pa.list_(_PICTURE)),
    ],
    metadata={VERSION_KEY: SCHEMA_VERSION.encode()},
)
_ROW = pa.struct(list(SCHEMA))
# Columns that files of the same schema version may lack: every token was allowed, or there were no pictures.
_OPTIONAL = {"allowed", "media"}


def write_trajectories(
    path: Path, step: int, groups: Sequence[Group], learner_log_probs: Mapping[int, FloatArray] = _NOTHING
) -> None:
    """Write the trajectories of one step. `learner_log_probs` are of response tokens, by position in the step."""
    with writing_trajectories(path, step) as write:
        write(groups, learner_log_probs)


@contextmanager
def writing_trajectories(path: Path, step: int) -> Iterator[Callable[..., None]]:
    """Write a file in parts: call the yielded function with groups. The file appears when the block has succeeded."""
    options = {"compression": "zstd", "write_page_checksum": True}
    with aside(path) as pending, pq.ParquetWriter(pending, SCHEMA, **options) as writer:

        def write(groups: Sequence[Group], learner_log_probs: Mapping[int, FloatArray] = _NOTHING) -> None:
            write_pictures(path.parent.parent / PICTURES, groups)
            writer.write_table(_table(step, groups, learner_log_probs), row_group_size=ROWS_PER_ROW_GROUP)

        yield write


def _table(step: int, groups: Sequence[Group], learner_log_probs: Mapping[int, FloatArray]) -> Any:
    members = ((group, index) for group in groups for index in range(len(group.trajectories)))
    rows = [
        _row(step, group, index, learner_log_probs.get(position)) for position, (group, index) in enumerate(members)
    ]
    return pa.Table.from_pylist([_storable(row, _ROW) for row in rows], schema=SCHEMA)


def _storable(value: Any, kind: pa.DataType) -> Any:
    """Escape halves of surrogate pairs; make values that are no numbers NaN, and too large ones infinite."""
    if value is None or isinstance(value, np.ndarray):
        return value
    if pa.types.is_string(kind):
        return str(value).encode("utf-8", "backslashreplace").decode()
    if pa.types.is_floating(kind):
        return _number(value)
    if pa.types.is_struct(kind):
        return {field.name: _storable(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(_storable(key, kind.key_type), _storable(item, kind.item_type)) for key, item in value]
    if pa.types.is_list(kind):
        return [_storable(item, kind.value_type) for item in value]
    return value


def _number(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    except (TypeError, ValueError):
        return float("nan")


def _over_all_tokens(trajectory: Trajectory, of_response: FloatArray | None) -> FloatArray | None:
    """Return (T,) values, 0 at tokens not sampled."""
    if of_response is None:
        return None
    values = np.zeros(trajectory.token_ids.size, np.float32)
    values[trajectory.response_mask] = of_response
    return values


def _row(step: int, group: Group, index: int, of_response: FloatArray | None) -> dict[str, Any]:
    prompt, trajectory = group.prompt, group.trajectories[index]
    reward, experts, allowed = trajectory.reward, trajectory.routed_experts, trajectory.allowed
    return {
        "step": step,
        "group_id": group.group_id,
        "index": index,
        "source": prompt.source,
        "task": prompt.task,
        "prompt": prompt.text,
        "messages": _json(prompt.messages),
        "ground_truth": _json(prompt.ground_truth),
        "extra_info": _json(prompt.extra_info),
        "prefill": prompt.prefill,
        "stop": list(prompt.stop),
        "num_prompt_tokens": prompt.token_ids.size,
        "num_response_tokens": trajectory.num_response_tokens,
        "completion": trajectory.completion_text,
        "token_ids": trajectory.token_ids,
        "response_mask": trajectory.response_mask,
        "rollout_log_probs": trajectory.rollout_log_probs,
        "learner_log_probs": _over_all_tokens(trajectory, of_response),
        "reward": reward.value,
        "reward_terms": list(reward.terms.items()),
        "reward_status": reward.status,
        "reward_detail": reward.detail,
        "valid": reward.valid,
        "failure_kind": reward.failure_kind,
        "status": trajectory.status.value,
        "num_turns": trajectory.num_turns,
        "min_policy_version": trajectory.min_policy_version,
        "max_policy_version": trajectory.max_policy_version,
        "time_generate_s": trajectory.time_generate_s,
        "time_score_s": reward.time_score_s,
        "turns": [asdict(turn) for turn in trajectory.turns],
        "forks": [asdict(fork) for fork in trajectory.forks],
        "agent_output": trajectory.agent_output,
        "routed_experts": None if experts is None else {"shape": list(experts.shape), "bytes": experts.tobytes()},
        "allowed": None if allowed is None else _as_record(allowed),
        "media": [asdict(picture) for picture in trajectory.media],
    }


def _as_record(allowed: AllowedTokens) -> dict[str, Any]:
    return {"num_masks": len(allowed.masks), "masks": allowed.masks.tobytes(), "mask_of": allowed.mask_of}


def _allowed(record: dict[str, Any] | None) -> AllowedTokens | None:
    if record is None:
        return None
    masks = np.frombuffer(record["masks"], np.int32).reshape(record["num_masks"], -1)
    return AllowedTokens(masks=masks, mask_of=np.array(record["mask_of"], np.int32))


def _experts(record: dict[str, Any] | None) -> ExpertArray | None:
    if record is None:
        return None
    size = len(record["bytes"]) // max(1, math.prod(record["shape"]))
    experts: ExpertArray = np.frombuffer(record["bytes"], np.dtype(f"u{size}")).reshape(record["shape"])
    return experts


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def read_groups(path: Path | str, files: Any = None) -> list[Group]:
    """Read the groups of a file, exactly as they were written. InputError: another schema version."""
    try:
        table = pq.read_table(path, filesystem=files, partitioning=None, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} is not a readable parquet file: {error}") from None
    if fault := schema_fault(table.schema):
        raise InputError(f"{path} {fault}")
    pictures = Path(path).parent.parent / PICTURES if files is None else None
    return [_group(list(rows), pictures) for _, rows in groupby(table.to_pylist(), key=lambda row: row["group_id"])]


def schema_fault(schema: Any) -> str:
    """Return why this version can't read a file with this arrow schema; empty if it can."""
    found = (schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if found != SCHEMA_VERSION:
        return f"has trajectory schema {found}, but this version reads only {SCHEMA_VERSION}"
    missing = [name for name in SCHEMA.names if name not in schema.names and name not in _OPTIONAL]
    return f"was written by an older rayapp: it has no column {', '.join(missing)}" if missing else ""


def _group(rows: list[dict[str, Any]], pictures: Path | None) -> Group:
    first, media = rows[0], [_media(row) for row in rows]
    names = {picture.sha256 for own in media for picture in own} if pictures is not None else set()
    prompt = Prompt(
        task=first["task"],
        text=first["prompt"],
        token_ids=np.array(first["token_ids"][: first["num_prompt_tokens"]], np.int32),
        prefill=first["prefill"],
        stop=tuple(first["stop"]),
        source=first["source"],
        messages=tuple(json.loads(first["messages"])),
        ground_truth=json.loads(first["ground_truth"]),
        extra_info=json.loads(first["extra_info"]),
        media=tuple(picture for picture in media[0] if picture.end <= first["num_prompt_tokens"]),
    )
    return Group(
        group_id=first["group_id"],
        prompt=prompt,
        trajectories=tuple(_trajectory(row) for row in rows),
        pictures={name: (pictures / name).read_bytes() for name in names if pictures and (pictures / name).exists()},
    )


def _media(row: Mapping[str, Any]) -> Media:
    return tuple(Picture(**each) for each in row.get("media") or ())


def _trajectory(row: dict[str, Any]) -> Trajectory:
    reward = Reward(
        value=row["reward"],
        terms=dict(row["reward_terms"]),
        status=row["reward_status"],
        valid=row["valid"],
        failure_kind=row["failure_kind"],
        detail=row["reward_detail"],
        time_score_s=row["time_score_s"],
    )
    return Trajectory(
        token_ids=np.array(row["token_ids"], np.int32),
        response_mask=np.array(row["response_mask"], np.bool_),
        rollout_log_probs=np.array(row["rollout_log_probs"], np.float32),
        completion_text=row["completion"],
        reward=reward,
        status=RolloutStatus(row["status"]),
        min_policy_version=row["min_policy_version"],
        max_policy_version=row["max_policy_version"],
        num_turns=row["num_turns"],
        time_generate_s=row["time_generate_s"],
        turns=tuple(_turn(turn) for turn in row["turns"]),
        forks=tuple(Fork(**fork) for fork in row["forks"]),
        agent_output=row["agent_output"],
        routed_experts=_experts(row["routed_experts"]),
        allowed=_allowed(row.get("allowed")),
        media=_media(row),
    )


def _turn(record: dict[str, Any]) -> TurnRecord:
    spans = tuple(VersionSpan(**span) for span in record["version_spans"])
    return TurnRecord(**record | {"calls": tuple(_call(call) for call in record["calls"]), "version_spans": spans})


def _call(record: dict[str, Any]) -> CallRecord:
    execs, pictures = tuple(ExecRecord(**one) for one in record["execs"]), tuple(record.get("pictures") or ())
    return CallRecord(**record | {"execs": execs, "pictures": pictures})

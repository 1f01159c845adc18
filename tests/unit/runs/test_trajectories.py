"""trajectories/step=NNNNNN.parquet: reading returns what was written, under a versioned schema."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.core.errors import InputError
from rayapp.core.types import (
    AllowedTokens,
    CallRecord,
    ExpertArray,
    Fork,
    Group,
    Picture,
    Prompt,
    Reward,
    RolloutStatus,
    Trajectory,
)
from rayapp.runs.trajectories import SCHEMA, read_groups, write_trajectories
from support import make

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
FLOATS = st.floats(allow_nan=False, width=32)
VALID = st.builds(
    Reward, value=FLOATS, terms=st.dictionaries(TEXT, FLOATS, max_size=3), status=TEXT, detail=TEXT, time_score_s=FLOATS
)
REWARDS = VALID | st.builds(Reward.invalid, st.just("sandbox_gone"), TEXT)


@st.composite
def groups(draw: st.DrawFn, group_id: int) -> Group:
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
    prompt = Prompt(
        task=draw(TEXT),
        text=draw(TEXT),
        token_ids=np.array(draw(ids), np.int32),
        prefill=draw(TEXT),
        stop=tuple(draw(st.lists(TEXT, max_size=2))),
        source=draw(TEXT),
    )
    size = draw(st.integers(1, 3))
    return Group(group_id=group_id, prompt=prompt, trajectories=tuple(draw(trajectories(prompt)) for _ in range(size)))


@st.composite
def trajectories(draw: st.DrawFn, prompt: Prompt) -> Trajectory:
    completion = draw(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans(), FLOATS), max_size=6))
    ids, mask, log_probs = ([row[column] for row in completion] for column in range(3))
    num_prompt = prompt.token_ids.size
    return Trajectory(
        token_ids=np.array([*prompt.token_ids, *ids], np.int32),
        response_mask=np.array([False] * num_prompt + mask, np.bool_),
        rollout_log_probs=np.array([0.0] * num_prompt + log_probs, np.float32),
        completion_text=draw(TEXT),
        reward=draw(REWARDS),
        status=draw(st.sampled_from(RolloutStatus)),
        min_policy_version=draw(st.integers(0, 9)),
        max_policy_version=draw(st.integers(0, 9)),
        num_turns=draw(st.integers(1, 9)),
        time_generate_s=draw(FLOATS),
        forks=tuple(Fork(start=start, after=start - 2) for start in draw(st.lists(st.integers(1, 9), max_size=2))),
        agent_output=draw(TEXT),
        routed_experts=draw(st.none() | experts(num_prompt + len(ids))),
        allowed=draw(st.none() | st.just(masks(num_prompt + len(ids)))),
    )


def experts(num_tokens: int) -> st.SearchStrategy[ExpertArray]:
    """(T, 3, 2), of few experts or of many."""
    few, many = (np.arange(num_tokens * 6).reshape(num_tokens, 3, 2).astype(kind) for kind in (np.uint8, np.uint16))
    return st.sampled_from([few, 256 + many])


def masks(num_tokens: int) -> AllowedTokens:
    """Two masks of 96 tokens, or none at all."""
    words = np.array([[1, -1, 0], [-(2**31), 5, 2**31 - 1]], np.int32)
    return AllowedTokens(masks=words, mask_of=(np.arange(num_tokens) % 3 - 1).astype(np.int32))


def plain(value: object) -> object:
    """A dataclass as plain data, arrays with their type, for comparison."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_groups_come_back_exactly_as_they_were_written(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    written = [data.draw(groups(group_id)) for group_id in (4, 5)]
    path = tmp_path_factory.mktemp("trajectories") / "step=000003.parquet"

    write_trajectories(path, 3, written)

    assert [plain(group) for group in read_groups(path)] == [plain(group) for group in written]
    assert list(path.parent.iterdir()) == [path]  # nothing half-written beside it


def test_a_file_without_one_of_the_columns_is_refused_by_its_name(tmp_path: Path) -> None:
    path, before = tmp_path / "step=000001.parquet", tmp_path / "before.parquet"
    write_trajectories(path, 1, [make.group(make.trajectory([1, 2]), source="code")])
    pq.write_table(pq.read_table(path).drop_columns(["allowed"]), before)
    assert read_groups(before)[0].trajectories[0].allowed is None  # written before there were forms
    pq.write_table(pq.read_table(path).drop_columns(["source"]), before)

    assert read_groups(path)[0].prompt.source == "code"
    with pytest.raises(InputError, match=r"before.parquet was written by an older rayapp: it has no column source"):
        read_groups(before)


def test_whatever_a_policy_wrote_and_a_reward_function_returned_can_be_stored(tmp_path: Path) -> None:
    half = "half a pair: \ud800"
    call = CallRecord(name=half, arguments=half, output=half, failure=half, reward=10**400)
    terms: Any = {half: 2**60 + 1, 3: np.float32(0.5), "no number": "x", "huge": -(10**400), "nan": float("nan")}
    reward: Any = Reward(value=np.int64(1), terms=terms, status=half, detail=half)  # type: ignore[arg-type]
    turns = (make.turn(1, 2, text=half, calls=(call,)),)
    trajectory = make.trajectory([1, 2], completion_text=half, reward=reward, turns=turns)
    path = tmp_path / "step=000001.parquet"

    write_trajectories(path, 1, [make.group(trajectory, text=half, stop=(half,))])

    (read,) = read_groups(path)[0].trajectories
    spelled = "half a pair: \\ud800"
    assert (read.completion_text, read.turns[0].text, read.turns[0].calls[0].output) == (spelled,) * 3
    assert read.turns[0].calls[0].reward == float("inf")
    assert {name: str(value) for name, value in read.reward.terms.items()} == {
        spelled: str(float(2**60)), "3": "0.5", "no number": "nan", "huge": "-inf", "nan": "nan",
    }  # fmt: skip


def test_what_the_learner_thought_of_sampled_tokens_stands_beside_the_engines(tmp_path: Path) -> None:
    sampled = make.trajectory([1, 2, 3, 4], log_prob=-1.0, response_mask=np.array([False, True, False, True]))
    path = tmp_path / "step=000001.parquet"
    groups = [make.group(sampled, sampled, group_id=number) for number in range(2)]

    # The third of the step: the first of the second group.
    write_trajectories(path, 1, groups, {2: np.array([-1.5, -2.5], np.float32)})

    assert pq.read_table(path)["learner_log_probs"].to_pylist() == [None, None, [0.0, -1.5, 0.0, -2.5], None]
    assert [plain(group) for group in read_groups(path)] == [plain(group) for group in groups]


def test_any_parquet_tool_reads_the_documented_columns(tmp_path: Path) -> None:
    path = tmp_path / "step=000003.parquet"
    write_trajectories(path, 3, [])

    table = pq.read_table(path)

    documented = (Path(__file__).parents[3] / "docs" / "run-folder.md").read_text()
    assert table.schema.metadata[b"rayapp.schema_version"] == b"1"
    assert table.column_names == SCHEMA.names
    assert [name for name in SCHEMA.names if f"`{name}`" not in documented] == []


def test_a_file_of_another_schema_is_refused_by_its_version(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"step": [1]}), path)

    with pytest.raises(InputError, match="has trajectory schema none, but this version reads only 1"):
        read_groups(path)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step=000001.parquet"
    path.write_bytes(b"PAR1 and then the disk was full")

    with pytest.raises(InputError, match=r"step=000001\.parquet is not a readable parquet file"):
        read_groups(path)


def test_a_changed_byte_is_not_read_as_other_tokens(tmp_path: Path) -> None:
    file = tmp_path / "step=000001.parquet"
    log_probs = np.random.default_rng(0).random(400).astype(np.float32)  # nothing that a packer could leave out
    write_trajectories(file, 1, [make.group(make.trajectory(range(400), rollout_log_probs=log_probs))])
    group = pq.ParquetFile(file).metadata.row_group(0)
    columns = {group.column(number).path_in_schema: group.column(number) for number in range(group.num_columns)}
    column = columns["rollout_log_probs.list.element"]
    data = bytearray(file.read_bytes())
    data[column.dictionary_page_offset + column.total_compressed_size // 2] ^= 0x10
    file.write_bytes(data)

    with pytest.raises(InputError, match=r"is not a readable parquet file: .*CRC"):
        read_groups(file)


def test_a_file_that_can_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "step=000001.parquet").mkdir()  # in the way of the rename
    with pytest.raises(OSError, match="directory"):
        write_trajectories(tmp_path / "step=000001.parquet", 1, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step=000001.parquet"]


def test_each_picture_lies_once_beside_the_trajectories_and_is_read_again(tmp_path: Path) -> None:
    shown, red = Picture(sha256="ab" * 32, start=0, end=1), b"red"
    told = dataclasses.replace(make.trajectory([1, 2]), media=(shown,))
    group = dataclasses.replace(make.group(told), pictures={shown.sha256: red})
    path = tmp_path / "trajectories" / "step=000001.parquet"
    path.parent.mkdir()

    write_trajectories(path, 1, [group])
    (found,) = read_groups(path)

    assert [file.name for file in (tmp_path / "pictures").iterdir()] == [shown.sha256]
    assert found.trajectories[0].media == (shown,)
    assert found.pictures == {shown.sha256: red}

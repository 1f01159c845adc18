"""Training data: which rows come, in which order, and errors about files and rows that can't be used."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayapp.core.errors import InputError
from rayapp.rollout.agents import check_agent_name
from rayapp.tasks.data.preparing import Preparation, prepare
from rayapp.tasks.data.reading import ReadOptions, TrainingData, cut_prompt, open_data, row_order, windows
from scripts.problems import FOLDER


def verl_row(number: int, *, words: int = 1, tool: str = "calc") -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": " ".join(["word"] * words)}],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number, "tools_kwargs": {tool: {"create_kwargs": {"ground_truth": str(number)}}}},
    }


def write(path: Path, rows: Sequence[Mapping[str, Any]], rows_per_group: int = 4) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=rows_per_group)
    return str(path)


def encode(messages: Sequence[Mapping[str, Any]], agent_name: str) -> list[int]:
    """One token a word, and three for the tools of an agent that has some."""
    tools = [0] * 3 if agent_name == "tool_agent" else []
    return tools + [index for message in messages for index, _ in enumerate(message["content"].split())]


def open_now(uris: Sequence[str], tmp_path: Path, options: ReadOptions = ReadOptions(), **more: Any) -> TrainingData:  # noqa: B008
    return asyncio.run(open_data(uris, options, cache=tmp_path / "cache", **more))


def numbers(data: TrainingData, count: int, start: int = 0) -> list[int]:
    return [int(row.ground_truth) for row in islice(data.rows(start), count)]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    window_rows=st.integers(1, 30),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_an_epoch_has_every_row_once_within_bounded_windows(
    sizes: list[int], window_rows: int, seed: int, epoch: int, shuffle: bool
) -> None:
    plan = windows(sizes, window_rows=window_rows, seed=seed, epoch=epoch, shuffle=shuffle)

    groups = [group for window in plan for group in window.groups]
    assert sorted(groups) == [group for group, size in enumerate(sizes) if size]
    assert [window.start for window in plan] == [sum(w.num_rows for w in plan[:i]) for i in range(len(plan))]
    assert all(window.num_rows <= window_rows or len(window.groups) == 1 for window in plan)
    for window in plan:
        assert sorted(row_order(window, seed=seed, epoch=epoch, shuffle=shuffle)) == list(range(window.num_rows))
    assert shuffle or groups == sorted(groups)
    assert plan == windows(sizes, window_rows=window_rows, seed=seed, epoch=epoch, shuffle=shuffle)


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("two")
    return [
        write(folder / "a.parquet", [verl_row(number) for number in range(11)]),
        write(folder / "b.parquet", [verl_row(number) for number in range(11, 20)]),
    ]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(start=st.integers(0, 65), seed=st.integers(0, 3), window_rows=st.sampled_from([1, 6, 100]))
def test_a_run_resumed_at_any_row_sees_what_an_unbroken_one_sees(
    two_files: list[str], tmp_path: Path, start: int, seed: int, window_rows: int
) -> None:
    options = ReadOptions(seed=seed, window_rows=window_rows)

    unbroken = numbers(open_now(two_files, tmp_path, options), 70)
    resumed = numbers(open_now(two_files, tmp_path, options), 70 - start, start)

    assert resumed == unbroken[start:]
    for epoch in range(3):
        assert sorted(unbroken[20 * epoch : 20 * epoch + 20]) == list(range(20))


def test_order_depends_on_seed_and_epoch(two_files: list[str], tmp_path: Path) -> None:
    first = numbers(open_now(two_files, tmp_path, ReadOptions(seed=1)), 40)
    other = numbers(open_now(two_files, tmp_path, ReadOptions(seed=2)), 40)

    assert first[:20] != first[20:]
    assert first[:20] != other[:20]


def test_at_most_two_windows_are_held(two_files: list[str], tmp_path: Path) -> None:
    data = open_now(two_files, tmp_path, ReadOptions(window_rows=4))

    numbers(data, 45)

    held = data._loaded.cache_info()
    assert held.currsize == 2
    # 20 rows in groups of 4, 4, 3 and 4, 4, 1: at most six windows an epoch, each read once; 45 rows are 2.25 epochs.
    assert held.misses <= 6 + 6 + 3


def test_a_row_has_its_own_tools_only(tmp_path: Path) -> None:
    # Parquet merges the structs: each row has the keys of both tools, and None in the other's.
    path = write(tmp_path / "a.parquet", [verl_row(0, tool="calc"), verl_row(1, tool="search")])

    row = open_now([path], tmp_path, ReadOptions(shuffle=False)).row(1)

    assert row.tools_kwargs == {"search": {"create_kwargs": {"ground_truth": "1"}}}
    assert row.extra_info["index"] == 1


def test_overlong_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [verl_row(number, words=number + 1) for number in range(10)])
    options = ReadOptions(max_prompt_tokens=6, shuffle=False)

    data = open_now([path], tmp_path, options, encode=encode)

    assert (len(data), data.num_overlong) == (6, 4)
    assert numbers(data, 7) == [0, 1, 2, 3, 4, 5, 0]
    assert data.row(3).prompt_ids == (0, 1, 2, 3)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_rows_of_a_json_file_are_those_of_the_same_parquet_file(tmp_path: Path, suffix: str) -> None:
    rows = [verl_row(number) for number in range(9)]
    rows[3]["extra_info"]["only_here"] = "2024-01-01"
    rows[4]["prompt"][0]["content"] = "one\u2028two\x85three"  # which Python calls ends of lines
    file, lines = tmp_path / f"rows{suffix}", [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    file.write_text(json.dumps(rows) if suffix == ".json" else "".join(lines))

    data = open_now([str(file)], tmp_path, ReadOptions(seed=4))

    same = open_now([write(tmp_path / "rows.parquet", rows, rows_per_group=1000)], tmp_path, ReadOptions(seed=4))
    assert list(islice(data.rows(), 20)) == list(islice(same.rows(), 20))
    assert sorted(row.extra_info.get("only_here", "") for row in islice(data.rows(), 9))[-2:] == ["", "2024-01-01"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n{"a": ', r"rows\.jsonl, line 2 is not JSON"),
        ("[1]", r"rows\.jsonl must contain a list of rows, each an object with prompt, data_source, reward_model"),
        ('{"a": 1}\n{"a": "x"}', r"rows\.jsonl: all values of a column must have the same type"),
        ('{"prompt": "2 + 2?", "answer": 4}', r"no column data_source, reward_model; .*`rayapp data rows`"),
    ],
)
def test_a_json_file_that_cannot_be_used_is_told_with_what_it_lacks(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)

    with pytest.raises(InputError, match=said):
        open_now([str(tmp_path / "rows.jsonl")], tmp_path)


def test_a_file_of_the_hub_is_fetched_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [verl_row(number) for number in range(3)]
    content = Path(write(tmp_path / "rows.parquet", rows)).read_bytes()
    asked = list[str]()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            found = self.path == "/datasets/me/mine/resolve/v1/data/rows.parquet"
            self.send_response(200 if found else 404)
            for name, value in {"ETag": '"abc"', "X-Repo-Commit": "c" * 40}.items() if found else ():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)) if found else "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        data = open_now(["hf://datasets/me/mine@v1/data/rows.parquet"], tmp_path, ReadOptions(shuffle=False))
        assert numbers(data, 3) == [0, 1, 2]
        with pytest.raises(InputError, match=r"mine/gone\.parquet can't be downloaded from the hub: "):
            open_now(["hf://datasets/me/mine/gone.parquet"], tmp_path)
        with pytest.raises(InputError, match=r"names no file: write hf://datasets/OWNER/NAME/FILE"):
            open_now(["hf://datasets/me/rows.parquet"], tmp_path)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("truncation", "expected"), [("left", [2, 3, 4, 5, 6]), ("right", [0, 1, 2, 3, 4]), ("middle", [0, 1, 4, 5, 6])]
)
def test_an_overlong_prompt_is_cut_where_it_is_asked_to(tmp_path: Path, truncation: Any, expected: list[int]) -> None:
    path = write(tmp_path / "a.parquet", [verl_row(0, words=7)])
    options = ReadOptions(max_prompt_tokens=5, filter_overlong_prompts=False, truncation=truncation)

    data = open_now([path], tmp_path, options, encode=encode)

    assert list(data.row(0).prompt_ids) == expected


@given(st.integers(0, 30), st.integers(1, 30), st.sampled_from(["left", "right", "middle"]))
def test_a_cut_prompt_has_the_length_it_may_have(length: int, most: int, truncation: Any) -> None:
    cut = cut_prompt(list(range(length)), most, truncation, "row")

    assert len(cut) == min(length, most)
    assert sorted(set(cut)) == list(cut)


def truth_row(source: object, truth: object) -> dict[str, Any]:
    return verl_row(0) | {"data_source": source, "reward_model": {"style": "rule", "ground_truth": truth}}


def kind_of(source: str) -> Any:
    if source not in ("text", "targets", "any"):
        raise InputError(f"no rule for {source}")
    return source


def test_ground_truths_that_rules_can_read_pass(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.parquet", [truth_row("text", 12), truth_row("any", 3)])
    lists = write(tmp_path / "b.parquet", [truth_row("targets", {"target": ["a", "b"]})] * 9)
    texts = write(tmp_path / "c.parquet", [truth_row("targets", {"target": "a"}), truth_row("any", {"target": None})])

    for path in (whole, lists, texts):
        assert len(open_now([path], tmp_path, truth_kind=kind_of)) > 0


async def test_what_prepare_writes_can_be_read(tmp_path: Path) -> None:
    await prepare(Preparation(name="gsm8k", source=str(FOLDER), out=str(tmp_path / "out")))

    data = await open_data([str(tmp_path / "out" / "train.parquet")], ReadOptions(), cache=tmp_path / "cache")

    assert len(data) == 240
    row = data.row(0)
    assert row.agent_name == "tool_agent"
    assert row.tools_kwargs == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": row.ground_truth}}}
    assert [message["role"] for message in row.messages] == ["system", "user"]


def test_the_tools_of_a_row_count_for_its_length(tmp_path: Path) -> None:
    rows = [
        verl_row(number, words=4) | {"agent_name": name} for number, name in enumerate(["tool_agent", None, "other"])
    ]
    path = write(tmp_path / "a.parquet", rows)

    data = open_now([path], tmp_path, ReadOptions(max_prompt_tokens=6, shuffle=False), encode=encode)

    assert numbers(data, 2) == [1, 2]  # 3 + 4 tokens are too many, 4 are not


def test_rows_with_images_are_refused_for_a_model_for_text_and_empty_columns_of_images_are_not(tmp_path: Path) -> None:
    image = {"bytes": b"png", "path": None}
    kind = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))

    def with_images(*images: list[dict[str, Any]] | None) -> str:
        table = pa.Table.from_pylist([verl_row(number) for number in range(len(images))])
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"
        pq.write_table(table.append_column("images", pa.array(images, kind)), path)
        return str(path)

    with pytest.raises(InputError, match="its rows have images, but the model reads only text"):
        open_now([with_images([], [image])], tmp_path, ReadOptions(), encode=encode)

    assert numbers(open_now([with_images([], None)], tmp_path, ReadOptions(shuffle=False), encode=encode), 2) == [0, 1]


def any_row(**change: Any) -> dict[str, Any]:
    return {key: value for key, value in (truth_row("any", "1") | change).items() if value is not ...}


def words(number: int) -> dict[str, Any]:
    return any_row(prompt=[{"role": "user", "content": " ".join(["word"] * number)}])


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    *(([any_row(**{column: ...})], f"no column {column}") for column in ("prompt", "data_source", "reward_model")),
    ([any_row(prompt=None)], "prompt must be"),
    ([any_row(), any_row(prompt=None)], "row 1: prompt must be a non-empty list"),
    ([any_row(prompt="text")], "prompt must be a list"),
    ([any_row(prompt=[{"text": "x"}])], "prompt must be a list of structs"),
    ([any_row(data_source=3)], "data_source must be text"),
    ([any_row(reward_model="4")], "reward_model must be a struct"),
    ([any_row(reward_model={"style": "rule"})], "struct with ground_truth"),
    ([any_row(extra_info="x")], "extra_info must be a struct"),
    ([any_row(extra_info={"tools_kwargs": "{}"})], r"extra_info\.tools_kwargs"),
    ([any_row(agent_name=3)], "agent_name must be text"),
    ([any_row(agent_name="tool_agent"), any_row(agent_name="react")], "row 1: agent_name 'react'"),
    ([truth_row("text", "1")] * 6 + [truth_row("text", None)] * 2, r"a\.parquet, row 6: .*no ground_truth"),
    ([truth_row("text", "1"), truth_row(None, "1")], "row 1: it has no data_source"),
    ([truth_row("text", "1"), truth_row("", "1")], "row 1: it has no data_source"),
    ([truth_row("text", "1"), truth_row("apps", "1")], "row 1: no rule for apps"),
    ([truth_row("text", 0.5)], "text or a whole number; it is double"),
    ([truth_row("text", {"target": ["a"]})], "text or a whole number; it is struct"),
    ([truth_row("targets", "a")], "struct whose `target`"),
    ([truth_row("targets", {"target": [1]})], "struct whose `target`"),
    ([truth_row("targets", {"targets": ["a"]})], "struct whose `target`"),
    ([truth_row("targets", {"target": [None, "a"]})], "no target"),
    ([truth_row("targets", {"target": ["a"]}), truth_row("targets", {"target": []})], "row 1: .*no target"),
    ([truth_row("targets", {"target": ["a"]}), truth_row("targets", {"target": None})], "row 1: .*no target"),
    ([words(2), words(9)], r"row 1: .*max_prompt_tokens is 5"),
]


@pytest.mark.parametrize(("rows", "said"), REFUSED)
def test_rows_that_can_not_be_used_are_named_when_their_file_is_opened(
    tmp_path: Path, rows: list[dict[str, Any]], said: str
) -> None:
    path = write(tmp_path / "a.parquet", rows)
    options = ReadOptions(max_prompt_tokens=5, filter_overlong_prompts=False)
    with pytest.raises(InputError, match=said):
        open_now([path], tmp_path, options, encode=encode, truth_kind=kind_of, check_agent=check_agent_name)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((content, "parquet") for content in (b"", b"PAR1", b"no parquet", b"PAR1" + bytes(100) + b"PAR1", "half")),
        ("empty", "no rows"),
        (None, "no such file"),
    ],
)
def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, content: bytes | str | None, said: str) -> None:
    path = Path(write(tmp_path / "a.parquet", [verl_row(number) for number in range(50)]))
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "half":
        path.write_bytes(path.read_bytes()[:2000])
    elif content == "empty":
        pq.write_table(pa.Table.from_pylist([verl_row(0)]).slice(0, 0), path)
    else:
        path.unlink()
    with pytest.raises(InputError, match=rf"(?s)a\.parquet.*{said}|{said}.*a\.parquet"):
        open_now([str(path)], tmp_path)


def test_data_of_no_files_or_of_overlong_prompts_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one"):
        open_now([], tmp_path)
    with pytest.raises(InputError, match="all 1 prompts"):
        open_now([write(tmp_path / "a.parquet", [words(9)])], tmp_path, ReadOptions(max_prompt_tokens=3), encode=encode)

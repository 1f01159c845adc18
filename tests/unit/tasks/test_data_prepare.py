"""`rayapp data prepare`: raw examples to verl's row schema, locally and on S3, and what it does with bad ones."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayapp.cli.main import run
from rayapp.core.errors import InputError
from rayapp.tasks.data.downloads import OwnColumns
from rayapp.tasks.data.preparing import Preparation, prepare
from rayapp.tasks.data.rows import extract_solution, geometry3k_row, gsm8k_row
from scripts.problems import FOLDER


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def problem(number: int) -> dict[str, Any]:
    return {"question": f"What is {number} + 0?", "answer": f"It stays.\n#### {number}"}


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def test_a_row_has_what_the_seeds_script_writes() -> None:
    row = gsm8k_row({"question": "1+1?", "answer": "two\n#### 2"}, 7, "train", "openai/gsm8k")

    assert list(row) == ["data_source", "agent_name", "prompt", "ability", "reward_model", "extra_info"]
    assert row["prompt"][1] == {
        "role": "user",
        "content": "1+1? Let's think step by step and output the final answer after `####`.",
    }
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert row["extra_info"] == {
        "split": "train",
        "index": 7,
        "answer": "two\n#### 2",
        "question": "1+1?",
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2"}}},
        "interaction_kwargs": {"query": "1+1?", "ground_truth": "2"},
    }


@pytest.mark.parametrize(
    ("answer", "number"), [("#### 1,234", "1234"), ("#### -5", "-5"), ("#### 1\n#### 2", "2"), ("####3.5.", "3.5")]
)
def test_the_solution_is_the_number_after_the_last_mark(answer: str, number: str) -> None:
    assert extract_solution(answer) == number


@pytest.mark.parametrize("answer", ["", "42", "#### none", "#### .", "#### 1.2.3", "####"])
def test_an_answer_without_a_number_is_refused(answer: str) -> None:
    with pytest.raises(InputError):
        extract_solution(answer)


async def test_the_shipped_problems_become_parquet_with_a_manifest(tmp_path: Path) -> None:
    out = tmp_path / "out"

    reports = await prepare(Preparation(name="gsm8k", source=str(FOLDER), out=str(out)))

    assert [(report.split, report.num_written, report.bad) for report in reports] == [
        ("train", 240, []),
        ("test", 60, []),
    ]
    assert [row["extra_info"]["index"] for row in read(out / "test.parquet")] == list(range(60))
    assert set(json.loads((out / "manifest.json").read_text())["files"]) == {"train.parquet", "test.parquet"}


async def test_the_same_source_gives_the_same_rows_from_every_kind_of_file(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = [problem(1), problem(2)]
    write_jsonl(tmp_path / "jsonl" / "train.jsonl", rows)
    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "parquet" / "train-00000-of-00001.parquet")
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "saved"))

    for kind in ("jsonl", "parquet", "saved", "jsonl/train.jsonl"):
        out = tmp_path / "out" / kind.replace("/", "-")
        await prepare(Preparation(name="gsm8k", source=str(tmp_path / kind), out=str(out)))
        assert [row["reward_model"]["ground_truth"] for row in read(out / "train.parquet")] == ["1", "2"]


async def test_rows_that_cannot_be_mapped_are_named_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_jsonl(tmp_path / "train.jsonl", [problem(1), {"question": "?", "answer": "no mark"}, problem(3)])
    job = Preparation(name="gsm8k", source=str(tmp_path / "train.jsonl"), out=str(tmp_path / "out"), max_bad_ratio=0.5)

    (report,) = await prepare(job)

    assert report.num_written == 2
    assert report.bad[0].startswith("line 2: the answer has no number")
    assert "line 2 can't be mapped" in caplog.text
    # The index is the source's, not that of the kept rows.
    assert [row["extra_info"]["index"] for row in read(tmp_path / "out" / "train.parquet")] == [0, 2]


async def test_too_many_bad_rows_fail_and_write_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [problem(1), {"question": "?", "answer": "no mark"}])

    with pytest.raises(InputError, match=r"1 of 2 rows .* line 2: the answer"):
        await prepare(Preparation(name="gsm8k", source=str(tmp_path / "train.jsonl"), out=str(tmp_path / "out")))

    assert not (tmp_path / "out" / "manifest.json").exists()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [('{"prompt": "x"}\n', "no column 'question'"), ("{broken", "line 1: it is not JSON"), ("", "no usable rows")],
)
async def test_a_source_of_another_kind_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "train.jsonl").write_text(content)

    with pytest.raises(InputError, match=words):
        await prepare(Preparation(name="gsm8k", source=str(tmp_path / "train.jsonl"), out=str(tmp_path / "out")))


@pytest.mark.parametrize("source", ["/nowhere/at/all", "not a hub id"])
async def test_a_source_that_is_nowhere_is_named(tmp_path: Path, source: str) -> None:
    with pytest.raises(InputError, match="neither a path"):
        await prepare(Preparation(name="gsm8k", source=source, out=str(tmp_path / "out")))


def png() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(buffer, "PNG")
    return buffer.getvalue()


async def test_geometry_rows_keep_the_bytes_of_their_images(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict, Features, Image, List, Value

    features = Features({"images": List(Image()), "problem": Value("string"), "answer": Value("string")})
    rows = [{"images": [{"bytes": png(), "path": None}], "problem": "<image>Find x.", "answer": "3"}]
    DatasetDict({"train": Dataset.from_list(rows, features=features)}).save_to_disk(str(tmp_path / "raw"))

    await prepare(Preparation(name="geometry3k", source=str(tmp_path / "raw"), out=str(tmp_path / "out")))

    (row,) = read(tmp_path / "out" / "train.parquet")
    assert row["images"][0]["bytes"] == png()
    assert row["data_source"] == "hiyouga/geometry3k"
    assert row["reward_model"]["ground_truth"] == "3"


def test_a_geometry_problem_whose_images_do_not_match_its_marks_is_refused() -> None:
    with pytest.raises(InputError, match="0 images, but its problem has 1"):
        geometry3k_row({"problem": "<image>?", "answer": "1", "images": []}, 0, "train", "x")


def test_the_command_prints_what_it_wrote_and_refuses_other_data_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["data", "prepare", "gsm8k", "--source", str(FOLDER), "--out", str(tmp_path / "out"), "--limit", "5"]

    assert run(arguments) == 0

    assert "train.parquet: 5 rows written, 0 rows could not be mapped" in capsys.readouterr().out
    assert run(["data", "prepare", "imagenet", "--out", str(tmp_path)]) == 2
    assert "Choose one of gsm8k, geometry3k" in capsys.readouterr().err


def own_rows(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """Train on a user's own examples, as `rayapp data rows` writes them."""
    assert run(["data", "rows", str(tmp_path / "mine.jsonl"), "--out", str(tmp_path / "out"), *options]) == 0
    return read(tmp_path / "out" / "train.parquet")


def test_own_rows_in_trls_columns_are_rows_to_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": "3 + 3?"}]
    write_jsonl(tmp_path / "mine.jsonl", [{"prompt": chat, "answer": 6, "level": "easy"}])

    [row] = own_rows(tmp_path, "--system", "Be brief.")

    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, *chat]
    assert row["reward_model"]["ground_truth"] == "6"
    assert (row["data_source"], row["extra_info"]) == ("own", {"split": "train", "index": 0, "level": "easy"})
    assert "reward.custom=FILE.py:FUNCTION" in capsys.readouterr().out


def test_own_columns_have_any_names_and_a_test_split_is_taken_from_them(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "mine.jsonl", [{"task": f"{n} + 0?", "result": str(n), "note": None} for n in range(20)])

    rows = own_rows(
        tmp_path, "--prompt-column", "task", "--answer-column", "result", "--test-ratio", "0.2", "--data-source", "math"
    )
    held_out = read(tmp_path / "out" / "test.parquet")

    assert (len(rows), len(held_out)) == (16, 4)
    assert {row["reward_model"]["ground_truth"] for row in [*rows, *held_out]} == {str(n) for n in range(20)}
    assert rows[0]["data_source"] == "math"


def test_own_rows_without_a_column_to_ask_or_to_compare_with_say_which_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "mine.jsonl", [{"text": "2 + 2?", "value": "4"}])
    arguments = ["data", "rows", str(tmp_path / "mine.jsonl"), "--out", str(tmp_path / "out")]

    assert run(arguments) == 2
    assert "the columns are text, value. Name one with --prompt-column" in capsys.readouterr().err
    assert run([*arguments, "--prompt-column", "text"]) == 2
    assert "Name one with --answer-column, or give --no-answers" in capsys.readouterr().err
    assert run([*arguments, "--prompt-column", "text", "--no-answers"]) == 0


def test_code_problems_with_asserts_are_rows_that_can_be_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mbpp = "google-research-datasets/mbpp"
    tests = "import math\nassert inc(1) == 2\nassert inc(\n    3) == 4"
    write_jsonl(tmp_path / "mine.jsonl", [{"problem": "Write inc(x).", "target": tests}])

    [row] = own_rows(tmp_path, "--data-source", mbpp)

    truth = json.loads(row["reward_model"]["ground_truth"])
    assert truth == {"test_list": ["assert inc(1) == 2", "assert inc(3) == 4"], "test_setup_code": "import math"}
    assert f"rayapp score {mbpp} --data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data_source", "words"),
    [
        ("gsm8k", "did you mean openai/gsm8k?"),
        ("google-research-datasets/mbpp", "must be an object with tests, not 4"),
    ],
)
def test_own_rows_that_training_would_refuse_are_not_written(
    tmp_path: Path, data_source: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "mine.jsonl", [{"prompt": "2 + 2?", "answer": "4"}])
    arguments = ["data", "rows", str(tmp_path / "mine.jsonl"), "--out", str(tmp_path / "out")]

    assert run([*arguments, "--data-source", data_source]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_folder_with_other_rows_needs_the_option_that_the_message_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "mine.jsonl", [{"prompt": f"{n}?", "answer": n} for n in range(3)])
    arguments = ["data", "rows", str(tmp_path / "mine.jsonl"), "--out", str(tmp_path / "out")]
    assert run([*arguments, "--limit", "1"]) == 0

    assert run(arguments) == 2
    assert "already holds different files" in (said := capsys.readouterr().err)
    assert "--overwrite" in said
    assert run([*arguments, "--overwrite"]) == 0


DIRTY = {
    b'{"prompt": "caf\xe9?", "answer": 1}': "can't decode byte 0xe9",
    b'{"prompt": "x", "answer": ': "not JSON",
    b'{"prompt": "", "answer": 1}': "column prompt is empty",
    b"[1, 2]": "not an object",
    b'{"prompt": "\\ud83d?", "answer": 1}': "half of a surrogate pair",
    b'{"prompt": "a\x00?", "answer": 1}': "not JSON",
    b'{"prompt": "a?", "answer": NaN}': "not nan",
    b'{"prompt": "a?", "answer": "  "}': "not '  '",
    b'{"prompt": "a?", "answer": ["x"]}': "not ['x']",
    b'{"prompt": "a?", "answer": true}': "not True",
    b'{"prompt": [], "answer": 1}': "not []",
    b'{"prompt": 5, "answer": 1}': "not 5",
    '{"prompt": " \u00a0\u200b", "answer": 1}'.encode(): "column prompt is empty",
    b'{"prompt": "' + b"x" * 600_000 + b'", "answer": 1}': "600,000 characters, more than the maximum",
}


async def test_real_data_is_converted_without_its_bad_lines_which_have_numbers(tmp_path: Path) -> None:
    good = [json.dumps({"prompt": f"{n} + {n}?", "answer": 2 * n if n % 5 else str(n)}).encode() for n in range(50)]
    lines = [*good[:9], *DIRTY, *good[9:]]
    (tmp_path / "mine.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\r\n")
    job = Preparation(name="own", source=str(tmp_path / "mine.jsonl"), out=str(tmp_path / "out"), own=OwnColumns())

    (report,) = await prepare(replace(job, max_bad_ratio=0.3))

    assert report.num_written == 50
    found = sorted(report.bad, key=lambda each: int(each.split()[1].strip(":")))
    assert [each.partition(":")[0] for each in found] == [f"line {number}" for number in range(10, 10 + len(DIRTY))]
    assert all(why in told for why, told in zip(DIRTY.values(), found, strict=True)), found


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-8"])
@pytest.mark.parametrize("indent", [None, 2])
async def test_a_list_loses_only_its_broken_items(tmp_path: Path, encoding: str, indent: int | None) -> None:
    items = [json.dumps({"prompt": f"Zürich {n}?", "answer": n}, indent=indent, ensure_ascii=False) for n in range(9)]
    text = "[\n" + ",\n".join([*items[:4], '{"prompt": "x" "answer": 1}', "7", *items[4:]]) + "\n]"
    (tmp_path / "mine.json").write_bytes(text.encode(encoding))
    job = Preparation(name="own", source=str(tmp_path / "mine.json"), out=str(tmp_path / "out"), own=OwnColumns())

    (report,) = await prepare(replace(job, max_bad_ratio=0.3))

    first = 2 + 4 * (1 + items[0].count("\n"))
    assert report.bad[0].partition(":")[0] == f"line {first}"
    assert report.num_written == 9
    assert read(tmp_path / "out" / "train.parquet")[8]["prompt"][0]["content"] == "Zürich 8?"


@pytest.mark.parametrize(
    ("rows", "bad", "num_written"),
    [
        ('a?,1\nb?,"2\nc?,3\nd?,4\n', ["line 3"], 3),
        ('a?,1\n"b?,2\nc?,3\nd?,"4"\n', ["line 3"], 3),
        ('a?,1\n\nb?,2,\nc?\n"d ""x"", e?",4\n', ["line 4", "line 5"], 2),
        ('a?, 1\n b?, "2"\n', [], 2),
    ],
)
@pytest.mark.parametrize(("mark", "encoding"), [(",", "utf-8"), (";", "utf-8-sig"), ("\t", "utf-16")])
async def test_a_table_in_another_form_loses_only_its_bad_lines(
    tmp_path: Path, rows: str, bad: list[str], num_written: int, mark: str, encoding: str
) -> None:
    text = f"prompt, answer\n{rows}".replace(",", mark)
    (tmp_path / "mine.csv").write_bytes(text.encode(encoding))
    job = Preparation(name="own", source=str(tmp_path / "mine.csv"), out=str(tmp_path / "out"), own=OwnColumns())

    (report,) = await prepare(replace(job, max_bad_ratio=0.6))

    assert ([each.partition(":")[0] for each in report.bad], report.num_written) == (bad, num_written)
    assert {row["reward_model"]["ground_truth"] for row in read(tmp_path / "out" / "train.parquet")} <= set("1234")


async def test_a_number_stays_as_it_is_written_beside_others(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": n} for n in (1, 2.5, 3)]
    write_jsonl(tmp_path / "mine.jsonl", rows)
    job = Preparation(name="own", source=str(tmp_path / "mine.jsonl"), out=str(tmp_path / "out"), own=OwnColumns())

    await prepare(job)

    truths = [row["reward_model"]["ground_truth"] for row in read(tmp_path / "out" / "train.parquet")]
    assert truths == ["1", "2.5", "3"]


async def test_a_table_of_text_loses_only_its_bad_lines(tmp_path: Path) -> None:
    rows = b"".join(b"What is %d?,%d\r\n" % (n, n) for n in range(20))
    bad = b"caf\xe9,1\r\na,b,c\r\n"
    (tmp_path / "mine.csv").write_bytes(b"prompt,answer\r\n" + rows + bad + b'"Two\nlines?",3\r\n')
    job = Preparation(name="own", source=str(tmp_path / "mine.csv"), out=str(tmp_path / "out"), own=OwnColumns())

    (report,) = await prepare(replace(job, max_bad_ratio=0.2))

    assert [each.partition(":")[0] for each in report.bad] == ["line 22", "line 23"]
    assert read(tmp_path / "out" / "train.parquet")[-1]["prompt"][0]["content"] == "Two\nlines?"


async def test_a_prompt_is_a_text_or_messages_also_beside_others(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2?"}]
    write_jsonl(tmp_path / "mine.jsonl", [{"prompt": "1?", "answer": 1}, {"prompt": messages, "answer": "2"}])
    job = Preparation(name="own", source=str(tmp_path / "mine.jsonl"), out=str(tmp_path / "out"), own=OwnColumns())

    await prepare(job)

    assert [len(row["prompt"]) for row in read(tmp_path / "out" / "train.parquet")] == [1, 2]
    assert read(tmp_path / "out" / "train.parquet")[1]["prompt"] == messages


async def test_all_shards_of_a_split_are_read_and_what_is_not_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine").mkdir()
    for shard in range(2):
        rows = [{"prompt": f"{shard} + {n}?", "answer": shard + n} for n in range(3)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mine" / f"train-0000{shard}-of-00002.parquet")
    job = Preparation(name="own", source=str(tmp_path / "mine"), out=str(tmp_path / "out"), own=OwnColumns())

    (report,) = await prepare(job)
    assert report.num_written == 6
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name in ("train", "validation")}).save_to_disk(
        str(tmp_path / "saved")
    )
    await prepare(replace(job, source=str(tmp_path / "saved"), overwrite=True))
    assert "splits that are left out, because only train, test are read: validation" in caplog.text
    write_jsonl(tmp_path / "mine" / "train.jsonl", rows)
    with pytest.raises(InputError, match=r"several files for one split: train-00000-of-.*, train\.jsonl. Leave one"):
        await prepare(job)


async def test_rows_with_the_same_prompt_are_in_one_split_and_reported(tmp_path: Path) -> None:
    blanks = ("What is {}?", " WHAT  is {}?\u00a0", "What\nis\t{}\uff1f\n")
    rows = [{"prompt": blanks[n // 20].format(n % 20), "answer": n} for n in range(60)]
    write_jsonl(tmp_path / "mine.jsonl", rows)
    job = Preparation(name="own", source=str(tmp_path / "mine.jsonl"), out=str(tmp_path / "out"), own=OwnColumns())

    reports = await prepare(replace(job, test_ratio=0.2))

    def asked(split: str) -> set[int]:
        rows = read(tmp_path / "out" / f"{split}.parquet")
        return {int("".join(filter(str.isdigit, row["prompt"][0]["content"]))) for row in rows}

    assert asked("train") & asked("test") == set()
    assert [report.num_written for report in reports] == [48, 12]
    assert sum(len(report.repeats) for report in reports) == 40
    assert reports[0].repeats[0].startswith("train line ")

"""Pictures of data rows: columns, places, limits, and the rows that are left out with their reasons."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayapp.core.errors import InputError
from rayapp.core.types import Media, Picture
from rayapp.storage.base import hash_bytes
from rayapp.storage.media import compact, from_data_uri
from rayapp.tasks.data.pictures import PictureFiles, PictureRows, with_parts
from rayapp.tasks.data.preparing import Preparation, prepare
from rayapp.tasks.data.reading import ReadOptions, TrainingData, open_data
from support.picture_models import bomb, picture

PLACEHOLDER = 7


class FourTokens:
    """A processor that gives a picture as many tokens as it has pixels across."""

    def expand(self, ids: Sequence[int], encoded: Sequence[bytes], sizes: Sequence[Any]) -> tuple[list[int], Media]:
        expanded, media, shown = list[int](), list[Picture](), iter(zip(encoded, sizes, strict=True))
        for token in ids:
            start = len(expanded)
            if token == PLACEHOLDER:
                data, (width, _) = next(shown)
                expanded += [PLACEHOLDER] * width
                media.append(Picture(sha256=hash_bytes(data), start=start, end=len(expanded)))
            else:
                expanded.append(token)
        return expanded, tuple(media)


def encode(messages: Sequence[Mapping[str, Any]], agent_name: str) -> list[int]:
    """One token a part or text."""
    parts = [part for each in messages for part in (each["content"] if isinstance(each["content"], list) else [{}])]
    return [PLACEHOLDER if part.get("type") == "image" else 1 for part in parts]


def row(content: Any = "<image>Which colour?", **columns: Any) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        **columns,
    }


def opened(path: Path, tmp_path: Path, **more: Any) -> TrainingData:
    pictures: Any = PictureRows(FourTokens(), PictureFiles(tmp_path / "cache"))  # type: ignore[arg-type]
    options = ReadOptions(shuffle=False, max_prompt_tokens=50, **more)
    return asyncio.run(open_data([str(path)], options, cache=tmp_path / "cache", encode=encode, pictures=pictures))


def written(tmp_path: Path, *rows: Mapping[str, Any]) -> Path:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.Table.from_pylist([{k: v for k, v in each.items() if k != "images"} for each in rows])
    table = table.append_column("images", pa.array([each.get("images") for each in rows], pa.list_(image)))
    pq.write_table(table, tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def stored(encoded: bytes | None = None, path: str | None = None) -> dict[str, Any]:
    return {"bytes": encoded, "path": path}


def test_a_row_with_bytes_gets_the_tokens_of_its_pictures_and_their_places(tmp_path: Path) -> None:
    red, wide = picture(size=(4, 4)), picture((0, 0, 255), (6, 4))
    data = opened(written(tmp_path, row("<image>a<image>", images=[stored(red), stored(wide)])), tmp_path)

    found = data.row(0)

    assert found.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    assert found.prompt_ids == (7, 7, 7, 7, 1, 7, 7, 7, 7, 7, 7)
    assert [(each.start, each.end) for each in found.media] == [(0, 4), (5, 11)]
    assert found.pictures == {hash_bytes(red): red, hash_bytes(wide): wide}
    assert compact(found.prompt_ids, found.media, PLACEHOLDER) == [7, 1, 7]


@pytest.mark.parametrize("column", ["images", "image"])
def test_lines_of_json_name_pictures_beside_the_file(tmp_path: Path, column: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "red.png").write_bytes(picture(size=(4, 4)))
    value: Any = ["red.png"] if column == "images" else "red.png"
    (tmp_path / "in" / "rows.jsonl").write_text(json.dumps(row(**{column: value})) + "\n")

    assert opened(tmp_path / "in" / "rows.jsonl", tmp_path).row(0).prompt_ids == (7, 7, 7, 7, 1)


def test_lines_of_json_may_have_parts_beside_texts_and_name_the_line_of_a_bad_picture(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(picture(size=(4, 4)))
    parts = row([{"type": "image"}, {"type": "text", "text": "What?"}], image="red.png")
    parts["prompt"].insert(0, {"role": "system", "content": "Be brief."})
    file = tmp_path / "mine.jsonl"

    def read(*more: Any) -> TrainingData:
        file.write_text("".join(json.dumps(each) + "\n" for each in (parts, *more)))
        return opened(file, tmp_path)

    data = read(row(image="lost.png"))
    assert data.row(0).prompt_ids == (1, 7, 7, 7, 7, 1)
    assert data.bad[0].startswith(f"{file}, row 1: picture {tmp_path / 'lost.png'} can't be read")
    for bad in (row(images=5), row([{"type": "image"}]), row([{"type": "image_url", "image_url": "a.png"}])):
        with pytest.raises(InputError, match=r"mine\.jsonl, row 1: "):
            read(bad)


def test_without_marks_the_pictures_come_first_in_the_users_message_and_without_pictures_a_mark_is_text() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}
    marked = {"role": "user", "content": "Close the tag <image>."}

    first = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    assert with_parts([system, user], 1) == (system, first)  # as in TRL
    assert with_parts([marked], 0) == (marked,)


@pytest.mark.parametrize("has_picture", [True, False])
def test_parts_of_a_row_without_pictures_are_text(tmp_path: Path, has_picture: bool) -> None:
    """Their list as Python shows it would be no error anywhere."""
    from rayapp.tasks.data.downloads import OwnColumns

    text = row([{"type": "text", "text": "What is 1 + 1?"}])
    made = OwnColumns()({"prompt": text["prompt"], "answer": "2", "images": []}, 0, "train", "own")
    assert made["prompt"] == [{"role": "user", "content": "What is 1 + 1?"}]
    rows = [text, row([{"type": "image"}], images=[stored(picture(size=(4, 4)))])][: 1 + has_picture]

    assert opened(written(tmp_path, *rows), tmp_path).row(0).messages[0]["content"] == "What is 1 + 1?"
    with pytest.raises(InputError, match=r"row 0: the messages have 1 places for pictures .* the row has 0"):
        opened(written(tmp_path, row([{"type": "image"}])), tmp_path)


def test_rows_with_unusable_pictures_are_left_out_and_counted_with_their_reasons(tmp_path: Path) -> None:
    good = row(images=[stored(picture(size=(4, 4)))])
    bad = [
        row(images=[stored(picture()[:60])]),
        row(images=[stored(bomb())]),
        row("<image><image>", images=[stored(picture())]),
        row(images=[stored(path="https://example.com/a.png")]),
        row(images=[stored(path="there-is-no.png")]),
        row(images=[stored(b"<svg/>")]),
        row(images=[stored(picture(size=(402, 2)))]),
        row(images=[stored(path="/dev/zero")]),
        row(images=[stored(path="/proc/self/pagemap")]),
        row(images=[stored(picture())] * 129),
    ]

    data = opened(written(tmp_path, good, *bad), tmp_path)

    assert len(data) == 1
    reasons = ["decoded", "pixels, more than", "2 places for pictures", "data.image_urls", "No such file", "decoded"]
    reasons += ["over 200 times the other", "not a file of at most", "must have 1 to", "129 pictures"]
    assert len(data.bad) == len(bad)
    for number, (why, reason) in enumerate(zip(data.bad, reasons, strict=True), start=1):
        assert f"rows.parquet, row {number}: " in why
        assert reason in why


def test_a_file_whose_pictures_are_all_unusable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"have pictures that can't be used\. First: .*row 0"):
        opened(written(tmp_path, row(images=[stored(b"no")])), tmp_path)


def test_rows_with_videos_are_refused_and_empty_lists_of_them_are_not(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row("What?", videos=list[str]()), row("And now?", videos=["a.mp4"])])
    for rows, has_videos in ((table[:1], False), (table, True)):
        pq.write_table(rows, tmp_path / "rows.parquet")
        with pytest.raises(InputError, match=r"rows\.parquet: its rows have videos") if has_videos else nullcontext():
            opened(tmp_path / "rows.parquet", tmp_path)


def test_a_prompt_is_never_cut_inside_a_picture(tmp_path: Path) -> None:
    path = written(tmp_path, row(images=[stored(picture(size=(60, 4)))]))

    with pytest.raises(InputError, match=r"61 tokens, but rollout\.max_prompt_tokens is 50"):
        opened(path, tmp_path, truncation="left", filter_overlong_prompts=False)


async def test_rows_of_ones_own_are_prepared_with_the_bytes_of_their_pictures(tmp_path: Path) -> None:
    from rayapp.tasks.data.downloads import OwnColumns

    (tmp_path / "red.png").write_bytes(picture())
    lines = [
        {"prompt": "Which colour?", "answer": "red", "image": "red.png"},
        {"prompt": "Which colour?", "answer": "red", "image": "lost.png"},
        {"prompt": "Which colour?", "answer": "red", "image": "http://example.com/a.png"},
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = Preparation(
        name="own", source=str(tmp_path / "mine.jsonl"), out=str(tmp_path / "out"), own=OwnColumns(), max_bad_ratio=0.7
    )

    (report,) = await prepare(job)

    (made,) = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert made["images"] == [{"bytes": picture(), "path": None}]
    assert made["prompt"][0]["content"] == "<image>Which colour?"
    assert report.bad[0] == f"line 2: picture {tmp_path / 'lost.png'} can't be read: No such file or directory"
    assert "'http://example.com/a.png' is an address" in report.bad[1]


def test_a_data_uri_is_read_and_nothing_else_is() -> None:
    assert from_data_uri("data:image/png;base64," + base64.b64encode(b"abc").decode()) == b"abc"
    for uri in (
        "https://example.com/a.png",
        "data:text/html;base64,YQ==",
        "data:image/png;base64,?",
        "file:///etc/passwd",
    ):
        with pytest.raises(InputError):
            from_data_uri(uri)


def test_the_command_shows_a_row_and_writes_its_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rayapp.cli.main import run

    path = written(tmp_path, row(images=[stored(picture(size=(4, 6)))]))

    assert run(["data", "view", str(path), "--save", str(tmp_path / "seen")]) == 0

    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("user: [picture 4 x 6, ")
    assert told[0].endswith("…]Which colour?")
    assert told[1:3] == ["data_source: openai/gsm8k", "ground_truth: 1"]
    assert (tmp_path / "seen" / "row0-0.png").read_bytes() == picture(size=(4, 6))
    assert run(["data", "view", str(path), "--row", "1"]) == 2

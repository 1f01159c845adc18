"""Shows rows of data files with their pictures, for `rayapp data view`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from rayapp.core.errors import InputError
from rayapp.storage.base import hash_bytes
from rayapp.storage.media import IMAGE_PART, kind_of
from rayapp.tasks.data.data_row import parse_row
from rayapp.tasks.data.files import as_parquet, fetch_files, open_files, read_group
from rayapp.tasks.data.pictures import PictureFiles, listed, with_parts


def shown_row(file: str, number: int, save: Path | None) -> Iterator[str]:
    """Yield one row of a file as lines for people, with its pictures in words, and write the pictures to `save`."""
    cache = Path("data/cache")
    (path,) = asyncio.run(fetch_files([file], cache))
    path = as_parquet(path, cache)
    groups = open_files([path])
    group = next((each for each in groups if 0 <= number - each.first_row < each.num_rows), None)
    if group is None:
        raise InputError(f"{file} has {sum(each.num_rows for each in groups)} rows: --row {number} is not one of them")
    (raw,) = read_group(group).slice(number - group.first_row, 1).to_pylist()
    files, pictures = PictureFiles(cache), listed(raw)
    row = parse_row(raw, f"{file}, row {number}")
    found = [files.read(each, path.parent, i) for i, each in enumerate(pictures)]
    words = (_described(*each) for each in found)
    for message in with_parts(row.messages, len(pictures)):
        parts = [message] if isinstance(message["content"], str) else message["content"]
        yield f"{message['role']}: " + "".join(
            next(words) if part == IMAGE_PART else part.get("text", part.get("content", "")) for part in parts
        )
    yield f"data_source: {row.data_source}"
    yield f"ground_truth: {row.ground_truth}"
    for i, (encoded, _) in enumerate(found if save is not None else ()):
        assert save is not None
        save.mkdir(parents=True, exist_ok=True)
        kind = kind_of(encoded) or "image/picture"
        name = save / f"row{number}-{i}.{kind.removeprefix('image/')}"
        name.write_bytes(encoded)
        yield f"wrote {name}"


def _described(picture: bytes, size: tuple[int, int]) -> str:
    return f"[picture {size[0]} x {size[1]}, {len(picture):,} bytes, sha256 {hash_bytes(picture)[:12]}…]"

"""Pictures of data rows: the columns of verl (`images`) and TRL (`images`, `image`), and their places in the messages.

    {"prompt": [{"content": "<image>Find x."}], "images": [{"bytes": b"…", "path": None}]}
      -> [{"content": [{"type": "image"}, {"type": "text", "text": "Find x."}]}], encoded bytes, (width, height)

A picture is bytes, a path relative to the data file, a data URI, or, with `data.image_urls`, an https:// address. Each
is decoded once in a text process, which has limits of time and memory, so a hostile file ends only its row.
"""

from __future__ import annotations

import asyncio
import atexit
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from rayapp.config.agent import DataSection
from rayapp.config.sections import ModelSection
from rayapp.core.errors import InputError
from rayapp.core.names import load_extra
from rayapp.core.types import Media
from rayapp.storage.base import hash_bytes
from rayapp.storage.media import (
    IMAGE_PART,
    MAX_BYTES,
    MOST_PICTURES,
    as_data_uri,
    check_bytes,
    from_data_uri,
    keep,
    sizes_of,
)
from rayapp.storage.models.pictures import PictureProcessor, load_pictures, reads_pictures
from rayapp.tasks.text_process import TextProcess, TextReadingFailedError, TextTooCostlyError

COLUMNS = ("images", "image")
MARK = "<image>"
_DECODE_CPU_S = 10.0
_MOST_SIZES = 4096
Message = Mapping[str, Any]
Size = tuple[int, int]  # width and height


def listed(row: Mapping[str, Any]) -> list[Any]:
    """Return the pictures of a row, as the file has them. Raises InputError: the column holds something else, or too
    many."""
    found: Any = next((row[name] for name in COLUMNS if row.get(name)), [])
    pictures = found if isinstance(found, list) else [found]
    if len(pictures) > MOST_PICTURES:
        raise InputError(f"the row has {len(pictures)} pictures: at most {MOST_PICTURES} are allowed")
    for each in pictures:
        if not isinstance(each, bytes | str | Mapping):
            raise InputError(f"a picture must be bytes, a path or {{bytes, path}}, not {each!r:.60}")
    return pictures


def with_parts(messages: Sequence[Message], num_pictures: int) -> tuple[Message, ...]:
    """Return messages in which each picture is a part: each `<image>` of a text becomes one. Without any mark or part,
    the pictures come first in the first user's message, as in TRL. InputError: their number differs."""
    if not num_pictures and not any(isinstance(each.get("content"), list) for each in messages):
        return tuple(messages)
    parted = [{**each, "content": _parts(each.get("content", ""), marks=num_pictures > 0)} for each in messages]
    if not any(part == IMAGE_PART for each in parted for part in each["content"]):
        user = next((each for each in parted if each.get("role") == "user"), parted[0])
        user["content"] = [IMAGE_PART] * num_pictures + user["content"]
    if (num := sum(part == IMAGE_PART for each in parted for part in each["content"])) != num_pictures:
        raise InputError(f"the messages have {num} places for pictures ({MARK}), but the row has {num_pictures}")
    return tuple(each if IMAGE_PART in each["content"] else {**each, "content": _text(each)} for each in parted)


def as_marks(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages whose contents are texts again, with `<image>` for each picture: the form of a file's column."""
    return tuple(each if isinstance(each["content"], str) else {**each, "content": _text(each)} for each in messages)


def with_data_uris(messages: Sequence[Message], pictures: Sequence[bytes]) -> tuple[Message, ...]:
    """Return messages in OpenAI's form: each `<image>` becomes the next picture, as a data URI. Without pictures
    contents stay texts."""
    shown = iter(pictures)

    def written(part: Mapping[str, str]) -> Mapping[str, Any]:
        if part != IMAGE_PART:
            return part
        return {"type": "image_url", "image_url": {"url": as_data_uri(next(shown))}}

    return tuple(
        each if isinstance(each["content"], str) else {**each, "content": [written(part) for part in each["content"]]}
        for each in with_parts(messages, len(pictures))
    )


def as_stored(picture: Any) -> dict[str, Any]:
    """Return a picture in verl's form, `{bytes, path}`. Raises InputError: it has neither bytes nor a path."""
    match picture:
        case bytes() | {"bytes": bytes()}:
            return {"bytes": picture if isinstance(picture, bytes) else picture["bytes"], "path": None}
        case str() | {"path": str()} | {"url": str()} | {"image": str()}:
            named = picture if isinstance(picture, str) else picture.get("path") or next(iter(picture.values()))
            return {"bytes": None, "path": named}
    raise InputError(f"an image must be bytes or a path, not {picture!r:.60}")


def _text(message: Message) -> str:
    return "".join(part.get("text", MARK) for part in message["content"])


def _parts(content: Any, *, marks: bool) -> list[dict[str, Any]]:
    if isinstance(content, str):
        texts = content.split(MARK) if marks else [content]
        parts = [part for text in texts for part in (IMAGE_PART, {"type": "text", "text": text})][1:]
        return [part for part in parts if part.get("text") != ""]
    found = list[dict[str, Any]]()
    for part in content:
        match part:
            case {"type": "image"}:
                found.append(IMAGE_PART)
            case {"type": "text", "text": str(text)}:
                found += _parts(text, marks=marks)
            case _:
                raise InputError(f"a message's part must be a text or an image, not {part!r:.60}")
    return found


_decoding = TextProcess(cpu_limit_s=_DECODE_CPU_S)
atexit.register(_decoding.close)
_sizes: dict[str, Size] = {}  # of the pictures that were decoded last, by SHA-256


async def decoded_sizes(pictures: Mapping[str, bytes]) -> dict[str, Size]:
    """Return the sizes of pictures by SHA-256. New ones are decoded in a text process, within one limit of time.
    InputError: one is damaged or too large, or decoding takes too long."""
    found = {sha256: _sizes[sha256] for sha256 in pictures if sha256 in _sizes}
    new = {sha256: encoded for sha256, encoded in pictures.items() if sha256 not in found}
    try:
        sizes = await _decoding.call(sizes_of, list(new.values())) if new else []
    except (TextTooCostlyError, TextReadingFailedError) as error:
        raise InputError(f"a picture can't be decoded: {error}") from None
    found |= {sha256: (width, height) for sha256, (width, height) in zip(new, sizes, strict=True)}
    _sizes.update(found)
    while len(_sizes) > _MOST_SIZES:
        del _sizes[next(iter(_sizes))]
    return found


async def placed(
    processor: PictureProcessor | None, ids: list[int], shown: Sequence[str], pictures: Mapping[str, bytes]
) -> tuple[list[int], Media]:
    """Return the ids with the tokens of the pictures named by `shown` in the places of their placeholders, and these
    places. InputError: a picture can't be used, or the chat template wrote another number of placeholders."""
    if not shown:
        return ids, ()
    if processor is None:
        raise InputError("the messages have pictures, but the policy reads only text")
    encoded = [pictures[sha256] for sha256 in shown]
    sizes = await decoded_sizes(dict(zip(shown, encoded, strict=True)))
    # In a thread: the processor takes milliseconds for the first picture of a size.
    return await asyncio.to_thread(processor.expand, ids, encoded, [sizes[sha256] for sha256 in shown])


@dataclass(frozen=True, slots=True)
class Pictured:
    """Messages of a row with its pictures."""

    messages: tuple[Message, ...]
    encoded: tuple[bytes, ...] = ()
    sizes: tuple[Size, ...] = ()


@dataclass(slots=True)
class PictureFiles:
    """Reads pictures, and decodes each once to find out its size."""

    cache: Path  # folder for fetched pictures
    fetches: bool = False  # https:// addresses

    def read(self, picture: Any, folder: Path, index: int = 0) -> tuple[bytes, Size]:
        """Return the encoded bytes and the size of a picture: bytes, a path relative to `folder`, or a mapping with one
        of them. `index` counts in the row, for messages. InputError: it can't be read, is damaged or too large."""
        stored = as_stored(picture)
        data = stored["bytes"]
        encoded = check_bytes(data) if data is not None else self._from(stored["path"], folder)
        try:
            [(width, height)] = _decoding.run(sizes_of, [encoded])
        except (TextTooCostlyError, TextReadingFailedError) as error:
            raise InputError(f"picture {index} can't be decoded: {error}") from None
        return encoded, (width, height)

    def embedded(self, row: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return a row in verl's schema with the bytes of its pictures in place of paths. https:// addresses are kept,
        unless this object fetches them. InputError: a picture can't be read."""
        if not row.get("images"):
            return row
        kept = [(each["path"] or "").startswith("https://") and not self.fetches for each in row["images"]]
        pictures = [
            each if is_kept else {"bytes": self.read(each, folder, i)[0], "path": None}
            for i, (each, is_kept) in enumerate(zip(row["images"], kept, strict=True))
        ]
        return row | {"images": pictures}

    def _from(self, name: str, folder: Path) -> bytes:
        if name.startswith("data:"):
            return from_data_uri(name)
        if _is_address(name):
            return self._fetched(name)
        path = folder / name.removeprefix("file://")
        try:
            if not S_ISREG((facts := path.stat()).st_mode) or facts.st_size > MAX_BYTES:
                raise InputError(f"picture {path} is not a file of at most {MAX_BYTES:,} bytes")
            with path.open("rb") as file:
                return check_bytes(file.read(MAX_BYTES + 1))  # files of /proc have no size
        except OSError as error:
            raise InputError(f"picture {path} can't be read: {error.strerror}") from None

    def _fetched(self, url: str) -> bytes:
        if not self.fetches or not url.startswith("https://"):
            raise InputError(
                f"picture {url!r:.80} is an address: download it and name the file, or set data.image_urls: true, "
                "which fetches https:// addresses"
            )
        path = self.cache / "pictures" / hash_bytes(url.encode())
        if not path.exists():
            keep(path, load_extra("pictures.fetching:fetched")(url))
        return path.read_bytes()


def _is_address(name: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*://", name) is not None and not name.startswith("file://")


def picture_rows(model: ModelSection, data: DataSection) -> PictureRows | None:
    """Return the reader of pictures for a local model; None if it reads only text."""
    if not reads_pictures(model):
        return None
    return PictureRows(load_pictures(model), PictureFiles(data.cache_dir, fetches=data.image_urls))


@dataclass(frozen=True, slots=True)
class PictureRows:
    """Reads and places the pictures of rows for a model."""

    processor: PictureProcessor
    files: PictureFiles

    def read(self, messages: Sequence[Message], row: Mapping[str, Any], folder: Path, where: str) -> Pictured:
        """Return the messages with parts, and the row's pictures; paths are relative to `folder`. InputError: a picture
        can't be used, or the number of places differs."""
        try:
            pictures = listed(row)
            parts = with_parts(messages, len(pictures))
            found = [self.files.read(each, folder, i) for i, each in enumerate(pictures)]
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        return Pictured(parts, tuple(encoded for encoded, _ in found), tuple(size for _, size in found))

    def place(self, ids: Sequence[int], row: Pictured, where: str) -> tuple[list[int], Media]:
        """Return the prompt's ids with the tokens of its pictures, and their places. InputError: the chat template
        wrote another number of placeholders."""
        try:
            return self.processor.expand(ids, row.encoded, row.sizes)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

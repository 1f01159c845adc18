"""Pictures of data rows: the columns of verl (`images`) and TRL (`images`, `image`), and their places in the messages.

    {"prompt": [{"content": "<image>Find x."}], "images": [{"bytes": b"…", "path": None}]}
      -> [{"content": [{"type": "image"}, {"type": "text", "text": "Find x."}]}], encoded bytes, (width, height)

A picture is bytes, a path relative to the data file, a data URI, or, with `data.image_urls`, an https:// address. Each
is decoded once in a text process, which has limits of time and memory, so a hostile file ends only its row.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayapp.core.errors import InputError, one_line
from rayapp.core.files import aside
from rayapp.core.media import IMAGE_PART, MAX_BYTES, check_bytes, from_data_uri, size_of
from rayapp.core.types import Media
from rayapp.storage.models.pictures import PictureProcessor
from rayapp.tasks.text_process import TextProcess, TextReadingFailedError, TextTooCostlyError

COLUMNS = ("images", "image")
MARK = "<image>"
_DECODE_CPU_S = 10.0
_FETCH_S = 30.0
Message = Mapping[str, Any]


def listed(row: Mapping[str, Any]) -> list[Any]:
    """Return the pictures of a row, as the file has them. Raises InputError: the column holds something else."""
    found = next((row[name] for name in COLUMNS if row.get(name) is not None), None)
    if found is None:
        return []
    pictures = found if isinstance(found, list) else [found]
    for each in pictures:
        if not isinstance(each, bytes | str | Mapping):
            raise InputError(f"a picture must be bytes, a path or {{bytes, path}}, not {each!r:.60}")
    return [] if found == "" else pictures


def with_parts(messages: Sequence[Message], num_pictures: int) -> tuple[Message, ...]:
    """Return messages in which each picture is a part: each `<image>` of a text becomes one. Without any mark or part,
    the pictures come first in the first user's message, as in TRL.

    Raises:
        InputError: the messages have another number of pictures.
    """
    if not num_pictures and not any(isinstance(each.get("content"), list) for each in messages):
        return tuple(messages)
    parted = [{**each, "content": _parts(each["content"], marks=num_pictures > 0)} for each in messages]
    if not any(part == IMAGE_PART for each in parted for part in each["content"]):
        user = next((each for each in parted if each["role"] == "user"), parted[0])
        user["content"] = [IMAGE_PART] * num_pictures + user["content"]
    if (num := sum(part == IMAGE_PART for each in parted for part in each["content"])) != num_pictures:
        raise InputError(f"the messages have {num} places for pictures ({MARK}), but the row has {num_pictures}")
    return tuple(each if IMAGE_PART in each["content"] else {**each, "content": _text(each)} for each in parted)


def _text(message: Message) -> str:
    return "".join(part["text"] for part in message["content"])


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


@dataclass(frozen=True, slots=True)
class Pictured:
    """Messages of a row with its pictures."""

    messages: tuple[Message, ...]
    encoded: tuple[bytes, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class PictureRows:
    """Reads and places the pictures of rows for a model."""

    processor: PictureProcessor
    cache: Path
    """Folder for fetched pictures."""
    fetches: bool = False
    """True fetches https:// addresses."""
    _child: TextProcess = field(default_factory=lambda: TextProcess(cpu_limit_s=_DECODE_CPU_S))

    def read(self, messages: Sequence[Message], row: Mapping[str, Any], folder: Path, where: str) -> Pictured:
        """Return the messages with parts, and the row's pictures, which were decoded.

        Args:
            folder: folder of the data file, for relative paths.
        Raises:
            InputError: a picture can't be read, or the number of places differs.
        """
        try:
            pictures = listed(row)
            parts = with_parts(messages, len(pictures))
            encoded = tuple(self._encoded(each, folder) for each in pictures)
            return Pictured(parts, encoded, tuple(self._size(each, i) for i, each in enumerate(encoded)))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def place(self, ids: Sequence[int], row: Pictured, where: str) -> tuple[list[int], Media]:
        """Return the prompt's ids with the tokens of its pictures, and their places.

        Raises:
            InputError: the chat template wrote another number of placeholders.
        """
        try:
            return self.processor.expand(ids, row.encoded, row.sizes)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def close(self) -> None:
        self._child.close()

    def _size(self, encoded: bytes, index: int) -> tuple[int, int]:
        try:
            width, height = asyncio.run(self._child.call(size_of, encoded))
        except (TextTooCostlyError, TextReadingFailedError) as error:
            raise InputError(f"picture {index} can't be decoded: {error}") from None
        return width, height

    def _encoded(self, picture: Any, folder: Path) -> bytes:
        match picture:
            case bytes() | {"bytes": bytes()}:
                return check_bytes(picture if isinstance(picture, bytes) else picture["bytes"])
            case str() | {"path": str()} | {"image": str()} | {"url": str()}:
                named = picture if isinstance(picture, str) else picture.get("path") or next(iter(picture.values()))
                return self._from(named, folder)
        raise InputError("a picture has neither bytes nor a path")

    def _from(self, name: str, folder: Path) -> bytes:
        if name.startswith("data:"):
            return from_data_uri(name)
        if re.match(r"[a-z][a-z0-9+.-]*://", name) and not name.startswith("file://"):
            return self._fetched(name)
        path = folder / name.removeprefix("file://")
        try:
            if path.stat().st_size > MAX_BYTES:
                raise InputError(f"picture {path} has more than {MAX_BYTES:,} bytes")
            return check_bytes(path.read_bytes())
        except OSError as error:
            raise InputError(f"picture {path} can't be read: {error.strerror}") from None

    def _fetched(self, url: str) -> bytes:
        if not self.fetches or not url.startswith("https://"):
            raise InputError(
                f"picture {url!r:.80} is an address: download it and name the file, or set data.image_urls: true, "
                "which fetches https:// addresses"
            )
        path = self.cache / "pictures" / hashlib.sha256(url.encode()).hexdigest()
        if not path.exists():
            try:
                with urllib.request.urlopen(url, timeout=_FETCH_S) as answer:
                    encoded = check_bytes(answer.read(MAX_BYTES + 1))
            except OSError as error:
                raise InputError(f"picture {url!r:.80} can't be fetched: {one_line(error)}") from None
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside(path) as pending:
                pending.write_bytes(encoded)
        return path.read_bytes()

"""Pictures: names by content, limits, decoding, and their places among tokens.

    encoded bytes --hash_bytes--> name      Picture(sha256, start, end) -- a run of tokens, made by the processor
    p q [v v v v] r  --compact-->  p q v r  -- the engine's form, in which one placeholder stands for a picture

Only `opened` and `sizes_of` need Pillow. `sizes_of` decodes whole pictures, so damaged or hostile files must be read in
the text process (`tasks.text_process`), which has limits of time and memory.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayapp.core.errors import InputError
from rayapp.core.files import aside
from rayapp.core.types import Group, Media, Trajectory
from rayapp.storage.base import hash_bytes

MAX_BYTES = 20 << 20  # of an encoded picture
MAX_PIXELS = 1 << 25  # of a picture: 33 million, e.g. 8192 x 4096
MOST_PIXELS = 1 << 27  # of the pictures that a prompt or a turn adds: 400 MB as RGB in the model server
MAX_RATIO = 200  # of a picture's sides: processors refuse longer strips, or take half a minute
MOST_PICTURES = 128  # of a prompt, and of the later turns of a trajectory
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_KINDS = {
    b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp",
    b"BM": "image/bmp",
}  # fmt: skip
IMAGE_PART = {"type": "image"}  # part of a message's content where a chat template writes its placeholder


def check_bytes(encoded: bytes) -> bytes:
    """Return the bytes. Raises InputError: there are none, or too many."""
    if not 0 < len(encoded) <= MAX_BYTES:
        raise InputError(f"a picture has {len(encoded):,} bytes: it must have 1 to {MAX_BYTES:,}")
    return encoded


def sizes_of(pictures: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return width and height of each picture as `opened` shows it. ValueError or OSError: one can't be shown."""
    from PIL import Image, ImageOps

    sizes = list[tuple[int, int]]()
    for encoded in pictures:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise ValueError(f"it has {width} x {height} pixels, more than {MAX_PIXELS:,}")
            if max(width, height) > MAX_RATIO * min(width, height):
                raise ValueError(f"it has {width} x {height} pixels: one side is over {MAX_RATIO} times the other")
            if picture.mode.startswith("I"):
                raise ValueError("it has 16 bits of grey, of which only white would be left: write it with 8 bits")
            picture.load()
            sizes.append(ImageOps.exif_transpose(picture).size)
    return sizes


def opened(encoded: bytes) -> Any:
    """Return the picture in Pillow's form as vLLM shows files: upright, transparent parts on white, in RGB."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(encoded), formats=FORMATS) as picture:
        layer = ImageOps.exif_transpose(picture).convert("RGBA")
    shown = Image.new("RGB", layer.size, "white")  # without an orientation, by which vLLM would turn it once more
    shown.paste(layer, mask=layer.getchannel("A"))
    return shown


def as_png(picture: Any) -> bytes:
    """Return the bytes of a picture in Pillow's form; PNG holds no CMYK, which becomes RGB."""
    written = io.BytesIO()
    (picture if picture.mode in ("1", "L", "LA", "P", "RGBA") else picture.convert("RGB")).save(written, "PNG")
    return written.getvalue()


def from_data_uri(uri: str) -> bytes:
    """Return the bytes of `data:image/png;base64,…`. Raises InputError: it has another form or is too long."""
    head, comma, data = uri.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise InputError(f"a picture must be a data URI (data:image/png;base64,…), not {uri!r:.40}: nothing is fetched")
    if len(data) > MAX_BYTES * 4 // 3 + 4:
        raise InputError(f"a picture has more than {MAX_BYTES:,} bytes")
    try:
        return check_bytes(base64.b64decode(data, validate=True))
    except binascii.Error as error:
        raise InputError(f"a picture's data is not base64: {error}") from None


def kind_of(encoded: bytes) -> str | None:
    """Return the media type of a picture, e.g. image/png; None: of no known format."""
    return next((kind for start, kind in _KINDS.items() if encoded.startswith(start)), None)


def as_data_uri(encoded: bytes) -> str:
    return f"data:{kind_of(encoded) or 'image/png'};base64,{base64.b64encode(encoded).decode()}"


def compact(token_ids: Sequence[int], media: Media, placeholder: int) -> list[int]:
    """Return the token ids with one placeholder in the place of each picture's run."""
    kept, end = list[int](), 0
    for picture in media:
        kept += [*token_ids[end : picture.start], placeholder]
        end = picture.end
    return [*kept, *token_ids[end:]]


def by_sha256(pictures: Iterable[bytes]) -> dict[str, bytes]:
    return {hash_bytes(check_bytes(each)): each for each in pictures}


def pictures_of(rows: Iterable[Trajectory], pictures: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the encoded bytes, by SHA-256, of the pictures in the trajectories."""
    return {each.sha256: pictures[each.sha256] for row in rows for each in row.media}


def pictured(text: str, number: int) -> str | list[dict[str, str]]:
    """Return a message's content: the text and, as parts, this number of pictures after it."""
    return [{"type": "text", "text": text}, *[IMAGE_PART] * number] if number else text


def moved(media: Media, size: int) -> Media:
    """Return the pictures behind `size` more tokens."""
    return tuple(replace(each, start=each.start + size, end=each.end + size) for each in media)


def write_pictures(folder: Path, groups: Sequence[Group]) -> None:
    """Write each picture of the groups to `folder`, under its SHA-256, unless it is there already."""
    for sha256, encoded in {name: data for group in groups for name, data in group.pictures.items()}.items():
        if not (folder / sha256).exists():
            keep(folder / sha256, encoded)


def keep(path: Path, encoded: bytes) -> None:
    """Write the file whole, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with aside(path) as pending:
        pending.write_bytes(encoded)

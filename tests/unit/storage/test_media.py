"""Pictures as models see them: as vLLM shows the same files, and as people see them in a browser."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from rayapp.storage.media import opened, sizes_of

RED, WHITE = (255, 0, 0), (255, 255, 255)


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    picture.save(written, kind, **options)
    return written.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_turned_once_by_its_orientation(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held upright
    photo = encoded(Image.new("RGB", (32, 24)), kind, exif=exif)

    assert sizes_of([photo]) == [(24, 32)]
    assert opened(photo).size == (24, 32)
    assert not opened(photo).getexif()  # by which vLLM would turn it again, unlike the learner


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_are_white(mode: str) -> None:
    """A diagram of black lines on nothing would be black everywhere."""
    drawing = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    drawing.paste((0, 0, 0, 255), (0, 0, 2, 8))

    shown = opened(encoded(drawing.convert(mode)))

    assert [shown.getpixel((x, 0)) for x in (0, 4)] == [(0, 0, 0), WHITE]


def test_the_first_frame_of_several_is_shown_and_cmyk_becomes_rgb() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, "blue")]

    assert opened(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])).getpixel((0, 0)) == RED
    assert opened(encoded(Image.new("CMYK", (8, 8)), "JPEG")).getpixel((0, 0)) == WHITE


def test_sixteen_bits_of_grey_are_refused_as_only_white_would_be_left() -> None:
    with pytest.raises(ValueError, match="write it with 8 bits"):
        sizes_of([encoded(Image.new("I;16", (8, 8), 900))])

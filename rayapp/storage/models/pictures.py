"""The processor of a model that reads pictures: tokens that stand for a picture, and the inputs of the vision tower.

    run(width, height) -> ids                       every module expands placeholders with these
    expand([p, v, q], sizes) -> [p, s v v v e, q]   and the place of each picture
    inputs(encoded) -> tensors                      pixel_values, image_grid_thw, … of one picture

It is transformers' `AutoProcessor` of the model. Rollout workers, servers and learners load it only for such models, as
it imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayapp.config.sections import ModelSection
from rayapp.core.errors import ConfigError, InputError
from rayapp.core.types import Int32Array, Media, Picture
from rayapp.storage.base import hash_bytes
from rayapp.storage.media import MOST_PICTURES, MOST_PIXELS, opened
from rayapp.storage.models.families import refuse_pictures

if TYPE_CHECKING:
    from torch import Tensor

_TEXT_NAMES = {"input_ids", "attention_mask", "mm_token_type_ids", "rows", "cols"}


class PictureProcessor:
    """The tokens and tensors of pictures, by transformers' processor of a model."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.placeholder: str = processor.image_token  # that the chat template writes for a picture
        self.token_id: int = processor.image_token_id
        self.run = lru_cache(maxsize=1024)(self._run)

    def _run(self, width: int, height: int) -> Int32Array:
        """Return the token ids that stand for a picture of this size: they depend on nothing else."""
        from PIL import Image

        try:
            return np.array(self._processed(Image.new("RGB", (width, height)))["input_ids"][0], np.int32)
        except ValueError as error:
            raise InputError(f"the model's processor reads no pictures of {width} x {height} pixels: {error}") from None

    def inputs(self, encoded: bytes) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for one picture, under their names in transformers' model."""
        return {name: value for name, value in self._processed(opened(encoded)).items() if name not in _TEXT_NAMES}

    def _processed(self, picture: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._processor(
            images=[[picture]], text=[self.placeholder], add_special_tokens=False, return_tensors="pt"
        )
        return found

    def expand(
        self, ids: Sequence[int], pictures: Sequence[bytes], sizes: Sequence[tuple[int, int]]
    ) -> tuple[list[int], Media]:
        """Return the ids with each placeholder replaced by its picture's run, and the pictures' places. InputError:
        the number of placeholders differs from the number of pictures, or these are too many, or too large."""
        if len(pictures) > MOST_PICTURES:
            raise InputError(f"the prompt has {len(pictures)} pictures: at most {MOST_PICTURES} are allowed")
        if (num_pixels := sum(width * height for width, height in sizes)) > MOST_PIXELS:
            raise InputError(f"the prompt's pictures have {num_pixels:,} pixels: at most {MOST_PIXELS:,} are allowed")
        if (num_places := list(ids).count(self.token_id)) != len(pictures):
            raise InputError(
                f"the prompt has {num_places} placeholders {self.placeholder}, but {len(pictures)} pictures"
            )
        expanded, media, shown = list[int](), list[Picture](), iter(zip(pictures, sizes, strict=True))
        for token in ids:
            if token != self.token_id:
                expanded.append(token)
                continue
            encoded, size = next(shown)
            start = len(expanded)
            expanded += self.run(*size).tolist()
            media.append(Picture(sha256=hash_bytes(encoded), start=start, end=len(expanded)))
        return expanded, tuple(media)


def reads_pictures(model: ModelSection) -> bool:
    """Return True if the model's family reads pictures and can be trained on them."""
    return not refuse_pictures(_architecture(model))


def load_pictures(model: ModelSection) -> PictureProcessor:
    """Return the processor of a local model. ConfigError: the model, or this installation, can't read pictures."""
    if why := refuse_pictures(_architecture(model)):
        raise ConfigError(f"model.path {model.path!r}: {why}")
    return _loaded(str(model.path), trust_remote_code=model.trust_remote_code)


@lru_cache(maxsize=4)
def _loaded(path: str, *, trust_remote_code: bool) -> PictureProcessor:
    from transformers import AutoProcessor

    try:
        return PictureProcessor(AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code))
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"the processor of {path}, which reads pictures, can't be loaded: {error}. It needs the model's "
            "preprocessor_config.json and the packages torchvision and pillow, for SmolVLM also num2words"
        ) from error


def _architecture(model: ModelSection) -> dict[str, Any]:
    try:
        architecture: dict[str, Any] = json.loads(Path(model.path, "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return architecture

"""Pictures under packing: keys of their tokens, positions, and features of the vision tower in place of embeddings.

A processor turns a picture into a run of placeholder tokens, and pixels into the inputs of the tower. For packing, each
placeholder gets a key that stands for its picture, so that sequences share it only if they share the picture. After
packing, the keys become placeholders again, and each gets its row of the picture's features:

    ids    p q # # r       keys  p q A A r       packed  p q A A r B B s     rows  - - 0 1 - 2 3 -
           p q # # s             p q B B s

The tower's weights are frozen by default (`model.freeze_vision`). Then every rank holds all of them, and computes the
features of a picture once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rayapp.core.errors import LearnerError
from rayapp.learner.batch import Inputs, MicroBatch, PackedPictures, TrainItem, split
from rayapp.learner.device import moved
from rayapp.learner.packing import Int64Array
from rayapp.storage.models.families import PICTURE_FAMILIES

FIRST_KEY = 1 << 30  # of pictures: above all token ids, and within int32
GRID = "image_grid_thw"  # input from which Qwen's models compute rotary positions: patches in time, height and width


def build_model(architecture: Any, attention: str, *, trust_remote_code: bool = False) -> Any:
    """Build transformers' model in float32, with this attention in its decoder, and with its tower if the learner can
    train on pictures."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reads_pictures = architecture.model_type in PICTURE_FAMILIES
    kind: Any = AutoModelForImageTextToText if reads_pictures else AutoModelForCausalLM
    return kind.from_config(
        architecture,
        dtype=torch.float32,
        attn_implementation=attention_of(architecture, attention),
        trust_remote_code=trust_remote_code,
    ).to(torch.float32)  # Apertus creates its activation's parameters in bfloat16 whatever dtype is given


def attention_of(architecture: Any, name: str) -> Any:
    """Return `attn_implementation` for this attention in the decoder; the tower keeps transformers' own."""
    if architecture.model_type not in PICTURE_FAMILIES:
        return name
    return {"": name, "text_config": name, "vision_config": "sdpa"}


def tower_parameters(causal_lm: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of the vision tower and its projection, by name; none in a model for text."""
    if getattr(causal_lm.config, "vision_config", None) is None or causal_lm.config.model_type not in PICTURE_FAMILIES:
        return {}
    inside = {id(p) for part in (causal_lm.get_decoder(), causal_lm.get_output_embeddings()) for p in part.parameters()}
    return {name: parameter for name, parameter in causal_lm.named_parameters() if id(parameter) not in inside}


def small_tower(vision: Any, hidden_size: int) -> dict[str, Any]:
    """Return the values of a tower of one narrow layer, for a decoder of this width."""
    heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
    lists = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
    sizes = {"depth": 1, "num_hidden_layers": 1, "intermediate_size": 32, "out_hidden_size": hidden_size}
    known = {name: value for name, value in (lists | sizes).items() if hasattr(vision, name)}
    return known | {"hidden_size": 16 * heads}


def freeze_tower(causal_lm: Any) -> None:
    for parameter in tower_parameters(causal_lm).values():
        parameter.requires_grad_(False)


def frozen_tower(causal_lm: Any) -> set[str]:
    """Return the names of the tower's parameters if they are not trained."""
    return {name for name, parameter in tower_parameters(causal_lm).items() if not parameter.requires_grad}


def replicated(causal_lm: Any) -> set[nn.Parameter]:
    """Return the parameters that every rank holds whole: of a frozen tower, which ranks run for different numbers of
    pictures."""
    return {parameter for parameter in tower_parameters(causal_lm).values() if not parameter.requires_grad}


class PictureReader:
    """Pictures of a step on one rank. `process` returns the inputs of a picture, given its encoded bytes."""

    def __init__(self, causal_lm: Any, process: Callable[[bytes], Inputs]) -> None:
        self._token_id: int = causal_lm.config.image_token_id
        self._rope_index = getattr(causal_lm.base_model, "get_rope_index", None)
        self._process = process
        self._encoded: dict[str, bytes] = {}
        self._inputs: dict[str, Inputs] = {}
        self._numbers: dict[str, int] = {}
        self._sizes: list[int] = []

    def take(self, encoded: Mapping[str, bytes]) -> None:
        """Add pictures of the step by their SHA-256."""
        self._encoded |= encoded

    def forget(self) -> None:
        """Drop all pictures at the end of a step."""
        for kept in (self._encoded, self._inputs, self._numbers, self._sizes):
            kept.clear()

    def keyed(self, item: TrainItem) -> TrainItem:
        """Return the item with keys in place of the placeholders."""
        if not item.trajectory.media:
            return item
        ids = item.trajectory.token_ids.copy()
        for picture in item.trajectory.media:
            own = ids[picture.start : picture.end]
            is_placeholder = own == self._token_id
            own[is_placeholder] = FIRST_KEY + self._number(picture.sha256, int(is_placeholder.sum()))
        return replace(item, trajectory=replace(item.trajectory, token_ids=ids))

    def _number(self, sha256: str, size: int) -> int:
        if sha256 not in self._numbers:
            if sha256 not in self._encoded:
                raise LearnerError(f"picture {sha256} of a trajectory is not in its group")
            self._numbers[sha256] = len(self._sizes)
            self._sizes.append(size)
            self._inputs[sha256] = self._process(self._encoded[sha256])
        number = self._numbers[sha256]
        if self._sizes[number] != size:
            raise LearnerError(
                f"picture {sha256} stands for {self._sizes[number]} tokens in one place and {size} in another"
            )
        return number

    def placed(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch of keyed items with placeholders again, and with its pictures."""
        keys = batch.packing.token_ids
        is_picture = keys >= FIRST_KEY
        if not is_picture.any():
            return batch
        names, numbers = list(self._numbers), (np.unique(keys[is_picture]) - FIRST_KEY).tolist()
        first_rows = np.cumsum([0, *(self._sizes[number] for number in numbers)])[:-1]
        rows, positions = np.full(keys.size, -1), np.stack([batch.packing.position_ids] * 3)
        for path in batch.packing.paths:
            own = keys[path]
            for number, first_row in zip(numbers, first_rows, strict=True):
                places = path[own == FIRST_KEY + number]
                rows[places] = first_row + self._rows(number, places.size)
            shown = own[np.isin(rows[path], first_rows)] - FIRST_KEY
            if self._rope_index is not None and shown.size:
                positions[:, path] = self._positions(own, [names[number] for number in shown])
        packing = replace(batch.packing, token_ids=np.where(is_picture, self._token_id, keys))
        pictures = PackedPictures(
            inputs={names[number]: self._inputs[names[number]] for number in numbers},
            rows=rows,
            positions=None if self._rope_index is None else positions,
        )
        return replace(batch, packing=packing, pictures=pictures)

    def _rows(self, number: int, num_tokens: int) -> NDArray[np.int64]:
        """Return the rows of a picture's tokens in one sequence, which may show the picture several times."""
        size = self._sizes[number]
        if num_tokens % size:
            raise LearnerError(f"a sequence has {num_tokens} tokens of a picture that stands for {size} tokens")
        rows: NDArray[np.int64] = np.arange(num_tokens) % size
        return rows

    def _positions(self, keys: Int64Array, shown: Sequence[str]) -> Int64Array:
        """Return transformers' rotary positions (3, T) of one sequence with the pictures `shown`."""
        assert self._rope_index is not None, "only models with rotary positions of pictures"
        is_picture = torch.from_numpy(keys >= FIRST_KEY)
        ids = torch.from_numpy(keys).masked_fill(is_picture, self._token_id)
        grids = torch.cat([self._inputs[sha256][GRID] for sha256 in shown])
        found, _ = self._rope_index(ids[None], mm_token_type_ids=is_picture[None].int(), image_grid_thw=grids)
        positions: Int64Array = found[:, 0].numpy()
        return positions


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePictures:
    """Pictures of this rank's tokens, on the learner's device."""

    inputs: Mapping[str, Inputs]  # on the host until the tower reads them
    places: Tensor  # (P,) positions of placeholders among this rank's tokens, ascending
    rows: Tensor  # (P,) row of each placeholder among the features of all pictures


def split_items(reader: PictureReader | None, items: Sequence[TrainItem], **options: Any) -> list[MicroBatch]:
    """Return the micro-batches of `batch.split`, with their pictures."""
    if not any(item.trajectory.media for item in items):
        return split(items, **options)
    if reader is None:
        raise LearnerError("a trajectory has pictures, but the policy is not a model that can be trained on pictures")
    return [reader.placed(batch) for batch in split([reader.keyed(item) for item in items], **options)]


@contextmanager
def reading(
    reader: PictureReader | None, towers: Iterable[Tower | None], *encoded: Mapping[str, bytes]
) -> Iterator[None]:
    """Provide these pictures in the block. After it, pictures and features are dropped."""
    if reader is None:
        yield
        return
    for pictures in encoded:
        reader.take(pictures)
    try:
        yield
    finally:
        reader.forget()
        for tower in filter(None, towers):
            tower.forget()


def on_device(pictures: PackedPictures, device: torch.device) -> DevicePictures:
    places = np.flatnonzero(pictures.rows >= 0)
    rows = moved(pictures.rows[places], device)
    return DevicePictures(inputs=pictures.inputs, places=moved(places, device), rows=rows)


class Tower:
    """The part of a model that reads pictures."""

    def __init__(self, causal_lm: Any) -> None:
        self._causal_lm = causal_lm
        self.num_tokens = 0  # whose features have been computed
        self._kept: dict[str, tuple[Tensor, ...]] = {}  # features of a frozen tower by SHA-256, until `forget`

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(tower_parameters(self._causal_lm))

    @cached_property
    def _is_frozen(self) -> bool:
        return not any(self._causal_lm.get_parameter(name).requires_grad for name in self._names)

    def share(self, other: Tower) -> None:
        """Use the weights and features of another frozen tower with equal weights, and free the own."""
        for name in self._names:
            self._causal_lm.get_parameter(name).data = other._causal_lm.get_parameter(name).data
        self._kept = other._kept

    def forget(self) -> None:
        self._kept.clear()

    def decoder_inputs(self, token_ids: Tensor, pictures: DevicePictures | None) -> dict[str, Any]:
        """Return the decoder's arguments: embeddings of tokens (1, n), with features in the places of pictures."""
        embedded: Tensor = self._causal_lm.get_input_embeddings()(token_ids)
        if not self._is_frozen and torch.is_grad_enabled():
            # FSDP's reduction waits for a gradient of every parameter on every rank, also of those without pictures.
            embedded = embedded + 0.0 * sum(self._causal_lm.get_parameter(name).view(-1)[0] for name in self._names)
        if pictures is None or not pictures.places.numel():
            return {"inputs_embeds": embedded}
        by_picture = [self._features(sha256, own, token_ids.device) for sha256, own in pictures.inputs.items()]
        first, *deeper = (torch.cat(layer).index_select(0, pictures.rows) for layer in zip(*by_picture, strict=True))
        embedded = embedded.index_copy(1, pictures.places, first[None].to(embedded.dtype))
        if not deeper:
            return {"inputs_embeds": embedded}
        is_picture = torch.zeros_like(token_ids, dtype=torch.bool).index_fill(1, pictures.places, value=True)
        return {"inputs_embeds": embedded, "visual_pos_masks": is_picture, "deepstack_visual_embeds": deeper}

    def _features(self, sha256: str, inputs: Inputs, device: torch.device) -> tuple[Tensor, ...]:
        """Return the features (T, H) of a picture's tokens, then those that Qwen3-VL adds after the first layers."""
        if sha256 in self._kept:
            return self._kept[sha256]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._is_frozen):
            found = self._causal_lm.get_image_features(**{name: moved(each, device) for name, each in inputs.items()})
        features = torch.cat(tuple(found.pooler_output)), *(getattr(found, "deepstack_features", None) or ())
        self.num_tokens += len(features[0])
        if self._is_frozen:
            self._kept[sha256] = features
        return features

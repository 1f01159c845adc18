"""Tiny models that read pictures, and groups of trajectories with pictures of random pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayapp.core.types import Group, Picture, Prompt, Reward, Trajectory
from rayapp.learner.batch import Inputs, TrainItem

VOCABULARY, PLACEHOLDER, VIDEO, BEGIN, END = 64, 60, 61, 62, 63
_TEXT = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3,
    "intermediate_size": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
}  # fmt: skip
_TOKENS = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": _TEXT | _ROPE,
        "vision_config": _TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
        **_TOKENS,
    },
    "qwen3_vl": {
        "text_config": _TEXT | _ROPE | {"head_dim": 32},
        "vision_config": _TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        **_TOKENS,
    },
    "smolvlm": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4,
        },
        "scale_factor": 2,
        "image_token_id": PLACEHOLDER,
        "pad_token_id": 0,
    },
}  # fmt: skip


def architecture_of(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[family](**CONFIGS[family])


def process(encoded: bytes) -> Inputs:
    """Return inputs that depend on all bytes: b"FAMILY HEIGHT WIDTH SEED", in tokens; SmolVLM's has one tile a row."""
    family, height, width, seed = encoded.decode().split()
    generator, size = torch.Generator().manual_seed(int(seed)), (2 * int(height), 2 * int(width))
    if family == "smolvlm":
        tiles = torch.randn((1, int(height), 3, 16, 16), generator=generator)
        return {"pixel_values": tiles, "pixel_attention_mask": torch.ones(1, int(height), 16, 16).long()}
    pixels = torch.randn(size[0] * size[1], 3 * 2 * 4 * 4, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, *size]])}


@dataclass
class Writer:
    """Writes the tokens of one trajectory."""

    family: str
    pictures: dict[str, bytes]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    media: list[Picture] = field(default_factory=list)

    def text(self, ids: Sequence[int], *, is_response: bool = False) -> Writer:
        self.ids += ids
        self.mask += [is_response] * len(ids)
        return self

    def picture(self, height: int, width: int, seed: int) -> Writer:
        """Add a picture between two tokens; SmolVLM's tiles have four tokens each, with a token of text between."""
        encoded = f"{self.family} {height} {width} {seed}".encode()
        start = len(self.ids)
        runs = [4] * height if self.family == "smolvlm" else [height * width]
        for run in runs:
            self.text([BEGIN, *[PLACEHOLDER] * run])
        self.text([END])
        self.pictures[encoded.hex()] = encoded
        self.media.append(Picture(sha256=encoded.hex(), start=start, end=len(self.ids)))
        return self

    def trajectory(self, reward: float) -> Trajectory:
        mask = np.array(self.mask)
        log_probs = np.where(mask, -1.0, 0.0).astype(np.float32)
        tokens = np.array(self.ids, np.int32)
        made = Trajectory.of_tokens(tokens, mask, reward=Reward(value=reward), log_probs=log_probs)
        return replace(made, media=tuple(self.media))


def group_of(number: int, family: str, write: Callable[[Writer, int], object], seed: int = 0) -> Group:
    """Return a group of four trajectories, each written by `write`, which gets the trajectory's index."""
    pictures: dict[str, bytes] = {}
    rewards = np.random.default_rng((seed, number)).normal(size=4)
    made = []
    for index, reward in enumerate(rewards):
        writer = Writer(family, pictures)
        write(writer, index)
        made.append(writer.trajectory(float(reward)))
    prompt = Prompt(task="t", text="", token_ids=made[0].token_ids[: made[0].num_prompt_tokens])
    return Group(group_id=number, prompt=prompt, trajectories=tuple(made), pictures=pictures)


def words(seed: int, size: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, PLACEHOLDER, size)]


def text_alone(writer: Writer, index: int) -> None:
    writer.text(words(1, 7)).text(words(10 + index, 4 + index), is_response=True)


def picture_in_the_middle(writer: Writer, index: int) -> None:
    writer.text(words(2, 3)).picture(2, 3, seed=1).text(words(3, 2))
    writer.text(words(20 + index // 2, 3), is_response=True).text(words(30 + index, 3), is_response=True)


def several_pictures(writer: Writer, index: int) -> None:
    """The first picture twice; between the turns another one, as from a tool."""
    writer.text(words(4, 2)).picture(2, 3, seed=1).picture(1, 2, seed=2).text(words(5, 1)).picture(2, 3, seed=1)
    writer.text(words(40, 4), is_response=True).picture(3, 1, seed=3 + index % 2).text(words(6, 2))
    writer.text(words(50 + index, 3), is_response=True)


def pictures_of_one_size(writer: Writer, index: int) -> None:
    """All trajectories have the same ids before their answers, but two of them show another picture."""
    writer.text(words(7, 6)).picture(3, 2, seed=10 + index % 2).text(words(8, 4))
    writer.text(words(60 + index, 5), is_response=True)


def groups_of(family: str) -> list[Group]:
    written = (text_alone, picture_in_the_middle, several_pictures, pictures_of_one_size)
    return [group_of(number, family, write) for number, write in enumerate(written)]


def items_of(group: Group) -> list[TrainItem]:
    nothing = [np.zeros(t.num_response_tokens, np.float32) for t in group.trajectories]
    rows = enumerate(zip(group.trajectories, nothing, strict=True))
    return [TrainItem(row=row, group=0, trajectory=t, advantages=zeros) for row, (t, zeros) in rows]


def plain_inputs(family: str, groups: Sequence[Group]) -> dict[str, Tensor]:
    """Return the pictures as arguments of transformers' model for all trajectories as one padded batch."""
    rows = [(t, [process(g.pictures[p.sha256]) for p in t.media]) for g in groups for t in g.trajectories]
    if family != "smolvlm":
        every = [inputs for _, shown in rows for inputs in shown]
        types = torch.zeros(len(rows), max(t.num_tokens for t, _ in rows), dtype=torch.int)
        for row, (t, _) in zip(types, rows, strict=True):
            row[: t.num_tokens] = torch.from_numpy(t.token_ids == PLACEHOLDER).int()
        return {name: torch.cat([inputs[name] for inputs in every]) for name in every[0]} | {"mm_token_type_ids": types}
    tiles = [torch.cat([torch.zeros(0, 3, 16, 16), *(i["pixel_values"][0] for i in shown)]) for _, shown in rows]
    pixels = torch.nn.utils.rnn.pad_sequence(tiles, batch_first=True)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(*pixels.shape[:2], 16, 16).long()}

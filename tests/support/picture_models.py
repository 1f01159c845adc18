"""Tiny models that read pictures: random weights, the family's own processor, and a tokenizer of single characters."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayapp.storage.media import MAX_PIXELS

QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SMOL_TOKENS = (
    "<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", "<video>",
    *(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)),
)  # fmt: skip
_PARTS = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.content is string %}\
{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}{{ 'PICTURE' }}\
{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ 'END\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TEMPLATES = {
    "qwen2_5_vl": _PARTS.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>").replace("END", "<|im_end|>"),
    "smolvlm": _PARTS.replace("PICTURE", "<image>").replace("END", "<end_of_utterance>"),
}
TEMPLATES["qwen3_vl"] = TEMPLATES["qwen2_5_vl"]
_TEXT = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 128, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
_TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "patch_size": 14, "in_channels": 3}


def picture(colour: tuple[int, int, int] = (255, 0, 0), size: tuple[int, int] = (56, 56)) -> bytes:
    """Return a PNG of one colour."""
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", size, colour).save(written, "PNG")
    return written.getvalue()


def bomb() -> bytes:
    """A PNG of few bytes that says it has more pixels than are allowed."""
    side = int(MAX_PIXELS**0.5) + 100
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def save_tokenizer(folder: Path, special: Sequence[str], template: str) -> dict[str, int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<eos>", "\n", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.chat_template = template
    fast.save_pretrained(folder)
    return {token: fast.convert_tokens_to_ids(token) for token in special} | {"size": len(fast)}


def architecture_of(family: str, ids: dict[str, int]) -> Any:
    from transformers import CONFIG_MAPPING

    text = _TEXT | {"vocab_size": ids["size"]}
    if family == "smolvlm":
        tower = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "image_size": 56, "patch_size": 14}  # fmt: skip
        return CONFIG_MAPPING[family](
            text_config=text | {"model_type": "llama"}, vision_config=tower, scale_factor=2,
            image_token_id=ids["<image>"], pad_token_id=0, tie_word_embeddings=True,
        )  # fmt: skip
    own = {"window_size": 56, "fullatt_block_indexes": [1]} if family == "qwen2_5_vl" else {
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
    more = {"head_dim": 32} if family == "qwen3_vl" else {}
    # Without this key vLLM computes the positions of Qwen2.5-VL, and transformers those of Qwen3-VL.
    interleaved = {"mrope_interleaved": True} if family == "qwen3_vl" else {}
    return CONFIG_MAPPING[family](
        text_config=text | more | {"rope_parameters": _ROPE | interleaved},
        vision_config=_TOWER | own | {"out_hidden_size": 64},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def _processor_files(family: str) -> dict[str, dict[str, Any]]:
    if family == "smolvlm":
        sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
        common = {"do_convert_rgb": True, "do_image_splitting": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        return {
            "preprocessor_config.json": common | sizes | {
                "image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor"},
            "processor_config.json": {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
        }  # fmt: skip
    sizes = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 64, "patch_size": 14, "temporal_patch_size": 2,
             "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip
    kind = "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else "Qwen3VLProcessor"
    return {"preprocessor_config.json": sizes | {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": kind}}  # fmt: skip


def save_picture_model(folder: Path, family: str, dtype: str = "float32") -> Path:
    """Write a model of two layers and a vision tower of two, with its processor."""
    import torch
    from transformers import AutoModelForImageTextToText

    special = SMOL_TOKENS if family == "smolvlm" else QWEN_TOKENS
    ids = save_tokenizer(folder, special, TEMPLATES[family])
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(architecture_of(family, ids), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    for name, values in _processor_files(family).items():
        (folder / name).write_text(json.dumps(values))
    return folder

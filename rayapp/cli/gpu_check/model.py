"""A model of random weights with a tokenizer, and a task for it: nothing is downloaded."""

from __future__ import annotations

import string
from pathlib import Path

from rayapp.cli.gpu_check.outcome import CheckContext

LETTERS = ["<pad>", "<eos>", *(letter for letter in string.printable if letter not in "\t\n\r\x0b\x0c")]
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16}
"""0.5 billion parameters: a gigabyte to send, and products large enough to be fast."""
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}

TASK = '''
"""Pays for vowels: every model writes some, and not all completions as many."""

from dataclasses import dataclass

import numpy as np

from rayapp.core.types import Prompt, Reward


@dataclass(frozen=True)
class Letters:
    name: str

    def render(self, tokenizer):
        text = "write: "
        return Prompt(task=self.name, text=text, token_ids=np.array(tokenizer.encode(text), np.int32))

    async def score(self, prompt, completion_text, sandboxes, *, seed):
        return Reward(value=sum(completion_text.count(vowel) for vowel in "aeiou") / 4, terms={})


TASK = Letters(name="letters")
'''


def model_of(context: CheckContext) -> str:
    """The user's model, or one that is made in the check's folder."""
    return context.model or str(random_model(context.folder / "model", LARGE if context.on_gpu else SMALL))


def random_model(folder: Path, shape: dict[str, int], *, vocabulary: int = len(LETTERS)) -> Path:
    """A Llama over single characters, in bfloat16."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    architecture = LlamaConfig(
        **shape, num_key_value_heads=shape["num_attention_heads"] // 2, vocab_size=vocabulary,
        max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(architecture).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder

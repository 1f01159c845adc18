"""What the tests of whole runs share: a configuration that takes seconds, and a look at what a run leaves behind."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

PR_SET_CHILD_SUBREAPER = 36
Descendants = Callable[[], dict[int, str]]


@pytest.fixture(scope="session")
def short_run(tiny_model: Path, letter_tasks: list[str]) -> Callable[..., dict[str, Any]]:
    """Makes the configuration of a run of the tiny model: `short_run(output_dir, train={"num_steps": 9})`."""

    def make(output_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = {
            "run": {"output_dir": str(output_dir)},
            "model": {"path": str(tiny_model)},
            "tasks": letter_tasks,
            "cluster": {"device": "cpu"},
            "rollout": {"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 16},
            "train": {"groups_per_step": 2},
            "learner": {"max_tokens_per_microbatch": 256, "compute_dtype": "float32", "optimizer": {"lr": 3e-3}},
            "server": {"kv_cache_gib": 1},
            "checkpoint": {"every_steps": 2},
        }
        return config | {name: config.get(name, {}) | changes for name, changes in sections.items()}

    return make


@pytest.fixture(scope="session")
def policy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, float]], Path]:
    """Makes a policy whose next token depends on the last one only: after a line's end it says one of these texts, each
    with the probability that follows from its logit, and after any of them it ends its turn."""

    def make(said: Mapping[str, float]) -> Path:
        return save_policy(tmp_path_factory.mktemp("models") / "policy", said)

    return make


def save_policy(folder: Path, said: Mapping[str, float]) -> Path:
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = ["<pad>", "\n", *(chr(code) for code in range(32, 127))]
    plain = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" "))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in said])
    tokenizer.save_pretrained(folder)
    eos_id, start_id = tokenizer.convert_tokens_to_ids(["<|im_end|>", "\n"])

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    logits = torch.zeros(len(tokenizer), len(tokenizer))  # next token x last token
    for text, logit in said.items():
        text_id = tokenizer.convert_tokens_to_ids(text)
        logits[text_id, start_id], logits[eos_id, text_id] = logit, 16.0
    with torch.no_grad():
        # The layers add nothing, so what the head sees is the last token's embedding, of length sqrt(128).
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        directions = torch.linalg.qr(torch.randn(128, 128))[0][: len(tokenizer)]
        model.model.embed_tokens.weight.copy_(directions)
        model.lm_head.weight.copy_(logits @ directions / 128**0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def descendants() -> Iterator[Descendants]:
    """Living processes that came from this one: pid and command line.

    While the module's tests run, a process whose parent ends becomes a child of this one instead of init's, whatever
    session, user or namespace it is in: so none can hide. Ask only when no `Popen` of the test is waiting to be waited
    for.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield lambda: {pid: line for pid, line in living().items() if pid not in before}
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def living() -> dict[int, str]:
    found: dict[int, str] = {}
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found[child.pid] = " ".join(child.cmdline()) or child.name()
            elif child.ppid() == os.getpid():
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return found


@pytest.fixture(scope="session")
def settled() -> Callable[[Descendants], dict[int, str]]:
    """What is still there once nothing ends any more: processes that were told to end take a moment."""

    def wait(descendants: Descendants, timeout_s: float = 60.0) -> dict[int, str]:
        deadline = time.monotonic() + timeout_s
        while (left := descendants()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    return wait

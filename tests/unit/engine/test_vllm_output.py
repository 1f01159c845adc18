"""vLLM's output gives the cause of a failure, and a completion the text that vLLM itself would write."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from rayapp.core.types import SamplingParams
from rayapp.engine.vllm_output import EngineOutput, text_of, vllm_sampling_params, way_out

OF_BEFORE = b"(EngineCore pid=1) ERROR 11-22 14:06:22 [core.py:1368] RuntimeError: of an engine before\n"
FATAL = b"""WARNING 11-22 14:05:22 [arg_utils.py:1812] ValueError: is no error of an engine
(Worker_TP0 pid=71) ERROR 11-22 14:06:22 [multiproc.py:9] Traceback (most recent call last):
(Worker_TP0 pid=71) ERROR 11-22 14:06:22 [multiproc.py:9]   File "x.py", line 1, in forward
(Worker_TP0 pid=71) ERROR 11-22 14:06:22 [multiproc.py:9] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB
(EngineCore pid=70) ERROR 11-22 14:06:23 [core.py:1368] RuntimeError: Worker failed
"""


def test_the_first_exception_that_a_process_of_the_engine_logged_is_the_cause(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb", buffering=0) as out:
        out.write(OF_BEFORE)
        output = EngineOutput(out.fileno())
        assert output.cause() == ""
        out.write(FATAL)

        assert output.cause() == ", because torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"


@pytest.mark.timeout(5)
def test_of_a_pipe_nothing_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, FATAL)

    assert EngineOutput(writing).cause() == ""

    assert os.read(reading, 1 << 16) == FATAL
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    "why",
    [
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "ValueError: Available memory on node 0 (22.1/23.4 GiB) is less than requested memory for kv (9.0 GiB)",
    ],
)
def test_where_vllm_speaks_of_its_cache_the_key_is_named(why: str) -> None:
    assert "server.kv_cache_gib" in way_out(why)
    assert way_out("RuntimeError: cached property of a model") == ""


def of_bytes() -> Tokenizer:
    """Each byte is a token, and 256 a special one: most characters take several."""
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(ByteLevel.alphabet())}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def of_words() -> Tokenizer:
    """As Llama 2's: a blank before a word is a part of its token, and is left out where a text begins."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["▁def", "▁x", "(", "▁"])}))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def vllms_text(tokenizer: Tokenizer, prompt_ids: list[int], token_ids: list[int]) -> str:
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    wrapped: Any = SimpleNamespace(_tokenizer=tokenizer)
    params = vllm_sampling_params(SamplingParams(max_tokens=64), with_seed=False)
    request: Any = SimpleNamespace(request_id="one", prompt_token_ids=prompt_ids, sampling_params=params)
    detokenizer = FastIncrementalDetokenizer(wrapped, request)
    for token in token_ids:
        detokenizer.update([token], False)
    return detokenizer.get_next_output_text(True, False)


@pytest.mark.parametrize("make_tokenizer", [of_bytes, of_words])
def test_a_completions_text_is_vllms_also_where_a_character_or_the_prompt_is_cut(make_tokenizer: Any) -> None:
    tokenizer, dice = make_tokenizer(), random.Random(0)
    letters = "".join(piece for piece, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str("Größe 漢字 🙂 "))
    spelt = [tokenizer.token_to_id(letter) or 0 for letter in letters]
    for cut in range(len(spelt)):
        for ids in (spelt[cut:], [dice.randrange(tokenizer.get_vocab_size()) for _ in range(cut)]):
            assert text_of(tokenizer, spelt[:cut], ids) == vllms_text(tokenizer, spelt[:cut], ids)

"""The table of checks in their order, with needs, deadline and function of each, and the types they share.

The module also makes the model with random weights, the tokenizer and the task that checks use, so that nothing is
downloaded.
"""

from __future__ import annotations

import os
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

Level = Literal["ok", "problem", "left out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of one check."""

    level: Level
    figure: str
    """Measurement or failure, in one line."""
    cure: str = ""
    """Cure of a problem; empty for other levels."""
    details: dict[str, Any] = field(default_factory=dict)
    """Numbers for the report: plain JSON."""


def judged(figure: str, problem: str = "", cure: str = "", **details: Any) -> CheckResult:
    """Return a result of level `ok` with its figure, or of level `problem` with figure, problem and cure."""
    shown = f"{figure}: {problem}" if problem else figure
    return CheckResult(
        level="problem" if problem else "ok", figure=shown, cure=cure if problem else "", details=details
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """Input of every check."""

    device: Literal["gpu", "cpu"]
    num_gpus: int
    """Number of GPUs to use; ignored on a CPU."""
    model: str
    """The user's model; empty: the check makes one with random weights."""
    folder: Path
    """Empty folder for this check alone."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "gpu"


def first_devices(count: int) -> str:
    """Return a CUDA_VISIBLE_DEVICES with the first `count` GPUs that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(count)]
    return ",".join(names[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheck:
    name: str
    what: str
    function: str
    """`module:function` in this package, which takes a CheckContext and returns a CheckResult."""
    deadline_s: float
    min_gpus: int = 1
    runs_on_cpu: bool = True

    def why_not(self, context: CheckContext) -> str:
        """Return why this check can't run here; empty if it can."""
        if not context.on_gpu:
            return "" if self.runs_on_cpu else "needs a GPU"
        return "" if context.num_gpus >= self.min_gpus else f"needs {self.min_gpus} GPUs"

    def run(self, context: CheckContext) -> CheckResult:
        """Run this check in this process."""
        module, _, function = self.function.partition(":")
        found: Callable[[CheckContext], CheckResult] = getattr(import_module(f"{__package__}.{module}"), function)
        return found(context)


CHECKS = (
    GpuCheck(name="versions", what="driver, CUDA, packages", function="hardware:versions", deadline_s=120),
    GpuCheck(name="gemm", what="bfloat16 products", function="hardware:gemm", deadline_s=180),
    GpuCheck(name="p2p", what="GPU to GPU", function="hardware:peer_access", deadline_s=180, min_gpus=2,
          runs_on_cpu=False),
    GpuCheck(name="all-reduce", what="collectives", function="hardware:all_reduce", deadline_s=300, min_gpus=2),
    GpuCheck(name="memory", what="a learner beside its plan", function="engine:memory_against_plan", deadline_s=600,
          runs_on_cpu=False),
    GpuCheck(name="vllm", what="an engine, asleep and awake, log-probs", function="engine:engine_tp1", deadline_s=900),
    GpuCheck(name="vllm-eager", what="the same without compiling and graphs", function="engine:engine_eager",
          deadline_s=900, runs_on_cpu=False),
    GpuCheck(name="vllm-fp8", what="the same with weights and KV cache of 8 bits", function="engine:engine_fp8",
          deadline_s=900, runs_on_cpu=False),
    GpuCheck(name="vllm-tp2", what="an engine over two GPUs", function="engine:engine_tp2", deadline_s=900, min_gpus=2,
          runs_on_cpu=False),
    GpuCheck(name="split", what="three steps, GPUs apart", function="training:train_split", deadline_s=1200,
          min_gpus=2),
    GpuCheck(name="split-store", what="the same, weights through Ray", function="training:train_split_store",
          deadline_s=1200, min_gpus=2),
    GpuCheck(name="colocated", what="three steps, GPUs shared", function="training:train_colocated", deadline_s=1200),
    GpuCheck(name="partial", what="the same, unfinished groups kept", function="training:train_partial",
          deadline_s=1200),
    GpuCheck(name="adapters", what="three steps of adapters, GPUs shared", function="training:train_adapters",
          deadline_s=1200),
    GpuCheck(name="async", what="three steps, sampling ahead", function="training:train_async", deadline_s=1200,
          min_gpus=2),
)  # fmt: skip
BY_NAME = {check.name: check for check in CHECKS}


LETTERS = ["<pad>", "<eos>", *(letter for letter in string.printable if letter not in "\t\n\r\x0b\x0c")]
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16}
"""Shape with 0.5 billion parameters: 1 GB of weights to send, and matrix products large enough to be fast."""
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
    """Return the path of the user's model, or make a model with random weights in the check's folder."""
    return context.model or str(random_model(context.folder / "model", LARGE if context.on_gpu else SMALL))


def random_model(folder: Path, shape: dict[str, int], *, vocabulary: int = len(LETTERS)) -> Path:
    """Write a Llama with random bfloat16 weights and a tokenizer of single characters; return its folder."""
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

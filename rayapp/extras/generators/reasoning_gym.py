"""Problems of the package reasoning-gym as tasks. They are generated from a seed, without a download.

    reasoning_gym:chain_sum      reasoning_gym:countdown?size=200&seed=7&max_value=20

Some generators compare texts, which this process does. Others evaluate the answer (`eval`, sympy's parser): they run in
a sandbox with the package, and make the problem again from their name and its number. The answer's code could forge its
score there, so the verdict has the term `verdict/forgeable`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from rayapp.config.agent import GENERATED
from rayapp.core.errors import InputError
from rayapp.core.names import did_you_mean
from rayapp.core.protocols import Sandbox, SandboxSource, Tokenizer
from rayapp.core.syntax import answer_of
from rayapp.core.types import AgentStart, CallResult, ExecResult, Prompt, Reward, SandboxSpec
from rayapp.tasks.verdict import judged_in_sandbox

PACKAGE = "reasoning_gym"
_SIZE, _SEED = 500, 0
_TIMEOUT_S = 20.0
_MAX_ANSWER_CHARS = 10_000
_INSTRUCTION = "Put your final answer between <answer> and </answer>."
_ENTRY = "_rayapp_score"
_INSIDE = f"""
import reasoning_gym
def {_ENTRY}(name, options, index, answer):
    data = reasoning_gym.create_dataset(name, **options)
    return float(data.score_answer(answer, data[index]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTask:
    """One generated problem, as a `Task` (`rayapp.core.protocols`)."""

    name: str
    prompt: str
    answer: str | None  # Right answer; None if several are right.
    options: str  # Options of the generator as JSON.
    index: int
    is_compared: bool  # False if a sandbox scores the answer.

    @property
    def solution(self) -> str | None:
        return None if self.answer is None else f"<answer>{self.answer}</answer>"

    def render(self, tokenizer: Tokenizer) -> Prompt:
        text, is_chat = f"{self._told}\n", bool(getattr(tokenizer, "chat_template", None))
        messages = ({"role": "user", "content": self._told},)
        if is_chat:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer.encode(text, add_special_tokens=not is_chat)
        return Prompt(task=self.name, text=text, token_ids=np.asarray(token_ids, np.int32), messages=messages)

    def agent_start(self) -> AgentStart:
        return AgentStart(messages=({"role": "user", "content": self._told},))

    @property
    def _told(self) -> str:
        return f"{self.prompt}\n\n{_INSTRUCTION}"

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        """Return the generator's score, from 0 to 1; the term `solved` is 1 if it is 1. Raises SandboxConfigError."""
        started = time.monotonic()
        answer = _answer_in(answer_of(completion_text))
        if answer is None:
            verdict = replace(_reward(0.0), status="no_answer", detail="there is no <answer>…</answer>")
        elif self.is_compared:
            verdict = _reward(_compared(answer, self.answer or ""))
        else:
            spec = SandboxSpec(packages=(PACKAGE,))
            verdict = await judged_in_sandbox(sandboxes, spec, partial(self._judge, answer))
        return replace(verdict, time_score_s=time.monotonic() - started)

    async def _judge(self, answer: str, sandbox: Sandbox) -> Reward:
        call, ran = await self._call(answer, sandbox)
        if ran.error.startswith("ModuleNotFoundError"):
            return Reward.invalid("no_package", f"{ran.error}: install the package in the provider's template")
        value = call.value if call.ok and isinstance(call.value, float) and 0.0 <= call.value <= 1.0 else 0.0
        why = f"stopped for {ran.stopped_for.value}" if ran.stopped_for else ran.error or call.error
        if why and not (await self._call(self.answer or "", sandbox))[0].ok:
            told = (
                "no answer can be scored"
                if self.answer is None
                else "the generator's own right answer can't be scored either"
            )
            return Reward.invalid("no_score", f"{told}: {why}")
        reward = _reward(value)
        return replace(reward, terms={**reward.terms, "verdict/forgeable": 1.0}, detail=why)

    async def _call(self, answer: str, sandbox: Sandbox) -> tuple[CallResult, ExecResult]:
        inputs = [[self.name, json.loads(self.options), self.index, answer]]
        report = await sandbox.call_function(_INSIDE, _ENTRY, inputs, timeout_s=_TIMEOUT_S)
        return report.calls[0], report.exec


def _answer_in(text: str) -> str | None:
    before, end, _ = text.rpartition("</answer>")
    _, begin, answer = before.rpartition("<answer>")
    return answer.strip() if begin and end and len(answer) <= _MAX_ANSWER_CHARS else None


def _compared(answer: str, wanted: str) -> float:
    """Return the score by the package's rule: 1 if the answer equals `wanted`, a fraction if it contains it."""
    if answer == wanted:
        return 1.0
    return len(wanted) / len(answer) if wanted and wanted in answer else 0.0


def _reward(value: float) -> Reward:
    return Reward(value=value, terms={"pass_rate": value, "solved": float(value >= 1.0)})


def load_generated(source: str) -> tuple[GeneratedTask, ...]:
    """Return the problems of a source `reasoning_gym:NAME?size=…&seed=…`, which may have options of the generator.

    Raises InputError: the package or the generator is missing, or it refuses an option.
    """
    name, _, query = source.removeprefix(GENERATED).partition("?")
    options = {"size": _SIZE, "seed": _SEED, **{key: _value(text) for key, text in parse_qsl(query)}}
    data = _dataset(source, name, options)
    from reasoning_gym.dataset import ProceduralDataset

    is_compared = type(data).score_answer is ProceduralDataset.score_answer
    return tuple(
        GeneratedTask(
            name=name,
            prompt=str(entry["question"]),
            answer=None if entry["answer"] is None else str(entry["answer"]),
            options=json.dumps(options),
            index=index,
            is_compared=is_compared,
        )
        for index, entry in enumerate(data[number] for number in range(len(data)))
    )


def _dataset(source: str, name: str, options: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError(
            f"{source} needs the package reasoning-gym on every node: pip install 'reasoning-gym>=0.1.25' ({error})"
        ) from error
    if name not in DATASETS:
        meant = did_you_mean(name, DATASETS)
        raise InputError(f"{source}: there is no generator {name!r}{meant} Choose from {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise InputError(f"{source}: the generator refuses its options: {error}") from error


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text

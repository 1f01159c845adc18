"""Rows in verl's schema from a user's own examples, TRL's `prompt` and `answer` columns among them. Pure; `rayapp data
rows` calls it through `preparing.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayapp.core.errors import InputError
from rayapp.tasks.data.data_row import parse_messages

PROMPT_NAMES = ("prompt", "question", "problem", "instruction", "input", "query")
ANSWER_NAMES = ("answer", "ground_truth", "solution", "label", "target", "output", "completion")
_TAKEN = frozenset({"split", "index", "tools_kwargs", "need_tools_kwargs", "interaction_kwargs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnColumns:
    """How the columns of a user's examples are read: a mapper of `rows.py`.

    Example: `OwnColumns()({"prompt": "2 + 2?", "answer": 4}, 0, "train", "mine")`.
    """

    prompt: str = ""
    """Empty: the first of PROMPT_NAMES that is there. A text, or a list of messages."""
    answer: str = ""
    """Empty: the first of ANSWER_NAMES that is there."""
    has_answers: bool = True
    """False: what an answer is worth depends on nothing but itself, and the ground truth is empty."""
    system: str = ""
    """System message in front of each prompt that has none."""

    def __call__(self, example: Mapping[str, Any], index: int, split: str, data_source: str) -> dict[str, Any]:
        """One row. All other columns go to `extra_info`, where a reward function finds them.

        Raises:
            InputError: a column is missing, or holds something else.
        """
        if {"data_source", "reward_model", "prompt"} <= example.keys():
            raise InputError("it is in verl's schema already: name the file in data.train_files")
        prompt = self._name(example, self.prompt, PROMPT_NAMES, "--prompt-column")
        answer = self._name(example, self.answer, ANSWER_NAMES, "--answer-column") if self.has_answers else ""
        others = {key: value for key, value in example.items() if key not in {prompt, answer, *_TAKEN}}
        return {
            "data_source": data_source,
            "prompt": self._messages(example[prompt], f"column {prompt}"),
            "ability": "own",
            "reward_model": {"style": "rule", "ground_truth": _truth(example[answer]) if answer else ""},
            "extra_info": {"split": split, "index": index, **others},
        }

    def _name(self, example: Mapping[str, Any], given: str, usual: tuple[str, ...], option: str) -> str:
        wanted = (given,) if given else usual
        found = next((name for name in wanted if example.get(name) is not None), None)
        if found is None:
            raise InputError(
                f"no column {' or '.join(wanted)}; there are {', '.join(example)}. Name one with {option}"
                + (", or give --no-answers" if option == "--answer-column" else "")
            )
        return found

    def _messages(self, value: Any, where: str) -> list[dict[str, str]]:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else parse_messages(value, where)
        found = [{"role": str(one["role"]), "content": str(one["content"])} for one in messages]
        if not any(one["content"].strip() for one in found):
            raise InputError(f"{where} is empty")
        if self.system and found[0]["role"] != "system":
            return [{"role": "system", "content": self.system}, *found]
        return found


def _truth(value: Any) -> str:
    """The answer as the text that rules compare. TRL's may be a list of messages: its last one counts."""
    if isinstance(value, list) and value and isinstance(value[-1], Mapping) and "content" in value[-1]:
        value = value[-1]["content"]
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise InputError(f"the answer must be a text or a number, not {value!r:.60}")
    return str(value)

"""Rows in verl's schema from raw GSM8K and geometry3k examples. Pure functions; `preparing.py` calls them.

data_source, agent_name, prompt [{role, content}], ability, reward_model {style, ground_truth},
extra_info {split, index, answer, question, need_tools_kwargs, tools_kwargs, interaction_kwargs}, images (geometry3k)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rayapp.core.errors import InputError

Row = dict[str, Any]
_ANSWER = re.compile(r"#### *(-?[0-9.,]+)")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
GSM8K_SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. "
    "Reasoning step by step before any tool call. "
    "You should use the `calc_gsm8k_reward` tool after step by step solving the question, "
    "before generate final answer at least once and refine your answer if necessary. "
    "Put your final answer in the format of `#### <answer>`."
)
"""GSM8K's system prompt, word for word that of verl's multi-turn job, so that runs stay comparable with it."""
GSM8K_INSTRUCTION = "Let's think step by step and output the final answer after `####`."
GEOMETRY3K_INSTRUCTION = (
    "First think about the problem, and write your reasoning between <think> and </think>. "
    r"Then write the final answer inside \boxed{}."
)


def extract_solution(answer: str) -> str:
    """The number after the last `####`, without thousands separators.

    Raises:
        InputError: there is none.
    """
    found = _ANSWER.findall(answer)
    number = found[-1].replace(",", "").rstrip(".") if found else ""
    if not _NUMBER.fullmatch(number):
        raise InputError(f"the answer has no number after ####: …{answer[-60:]!r}")
    return number


def gsm8k_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """One problem with the tools of the multi-turn job.

    Raises:
        InputError: `question` or `answer` is missing, no text or empty; or there is no `#### number`.
    """
    question, answer = _text(example, "question"), _text(example, "answer")
    solution = extract_solution(answer)
    extra = {
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": solution}}},
        "interaction_kwargs": {"query": question, "ground_truth": solution},
    }
    return {
        "data_source": data_source,
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": GSM8K_SYSTEM},
            {"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question, **extra},
    }


def geometry3k_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """One geometry problem. Each `<image>` in its text stands for one of `images`: `{"bytes": …, "path": …}`.

    Raises:
        InputError: `problem` or `answer` is missing, or the images don't match the marks.
    """
    problem, answer = _text(example, "problem"), _text(example, "answer")
    images = [_image(image) for image in example.get("images") or ()]
    if len(images) != problem.count("<image>"):
        raise InputError(f"{len(images)} images, but {problem.count('<image>')} <image> marks in its problem")
    extra = {"need_tools_kwargs": False, "interaction_kwargs": {"query": problem, "ground_truth": answer}}
    return {
        "data_source": data_source,
        "agent_name": "single_turn_agent",
        "prompt": [{"role": "user", "content": f"{problem} {GEOMETRY3K_INSTRUCTION}"}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": problem, **extra},
    }


def _text(example: Mapping[str, Any], column: str) -> str:
    if column not in example:
        raise InputError(f"no column {column!r}; there are {', '.join(sorted(example))}")
    value = example[column]
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"column {column!r} must be a text that isn't empty, not {value!r:.80}")
    return value


def _image(image: object) -> dict[str, Any]:
    match image:
        case {"bytes": bytes() as data}:
            return {"bytes": data, "path": None}
        case {"path": str(path)}:
            return {"bytes": None, "path": path}
    raise InputError(f"an image must be bytes or a path, not {type(image).__name__}")


Mapper = Callable[[Mapping[str, Any], int, str, str], Row]
DATASETS: Mapping[str, tuple[str, str | None, Mapper]] = {
    "gsm8k": ("openai/gsm8k", "main", gsm8k_row),
    "geometry3k": ("hiyouga/geometry3k", None, geometry3k_row),
}
"""Name -> hub id (which is also the data_source that scoring goes by), hub configuration, mapper."""

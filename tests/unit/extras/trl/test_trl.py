"""TRL's GRPOConfig and trainer arguments as a run here: every field lands, and the page's script runs."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from rayapp.config.config import Config
from rayapp.config.foreign_keys import GivenRun
from rayapp.core.errors import ConfigError, InputError, RewardFailedError
from rayapp.core.names import giving
from rayapp.core.types import CallRecord
from rayapp.extras.environments.trl import TrlEpisodes
from rayapp.extras.trl.fields import DEFAULTS, FIELDS
from rayapp.extras.trl.translation import trl_config
from rayapp.tasks.custom_rewards import CustomReward
from rayapp.tasks.loading import load_tasks
from support import make

ROOT = Path(__file__).parents[4]
RECORDED: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "trl_fields.json").read_text())
"""Fields of TRL 1.16's own GRPOConfig with their defaults."""
ROWS = [{"prompt": f"{number} + 1?", "answer": number + 1} for number in range(16)]


def right(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    return [float(text.endswith(str(each))) for text, each in zip(completions, answer, strict=True)]


async def short(completions: list[str], **_: Any) -> list[float | None]:
    return [1.0 if len(text) < 9 else None for text in completions]


def translated(folder: Path, args: dict[str, Any], **more: Any) -> GivenRun:
    parts = {"model": "m", "train_dataset": ROWS, "reward_funcs": [right, short]} | more
    return trl_config({"output_dir": str(folder), **args}, **parts)


def test_every_field_of_trls_class_has_a_place_or_a_reason(tmp_path: Path) -> None:
    run = translated(tmp_path, RECORDED["fields"] | {"output_dir": str(tmp_path)})

    assert FIELDS.keys() == RECORDED["fields"].keys()
    assert [row.key for row in run.rows if row.outcome == "ignored" and not row.landing.note] == []
    text = " ".join(str(run).split())
    assert all(name in text for name in RECORDED["fields"])
    assert text.count("concerns only the internals of transformers or accelerate") == 1


def test_defaults_of_omitted_fields_are_trls() -> None:
    assert {name: RECORDED["fields"][name] for name in DEFAULTS} == DEFAULTS


def test_the_arithmetic_of_batches_is_trls(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8}
    steps = {"max_steps": 40, "save_steps": 8, "warmup_steps": 0.1}

    found = translated(tmp_path, sizes | steps | {"num_generations": 4}, num_gpus=2).config

    # 4 x 2 processes x 8 = 64 completions are sampled, 16 prompts; 16 completions are an optimizer step.
    assert (found.train.groups_per_step, found.train.num_minibatches) == (16, 4)
    assert (found.train.num_steps, found.checkpoint.every_steps) == (10, 2)
    assert found.learner.optimizer.warmup_steps == 4
    assert (found.learner.num_learners, found.server.num_servers, found.cluster.placement) == (2, 2, "colocated")


def test_the_algorithm_means_the_same(tmp_path: Path) -> None:
    plain = translated(tmp_path, {"use_vllm": True, "beta": 0.01, "delta": 4.0}).config.algorithm
    assert (plain.loss_agg_mode, plain.clip_ratio_c, plain.kl_loss_type) == ("token-mean", 4.0, "k3+")
    correction = plain.rollout_correction
    assert (correction.level, correction.threshold, correction.min_weight) == ("sequence", 3.0, 1e-6)
    cispo = translated(tmp_path, {"loss_type": "cispo", "epsilon_high": 5.0}).config.algorithm
    assert (cispo.policy_loss, cispo.clip_ratio_low, cispo.clip_ratio_high) == ("cispo", 1.0, 4.0)
    gspo = translated(tmp_path, {"loss_type": "grpo", "importance_sampling_level": "sequence"}).config.algorithm
    assert (gspo.policy_loss, gspo.loss_agg_mode) == ("gspo", "seq-mean-token-mean")


def test_a_vllm_server_is_one_of_the_runs_own(tmp_path: Path) -> None:
    args = {"use_vllm": True, "vllm_mode": "server", "vllm_tensor_parallel_size": 2}
    found = translated(tmp_path, args, num_gpus=4).config
    assert (found.cluster.placement, found.cluster.num_gpus, found.learner.num_learners) == ("split", 6, 4)
    assert (found.server.num_servers, found.server.tensor_parallel_size) == (1, 2)


async def test_rewards_are_called_as_trl_does_and_weighed(tmp_path: Path) -> None:
    run = translated(tmp_path, {"reward_weights": [1.0, 0.5], "max_steps": 2})

    assert await score_of(run, "4", 3) == {"right": 1.0, "short": 1.0, "score": 1.5}
    assert await score_of(run, "well, it is 4", 3) == {"right": 1.0, "score": 1.0}, "None adds nothing, as in TRL"
    assert (await score_of(run, "5", 3))["score"] == 0.5


class Game:
    """An environment in TRL's form."""

    def reset(self, **columns: Any) -> str:
        return "begin"

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: any.
        """
        return "no"


def test_an_environment_is_a_task_with_the_class_itself(tmp_path: Path) -> None:
    run = translated(tmp_path, {"max_steps": 1}, environment_factory=Game)

    tasks: Any = load_tasks(run.config.tasks)

    assert run.objects[tasks[0].environment.factory] is Game
    assert len(tasks) == len(ROWS)
    assert tasks[0].columns == ROWS[0]
    assert tasks[0].environment.reward in run.objects


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"learning_rat": 1}, "learning_rat is not a field.*did you mean learning_rate"),
        ({"loss_type": "vespo"}, "loss_type = 'vespo'"),
        ({"top_p": 0.9}, "bias the importance ratio"),
        ({"num_iterations": 2}, "trained on once"),
        ({"lr_scheduler_type": "polynomial"}, "supported values are linear"),
        ({"per_device_train_batch_size": 3}, "not a multiple of num_generations"),
        ({"eval_strategy": "epoch"}, "eval_strategy = 'epoch' can't be imported: it must be steps or no"),
        ({"reward_weights": [1.0]}, "1 weights for 2 reward_funcs"),
        ({"optim": "adafactor"}, "AdamW"),
        ({"fp16": True}, "bf16=True"),
        ({"resume_from_checkpoint": "out/checkpoint-5"}, "continues from the last checkpoint"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "adv_estimator=gdpo"),
        ({"max_completion_length": None}, "max_completion_length = None can't be imported"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_its_reason(tmp_path: Path, args: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        translated(tmp_path, args)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    def reads_more(trainer_state: Any, log_extra: Any, log_metric: Any = None, **_: Any) -> list[float]:
        return [0.0]

    adapters = {"r": 8, "lora_dropout": 0.1, "target_modules": None}
    others = {"callbacks": [1], "rollout_func": print, "processing_class": None, "rewrd_funcs": 1, "tools": [print]}
    others["quantization_config"] = {"load_in_4bit": True}
    wrong = {"reward_funcs": ["a/model", reads_more], "peft_config": adapters, "environment_factory": Game} | others
    with pytest.raises(ConfigError) as caught:
        translated(tmp_path, {"top_p": 0.9, "fp16": True}, **wrong)
    for said in (
        "top_p", "fp16", "docs/judges.md", "reads_more needs trainer_state, log_extra,", "lora_dropout",
        "target_modules",
        "callbacks", "rollout_func", "rewrd_funcs", "tools", "overrides=['model.quantization=nf4'] loads",
    ):  # fmt: skip
        assert said in str(caught.value)
    assert "processing_class" not in str(caught.value)


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        ([], "reward_funcs is empty"),
        ([lambda completions: [1.0]], "<lambda> doesn't take answer, prompts, which it gets"),
        ([lambda completions, solution, **_: [1.0]], "<lambda> needs solution, which rayapp doesn't pass"),
        ([lambda prompt_ids, *_, **__: [1.0]], "<lambda> needs prompt_ids, which"),
        ([functools.partial(lambda scale, completions: [scale], 2.0)], "doesn't take answer, prompts"),
    ],
)
def test_a_reward_function_that_cannot_be_called_is_named_at_once(
    tmp_path: Path, functions: list[Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        translated(tmp_path, {}, reward_funcs=functions)


@pytest.mark.parametrize("found", [None, 1.0, np.float64(1.0), [], [1.0, 2.0]])
async def test_a_return_value_that_is_no_list_of_a_reward_is_named(tmp_path: Path, found: Any) -> None:
    run = translated(tmp_path, {}, reward_funcs=[lambda completions, **_: found])
    with pytest.raises(RewardFailedError, match=r"<lambda> returned .*, not a list with a reward for each completion"):
        await score_of(run, "x")


async def test_columns_that_trl_keeps_for_itself_are_not_passed(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "c", "completions": "d", "prompts": "q", "completion_ids": [1], "k": 3}] * 16
    run = translated(tmp_path, {}, train_dataset=rows, reward_funcs=[lambda prompts, completions, k: k])
    assert await score_of(run, "x") == {"<lambda>": 3.0, "score": 3.0}


def times(completions: list[str], k: float, trainer_state: Any = None, **_: Any) -> list[float]:
    return [k for _ in completions]


class Constant:
    def __init__(self, value: float) -> None:
        self._value = value

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [self._value]

    say = __call__


async def score_of(run: GivenRun, text: str, index: int = 0) -> dict[str, float]:
    row = pq.read_table(run.config.tasks[0]).to_pylist()[index]
    with giving(run.objects):
        custom = CustomReward(path=run.config.reward.custom, timeout_s=30.0)
        return await custom(data_source="trl", solution_str=text, ground_truth="", extra_info=row["extra_info"])


@pytest.mark.parametrize(
    "functions",
    [
        [functools.partial(times, k=1), functools.partial(times, k=2)],
        [lambda completions, **_: [1.0], lambda completions, **_: [2.0]],
        [functools.partial(times, k=1), lambda completions, **_: [2.0]],
        [Constant(1.0), Constant(2.0)],
        [Constant(1.0).say, Constant(2.0).say],
    ],
)
async def test_two_functions_are_two_terms_whatever_their_names(tmp_path: Path, functions: list[Any]) -> None:
    found = await score_of(translated(tmp_path, {}, reward_funcs=functions), "x")
    assert found["score"] == 3.0
    assert sorted(found.values()) == [1.0, 2.0, 3.0]


async def test_a_number_in_a_functions_own_name_is_no_other_functions_term(tmp_path: Path) -> None:
    def times_3(completions: list[str], **_: Any) -> list[float]:
        return [10.0]

    functions = [times_3, functools.partial(times, k=1), functools.partial(times, k=2)]
    found = await score_of(translated(tmp_path, {}, reward_funcs=functions), "x")
    assert sorted(found.values()) == [1.0, 2.0, 10.0, 13.0]


async def test_functions_that_name_completion_ids_get_them(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "m").mkdir()
    words.save(str(tmp_path / "m" / "tokenizer.json"))
    (tmp_path / "m" / "tokenizer_config.json").write_text("{}")

    def last(completion_ids: list[list[int]], log_metric: Any = None, **_: Any) -> list[float]:
        return [float(ids[-1]) for ids in completion_ids]

    run = translated(tmp_path, {}, model=str(tmp_path / "m"), reward_funcs=[last], train_dataset=[{"prompt": "p"}] * 8)
    assert (await score_of(run, "a a b"))["score"] == 1.0


def test_tools_are_the_methods_of_an_environment(tmp_path: Path) -> None:
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one.
            b: another.
        """
        return a + b

    run = translated(tmp_path, {"max_steps": 1}, tools=[add])
    tasks: Any = load_tasks(run.config.tasks)
    made: Any = run.objects[tasks[0].environment.factory]
    assert (made().add(1, 2), made().reset(prompt="p")) == (3, None)
    assert tasks[0].environment.reward in run.objects
    with giving(run.objects):
        [schema] = asyncio.run(TrlEpisodes(tasks[0].environment).open())
    assert (schema.name, list(schema.parameters["properties"])) == ("add", ["a", "b"])


def test_an_environment_is_evaluated_on_the_rows_of_the_evaluation_set(tmp_path: Path) -> None:
    held_out = [{"prompt": "held out", "answer": "1"}]
    run = translated(tmp_path, {"max_steps": 1}, environment_factory=Game, eval_dataset=held_out)
    assert [task.columns["prompt"] for task in cast("Any", load_tasks(run.config.eval.tasks))] == ["held out"]
    assert len(load_tasks(run.config.tasks)) == len(ROWS)


async def test_reward_functions_read_tool_calls_and_their_results_as_in_trl(tmp_path: Path) -> None:
    seen = []

    def called(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        return [1.0]

    run = translated(tmp_path, {"reward_weights": [0.5]}, reward_funcs=[called], environment_factory=Game)
    [task, *_] = cast("Any", load_tasks(run.config.tasks))
    call = CallRecord(name="guess", arguments='{"number": 3}', output="too low")
    bomb = CallRecord(name="guess", arguments="[" * 100_000, output="no")
    turn = make.turn(1, 2, text="<tool_call>", calls=(call, bomb))
    with giving(run.objects):
        async with TrlEpisodes(task.environment).episode() as episode:
            rewards = await episode.reward(task, make.trajectory([0, 1], turns=(turn,)))
    assert rewards == {"called": 1.0, "environment": 0.5}
    functions = [{"name": "guess", "arguments": given} for given in ({"number": 3}, bomb.arguments)]
    calls = [{"type": "function", "function": function} for function in functions]
    results = [{"role": "tool", "name": "guess", "content": each} for each in ("too low", "no")]
    assert seen == [[{"role": "assistant", "content": "<tool_call>", "tool_calls": calls}, *results]]


def test_rows_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    for rows, reason in (
        (["x"], "row 0: a row must be a mapping"),
        ([{"prompt": ""}], "row 0 has no prompt"),
        ([{"prompt": "a", "b": b"x"}] * 9, "train_dataset, row 0: a value can't be written as JSON"),
        ("f", "a str"),
    ):
        with pytest.raises(InputError, match=reason):
            translated(tmp_path, {}, train_dataset=rows, reward_funcs=[short])


@pytest.mark.timeout(900)
def test_the_script_of_the_page_runs_before_and_after_with_trls_own_class(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "migrate-from-trl.md").read_text()
    before, after = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for name, script in {"before.py": before, "after.py": after}.items():
        (tmp_path / name).write_text(script)
    for name in ("math.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in ROWS * 4))

    argv = [sys.executable, str(ROOT / "tests" / "data" / "run_trl_page.py"), "before.py", "after.py"]
    away = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, cwd=tmp_path, env=away, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr

    config = Config.model_validate_json(done.stdout)
    assert (config.rollout.group_size, config.train.groups_per_step, config.train.num_minibatches) == (8, 8, 1)
    assert (config.train.num_steps, config.eval.every_steps, config.checkpoint.every_steps) == (16, 25, 50)
    assert (config.learner.lora.rank, config.learner.lora.alpha, config.run.seed) == (32, 64, 7)
    assert (tmp_path / config.tasks[0]).is_file()
    assert (tmp_path / config.eval.tasks[0]).is_file()
    assert (config.learner.optimizer.lr, config.learner.optimizer.schedule) == (2e-5, "linear")
    assert (config.cluster.num_gpus, config.cluster.placement) == (1, "colocated")
    assert "learning_rate = 2e-05: learner.optimizer.lr" in done.stderr


def test_columns_with_pictures_become_verls_and_stay_out_of_the_rewards_arguments(tmp_path: Path) -> None:
    red = Image.new("CMYK", (8, 4), (0, 255, 255, 0))  # as of a JPEG for print, which PNG does not hold
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]
    rows = [
        {"prompt": "Which?", "images": [], "image": red, "answer": 1},
        {"prompt": parts, "images": ["a.png"], "answer": 2},
        {"prompt": [{"role": "user", "content": parts[0]["content"][1:]}], "images": [], "answer": 3},
    ]

    run = translated(tmp_path, {}, train_dataset=rows)

    first, second, text = pq.read_table(run.config.tasks[0]).to_pylist()
    assert text["prompt"] == [{"role": "user", "content": "Which?"}]
    assert Image.open(io.BytesIO(first["images"][0]["bytes"])).getpixel((0, 0)) == (255, 0, 0)
    assert second["images"] == [{"bytes": None, "path": str(Path("a.png").absolute())}]
    assert [each["prompt"] for each in (first, second)] == [[{"role": "user", "content": "<image>Which?"}]] * 2
    assert json.loads(second["extra_info"]["columns"]) == {"prompt": parts, "answer": 2}

"""Arguments of the library's functions become the configuration that the command line would make."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayapp.api.arguments import load, make_job
from rayapp.core.errors import ConfigError, InputError
from rayapp.core.names import giving
from rayapp.tasks.custom_rewards import CustomReward
from rayapp.tasks.loading import load_task, load_tasks
from support import make

DOUBLE = make.double_task(tests=("1",))


def test_a_file_a_mapping_and_a_config_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {num_steps: 7}\ntasks: [a.parquet]\n")
    settings = {"train": {"num_steps": 7}, "tasks": ["a.parquet"]}

    assert load(file) == load(str(file)) == load(settings) == load(load(file)) == load(None, settings)
    assert load(load(file), ["train.num_steps=8"]) == load(settings, {"train.num_steps": 8})
    assert load(load(file), ["train.num_steps=8"]).tasks == ("a.parquet",)


def test_overrides_that_are_one_text_are_refused_with_the_list_they_were_meant_to_be() -> None:
    with pytest.raises(ConfigError, match=r"write \['train.num_steps=8'\]"):
        load(None, "train.num_steps=8")


def test_a_task_and_a_reward_of_a_program_have_names_in_the_configuration_and_are_found_by_them() -> None:
    def shortest(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
        return -float(len(solution_str))

    tasks = make_job(None, tasks=[DOUBLE, "sort_numbers"])
    rows = make_job({"tasks": ["a.parquet"]}, reward=shortest)

    assert tasks.config.tasks == ("python:double", "sort_numbers")
    assert rows.config.reward.custom == "python:shortest"
    with giving({**tasks.objects, **rows.objects}):
        assert load_tasks(tasks.config.tasks)[0] is DOUBLE
        assert CustomReward(path=rows.config.reward.custom).load() is shortest
    with pytest.raises(InputError, match="python:double is an object of the Python program"):
        load_task("python:double")


def test_two_objects_of_one_name_and_what_is_no_task_are_refused() -> None:
    other = DOUBLE.model_copy(update={"prompt": "Other."})

    with pytest.raises(ConfigError, match="two different objects have the name 'double'"):
        make_job(None, tasks=[DOUBLE, other])
    with pytest.raises(InputError, match="a task must have the attributes `name`, `render` and `score`"):
        make_job(None, tasks=[object()])  # type: ignore[list-item]


def test_a_reward_that_no_task_would_ask_is_refused() -> None:
    with pytest.raises(ConfigError, match="score answers themselves"):
        make_job(None, tasks=["sort_numbers"], reward=len)

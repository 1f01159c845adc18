"""Configs from files and overrides, and the messages for what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayapp.config.agent import is_data_file
from rayapp.config.config import Config
from rayapp.config.loading import load_config, to_yaml
from rayapp.core.errors import ConfigError
from rayapp.core.validation import nearest_key, valid_keys
from rayapp.tasks.loading import load_tasks

ROOT = Path(__file__).parents[3]
CONFIGS = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs" / "agents").glob("*.yaml")])


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_config_loads_with_its_tasks_or_data(path: Path) -> None:
    config = load_config(path)

    assert config.uses_data or load_tasks(config.tasks)


def test_overrides_win_over_the_file_and_the_file_over_the_one_that_it_includes(tmp_path: Path) -> None:
    write(tmp_path, "train: {num_steps: 5, groups_per_step: 4}\nrun: {seed: 1}\n", "base.yaml")
    path = write(tmp_path, "include: base.yaml\ntrain: {num_steps: 9}\n")
    values = ["tasks=[sort_numbers]", "learner.optimizer.lr=1e-5", "learner.share_prefixes=false"]

    included = load_config(path)
    config = load_config(path, ["run.seed=2", "run.seed=3", *values, "cluster.num_gpus=null"])

    assert (included.train.num_steps, included.train.groups_per_step, included.run.seed) == (9, 4, 1)
    assert (config.run.seed, config.tasks, config.learner.optimizer.lr) == (3, ("sort_numbers",), 1e-5)
    assert (config.learner.share_prefixes, config.cluster.num_gpus) == (False, None)


def test_resolved_yaml_loads_to_the_same_config(tmp_path: Path) -> None:
    config = load_config(
        None, ["algorithm.policy_loss=clip_cov", "algorithm.policy_loss_options={clip_cov_ratio: 0.1}"]
    )

    assert load_config(write(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("rollout.group_sise=3", "rollout.group_size"),
        ("rolout.group_size=3", "rollout"),
        ("group_size=3", "rollout.group_size"),
        ("rollout.lr=1", "learner.optimizer.lr or warmup.lr"),
        ("trian.num_steps=3", "train"),
        ("learner.optimiser.lr=1", "learner.optimizer"),
        ("server.tensor_paralel_size=1", "server.tensor_parallel_size"),
    ],
)
def test_typo_names_the_nearest_valid_key_with_its_path(typo: str, meant: str) -> None:
    assert f"did you mean {meant}?" in message(typo)


def test_every_key_is_nearest_to_itself() -> None:
    assert [key for key in valid_keys(Config) if nearest_key(key, Config) != key] == []


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("rollout.group_size=0", "rollout.group_size = 0: must be an integer, at least 1"),
        ("server.gpu_memory_utilization=1.5", "= 1.5: must be a number, above 0 and at most 1"),
        ("train.num_steps=many", "train.num_steps = 'many': must be an integer, at least 1"),
        ("train.num_steps=1.5", "train.num_steps = 1.5: must be an integer, at least 1"),
        ("learner.share_prefixes=maybe", "learner.share_prefixes = 'maybe': must be true or false"),
        ("algorithm.loss_agg_mode=mean", "= 'mean': must be one of token-mean, token-sum"),
        ("run.name=a/b", "run.name = 'a/b': must be text, 1 to 63 letters, digits, '.', '_' and '-', the first"),
        ("tasks=x.yaml", "tasks = 'x.yaml': must be a list of texts, e.g. tasks=[x.yaml]"),
        ("learner.max_tokens_per_microbatch=3", "must be an integer, at least 16, or auto"),
        ("cluster.num_gpus=-1", "cluster.num_gpus = -1: must be an integer, at least 0"),
        ("rollout=3", "rollout = 3: must be a section with group_size, max_prompt_tokens"),
        ("learner.optimizer.betas=[0.9]", "learner.optimizer.betas"),
    ],
)
def test_bad_value_names_its_range_and_the_value(override: str, text: str) -> None:
    assert text in message(override)


SPLIT = "learner.expert_parallel_size=2"


@pytest.mark.parametrize(
    ("overrides", "arithmetic"),
    [
        (
            "server.num_servers=2 server.tensor_parallel_size=2 learner.num_learners=5 cluster.num_gpus=8",
            "2 servers x TP 2 + 5 learners = 9 GPUs, but cluster.num_gpus is 8",
        ),
        ("train.groups_per_step=3 train.num_minibatches=2", "is 2, which does not divide train.groups_per_step = 3"),
        (f"learner.num_learners=3 {SPLIT}", "is 3, which is not a multiple of learner.expert_parallel_size = 2"),
        (f"learner.num_learners=4 learner.replicas=2 {SPLIT}", "has not been built together with learner.replicas = 2"),
        (f"learner.num_learners=2 learner.max_tokens_per_microbatch=auto {SPLIT}", "microbatch to a number"),
        ("distillation.weight=2", "distillation.weight is 2.0, but distillation.teacher names no model"),
        ("rollout.group_size=1 algorithm.adv_estimator=grpo_passk", "grpo_passk compares the trajectories of a group"),
        ("rollout.group_size=1 algorithm.adv_estimator=remax", "remax compares the trajectories of a group, or keeps"),
        ("rollout.max_completion_tokens=9000", "512 + rollout.max_completion_tokens 9000 = 9512 tokens"),
    ],
)
def test_contradiction_shows_the_arithmetic(overrides: str, arithmetic: str) -> None:
    text = message(*overrides.split())

    assert arithmetic in text
    assert "validation error" not in text


def test_everything_wrong_is_listed_at_once() -> None:
    text = message("rollout.group_size=0", "train.num_step=3")

    assert text.splitlines() == [
        "the overrides:",
        "  rollout.group_size = 0: must be an integer, at least 1",
        "  unknown key train.num_step; did you mean train.num_steps?",
    ]


@pytest.mark.parametrize("key", ["algorithm.adv_estimator", "algorithm.policy_loss"])
def test_name_outside_the_registry_lists_those_in_it(key: str) -> None:
    text = message(f"{key}=nothing_like_it")

    assert text.startswith(f"{key} = 'nothing_like_it' is unknown. Use one of ")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "is not YAML"),
        ("- a\n- b\n", "must hold sections such as `train:`"),
        ("run: {seed: '${nowhere}'}", "nowhere"),
        ("include: c.yaml\n", "includes itself"),
        ("include: gone.yaml\n", "there is no config file"),
    ],
)
def test_broken_file_is_explained(tmp_path: Path, text: str, part: str) -> None:
    assert part in message(path=write(tmp_path, text))


@pytest.mark.parametrize("override", ["train.num_steps", "=3", "--num-steps"])
def test_override_without_key_or_value_shows_the_form(override: str) -> None:
    assert "is not of the form key.sub=value" in message(override)


@pytest.mark.parametrize("override", ["rollout.top_p=0.9", "rollout.top_k=20", "rollout.repetition_penalty=1.1"])
def test_filters_of_sampling_are_refused_with_the_reason(override: str) -> None:
    said = message(override)

    assert f"{override.split('=', maxsplit=1)[0].removeprefix('rollout.')} can't be set for training" in said
    assert "temperature is allowed: engine and learner both apply it" in said


def test_the_file_of_a_benchmark_is_not_a_file_of_rows() -> None:
    assert not is_data_file("benchmark:humaneval=HumanEval.jsonl")
    assert is_data_file("HumanEval.jsonl")


def test_partial_rollouts_need_a_step_of_staleness_and_fit_shared_gpus() -> None:
    with pytest.raises(ConfigError, match="Set max_staleness: 1 or more"):
        load_config(None, ["train.partial_rollouts=true"])
    with pytest.raises(ConfigError, match="extra_groups is 5, which is above max_staleness 2 x groups_per_step 2 = 4"):
        load_config(None, ["train.extra_groups=5", "train.max_staleness=2"])
    with pytest.raises(ConfigError, match=r"train\.partial_rollouts"):
        load_config(None, ["cluster.placement=colocated", "train.max_staleness=1"])

    config = load_config(
        None,
        ["cluster.placement=colocated", "train.max_staleness=2", "train.partial_rollouts=true", "train.extra_groups=1"],
    )
    assert (config.train.max_groups_in_flight, config.train.takes_turns) == (3, True)
    # A group that is kept waits for the learners, twice.
    alone = load_config(None, ["train.max_staleness=2", "train.extra_groups=1"])
    assert config.group_deadline_s == alone.group_deadline_s + 2 * config.recovery.stall_stop_s


@pytest.mark.parametrize(
    "word",
    ["${HOME}", "${HOME:-/root}", "${name%.py}", "${#list[@]}", "${a/b/c}", "$HOME", "$(pwd)", "${1}", "\\${run}",
     "${name+x}", "${name?no}", "${name=x}", "${list[@]}", "${$}", "$$", "\\${oc.env:HOME}", "\\${", "\\${{ name }}"],
)  # fmt: skip
def test_expansions_of_a_shell_are_passed_on(tmp_path: Path, word: str) -> None:
    command = ["sh", "-c", f"echo {word}"]
    (tmp_path / "a.yaml").write_text(json.dumps({"agent": {"external": {"command": command}}}))
    wanted = ("sh", "-c", f"echo {word}".replace("\\$", "$"))
    overrides = ["agent.name=external_agent"]

    assert load_config(tmp_path / "a.yaml", overrides).agent.external.command == wanted
    given = f"agent.external.command={json.dumps(command)}"
    config = load_config(None, [*overrides, given])
    assert config.agent.external.command == wanted
    assert load_config(write(tmp_path, to_yaml(config))) == config


def test_a_reference_to_no_key_shows_the_escape() -> None:
    for name in ("${no_such.key}", "${no_such", "${no such}"):
        with pytest.raises(ConfigError, match=r"such|' s'.*literal \$\{ as \\\$\{"):
            load_config(None, [f"run.name={name}"])
    assert load_config(None, ["run.seed=3", "run.name=x${run.seed}"]).run.name == "x3"

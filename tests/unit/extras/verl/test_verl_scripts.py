"""verl's launch scripts run in a sandbox with stubs; their commands are imported or refused with one message."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest
import yaml

from rayapp.cli.main import run
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError
from rayapp.extras.verl.importing import import_verl, read_verl
from rayapp.extras.verl.keys import TABLE
from rayapp.extras.verl.script import read_script
from support.timing import takes_at_most_s

COMMANDS: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[3] / "data" / "verl_commands.json").read_text(encoding="utf-8")
)
"""Overrides of 29 example scripts of verl 0.9.0, by the script's name."""
REFUSED = {
    "v_generation__run_deepseek_llm_7b": "data.output_path",
    "v_grpo_trainer__run_gpt_oss_20b_fsdp": "rollouts run on vLLM",
    "v_grpo_trainer__run_mistral_nemo_12b_skyworkrm_fsdp": "make the model a judge",
    "v_grpo_trainer__run_qwen3_5_35b_megatron_lite": r"actor\.engine\.\* can't be imported",
    "v_on_policy_distillation_trainer__run_qwen3_8b_fsdp": r"give the teacher as rayapp\.distillation\.teacher=MODEL",
}
"""Commands that can't be imported, with the reason: 24 of 29 can be."""

SCRIPT = r"""#!/usr/bin/env bash
# don't mind the apostrophe
set -xeuo pipefail
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
data_dir="$HOME/data"
train_files="['$data_dir/gsm8k/train.parquet', '$data_dir/math/train.parquet']"
prompt=$((1024 * 2))
n=8
if [ "$n" -gt 4 ]; then tp=2; else tp=4; fi
case "${DEVICE:-gpu}" in
    gpu|cuda) name=vllm ;;
    *) name=other ;;
esac
DATA=(
    data.train_files="$train_files"   # two files
    data.max_prompt_length=$prompt
    data.max_response_length=$((prompt + 1024))
)
DATA+=("data.train_batch_size=${BATCH:=64}")
cat > notes.txt <<EOF
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae
EOF
touch "$(dirname "$0")/must_not_be_there"
PYTHONUNBUFFERED=1 ray job submit --address=http://127.0.0.1:8265 -- python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" \
    actor_rollout_ref.model.path=$MODEL_PATH \
    actor_rollout_ref.rollout.name=$name \
    actor_rollout_ref.rollout.n=$n actor_rollout_ref.rollout.tensor_model_parallel_size=$tp \
    trainer.logger='["console","wandb"]' \
    trainer.experiment_name="${MODEL_PATH##*/}-$(basename $data_dir)" \
    trainer.total_training_steps=10 "$@" 2>&1 | tee log.txt
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "run_model.sh"
    path.write_text(text)
    return path


def command_with(value: str, before: str = "") -> str:
    return f"{before}\npython3 -m verl.trainer.main_ppo actor_rollout_ref.model.path={value}\n"


def test_a_launch_script_runs_where_it_can_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = script(tmp_path, SCRIPT)

    values = read_verl(path, ["data.train_batch_size=16"])

    assert values["data.train_files"] == ["/home/me/data/gsm8k/train.parquet", "/home/me/data/math/train.parquet"]
    assert (values["data.max_prompt_length"], values["data.max_response_length"]) == (2048, 3072)
    assert values["data.train_batch_size"] == 16, "what stands after the file wins"
    assert values["actor_rollout_ref.rollout.tensor_model_parallel_size"] == 2
    assert values["actor_rollout_ref.rollout.name"] == "vllm"
    assert values["trainer.experiment_name"] == "Qwen3-8B-data"
    assert values["trainer.logger"] == ["console", "wandb"]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert run(["config", "import-verl", str(path), "trainer.nnodes=2"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["cluster"]["num_gpus"], config["train"]["groups_per_step"]) == (16, 64)


def test_every_value_that_cannot_be_computed_is_named_at_once(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "python3 -m verl.trainer.main_ppo trainer.nnodes=$NUMBER_OF_NODES data.seed=$(git rev-parse HEAD) "
        "actor_rollout_ref.model.path=$(basename $1) trainer.experiment_name=mine-$(hostname)",
    )
    with pytest.raises(ConfigError, match="can't be computed") as caught:
        read_script(path, {})
    for said in (
        "nnodes: $NUMBER_OF_NODES is empty",
        "seed: git rev-parse HEAD did not",
        "path: $(basename is empty",
    ):
        assert said in str(caught.value)
    keys = ["trainer.nnodes", "data.seed", "actor_rollout_ref.model.path"]
    launch = read_script(path, {}, overridden=keys)
    assert launch.module == "verl.trainer.main_ppo"
    assert launch.arguments[-1] == "trainer.experiment_name=mine-", "a name may lack a part"


def test_the_command_that_trains_is_taken_among_others_and_its_file_found_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "recipe/own/config").mkdir(parents=True)
    shared = "data: {max_prompt_length: 7, max_response_length: 8}\n"
    (tmp_path / "recipe/own/config/shared.yaml").write_text(shared)
    own = "defaults: [ppo_trainer, shared, _self_]\ndata: {max_response_length: 9}\n"
    (tmp_path / "recipe/own/config/own.yaml").write_text(own)
    (tmp_path / "scripts").mkdir()
    path = script(
        tmp_path / "scripts",
        "python -m verl.trainer.main_generation x=1\n${CONDA}python -m recipe.own.main_ppo --config-path=config "
        "--config-name=own data.seed=2\npython -m verl.trainer.main_eval x=2",
    )
    assert read_verl(path) == {"data.max_prompt_length": 7, "data.max_response_length": 9, "data.seed": 2}


PARTS = {
    "${A%%-*}": ("A=x-y-z", "x"),
    '"${B[1]}${#B[@]}"': ("B=(p q)", "q2"),
    "${C/b/c}${C^^}": ("C=ab", "acAB"),
    '"${D:-${E:-deep}}"': ("", "deep"),
    "$F": ('F=5; while [[ $# -gt 0 ]]; do case "$1" in --f) F="$2"; shift 2;; esac; done', "5"),
    "$G": ("G=$(echo ABc | tr '[:upper:]' '[:lower:]')", "abc"),
    "$H": ("if npu-smi info; then H=npu; else H=gpu; fi; python3 -c 'import torch_npu' && H=npu", "gpu"),
    "$I": ("set -e; wget https://example.org/x; . /dev/null; mkdir -p /data/x; ray stop --force; I=1", "1"),
    "$J": ('J="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"', "FOLDER"),
}
"""Expression -> the lines before it, and its value."""


def test_bash_itself_computes_values(tmp_path: Path) -> None:
    words = " ".join(f"{name}={value}" for name, value in zip("abcdfghij", PARTS, strict=True))
    before = "\n".join(lines for lines, _ in PARTS.values())
    path = script(tmp_path, f"{before}\nnohup python3 -m verl.trainer.main_ppo {words} > log 2>&1 &\n")

    found = [argument.partition("=")[2] for argument in read_script(path, {}).arguments]
    assert found == [value.replace("FOLDER", str(tmp_path)) for _, value in PARTS.values()]


def test_scripts_have_little_time_and_little_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayapp.extras.verl.script.TIMEOUT_S", 3.0)
    endless = "while :; do :; done", "x() { x | x & }; x; while :; do python3 -m verl.trainer.main_ppo a=1; done"
    for text in endless:
        with pytest.raises(ConfigError, match="Give the overrides"):
            read_script(script(tmp_path, text), {})
    with pytest.raises(ConfigError, match="bytes"):
        read_script(script(tmp_path, "#" * (1 << 21)), {})


def test_secrets_stay_outside(tmp_path: Path) -> None:
    path = script(tmp_path, command_with("$WANDB_API_KEY$HF_TOKEN$NAME"))
    launch = read_script(path, {"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "NAME": "-name"})
    assert launch.arguments == ("actor_rollout_ref.model.path=hiddenhidden-name",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo hello", "starts no `python -m verl"),
        ("python3 -m verl.trainer.main_generation a=1", "rayapp eval"),
        ("torchrun -m verl.trainer.sft_trainer a=1", "rayapp sft"),
        (command_with("a") + command_with("b"), "2 commands"),
        ("python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer", "Megatron"),
        ("python3 -m verl.trainer.main_ppo --config-path=conf --config-name=mine", "mine.yaml does not exist"),
        ("python3 -m verl.trainer.main_ppo a='b", "unexpected EOF"),
    ],
)
def test_a_script_that_starts_no_training_that_is_here_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_verl(script(tmp_path, text))


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_verls_examples_are_taken_or_refused_in_one_message(name: str) -> None:
    with takes_at_most_s(2):
        if name in REFUSED:
            with pytest.raises(ConfigError, match=REFUSED[name]):
                import_verl(None, COMMANDS[name])
        else:
            assert import_verl(None, COMMANDS[name]).config.cluster.placement == "colocated"


def test_the_algorithms_of_verls_examples_mean_the_same_here() -> None:
    def taken(name: str, *overrides: str) -> Config:
        return import_verl(None, [*COMMANDS[f"v_{name}"], *overrides]).config

    rloo, remax = taken("rloo_trainer__run_qwen3_8b_fsdp"), taken("remax_trainer__run_qwen3_8b_fsdp")
    kl = {"coef": 0.001, "type": "k1"}
    assert rloo.algorithm.kl_in_reward.model_dump(include=set(kl)) == kl
    assert (rloo.algorithm.adv_estimator, rloo.rollout.group_size) == ("rloo", 5)
    assert remax.rollout.group_size == 4 + 1, "verl samples the greedy baseline beside the four"
    alone = taken("reinforce_plus_plus_trainer__run_qwen3_8b_fsdp", "algorithm.kl_penalty=low_var_kl+",
                  "actor_rollout_ref.rollout.n=1")  # fmt: skip
    assert alone.algorithm.kl_in_reward.model_dump() == {"coef": 0.001, "type": "low_var_kl"}
    assert alone.rollout.group_size == 1
    taught = taken("on_policy_distillation_trainer__run_qwen3_8b_fsdp", "distillation.enabled=False",
                   "rayapp.distillation.teacher=m", "rayapp.distillation.reward_weight=0")  # fmt: skip
    assert (taught.rollout.group_size, taught.distillation.reward_weight) == (1, 0.0)

    bypass = taken("rollout_correction__run_qwen2_5_7b_fsdp_multi_rs", "actor_rollout_ref.rollout.n=8").algorithm
    options = {"loss_type": "ppo_clip", "rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.6_1.6,2.5"}
    assert (bypass.policy_loss, bypass.policy_loss_options) == ("bypass_mode", options)
    assert (bypass.rollout_correction.level, bypass.rollout_correction.threshold) == ("token", 2.0)


def test_all_problems_are_told_at_once_in_verls_names() -> None:
    with pytest.raises(ConfigError) as caught:
        import_verl(None, ["algorithm.adv_estimator=gae", "trainer.nnodes=0", "data.seeed=1", "trainer.val_only=True"])
    wrong = ("algorithm.adv_estimator = gae", "trainer.nnodes = 0", "did you mean data.seed?", "trainer.val_only")
    assert len(str(caught.value).splitlines()) == 1 + len((*wrong, "data.train_files is not set"))
    for said in (*wrong, "data.train_files is not set"):
        assert said in str(caught.value)


def test_steps_of_files_that_are_elsewhere_are_left_open(capsys: pytest.CaptureFixture[str]) -> None:
    command = COMMANDS["v_gspo_trainer__run_qwen3_8b_fsdp"]

    assert import_verl(None, command).to_yaml().startswith("# Set train.num_steps: ")
    assert run(["train", "--verl", *command]) == 2
    assert "trainer.total_training_steps is not set" in capsys.readouterr().err


def test_odd_values_are_refused_without_a_traceback() -> None:
    generator = random.Random(7)
    odd = ["null", "-1", "0", "nan", "[]", "{}", "'x'", "1e99", "[1,2]", "true", "${x}", "{a: 1}", "'{'", "*a", "-"]
    base = COMMANDS["v_gspo_trainer__run_qwen3_8b_fsdp"]
    for key in generator.sample(sorted(key.replace("*", "a") for key in TABLE), 60):
        with contextlib.suppress(ConfigError):
            import_verl(None, [*base, f"{key}={generator.choice(odd)}"])


def test_odd_scripts_are_refused_without_a_traceback(tmp_path: Path) -> None:
    generator = random.Random(7)
    for _ in range(8):
        at, length = generator.randrange(len(SCRIPT)), generator.randrange(1, 40)
        noise = "".join(generator.choice("${}()[]'\"\\;|&<>#\n a=1") for _ in range(generator.randrange(6)))
        with contextlib.suppress(ConfigError):
            read_script(script(tmp_path, SCRIPT[:at] + noise + SCRIPT[at + length :]), {"HOME": "/h"})


def test_files_that_are_cut_off_or_no_text_are_refused_without_a_traceback(tmp_path: Path) -> None:
    generator = random.Random(7)
    whole = SCRIPT.encode()
    for count in range(60):
        data = bytearray(whole[: generator.randrange(1, len(whole))])
        for _ in range(generator.randrange(20)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        for name in ("run.sh", "file.yaml") if count < 4 else ("file.yaml",):
            (tmp_path / name).write_bytes(bytes(data))
            with contextlib.suppress(ConfigError):
                import_verl(tmp_path / name)

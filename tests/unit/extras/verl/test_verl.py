"""verl configurations: the whole job of the first seed, its YAML and every override, and refused keys."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rayapp.cli.main import run
from rayapp.config.loading import load_config
from rayapp.core.errors import ConfigError
from rayapp.extras.verl.command import shortened
from rayapp.extras.verl.importing import Imported, import_verl
from rayapp.extras.verl.keys import DEFAULTS, TABLE

YAML = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 1024
  max_response_length: 1024
  train_batch_size: 256
  return_raw_chat: True
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: vllm
    multi_turn:
      enable: True
      max_assistant_turns: 5
"""

OVERRIDES = r"""
algorithm.adv_estimator=grpo
data.train_batch_size=16
data.max_prompt_length=1024
data.max_response_length=1024
data.filter_overlong_prompts=True
data.truncation='error'
data.return_raw_chat=True
actor_rollout_ref.model.path=/var/model/Qwen2.5-3B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=8
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.mode=async
actor_rollout_ref.rollout.gpu_memory_utilization=0.5
actor_rollout_ref.rollout.n=16
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1
actor_rollout_ref.ref.fsdp_config.param_offload=True
actor_rollout_ref.rollout.trace.backend=mlflow
actor_rollout_ref.rollout.trace.token2text=True
algorithm.use_kl_in_reward=False
trainer.critic_warmup=0
trainer.logger='["console","mlflow"]'
trainer.project_name='gsm8k_tool-agent'
trainer.experiment_name='qwen2.5-3b_function_rm-gsm8k-vllm-tool-agent-verify-n16'
trainer.n_gpus_per_node=8
trainer.nnodes=1
trainer.save_freq=1
trainer.test_freq=20
trainer.total_training_steps=1
data.train_files=/var/model-dataset/processed-gsm8k/train20.parquet
data.val_files=/var/model-dataset/processed-gsm8k/test100.parquet
actor_rollout_ref.rollout.multi_turn.tool_config_path="/var/configs/gsm8k_mcp_tool_config.yaml"
actor_rollout_ref.actor.checkpoint.save_contents='["hf_model", "model"]'
trainer.total_epochs=1
"""

TOP_K = "distillation.distillation_loss.loss_mode=forward_kl_topk"
REVERSE = "distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True"
TEACHER = "distillation.enabled=True distillation.teacher_models.teacher_model.model_path=models/teacher"


@pytest.fixture
def seed_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "gsm8k_multiturn_grpo.yaml"
    path.write_text(YAML)
    return path


def imported(path: Path, *more: str) -> Imported:
    """Import the seed's job; the shell removes the quotes, as it does for the entrypoint."""
    return import_verl(path, [*shlex.split(OVERRIDES), *more])


def test_the_seeds_job_means_the_same_here(seed_yaml: Path) -> None:
    config = imported(seed_yaml).config

    assert config.model.path == "/var/model/Qwen2.5-3B-Instruct"
    assert config.tasks == ("/var/model-dataset/processed-gsm8k/train20.parquet",)
    assert config.eval.tasks == ("/var/model-dataset/processed-gsm8k/test100.parquet",)
    assert (config.rollout.group_size, config.train.groups_per_step) == (16, 16)
    assert config.train.num_minibatches == 2  # 16 prompts in mini-batches of 8
    assert (config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens) == (1024, 1024)
    assert config.learner.max_tokens_per_microbatch == 2048  # 1 sequence of 1024 + 1024
    assert config.algorithm.kl_loss_coef == 0.001
    assert config.agent.tool_file == "/var/configs/gsm8k_mcp_tool_config.yaml"
    assert config.agent.max_assistant_turns == 5
    assert (config.train.num_steps, config.checkpoint.every_steps, config.eval.every_steps) == (1, 1, 20)
    assert config.checkpoint.save_contents == ("hf_model", "model")
    assert config.server.tensor_parallel_size == 2
    # 8 learners, and on their GPUs 4 servers of 2.
    assert (config.server.num_servers, config.learner.num_learners, config.cluster.num_gpus) == (4, 8, 8)
    assert config.cluster.placement == "colocated"


def test_the_seeds_traces_go_to_mlflow_and_rows_without_a_name_speak_once_as_in_verl(seed_yaml: Path) -> None:
    config = imported(seed_yaml).config

    assert config.tracking.trackers == ("console", "mlflow", "jsonl")
    assert config.tracking.trace_ratio == 1.0
    assert config.agent.name == "single_turn_agent"


def test_on_a_laptop_three_overrides_make_a_run_for_its_cpu(seed_yaml: Path) -> None:
    laptop = ["trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]

    config = imported(seed_yaml, *laptop, "rayapp.cluster.device=cpu").config

    assert (config.cluster.device, config.server.num_servers, config.learner.num_learners) == ("cpu", 1, 1)
    assert config.rollout.num_workers == 1, "verl's default is 8, whatever the machine"


def test_a_share_of_the_traces_is_that_of_verls_workers(seed_yaml: Path) -> None:
    config = imported(seed_yaml, "actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker=1").config

    assert config.tracking.trace_ratio == 0.5  # 1 prompt of each of verl's 8 workers, of 16 prompts


def test_verls_defaults_count_where_the_user_says_nothing(seed_yaml: Path) -> None:
    config = imported(seed_yaml).config

    assert config.learner.optimizer.weight_decay == 0.01
    assert (config.eval.temperature, config.eval.top_p, config.eval.samples_per_task) == (0.0, 1.0, 1)
    assert config.eval.before_training
    assert config.agent.max_tool_output_chars == 256


def test_every_key_of_the_seed_is_in_the_table_with_a_place_or_a_reason(seed_yaml: Path) -> None:
    rows = {row.key: row for row in imported(seed_yaml).rows}

    keys = {line.partition("=")[0] for line in OVERRIDES.split()}
    assert {key for key in keys if "." in key} <= rows.keys()
    assert [row.key for row in rows.values() if row.outcome == "ignored" and not row.landing.note] == []


def test_the_config_that_is_printed_is_the_config_that_runs(seed_yaml: Path, tmp_path: Path) -> None:
    found = imported(seed_yaml)
    (tmp_path / "ours.yaml").write_text(found.to_yaml())

    assert load_config(tmp_path / "ours.yaml") == found.config


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("custom_reward_function.overlong_buffer.len=512", "rayapp.algorithm.overlong.buffer_tokens"),
        ("reward.overlong_buffer_cfg.penalty_factor=1", "rayapp.algorithm.overlong.penalty"),
        ("actor_rollout_ref.actor.use_token_level_loss=True", "loss_agg_mode=token-mean"),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=2", "rollout_is=token"),
        ("data.max_obs_length=3", "max_tool_response_length"),
        ("max_turns=3", "multi_turn.max_assistant_turns"),
    ],
)
def test_a_key_of_a_fork_names_its_counterpart(seed_yaml: Path, key: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key.partition("=")[0]) + ".*" + re.escape(named)):
        imported(seed_yaml, key)


def test_keys_are_deleted_as_by_hydra(seed_yaml: Path) -> None:
    gone = imported(
        seed_yaml, "actor_rollout_ref.actor.use_token_level_loss=True", "~actor_rollout_ref.actor.use_token_level_loss",
        "~actor_rollout_ref.rollout.multi_turn", "~trainer.save_freq=1",
    )  # fmt: skip
    assert (gone.config.checkpoint.every_steps, gone.config.agent.tool_file) == (0, ""), "verl's defaults"


def test_the_table_begins_with_what_changes_the_training_and_keeps_both_ends_of_a_key(seed_yaml: Path) -> None:
    outcomes = {row.key: row.outcome for row in sorted(imported(seed_yaml).rows, key=lambda row: row.rank)}
    kinds = [said.split()[0] if said.startswith(("folded", "ignored")) else "set" for said in outcomes.values()]

    assert kinds == sorted(kinds, key=["set", "folded", "ignored"].index)
    assert outcomes["actor_rollout_ref.actor.use_kl_loss"] == "folded into actor_rollout_ref.actor.kl_loss_coef"
    turns = "actor_rollout_ref.rollout.multi_turn.max_"
    assert len({shortened(f"{turns}{end}", 40) for end in ("user_turns", "assistant_turns", "parallel_calls")}) == 3
    assert shortened("data.seed = 1", 40) == "data.seed = 1"


def test_an_unknown_key_fails_and_every_unknown_key_is_named(seed_yaml: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean data\.train_batch_size") as caught:
        imported(seed_yaml, "data.train_batchsize=8", "actor_rollout_ref.rollout.warp_speed=9")

    assert "actor_rollout_ref.rollout.warp_speed" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor_rollout_ref.rollout.top_p=0.9", "bias the importance ratio"),
        ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=full", "supported values are kl, k1, mse"),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive", "It must be fixed"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "only with algorithm.rollout_correction.bypass_mode=True"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=5", "does not divide"),
        ("actor_rollout_ref.rollout.name=sglang", "vLLM"),
        ("trainer.n_gpus_per_node=3", "can't be divided into servers"),
        ("algorithm.adv_estimator=gae", "critic"),
        ("actor_rollout_ref.rollout.n=1 algorithm.adv_estimator=grpo_passk", r"Set actor_rollout_ref\.rollout\.n=8"),
        ("rollout.n_gpus_per_node=4", "alone: give both rollout.n_gpus_per_node and rollout.nnodes"),
        ("async_training.staleness_threshold=0.5", "rayapp.train.max_staleness=1"),
        ("reward.reward_model.enable=True", "reward.reward_model.model_path is not set. Set reward"),
        (
            "reward_model.enable=True reward_model.model.path=/rm custom_reward_function.path=r.py",
            "your custom_reward_function calls the model through verl's router",
        ),
        ("data.seed", "key=value or ~key"),
        ("reward_model.reward_manager=mine", "known reward managers are naive, batch, prime, dapo"),
        ("custom_reward_function.reward_kwargs.a=3", "can't get arguments"),
        ("data.apply_chat_template_kwargs.a=[1]", "must be a string, a number"),
        ("data.custom_cls.path=a.py", "verl's default schema"),
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path=a", "only tools answer the policy"),
        ("actor_rollout_ref.model.override_config.vocab_size=3", "a copy of the model"),
        ("trainer.resume_mode=resume_path", "supported values are auto, disable"),
        ("reward.reward_kwargs.temper=3", "rayapp's rewards have no such argument"),
        (
            "actor_rollout_ref.rollout.agent.default_agent_loop=react",
            "supported values are tool_agent, single_turn_agent",
        ),
        ("actor_rollout_ref.rollout.trace.backend=weave", "traces go to MLflow"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.seed=3", "rayapp sets it from run.seed"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.logprobs_mode=raw_logprobs", "log-probs must be"),
        (
            "actor_rollout_ref.rollout.quantization=fp8 algorithm.rollout_correction.rollout_is=sequence",
            "rollout_correction.level is sequence",
        ),
        ("actor_rollout_ref.rollout.quantization=int4", "use fp8_per_block"),
        ("actor_rollout_ref.rollout.response_length=99", "must equal data.max_response_length, which is 1024"),
        ("distillation.enabled=True", "no teacher_models.*model_path is set"),
        (
            f"{TEACHER} distillation.teacher_models.b.model_path=b distillation.teacher_models.c.model_path=c",
            "b, c are",
        ),
        (f"{TEACHER} distillation.distillation_loss.loss_mode=abs", "loss_mode = 'abs'.*supported are k1 with"),
        (
            f"{TEACHER} {REVERSE} distillation.distillation_loss.clip_ratio_high=0.3",
            r"clip_ratio_high = 0\.3 can't be imported",
        ),
        ("skip.rollout.enable=True", "groups are always sampled"),
        (f"{TEACHER} {TOP_K} distillation.distillation_loss.log_prob_min_clamp=-10", "no such limit"),
        ("actor_rollout_ref.actor.qat.enable=True", "learner.compute_dtype"),
        ("actor_rollout_ref.actor.fsdp_config.qat.enable=True", "learner.compute_dtype"),
        ("actor_rollout_ref.actor.fsdp_config.dtype=float16", "supported values are bfloat16"),
        ("actor_rollout_ref.actor.fsdp_config.dtyp=1", r"did you mean actor_rollout_ref\.actor\.fsdp_config\.dtype"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "not Megatron"),
        ("data.train_batch_size=0", "at least 1"),
        ("trainer.nnodes=0", "at least 1"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=0", "at least 1"),
        ("data.train_files=null", "data.train_files is not set"),
        ("trainer.v1.trainer_mode=separate_async", "max_staleness"),
        ("data.max_prompt_length='${data.nobody}'", "nobody"),
        ("actor_rollout_ref.actor.optim.lr=null", r"optim\.lr = None can't be imported"),
        ("trainer.save_freq=often", r"save_freq = 'often' can't be imported"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_reason(seed_yaml: Path, override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        imported(seed_yaml, *shlex.split(override))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("use_policy_gradient=True loss_mode=k1 loss_max_clamp=10.0", ("reverse", "sampled", 1.0, 1.0, 10.0)),
        ("use_task_rewards=False distillation_loss_coef=0.2", ("forward", "sampled", 1.0, 0.0, None)),
        ("loss_mode=k2 distillation_loss_coef=0.2", ("reverse", "sampled", 0.2, 1.0, None)),
        ("loss_mode=forward_kl_topk topk=8", ("forward", "top_k", 1.0, 1.0, 10.0)),
    ],
)
def test_a_teacher_of_verls_teaches_as_it_does_there(
    seed_yaml: Path, overrides: str, expected: tuple[Any, ...]
) -> None:
    loss = [f"distillation.distillation_loss.{override}" for override in overrides.split()]
    found = imported(seed_yaml, *TEACHER.split(), *loss).config.distillation

    assert found.teacher == "models/teacher"
    assert (found.kl, found.kl_over, found.weight, found.reward_weight, found.max_log_ratio) == expected
    assert found.top_k == (8 if found.kl_over == "top_k" else 64)


_OPTIM = "actor_rollout_ref.actor.optim"


@pytest.mark.parametrize(
    ("overrides", "warmup_steps"),
    [
        # The seed's batch has 2 mini-batches, and verl's scheduler steps once for both.
        ((f"{_OPTIM}.lr_warmup_steps=3",), 6),
        ((f"{_OPTIM}.lr_warmup_steps=0", f"{_OPTIM}.lr_warmup_steps_ratio=0.25", "trainer.total_training_steps=10"), 4),
        ((f"{_OPTIM}.lr_warmup_steps=null", f"{_OPTIM}.lr_warmup_steps_ratio=0"), 0),
    ],
)
def test_warm_up_takes_as_many_training_steps_as_in_verl(
    seed_yaml: Path, overrides: tuple[str, ...], warmup_steps: int
) -> None:
    assert imported(seed_yaml, *overrides).config.learner.optimizer.warmup_steps == warmup_steps


def test_a_side_of_the_clip_without_a_value_is_clip_ratio(seed_yaml: Path) -> None:
    actor = "actor_rollout_ref.actor"
    found = imported(
        seed_yaml, f"{actor}.clip_ratio=0.3", f"{actor}.clip_ratio_low=null", f"{actor}.clip_ratio_high=0.4"
    )
    assert (found.config.algorithm.clip_ratio_low, found.config.algorithm.clip_ratio_high) == (0.3, 0.4)


@pytest.mark.parametrize("limit", ["5", "0"])
def test_turns_are_limited_whether_multi_turn_is_on_or_not_as_in_verl(seed_yaml: Path, limit: str) -> None:
    turns = "actor_rollout_ref.rollout.multi_turn"
    found = imported(seed_yaml, f"{turns}.enable=False", f"{turns}.max_assistant_turns={limit}")
    assert found.config.agent.max_assistant_turns == (int(limit) or 32)


def test_dapo_comes_over(seed_yaml: Path) -> None:
    config = imported(
        seed_yaml,
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=seq_reward",
        "algorithm.filter_groups.max_num_gen_batches=3",
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer.enable=True",
        "reward_model.overlong_buffer.len=256",
        "reward_model.overlong_buffer.penalty_factor=0.5",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
    ).config

    assert config.algorithm.dynamic_sampling.enabled
    assert config.algorithm.dynamic_sampling.max_dropped_per_step == 32  # 3 batches of 16, of which 16 are kept
    assert (config.algorithm.overlong.buffer_tokens, config.algorithm.overlong.penalty) == (256, 0.5)
    assert config.algorithm.clip_ratio_high == 0.28


@pytest.mark.parametrize(("metric", "ours"), [("acc", "acc"), ("score", "score"), ("seq_reward", ""), ("reward", "")])
def test_groups_are_compared_by_the_term_that_verl_compares(seed_yaml: Path, metric: str, ours: str) -> None:
    name = f"algorithm.filter_groups.metric={metric}"
    section = imported(seed_yaml, "algorithm.filter_groups.enable=True", name).config.algorithm.dynamic_sampling
    assert (section.enabled, section.metric) == (True, ours)


def test_evaluation_samples_as_in_verl_whose_agent_loops_do_not_read_do_sample(seed_yaml: Path) -> None:
    kwargs = {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "n": 4, "do_sample": False}
    overrides = [f"actor_rollout_ref.rollout.val_kwargs.{name}={value}" for name, value in kwargs.items()]

    found = imported(seed_yaml, *overrides).config.eval

    assert (found.temperature, found.top_p, found.top_k, found.samples_per_task) == (0.6, 0.95, 0, 4)


def test_what_verl_tells_the_template_and_the_model_comes_over(seed_yaml: Path) -> None:
    config = imported(
        seed_yaml,
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "+actor_rollout_ref.model.override_config.max_position_embeddings=32768",
        "+actor_rollout_ref.model.override_config.attention_dropout=0.",
        "actor_rollout_ref.actor.kl_loss_type=k3+",
    ).config

    assert config.agent.chat_template_kwargs == {"enable_thinking": False}
    assert (config.model.max_position_embeddings, config.algorithm.kl_loss_type) == (32768, "k3+")


@pytest.mark.parametrize(("threshold", "ours"), [("0.5_5.0", (0.5, 5.0)), ("2", (None, 2.0))])
def test_two_bounds_drop_weights_outside_of_them_as_in_verl(
    seed_yaml: Path, threshold: str, ours: tuple[float | None, float]
) -> None:
    section = "algorithm.rollout_correction"
    found = imported(seed_yaml, f"{section}.rollout_is=token", f"{section}.rollout_is_threshold={threshold}")
    correction = found.config.algorithm.rollout_correction
    assert (correction.min_weight, correction.threshold) == ours


@pytest.mark.parametrize(("assistant", "user", "ours"), [(5, 3, 4), (3, 16, 3), ("null", 8, 9), ("null", "null", 32)])
def test_answers_of_tools_limit_turns_as_in_verl(
    seed_yaml: Path, assistant: int | str, user: int | str, ours: int
) -> None:
    turns = "actor_rollout_ref.rollout.multi_turn"
    found = imported(seed_yaml, f"{turns}.max_assistant_turns={assistant}", f"{turns}.max_user_turns={user}")
    assert found.config.agent.max_assistant_turns == ours


@pytest.mark.parametrize(("fsdp_size", "replicas"), [("-1", 1), ("8", 1), ("16", 1), ("2", 4)])
def test_a_copy_of_the_model_for_every_fsdp_size_learners(seed_yaml: Path, fsdp_size: str, replicas: int) -> None:
    found = imported(seed_yaml, f"actor_rollout_ref.actor.fsdp_config.fsdp_size={fsdp_size}")
    assert found.config.learner.replicas == replicas


def test_options_of_a_policy_loss_come_over_with_the_loss(seed_yaml: Path) -> None:
    loss = "actor_rollout_ref.actor.policy_loss"
    config = imported(seed_yaml, f"{loss}.loss_mode=clip_cov", f"{loss}.clip_cov_lb=0.5").config

    assert (config.algorithm.policy_loss, config.algorithm.policy_loss_options) == ("clip_cov", {"clip_cov_lb": 0.5})
    dumped = imported(
        seed_yaml, f"{loss}.loss_mode=sapo", f"{loss}.clip_cov_lb=0.5", "actor_rollout_ref.actor.tau_pos=2.0"
    ).config
    assert dumped.algorithm.policy_loss_options == {"tau_pos": 2.0}  # a dump has the keys of all losses


def test_one_value_can_stand_for_another_as_in_hydra(seed_yaml: Path) -> None:
    config = imported(
        seed_yaml, "data.max_response_length=${data.max_prompt_length}", "data.max_prompt_length=512"
    ).config

    assert config.rollout.max_completion_tokens == 512


def test_every_key_that_verl_itself_ships_has_a_place_or_a_reason() -> None:
    required = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.name=vllm"]
    named = ["data.train_files=/a.parquet", "data.val_files=/b.parquet", "actor_rollout_ref.model.path=/m"]
    steps = ["trainer.total_training_steps=3", "trainer.logger=[console]"]

    rows = import_verl(verls_own_file(), [*required, *named, *steps]).rows

    assert len(rows) > 800
    assert [row.key for row in rows if row.outcome == "ignored" and not row.landing.note] == []


HARMLESS = re.compile(
    r"critic|distillation|global_profiler|ray_kwargs|skip|transfer_queue|sandbox_fusion|reward_model"
    r"|.*profiler|.*\b(qat|turbo_config|wrap_policy|fused_kernel_options|mtp|tiled_mlp|disaggregation|prometheus)"
    r"|actor_rollout_ref\.(ref|model\.lora|rollout\.(checkpoint_engine|engine_kwargs|agent\.custom_async_server))"
    r"|algorithm\.(kl_ctrl|pf_ppo)|data\.custom_cls|reward\.(reward_manager\.module|reward_model|sandbox_fusion)"
    r"|trainer\.v1"
)
"""Sections that are imported or refused as a whole, so that a new key in them needs no decision."""


def test_a_new_key_of_verl_is_refused_in_every_section_but_those_taken_as_a_whole() -> None:
    sections = {".".join(path[:-1]) for path in keys_of(yaml.safe_load(verls_own_file().read_text()))} - {""}
    undecided = sorted(section for section in sections if not HARMLESS.match(section))
    assert len(undecided) > 20
    with pytest.raises(ConfigError) as caught:
        import_verl(None, [f"+{section}.brand_new=1" for section in undecided])
    assert [section for section in undecided if f"{section}.brand_new: " not in str(caught.value)] == []


def keys_of(tree: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        yield from keys_of(value, (*above, name)) if isinstance(value, dict) and value else [(*above, name)]


def test_without_a_number_of_steps_epochs_and_rows_give_it(seed_yaml: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["x"] * 40}), file)

    found = imported(
        seed_yaml, f"data.train_files={file}", "trainer.total_training_steps=null", "trainer.total_epochs=3"
    )

    assert found.config.train.num_steps == 6  # 3 x floor(40 / 16)


@pytest.mark.parametrize("section", ["reward.reward_model.model_path", "reward_model.model.path"])
def test_a_reward_model_is_a_judge_on_gpus_of_its_own_whose_number_is_the_reward(seed_yaml: Path, section: str) -> None:
    path, part = section, section.removesuffix(".model_path").removesuffix(".model.path")
    more = ["gpu_memory_utilization=0.8", "tensor_model_parallel_size=2", "prompt_length=96", "response_length=32"]
    rollout = [f"{part}.rollout.{setting}" for setting in more]

    config = imported(seed_yaml, f"{part}.enable=True", f"{path}=/models/rm", *rollout).config

    (server,), (judge,) = config.model_servers, config.judges
    assert (server.path, server.tensor_parallel_size) == ("/models/rm", 2)
    assert server.options == {"runner": "pooling", "gpu-memory-utilization": 0.8, "max-model-len": 128}
    assert (judge.kind, judge.base_url) == ("reward_model", f"run://{server.name}")
    assert (config.reward.judges, config.reward.verdict_weight) == ({judge.name: 1.0}, 0.0)
    assert config.cluster.num_gpus == 8 + 2


def test_one_step_off_policy_gives_servers_their_own_gpus_one_step_ahead(seed_yaml: Path) -> None:
    config = imported(seed_yaml, "rollout.nnodes=2", "rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=2").config

    assert (config.cluster.placement, config.cluster.num_gpus, config.train.max_staleness) == ("split", 10, 1)
    assert (config.server.num_servers, config.learner.num_learners) == (4, 2)


def test_one_trajectory_for_each_prompt_is_taken_with_a_warning(seed_yaml: Path) -> None:
    found = imported(seed_yaml, "actor_rollout_ref.rollout.n=1")

    assert found.config.lacks_baseline
    (note,) = [row.landing.note for row in found.rows if row.key == "actor_rollout_ref.rollout.n"]
    assert (
        note == "warning: grpo has no other trajectory to compare with, so rewards are the advantages, as in verl; set "
        "actor_rollout_ref.rollout.n=8"
    )


def test_older_names_of_keys_and_files_are_understood(seed_yaml: Path) -> None:
    actor = "actor_rollout_ref.actor"
    older = [f"{actor}.optim.warmup_style=cosine", f"{actor}.loss_mode=kl_cov", f"{actor}.kl_cov_ratio=0.02"]
    sizes = [f"{actor}.ppo_micro_batch_size_per_gpu=null", f"{actor}.ppo_micro_batch_size=16"]

    found = imported(seed_yaml, *older, *sizes, "data.train_files=/data/train").config

    assert (found.learner.optimizer.schedule, found.algorithm.policy_loss) == ("cosine", "kl_cov")
    assert found.algorithm.policy_loss_options == {"kl_cov_ratio": 0.02}
    assert found.learner.max_tokens_per_microbatch == 2 * 2048, "16 sequences on 8 GPUs"
    assert found.tasks == ("/data/train.parquet",)


def test_adapters_come_over(seed_yaml: Path) -> None:
    config = imported(seed_yaml, "actor_rollout_ref.model.lora_rank=8").config

    assert (config.learner.lora.rank, config.learner.lora.alpha) == (8, 16)  # 16 is verl's default
    assert config.learner.lora.sends_adapter
    merged = imported(seed_yaml, "actor_rollout_ref.model.lora_rank=8", "+actor_rollout_ref.model.lora.merge=True")
    assert not merged.config.learner.lora.sends_adapter


def test_router_replay_comes_over(seed_yaml: Path) -> None:
    replayed = imported(seed_yaml, "actor_rollout_ref.rollout.enable_rollout_routing_replay=True")
    assert replayed.config.learner.router_replay
    assert not imported(seed_yaml).config.learner.router_replay


def test_a_key_of_ours_can_be_set_beside_verls(seed_yaml: Path) -> None:
    assert imported(seed_yaml, "rayapp.run.seed=7").config.run.seed == 7


SCRIPT = """
algorithm.adv_estimator=grpo data.train_files=/data/train.parquet actor_rollout_ref.rollout.n=8
trainer.total_training_steps=10
"""


def test_the_overrides_of_a_launch_script_need_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "import-verl", *shlex.split(SCRIPT)]) == 0
    config = yaml.safe_load(capsys.readouterr().out)

    assert config["tasks"] == ["/data/train.parquet"]
    assert (config["rollout"]["group_size"], config["train"]["num_steps"]) == (8, 10)
    assert run(["train", "--verl", "algorithm.adv_estimator=grpo"]) == 2
    assert "data.train_files is not set" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["fsdp_config.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size"])
def test_sequences_longer_than_a_micro_batch_are_shared_by_learners_as_in_verl(key: str) -> None:
    long = ["data.max_response_length=32768", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000"

    learner = import_verl(
        None, [*shlex.split(SCRIPT), *long, budget, f"actor_rollout_ref.actor.{key}=4"]
    ).config.learner

    assert (learner.sequence_parallel, learner.max_tokens_per_microbatch) == (4, 9000)


@pytest.mark.parametrize("section", ["actor.fsdp_config", "rollout"])
def test_a_run_may_ask_to_repeat(section: str) -> None:
    whole = [*shlex.split(SCRIPT), f"actor_rollout_ref.{section}.full_determinism=True"]

    assert import_verl(None, whole).config.run.deterministic


def test_arguments_of_vllm_go_to_it_by_their_names_or_to_a_key() -> None:
    vllm = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    given = [
        f"{vllm}.attention_backend=FLASH_ATTN",
        f"{vllm}.compilation_config.level=2",
        f"{vllm}.kv_cache_dtype=fp8",
        "actor_rollout_ref.rollout.quantization=fp8",
        "algorithm.rollout_correction.rollout_is=token",
    ]

    server = import_verl(None, [*shlex.split(SCRIPT), *given]).config.server

    assert server.engine_args == {"attention_backend": "FLASH_ATTN", "compilation_config": {"level": 2}}
    assert (server.kv_cache_dtype, server.quantization) == ("fp8", "fp8_per_block")


def test_the_command_prints_a_config_and_fails_on_unknown_keys(
    seed_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "import-verl", str(seed_yaml), *shlex.split(OVERRIDES)]) == 0
    out, err = capsys.readouterr()
    assert "num_minibatches: 2" in out
    assert "ignored" in err

    assert run(["train", "--verl", str(seed_yaml), "nobody.knows=1"]) == 2
    assert "nobody.knows" in capsys.readouterr().err


def test_every_default_that_is_taken_from_verl_has_a_rule() -> None:
    assert DEFAULTS.keys() <= TABLE.keys()


def verls_own_file() -> Path:
    """All keys with their defaults, as verl ships them."""
    package = importlib.util.find_spec("verl")
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0]) / "trainer" / "config" / "_generated_ppo_trainer.yaml"


def test_the_defaults_are_those_of_the_verl_that_is_installed() -> None:
    theirs = yaml.safe_load(verls_own_file().read_text())

    def value(key: str) -> object:
        found = theirs
        for part in key.split("."):
            found = found[part]
        return found

    assert {key: value(key) for key in DEFAULTS} == DEFAULTS

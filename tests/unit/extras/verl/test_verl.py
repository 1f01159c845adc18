"""verl configurations: the whole job of the first seed, its YAML and every override, and refused keys."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import reduce
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
    assert config.tracking.trackers == ("console", "mlflow", "jsonl")
    assert config.tracking.trace_ratio == 1.0
    assert config.agent.name == "single_turn_agent", "rows without a name speak once"
    # verl's defaults count where the user says nothing.
    assert config.learner.optimizer.weight_decay == 0.01
    assert (config.eval.temperature, config.eval.top_p, config.eval.samples_per_task) == (0.0, 1.0, 1)
    assert config.eval.before_training
    assert config.agent.max_tool_output_chars == 256


def test_on_a_laptop_three_overrides_make_a_run_for_its_cpu(seed_yaml: Path) -> None:
    laptop = ["trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]

    config = imported(seed_yaml, *laptop, "rayapp.cluster.device=cpu").config

    assert (config.cluster.device, config.server.num_servers, config.learner.num_learners) == ("cpu", 1, 1)
    assert config.rollout.num_workers == 1, "verl's default is 8, whatever the machine"


SHORT = {
    "ROLLOUT": "actor_rollout_ref.rollout", "ACTOR": "actor_rollout_ref.actor", "MODEL": "actor_rollout_ref.model",
    "TURNS": "actor_rollout_ref.rollout.multi_turn", "CORRECTION": "algorithm.rollout_correction",
    "GROUPS": "algorithm.filter_groups",
}  # fmt: skip


def in_full(overrides: str) -> str:
    for name, key in SHORT.items():
        overrides = re.sub(rf"\b{name}\b", key, overrides)
    return overrides


MEANINGS: list[tuple[str, dict[str, Any]]] = [
    # The seed's batch has 2 mini-batches, and verl's scheduler steps once for both.
    ("ACTOR.optim.lr_warmup_steps=3", {"learner.optimizer.warmup_steps": 6}),
    ("ACTOR.optim.lr_warmup_steps=0 ACTOR.optim.lr_warmup_steps_ratio=0.25 trainer.total_training_steps=10",
     {"learner.optimizer.warmup_steps": 4}),
    ("ACTOR.optim.lr_warmup_steps=null ACTOR.optim.lr_warmup_steps_ratio=0", {"learner.optimizer.warmup_steps": 0}),
    ("ACTOR.clip_ratio=0.3 ACTOR.clip_ratio_low=null ACTOR.clip_ratio_high=0.4",
     {"algorithm.clip_ratio_low": 0.3, "algorithm.clip_ratio_high": 0.4}),
    ("TURNS.enable=False TURNS.max_assistant_turns=5", {"agent.max_assistant_turns": 5}),
    ("TURNS.enable=False TURNS.max_assistant_turns=0", {"agent.max_assistant_turns": 32}),
    ("TURNS.max_assistant_turns=5 TURNS.max_user_turns=3", {"agent.max_assistant_turns": 4}),
    ("TURNS.max_assistant_turns=3 TURNS.max_user_turns=16", {"agent.max_assistant_turns": 3}),
    ("TURNS.max_assistant_turns=null TURNS.max_user_turns=8", {"agent.max_assistant_turns": 9}),
    ("TURNS.max_assistant_turns=null TURNS.max_user_turns=null", {"agent.max_assistant_turns": 32}),
    (("GROUPS.enable=True GROUPS.metric=seq_reward GROUPS.max_num_gen_batches=3 reward_model.reward_manager=dapo "
     "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=256 "
     "reward_model.overlong_buffer.penalty_factor=0.5"),
     {"algorithm.dynamic_sampling.enabled": True, "algorithm.dynamic_sampling.metric": "",
      "algorithm.dynamic_sampling.max_dropped_per_step": 32,  # 3 batches of 16, of which 16 are kept
      "algorithm.overlong.buffer_tokens": 256, "algorithm.overlong.penalty": 0.5}),
    ("GROUPS.enable=True GROUPS.metric=acc", {"algorithm.dynamic_sampling.metric": "acc"}),
    # verl's agent loops don't read do_sample.
    (("ROLLOUT.val_kwargs.temperature=0.6 ROLLOUT.val_kwargs.top_p=0.95 ROLLOUT.val_kwargs.top_k=-1 "
     "ROLLOUT.val_kwargs.n=4 ROLLOUT.val_kwargs.do_sample=False"),
     {"eval.temperature": 0.6, "eval.top_p": 0.95, "eval.top_k": 0, "eval.samples_per_task": 4}),
    ("+data.apply_chat_template_kwargs.enable_thinking=False",
     {"agent.chat_template_kwargs": {"enable_thinking": False}}),
    ("+MODEL.override_config.max_position_embeddings=32768 +MODEL.override_config.attention_dropout=0.",
     {"model.max_position_embeddings": 32768}),
    ("ACTOR.kl_loss_type=k3+", {"algorithm.kl_loss_type": "k3+"}),
    ("CORRECTION.rollout_is=token CORRECTION.rollout_is_threshold=0.5_5.0",
     {"algorithm.rollout_correction.min_weight": 0.5, "algorithm.rollout_correction.threshold": 5.0}),
    ("CORRECTION.rollout_is=token CORRECTION.rollout_is_threshold=2",
     {"algorithm.rollout_correction.min_weight": None, "algorithm.rollout_correction.threshold": 2.0}),
    ("ACTOR.fsdp_config.fsdp_size=16", {"learner.replicas": 1}),
    ("ACTOR.fsdp_config.fsdp_size=2", {"learner.replicas": 4}),
    ("ACTOR.policy_loss.loss_mode=clip_cov ACTOR.policy_loss.clip_cov_lb=0.5",
     {"algorithm.policy_loss": "clip_cov", "algorithm.policy_loss_options": {"clip_cov_lb": 0.5}}),
    # A dump has the keys of all losses.
    ("ACTOR.policy_loss.loss_mode=sapo ACTOR.policy_loss.clip_cov_lb=0.5 ACTOR.tau_pos=2.0",
     {"algorithm.policy_loss_options": {"tau_pos": 2.0}}),
    ("data.max_response_length=${data.max_prompt_length} data.max_prompt_length=512",
     {"rollout.max_completion_tokens": 512}),
    ("rollout.nnodes=2 rollout.n_gpus_per_node=4 trainer.n_gpus_per_node=2",
     {"cluster.placement": "split", "cluster.num_gpus": 10, "train.max_staleness": 1, "server.num_servers": 4,
      "learner.num_learners": 2}),
    ("MODEL.lora_rank=8", {"learner.lora.rank": 8, "learner.lora.alpha": 16, "learner.lora.sends_adapter": True}),
    ("MODEL.lora_rank=8 +MODEL.lora.merge=True", {"learner.lora.sends_adapter": False}),
    ("+data.image_key=images", {"model.freeze_vision": False}),
    ("+data.image_key=images ACTOR.freeze_vision_tower=True", {"model.freeze_vision": True}),
    ("+data.image_key=images MODEL.lora_rank=8 MODEL.exclude_modules=.*visual.*",
     {"model.freeze_vision": True, "learner.lora.rank": 8}),
    ("ROLLOUT.enable_rollout_routing_replay=True", {"learner.router_replay": True}),
    ("rayapp.run.seed=7", {"run.seed": 7, "learner.router_replay": False}),
    ("ACTOR.use_dynamic_bsz=True ACTOR.ppo_max_token_len_per_gpu=9000 ACTOR.ulysses_sequence_parallel_size=4",
     {"learner.sequence_parallel": 4, "learner.max_tokens_per_microbatch": 9000}),
    ("ACTOR.fsdp_config.ulysses_sequence_parallel_size=4", {"learner.sequence_parallel": 4}),
    ("ACTOR.fsdp_config.full_determinism=True", {"run.deterministic": True}),
    ("ROLLOUT.full_determinism=True", {"run.deterministic": True}),
    # Older names; 16 sequences on 8 GPUs.
    (("ACTOR.optim.warmup_style=cosine ACTOR.loss_mode=kl_cov ACTOR.kl_cov_ratio=0.02 data.train_files=/data/train "
     "ACTOR.ppo_micro_batch_size_per_gpu=null ACTOR.ppo_micro_batch_size=16"),
     {"learner.optimizer.schedule": "cosine", "algorithm.policy_loss": "kl_cov",
      "algorithm.policy_loss_options": {"kl_cov_ratio": 0.02}, "learner.max_tokens_per_microbatch": 2 * 2048,
      "tasks": ("/data/train.parquet",)}),
    ("ACTOR.use_token_level_loss=True ~ACTOR.use_token_level_loss ~TURNS ~trainer.save_freq=1",
     {"checkpoint.every_steps": 0, "agent.tool_file": ""}),
]  # fmt: skip
"""Overrides after the seed's, and what they set here."""


@pytest.mark.parametrize(("overrides", "expected"), MEANINGS, ids=lambda value: value if isinstance(value, str) else "")
def test_overrides_mean_here_what_they_mean_in_verl(seed_yaml: Path, overrides: str, expected: dict[str, Any]) -> None:
    config = imported(seed_yaml, *in_full(overrides).split()).config

    assert {key: reduce(getattr, key.split("."), config) for key in expected} == expected


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
        ("+actor_rollout_ref.rollout.max_new_tokens=9", "data.max_response_length=N"),
        ("++trainer.max_steps=9", "trainer.total_training_steps=N"),
        ("algorithm.kl_coef=0.1", "algorithm.kl_ctrl.kl_coef=C"),
        ("actor_rollout_ref.rollout.min_p=0.1", "samples the model's own distribution"),
    ],
)
def test_a_key_of_a_fork_names_its_counterpart(seed_yaml: Path, key: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key.partition("=")[0].lstrip("+")) + ".*" + re.escape(named)):
        imported(seed_yaml, key)


def test_the_table_begins_with_what_changes_the_training_and_keeps_both_ends_of_a_key(seed_yaml: Path) -> None:
    outcomes = {row.key: row.outcome for row in sorted(imported(seed_yaml).rows, key=lambda row: row.rank)}
    kinds = [said.split()[0] if said.startswith(("folded", "ignored")) else "set" for said in outcomes.values()]

    assert kinds == sorted(kinds, key=["set", "folded", "ignored"].index)
    assert outcomes["actor_rollout_ref.actor.use_kl_loss"] == "folded into actor_rollout_ref.actor.kl_loss_coef"
    turns = "actor_rollout_ref.rollout.multi_turn.max_"
    assert len({shortened(f"{turns}{end}", 40) for end in ("user_turns", "assistant_turns", "parallel_calls")}) == 3
    assert shortened("data.seed = 1", 40) == "data.seed = 1"


def test_a_default_of_verl_that_keeps_every_checkpoint_is_in_the_table(seed_yaml: Path) -> None:
    (row,) = (row for row in imported(seed_yaml).rows if row.key == "trainer.max_actor_ckpt_to_keep")

    assert row.is_default
    assert "checkpoint.keep_last" in row.landing.note
    assert imported(seed_yaml, "trainer.max_actor_ckpt_to_keep=7").config.checkpoint.keep_last == 7


def test_an_unknown_key_fails_and_every_unknown_key_is_named(seed_yaml: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean data\.train_batch_size") as caught:
        imported(
            seed_yaml, "data.train_batchsize=8", "actor_rollout_ref.rollout.warp_speed=9", "algorithm.filter_group.x=1",
            "trainers.nnodes=1",
        )  # fmt: skip

    assert "actor_rollout_ref.rollout.warp_speed" in str(caught.value)
    assert "algorithm.filter_group.x: rayapp has no rule" in str(caught.value)
    assert "did you mean trainer.nnodes?" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ("ROLLOUT.top_p=0.9", "bias the importance ratio"),
        ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=full", "supported values are kl, k1, mse"),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive", "It must be fixed"),
        ("CORRECTION.rollout_rs=token_k1", "only with algorithm.rollout_correction.bypass_mode=True"),
        ("ACTOR.ppo_mini_batch_size=5", "does not divide"),
        ("trainer.n_gpus_per_node=3", "can't be divided into servers"),
        ("algorithm.adv_estimator=gae", "critic"),
        ("ROLLOUT.n=1 algorithm.adv_estimator=grpo_passk", r"Set actor_rollout_ref\.rollout\.n=8"),
        ("rollout.n_gpus_per_node=4", "alone: give both rollout.n_gpus_per_node and rollout.nnodes"),
        ("async_training.staleness_threshold=0.5", "rayapp.train.max_staleness=1"),
        ("reward.reward_model.enable=True", "make the model a judge"),
        ("data.seed", "key=value or ~key"),
        ("~trainer.save_frek", r"~trainer\.save_frek: unknown key; did you mean trainer\.save_freq"),
        ("custom_reward_function.reward_kwargs.a=3", "can't get arguments"),
        ("data.apply_chat_template_kwargs.a=[1]", "must be a string, a number"),
        ("MODEL.override_config.vocab_size=3", "a copy of the model"),
        ("reward.reward_kwargs.temper=3", "rayapp's rewards have no such argument"),
        ("ROLLOUT.agent.default_agent_loop=react", "supported values are tool_agent, single_turn_agent"),
        ("ROLLOUT.engine_kwargs.vllm.seed=3", "rayapp sets it from run.seed"),
        ("ROLLOUT.quantization=fp8 CORRECTION.rollout_is=sequence", "rollout_correction.level is sequence"),
        ("ROLLOUT.engine_kwargs.vllm.logprobs_mode=raw_logprobs", "log-probs must be"),
        ("trainer.v1.trainer_mode=separate_async", "max_staleness"),
        ("ROLLOUT.quantization=int4", "use fp8_per_block"),
        ("ROLLOUT.response_length=99", "must equal data.max_response_length, which is 1024"),
        ("distillation.enabled=True", r"give the teacher as rayapp\.distillation\.teacher=MODEL"),
        ("ACTOR.fsdp_config.dtyp=1", r"did you mean actor_rollout_ref\.actor\.fsdp_config\.dtype"),
        ("ACTOR.megatron.tensor_model_parallel_size=2", "not Megatron"),
        ("data.train_batch_size=0", "at least 1"),
        ("data.train_files=null", "data.train_files is not set"),
        ("data.max_prompt_length='${data.nobody}'", "nobody"),
        ("ACTOR.optim.lr=null", r"optim\.lr = None can't be imported"),
        ("trainer.save_freq=often", r"save_freq = 'often' can't be imported"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_reason(seed_yaml: Path, overrides: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        imported(seed_yaml, *shlex.split(in_full(overrides)))


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


def test_one_trajectory_for_each_prompt_is_taken_with_a_warning(seed_yaml: Path) -> None:
    found = imported(seed_yaml, "actor_rollout_ref.rollout.n=1")

    assert found.config.lacks_baseline
    (note,) = [row.landing.note for row in found.rows if row.key == "actor_rollout_ref.rollout.n"]
    assert note.startswith("warning: grpo has no other trajectory to compare with, so rewards are the advantages")


SCRIPT = """
algorithm.adv_estimator=grpo data.train_files=/data/train.parquet actor_rollout_ref.rollout.n=8
trainer.total_training_steps=10
"""


def test_the_overrides_of_a_launch_script_need_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "import-verl", *shlex.split(SCRIPT)]) == 0
    out, err = capsys.readouterr()
    config = yaml.safe_load(out)

    assert "What becomes of each key" in err
    assert config["tasks"] == ["/data/train.parquet"]
    assert (config["rollout"]["group_size"], config["train"]["num_steps"]) == (8, 10)
    assert run(["train", "--verl", "nobody.knows=1"]) == 2
    assert "nobody.knows" in capsys.readouterr().err


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


def test_every_default_that_is_taken_from_verl_has_a_rule() -> None:
    assert DEFAULTS.keys() <= TABLE.keys()


def verls_own_file() -> Path:
    """All keys with their defaults, as verl ships them."""
    package = importlib.util.find_spec("verl")
    return Path(package.submodule_search_locations[0]) / "trainer" / "config" / "_generated_ppo_trainer.yaml"


def test_the_defaults_are_those_of_the_verl_that_is_installed() -> None:
    theirs = yaml.safe_load(verls_own_file().read_text())

    def value(key: str) -> object:
        found = theirs
        for part in key.split("."):
            found = found[part]
        return found

    assert {key: value(key) for key in DEFAULTS} == DEFAULTS

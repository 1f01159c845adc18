"""The configuration of a run: all sections together, the checks across them, and the GPUs that they ask for.

`configs/*.yaml` hold only settings that differ from these defaults. The sections are in the modules beside this one;
`loading.py` reads files and `key.sub=value` overrides. Nothing here imports a heavy package, so that `rayapp --help`
is instant.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import model_validator

from rayapp.config.agent import (
    AGENTS,
    AUTO,
    AgentSection,
    DataSection,
    RewardSection,
    SourceSection,
    filled_in,
    is_data_file,
)
from rayapp.config.algorithm import (
    NEEDS_GREEDY_BASELINE,
    NEEDS_GROUP,
    NEEDS_LOG_PROBS,
    NEEDS_NO_GROUP,
    AlgorithmSection,
)
from rayapp.config.base import FrozenModel
from rayapp.config.learner import LearnerSection
from rayapp.config.other_models import SCHEME, DistillationSection, JudgeSection, ModelServerSection, server_named
from rayapp.config.sandbox import SandboxConfig
from rayapp.config.sections import (
    CheckpointSection,
    ClusterSection,
    EvalSection,
    ModelSection,
    RecoverySection,
    RolloutSection,
    RunSection,
    ServerSection,
    TrackingSection,
    TrainSection,
    WarmupSection,
)
from rayapp.core.files import Location

LEAST_DEADLINE_S = 300.0
SLOWEST_TOKEN_S = 0.25
"""Seconds per token, in a full batch, that no healthy server needs: 20 times those of an 8B model on an H100."""
LACKS_BASELINE = (
    "rollout.group_size is 1, so a trajectory is compared with no other, and its reward is its advantage: rewards that "
    "are never negative only make answers likelier. Raise it, e.g. to 8."
)
"""Warning for a config that `lacks_baseline`."""


class Config(FrozenModel):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    tasks: tuple[str, ...] = ("sort_numbers", "max_subarray_sum")
    """Tasks to train on. Either names of shipped ones, .yaml or .py files, task folders, benchmarks and
    generators (docs/tasks.md). Or data files in verl's schema: .parquet, .jsonl or .json, local, on s3://, or on the
    Hugging Face hub as hf://datasets/OWNER/NAME/FILE (docs/data.md). Prompts come in a seeded order. To combine both,
    use `sources`, with which this is empty."""
    sources: tuple[SourceSection, ...] = ()
    """Several sets of tasks in one run, each with a share of the groups and its own settings (docs/tasks.md). Replaces
    `tasks`, which is short for one source with the run's settings."""
    data: DataSection = DataSection()
    agent: AgentSection = AgentSection()
    reward: RewardSection = RewardSection()
    judges: tuple[JudgeSection, ...] = ()
    """Judge models behind HTTP, which `reward.judges` refers to by name (docs/judges.md)."""
    model_servers: tuple[ModelServerSection, ...] = ()
    """Models that the run serves itself, for judges and a teacher (docs/judges.md#servers-of-the-run)."""
    algorithm: AlgorithmSection = AlgorithmSection()
    distillation: DistillationSection = DistillationSection()
    rollout: RolloutSection = RolloutSection()
    train: TrainSection = TrainSection()
    warmup: WarmupSection = WarmupSection()
    learner: LearnerSection = LearnerSection()
    server: ServerSection = ServerSection()
    sandbox: SandboxConfig = SandboxConfig()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    cluster: ClusterSection = ClusterSection()
    recovery: RecoverySection = RecoverySection()
    tracking: TrackingSection = TrackingSection()

    @property
    def judges_read_references(self) -> bool:
        """True if a judge of this source reads its rows' ground truths."""
        return any(judge.reference for judge in self.judges if judge.name in self.reward.judges)

    @property
    def uses_data(self) -> bool:
        """True for a run on data files, False for one on other tasks."""
        return any(map(is_data_file, (*self.tasks, *self.eval.tasks)))

    @property
    def agent_name(self) -> str:
        """Agent of tasks, and of data rows that name no agent: tool_agent, single_turn_agent or external_agent."""
        tool_agent, single_turn_agent = AGENTS
        usual = tool_agent if self.uses_data else single_turn_agent
        return usual if self.agent.name == AUTO else self.agent.name

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence the engine must hold."""
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def compares_groups(self) -> bool:
        """True if advantages compare the trajectories of a group, so that one alone has none."""
        is_alone = self.rollout.group_size == 1 and self.algorithm.adv_estimator not in NEEDS_GROUP
        uses_rewards = self.distillation.reward_weight > 0
        return uses_rewards and not is_alone and self.algorithm.adv_estimator not in NEEDS_NO_GROUP

    @property
    def lacks_baseline(self) -> bool:
        """True if rewards are taken as advantages, because a group has one trajectory to compare with none."""
        others = (*NEEDS_NO_GROUP, *NEEDS_GROUP)
        uses_rewards = self.distillation.reward_weight > 0
        return self.rollout.group_size == 1 and uses_rewards and self.algorithm.adv_estimator not in others

    @property
    def scores_old_log_probs(self) -> bool:
        """True if old log-probs take a forward pass of their own; otherwise the update gives them itself."""
        algorithm = self.algorithm
        return (
            self.train.num_minibatches > 1
            or algorithm.is_batch_coupled
            or algorithm.normalizes_by_step
            or algorithm.adv_estimator in NEEDS_LOG_PROBS
            or (algorithm.kl_in_reward.coef > 0 and algorithm.policy_loss != "bypass_mode")
        )

    @property
    def group_deadline_s(self) -> float:
        """Seconds from a group's start to its end; see rollout.group_deadline_s."""
        rollout, server, train = self.rollout, self.server, self.train
        if rollout.group_deadline_s is not None:
            return rollout.group_deadline_s
        sequences = (train.max_staleness + 1) * train.groups_per_step * rollout.group_size
        rounds = max(1.0, sequences / (server.num_servers * server.max_num_seqs))
        return max(LEAST_DEADLINE_S, SLOWEST_TOKEN_S * rollout.max_completion_tokens * rounds)

    @property
    def max_learner_tokens(self) -> int:
        """Longest sequence that a learner computes, including text that only a teacher reads."""
        return self.max_model_tokens + self.distillation.num_privileged_tokens

    @property
    def max_demonstration_tokens(self) -> int:
        """Longest demonstration that the warm-up takes, in tokens."""
        return self.warmup.max_tokens or self.max_model_tokens

    @property
    def run_uri(self) -> str:
        """Location of the run: `<output_dir>/<name>`."""
        return str(Location.parse(self.run.output_dir).join(self.run.name))

    @property
    def run_folder(self) -> Path:
        """Folder that the run is written to on this machine: `run_uri`, or the staging folder of a run on s3://."""
        if not Location.parse(self.run.output_dir).is_remote:
            return Path(self.run_uri)
        # The folder's name includes a hash of the location: two buckets may hold runs of the same name.
        digest = hashlib.sha256(self.run_uri.encode()).hexdigest()[:12]
        return self.run.staging_dir.expanduser() / f"{self.run.name}-{digest}"

    @model_validator(mode="before")
    @classmethod
    def _no_default_tasks(cls, values: Any) -> Any:
        """Make `tasks` empty if the user names none, and gives sources or data files to evaluate."""
        if not isinstance(values, dict) or "tasks" in values:
            return values
        section = values.get("eval")
        evaluated = section.get("tasks") if isinstance(section, dict) else ()
        has_files = any(isinstance(task, str) and is_data_file(task) for task in evaluated or ())
        return values | {"tasks": []} if has_files or values.get("sources") else values

    @model_validator(mode="before")
    @classmethod
    def _sources_filled_in(cls, values: Any) -> Any:
        has_sources = isinstance(values, dict) and "sources" in values
        return values | {"sources": filled_in(values["sources"], values)} if has_sources else values

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        _check_agreement(self)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source of a run's groups, with its settings as a full config."""

    name: str
    """Name of the source; empty in a run without `sources`, which has one."""
    ratio: float
    config: Config
    """The run's config with only this source's tasks or data, and its settings in place of the run's."""


def sources_of(config: Config) -> tuple[Source, ...]:
    """Return all sources of a run, at least one: `tasks` is a single source without a name."""
    if not config.sources:
        return (Source(name="", ratio=1.0, config=config),)
    return tuple(Source(name=each.name, ratio=each.ratio, config=_alone(config, each)) for each in config.sources)


def with_values(config: Config, **sections: dict[str, Any]) -> Config:
    """Return the config with other values in some sections. The values are not validated."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def frozen_models(config: Config) -> dict[str, Config]:
    """Return name -> config to load it by, of the frozen models that learners hold beside the policy."""
    models = {"reference": config} if config.algorithm.has_reference else {}
    section = config.distillation
    if section.teacher and not section.is_policy and not section.base_url:
        models["teacher"] = with_values(config, model={"path": section.teacher, "max_position_embeddings": None})
    return models


def asked_servers(config: Config, *, by_workers: bool = True, by_learners: bool = True) -> list[ModelServerSection]:
    """Return the model servers that serve a judge (asked by rollout workers) or the teacher (asked by learners)."""
    used = {name for source in sources_of(config) for name in source.config.reward.judges}
    urls = [judge.base_url for judge in config.judges if judge.name in used and by_workers]
    urls += [config.distillation.base_url] if by_learners else []
    names = {server_named(url) for url in urls}
    return [server for server in config.model_servers if server.name in names]


def alone(config: Config, server: ModelServerSection) -> Config:
    """Return the config with a model server's model as the policy, to check and plan that model as one."""
    own = {name: getattr(server, name) for name in ("tensor_parallel_size", "gpu_memory_utilization")}
    return with_values(config, model={"path": server.path, "max_position_embeddings": None}, server=own)


def with_addresses(config: Config, urls: Mapping[str, str]) -> Config:
    """Return the config with run://NAME replaced by the address of the running model server of that name."""

    def address(base_url: str) -> str:
        return urls.get(server_named(base_url), base_url)

    judges = tuple(judge.model_copy(update={"base_url": address(judge.base_url)}) for judge in config.judges)
    teacher = config.distillation.model_copy(update={"base_url": address(config.distillation.base_url)})
    return config.model_copy(update={"judges": judges, "distillation": teacher})


def all_tasks(config: Config) -> tuple[str, ...]:
    """Return the tasks of all sources, each once, without data files."""
    found = dict.fromkeys(name for source in sources_of(config) for name in source.config.tasks)
    return tuple(name for name in found if not is_data_file(name))


def _alone(config: Config, source: SourceSection) -> Config:
    own = {"sources": (), "tasks": source.tasks, "data": source.data, "agent": source.agent, "reward": source.reward}
    limits = config.rollout.model_copy(update=source.rollout.model_dump(exclude_none=True))
    evaluation = config.eval.model_copy(update=source.eval.model_dump(exclude_none=True))
    return config.model_copy(update=own | {"rollout": limits, "eval": evaluation})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Processes that share GPUs of one node."""

    num_gpus: int
    server: int | None = None
    """Index of the bundle's server."""
    learners: tuple[int, ...] = ()
    """Ranks of the bundle's learners."""
    model_server: str = ""
    """Name of the bundle's model server."""


def bundles_of(
    config: Config, *, on_gpu: bool = True, with_servers: bool = True, with_learners: bool = True
) -> list[Bundle]:
    """Return the bundles of a run: servers first, then learners, then model servers. An evaluation has no learners, a
    replay no servers.

    A colocated server is in one bundle with the learners whose GPUs it uses. Without GPUs, no processes share a bundle.
    """
    tp = config.server.tensor_parallel_size
    servers = range(config.server.num_servers if with_servers else 0)
    learners = tuple(range(config.learner.num_learners if with_learners else 0))
    is_shared = on_gpu and with_servers and config.cluster.placement == "colocated"
    bundles = [
        Bundle(
            num_gpus=tp * on_gpu, server=server, learners=learners[server * tp : (server + 1) * tp] if is_shared else ()
        )
        for server in servers
    ]
    own = () if is_shared else learners
    bundles += [Bundle(num_gpus=int(on_gpu), learners=(rank,)) for rank in own]
    others = asked_servers(config, by_workers=with_servers, by_learners=with_learners)
    return bundles + [Bundle(num_gpus=each.tensor_parallel_size * on_gpu, model_server=each.name) for each in others]


def num_gpus_of(bundles: Sequence[Bundle]) -> int:
    """Return the number of GPUs of all bundles together."""
    return sum(bundle.num_gpus for bundle in bundles)


def gpu_arithmetic(bundles: Sequence[Bundle]) -> str:
    """Return `4 servers x TP 2 + 8 learners = 16`, for messages."""
    servers = [bundle for bundle in bundles if bundle.server is not None]
    num_learners = sum(len(bundle.learners) for bundle in bundles)
    parts = [f"{len(servers)} servers x TP {servers[0].num_gpus}"] if servers else []
    parts += [f"{num_learners} learners"] if num_learners else []
    joint = " on those of " if any(server.learners for server in servers) else " + "
    others = [f"{each.model_server} x TP {each.num_gpus}" for each in bundles if each.model_server]
    return f"{' + '.join([joint.join(parts), *others])} = {num_gpus_of(bundles)}"


def fewer_gpus(config: Config, have: int) -> str:
    """Return advice for messages: how to make the config run on this many GPUs."""
    server, learners = config.server, config.learner.num_learners
    takes_turns = config.train.max_staleness == 0 and server.num_servers * server.tensor_parallel_size == learners
    if config.cluster.placement == "split" and takes_turns and learners <= have:
        return "Let servers and learners take turns on them: cluster.placement=colocated."
    return "Lower server.num_servers, a tensor_parallel_size or learner.num_learners."


def _check_agreement(config: Config) -> None:
    """Check settings against each other. Raises ValueError with both values and the way out."""
    _tasks_or_data(config)
    _sources_fit(config)
    _external_agents_fit(config)
    _judges_fit(config)
    _model_servers_fit(config)
    _placement_fits(config)
    _gpus_suffice(config)
    _minibatches_divide(config)
    _sequence_fits_microbatch(config)
    _warmup_fits(config)
    _dapo_fits(config)
    _groups_suffice(config)
    _kl_in_reward_fits(config)
    _best_metric_exists(config)
    _teacher_fits(config)


def _model_servers_fit(config: Config) -> None:
    names = [server.name for server in config.model_servers]
    if len(set(names)) < len(names):
        raise ValueError(f"model_servers: two have the same name ({', '.join(names)})")
    asked = {f"judges ({judge.name})": (judge.base_url, "model", judge.model) for judge in config.judges}
    asked["distillation"] = (config.distillation.base_url, "teacher", config.distillation.teacher)
    for who, (base_url, key, model) in asked.items():
        name = server_named(base_url)
        if name and name not in names:
            raise ValueError(f"{who}: base_url is {base_url}, but model_servers are {', '.join(names) or 'none'}")
        if name and model != name:
            raise ValueError(f"{who}: {key} is {model!r}, but at {base_url} it is called {name!r}: use that")
    used = {server.name for server in asked_servers(config)}
    if idle := [name for name in names if name not in used]:
        raise ValueError(
            f"model_servers ({idle[0]}): nothing uses it. Give a judge that reward.judges names, or distillation, "
            f"base_url: {SCHEME}{idle[0]}, or leave it out."
        )


def _teacher_fits(config: Config) -> None:
    if config.distillation.base_url and config.rollout.temperature != 1.0:
        raise ValueError(
            f"rollout.temperature is {config.rollout.temperature:g} and distillation.base_url is set: the server's "
            "log-probs are those of temperature 1. Use that, or a teacher in the learners."
        )


def _sources_fit(config: Config) -> None:
    names = [source.name for source in config.sources]
    for number, source in enumerate(config.sources):
        where = f"sources[{number}] ({source.name})"
        if names.index(source.name) != number:
            raise ValueError(f"{where}: sources[{names.index(source.name)}] has the same name. Metrics go by name.")
        if not source.tasks and not source.eval.tasks:
            raise ValueError(f"{where} has no tasks: name tasks, or data files.")
        _one_kind(_alone(config, source), f"{where}: ")
        _tools_have_players(_alone(config, source), f"{where}: ")
        for key, own in source.rollout.model_dump(exclude_none=True).items():
            most = config.group_deadline_s if key == "group_deadline_s" else getattr(config.rollout, key)
            if own > most:
                raise ValueError(
                    f"{where}: rollout.{key} is {own:g}, but the run's is {most:g}, which its processes are laid out "
                    f"for. Raise the run's rollout.{key} to {own:g}, or lower the source's."
                )


def _external_agents_fit(config: Config) -> None:
    for source in sources_of(config):
        agent, where = source.config.agent, f"source {source.name}: " if source.name else ""
        external = agent.external
        is_given = bool(external.command), bool(external.entry)
        if source.config.agent_name != "external_agent":
            if any(is_given):
                raise ValueError(
                    f"{where}agent.external is set, but agent.name is {agent.name}, which doesn't use it. Set "
                    "agent.name: external_agent, or leave agent.external out."
                )
            continue
        if all(is_given) or not any(is_given):
            raise ValueError(
                f"{where}agent.name is external_agent, and agent.external has "
                f"{'both a command and an entry' if all(is_given) else 'neither a command nor an entry'}: give it one "
                "(docs/agents.md)."
            )
        if external.inside and external.entry:
            raise ValueError(
                f"{where}agent.external.inside: a function runs in the rollout worker, and only a command can run in a "
                "sandbox. Give agent.external.command, or leave inside out (docs/agents.md)."
            )
        others = [section.type for section in config.sandbox.providers if section.type in ("mcp", "fake")]
        if external.inside and others:
            raise ValueError(
                f"{where}agent.external.inside: sandboxes of {', '.join(others)} have no way to the policy; those of "
                "local, e2b and daytona have. Leave the others out of sandbox.providers, or inside (docs/agents.md)."
            )
        if external.inside and config.sandbox.lease_ttl_s < (least_s := external.timeout_s + 60.0):
            raise ValueError(
                f"{where}agent.external.inside: an agent has agent.external.timeout_s = {external.timeout_s:g} s, and "
                f"its sandbox is taken back after sandbox.lease_ttl_s = {config.sandbox.lease_ttl_s:g} s. Raise that "
                f"to {least_s:g}, or lower timeout_s."
            )
        if not config.learner.share_prefixes:
            raise ValueError(
                f"{where}agent.name is external_agent, whose trajectories may fork, and learner.share_prefixes is "
                "false: what their branches share would be computed for each, and might fit in no micro-batch. Set "
                "learner.share_prefixes: true."
            )


def _judges_fit(config: Config) -> None:
    judges = {judge.name: judge for judge in config.judges}
    if len(judges) < len(config.judges):
        raise ValueError(f"judges: two have the same name ({', '.join(judge.name for judge in config.judges)})")
    for judge in config.judges:
        if judge.max_concurrent < config.rollout.num_workers:
            raise ValueError(
                f"judges ({judge.name}): max_concurrent is {judge.max_concurrent}, which rollout.num_workers = "
                f"{config.rollout.num_workers} can't share: raise it, or use fewer workers."
            )
    for source in sources_of(config):
        _source_has_judges(source, judges)


def _source_has_judges(source: Source, judges: Mapping[str, JudgeSection]) -> None:
    where, reward = f"source {source.name}: " if source.name else "", source.config.reward
    weight = reward.verdict_weight
    if (not reward.judges and weight != 1.0) or (not weight and not any(reward.judges.values())):
        raise ValueError(
            f"{where}reward.verdict_weight is {weight:g}, and reward.judges names nothing that would count beside the "
            "verdict: name a judge with a weight, or leave it out."
        )
    for name, weight in reward.judges.items():
        if name not in judges or not math.isfinite(weight):
            raise ValueError(
                f"{where}reward.judges has {name}: {weight}, but judges are {', '.join(judges) or 'none'}, and a "
                "weight is a finite number. Name one of them, or add it to `judges` (docs/judges.md)."
            )
        judge, deadline_s = judges[name], source.config.group_deadline_s
        if judge.reference and not source.config.uses_data:
            raise ValueError(
                f"{where}judges ({name}): reference is true, but tasks have no ground_truth to show: leave it out, or "
                "ask this judge about rows of data."
            )
        if judge.kind == "pairwise" and source.config.rollout.group_size < 2:
            raise ValueError(
                f"{where}judges ({name}): kind is pairwise, which compares the responses of a group, and "
                "rollout.group_size is 1. Raise that, or use another kind."
            )
        if judge.kind == "pairwise" and judge.timeout_s >= deadline_s:
            raise ValueError(
                f"{where}judges ({name}): timeout_s is {judge.timeout_s:g}, but rollout.group_deadline_s is "
                f"{deadline_s:g}, and a group is compared within it: lower timeout_s, or raise the deadline."
            )


def _best_metric_exists(config: Config) -> None:
    metric, keep_best = config.checkpoint.best_metric, config.checkpoint.keep_best
    if keep_best and metric.startswith("eval/") and config.eval.every_steps == 0:
        raise ValueError(
            f"checkpoint.best_metric is {metric}, but eval.every_steps is 0: nothing is evaluated during training, "
            f"and checkpoint.keep_best = {keep_best} would keep nothing. Set eval.every_steps, or use reward/mean."
        )


def _warmup_fits(config: Config) -> None:
    warmup, budget = config.warmup, config.learner.max_tokens_per_microbatch
    if not warmup.num_steps:
        return
    if isinstance(budget, int) and config.max_demonstration_tokens > budget * config.learner.sequence_parallel:
        raise ValueError(
            f"warmup.max_tokens is {config.max_demonstration_tokens}, but learner.max_tokens_per_microbatch is "
            f"{budget}: the longest demonstration would fit in no micro-batch. Raise it, or lower warmup.max_tokens."
        )
    if not warmup.files and not all_tasks(config):
        raise ValueError(
            f"warmup.num_steps is {warmup.num_steps}, but warmup.files is empty and there are no tasks whose "
            "demonstrations could be taken: name the files to learn from (docs/sft.md), or set warmup.num_steps to 0."
        )


def _dapo_fits(config: Config) -> None:
    buffer = config.algorithm.overlong.buffer_tokens
    longest = min(source.config.rollout.max_completion_tokens for source in sources_of(config))
    if buffer > longest:
        raise ValueError(
            f"algorithm.overlong.buffer_tokens is {buffer}, but rollout.max_completion_tokens is {longest}: the "
            f"punishment would begin before the first token. Use at most {longest}."
        )
    if config.algorithm.dynamic_sampling.enabled and config.distillation.reward_weight == 0:
        raise ValueError(
            "algorithm.dynamic_sampling drops groups of equal rewards, and distillation.reward_weight is 0: rewards "
            "would choose what the teacher alone trains. Turn it off, or give rewards a weight."
        )
    estimator = config.algorithm.adv_estimator
    if config.algorithm.dynamic_sampling.enabled and estimator in ("gdpo", *NEEDS_NO_GROUP):
        raise ValueError(
            f"algorithm.dynamic_sampling drops groups of equal rewards, which teach {estimator} something: its "
            "baseline is not the mean of the group's rewards. Turn it off, or use grpo."
        )


def _groups_suffice(config: Config) -> None:
    estimator, size = config.algorithm.adv_estimator, config.rollout.group_size
    if size > 1:
        return
    if estimator in NEEDS_GREEDY_BASELINE:
        raise ValueError(
            f"rollout.group_size is 1, and the last trajectory of a group is the greedy baseline of {estimator}: none "
            "would be trained on. Use 2 or more."
        )
    if config.compares_groups:
        raise ValueError(
            f"rollout.group_size is 1, and algorithm.adv_estimator {estimator} compares the trajectories of a group: "
            "no advantage would be left. Use 2 or more."
        )


def _kl_in_reward_fits(config: Config) -> None:
    section, algorithm = config.algorithm.kl_in_reward, config.algorithm
    if section.coef == 0:
        return
    if algorithm.adv_estimator == "gdpo" and algorithm.gdpo_reward_terms:
        raise ValueError(
            f"algorithm.kl_in_reward.coef is {section.coef:g}, but gdpo reads the terms of algorithm.gdpo_reward_terms "
            "and never this KL. Use algorithm.kl_loss_coef, or another estimator."
        )
    sequences = config.train.groups_per_step * config.rollout.group_size
    if section.control == "adaptive" and sequences >= 5 * section.horizon:
        raise ValueError(
            f"algorithm.kl_in_reward.horizon is {section.horizon}, but a step has train.groups_per_step x "
            f"rollout.group_size = {sequences} trajectories, which could move the coefficient by 0.2 x {sequences} / "
            f"{section.horizon} of itself, to 0 or below. Use a horizon above {sequences // 5}."
        )


def _tasks_or_data(config: Config) -> None:
    if config.sources:
        for key, given in (("tasks", config.tasks), ("eval.tasks", config.eval.tasks)):
            if given:
                raise ValueError(
                    f"{key} ({', '.join(given)}) and sources are both set: {key} is short for a run with one source. "
                    "Give a source these tasks, or leave them out."
                )
        return
    _one_kind(config)
    _tools_have_players(config)
    if config.reward.custom and config.tasks and not config.uses_data:
        raise ValueError(
            f"reward.custom is {config.reward.custom!r}, but the run is on tasks ({', '.join(config.tasks)}) that "
            "score answers themselves: it would never be called. Name data files (.parquet), or leave it out."
        )


def _one_kind(config: Config, where: str = "") -> None:
    """Refuse data files beside other tasks in one source: they differ in order, agent and scoring."""
    rows, others = _of_kind(config, files=True), _of_kind(config, files=False)
    if not (any(rows) and any(others)):
        return
    said = (
        f"{where}data files ({', '.join([*rows[0], *rows[1]])}) and other tasks ({', '.join([*others[0], *others[1]])})"
    )
    if not (rows[0] and others[0]):
        raise ValueError(
            f"{said} can't be in one source, and `tasks` has only one of these kinds. Evaluate the other kind by a "
            "command of its own: rayapp eval CONFIG tasks=[] eval.tasks=[…]."
        )
    sources = [
        {"name": name, "ratio": 1, "tasks": trained} | ({"eval": {"tasks": evaluated}} if evaluated else {})
        for name, (trained, evaluated) in (("problems", others), ("rows", rows))
    ]
    written = yaml.safe_dump(sources, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    raise ValueError(f"{said} can't be in one source. Make them two: `sources: {written}` (docs/tasks.md).")


def _of_kind(config: Config, *, files: bool) -> tuple[list[str], list[str]]:
    """Return the tasks to train on and those to evaluate: data files, or all others."""
    trained, evaluated = (
        [task for task in tasks if is_data_file(task) == files] for tasks in (config.tasks, config.eval.tasks)
    )
    return trained, evaluated


def _tools_have_players(config: Config, where: str = "") -> None:
    if config.agent.tool_file and config.agent_name == "external_agent":
        raise ValueError(
            f"{where}agent.tool_file is {config.agent.tool_file!r}, but an external agent brings tools of its own: "
            "leave it empty."
        )
    if config.agent.tool_file and not config.uses_data and config.agent_name == "single_turn_agent":
        raise ValueError(
            f"{where}agent.tool_file is {config.agent.tool_file!r}, but tasks are played in one turn, without tools: "
            "set agent.name: tool_agent, or leave agent.tool_file empty. Several sources can have one each."
        )


def _gpus_suffice(config: Config) -> None:
    have = config.cluster.num_gpus
    if have is None or config.cluster.device == "cpu":
        return
    bundles = bundles_of(config)
    if num_gpus_of(bundles) > have:
        raise ValueError(f"GPUs: {gpu_arithmetic(bundles)}, but cluster.num_gpus is {have}. {fewer_gpus(config, have)}")


def _placement_fits(config: Config) -> None:
    _offload_helps(config)
    if config.cluster.placement == "split":
        return
    servers, tp, learners = config.server.num_servers, config.server.tensor_parallel_size, config.learner.num_learners
    if servers * tp != learners:
        raise ValueError(
            f"cluster.placement is colocated: {servers} servers x TP {tp} = {servers * tp} GPUs must be those of "
            f"{learners} learners, one each. Make learner.num_learners {servers * tp}, or use placement split."
        )
    if config.train.max_staleness > 0:
        raise ValueError(
            f"cluster.placement is colocated and train.max_staleness is {config.train.max_staleness}: on shared GPUs "
            "nothing is generated while the learners train. Use max_staleness 0, or placement split."
        )


def _offload_helps(config: Config) -> None:
    learner = config.learner
    if learner.offload_when_idle and config.cluster.placement == "split":
        raise ValueError(
            "learner.offload_when_idle is true and cluster.placement is split: no server shares the learners' GPUs, so "
            "the freed memory would stay unused. Turn it off, or use placement colocated."
        )
    if learner.offload_when_idle and learner.cpu_offload:
        raise ValueError(
            "learner.offload_when_idle and learner.cpu_offload are both true: with the second everything is in host "
            "memory all the time. Choose one."
        )


def _minibatches_divide(config: Config) -> None:
    groups, minibatches = config.train.groups_per_step, config.train.num_minibatches
    if groups % minibatches:
        raise ValueError(
            f"train.groups_per_step = {groups} groups x rollout.group_size = {config.rollout.group_size} cannot be "
            f"split into train.num_minibatches = {minibatches} equal parts of whole groups: "
            f"{groups} / {minibatches} = {groups / minibatches:g}. Use a divisor of {groups}."
        )


def _sequence_fits_microbatch(config: Config) -> None:
    longest, budget = config.max_learner_tokens, config.learner.max_tokens_per_microbatch
    parts = config.learner.sequence_parallel
    if isinstance(budget, int) and longest > budget * parts:
        more = config.distillation.num_privileged_tokens
        privileged = f" + distillation.max_privileged_tokens {more}" if more else ""
        over = f" x learner.sequence_parallel {parts} = {budget * parts}" if parts > 1 else ""
        raise ValueError(
            f"rollout.max_prompt_tokens {config.rollout.max_prompt_tokens} + rollout.max_completion_tokens "
            f"{config.rollout.max_completion_tokens}{privileged} = {longest} tokens, but "
            "learner.max_tokens_per_microbatch is "
            f"{budget}{over}: the longest trajectory would fit in no micro-batch. Raise it to at least "
            f"{-(-longest // parts)}, or learner.sequence_parallel."
        )

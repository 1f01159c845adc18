"""Checks a run's keys against each other. Each error names both values and how to correct them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayapp.config.agent import EXTERNAL_AGENT, ExternalSection, is_data_file
from rayapp.config.algorithm import NEEDS_GREEDY_BASELINE, NEEDS_NO_GROUP
from rayapp.config.bundles import asked_servers, bundles_of, fewer_gpus, gpu_arithmetic, num_gpus_of
from rayapp.config.keys import Keys
from rayapp.config.other_models import JudgeSection
from rayapp.core.http import SCHEME, server_named


def check_agreement(config: Keys) -> None:
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
    _adapters_fit(config)
    _rounding_is_corrected(config)
    _packed_weights_are_frozen(config)
    _repeats(config)


def _adapters_fit(config: Keys) -> None:
    if config.learner.lora.rank > 0 and not config.model.freeze_vision:
        raise ValueError(
            f"model.freeze_vision is false, but with learner.lora.rank {config.learner.lora.rank} only adapters of the "
            "language model are trained. Set model.freeze_vision: true, or learner.lora.rank: 0."
        )


def _model_servers_fit(config: Keys) -> None:
    names = [server.name for server in config.model_servers]
    if twice := _twice(names):
        raise ValueError(f"model_servers: two servers have the name {twice!r}. Rename one of them.")
    asked = {f"judges ({judge.name})": (judge.base_url, "model", judge.model) for judge in config.judges}
    for source, own in config.by_source():
        endpoint = own.agent.external.endpoint
        name = server_named(endpoint.base_url)
        asked[f"{_named(source)}agent.external.endpoint"] = (endpoint.base_url, "model", endpoint.model or name)
    for who, (base_url, key, model) in asked.items():
        name = server_named(base_url)
        if name and name not in names:
            raise ValueError(
                f"{who}: base_url is {base_url}, but `model_servers` has {', '.join(names) or 'no server'}. Add it."
            )
        if name and model != name:
            raise ValueError(
                f"{who}: {key} is {model!r}, but the server at {base_url} calls its model {name!r}. Use that name."
            )
    used = {server.name for server in asked_servers(config)}
    if idle := [name for name in names if name not in used]:
        raise ValueError(
            f"model_servers ({idle[0]}): no judge or agent uses this server. Remove it, or set base_url: "
            f"{SCHEME}{idle[0]} in agent.external.endpoint, or a judge of reward.judges."
        )


def _sources_fit(config: Keys) -> None:
    names = [source.name for source in config.sources]
    for number, source in enumerate(config.sources):
        where = f"sources[{number}] ({source.name})"
        if names.index(source.name) != number:
            raise ValueError(f"{where}: sources[{names.index(source.name)}] has the same name. Rename one of them.")
        if not source.tasks and not source.eval.tasks:
            raise ValueError(f"{where} has no tasks: name tasks, or data files.")
        _one_kind(config.with_source(source), f"{where}: ")
        _tools_have_players(config.with_source(source), f"{where}: ")
        for key, own in source.rollout.model_dump(exclude_none=True).items():
            most = config.group_deadline_s if key == "group_deadline_s" else getattr(config.rollout, key)
            if own > most:
                raise ValueError(
                    f"{where}: rollout.{key} is {own:g}, which is above the run's rollout.{key} = {most:g}. Raise the "
                    "run's, or lower the source's."
                )


def _external_agents_fit(config: Keys) -> None:
    for name, own in config.by_source():
        where = _named(name)
        if own.agent_name == EXTERNAL_AGENT:
            _external_agent_fits(config, own.agent.external, where)
        elif own.agent.external.command or own.agent.external.entry:
            raise ValueError(
                f"{where}agent.external is set, but agent.name is {own.agent.name}, which doesn't use it. Set "
                "agent.name: external_agent, or leave agent.external out."
            )


def _external_agent_fits(config: Keys, external: ExternalSection, where: str) -> None:
    if bool(external.command) == bool(external.entry):
        raise ValueError(
            f"{where}agent.name is external_agent, and agent.external has "
            f"{'both a command and an entry' if external.entry else 'neither a command nor an entry'}: give exactly "
            "one of them (docs/agents.md)."
        )
    if (external.models == "endpoint") != bool(external.endpoint.base_url):
        raise ValueError(
            f"{where}agent.external.models is {external.models}, and agent.external.endpoint.base_url is "
            f"{external.endpoint.base_url!r}. Set models: endpoint and a base_url, or leave both out."
        )
    if external.structured == "guide" and config.distillation.teacher:
        raise ValueError(
            f"{where}agent.external.structured is guide, but the run has a teacher, whose log-probs are over the whole "
            "vocabulary. Use free or refuse, or remove the teacher."
        )
    if external.inside:
        _agent_fits_inside(config, external, where)
    if not config.learner.share_prefixes:
        raise ValueError(
            f"{where}agent.name is external_agent, whose trajectories may fork, and learner.share_prefixes is false: "
            "branches might not fit into a micro-batch. Set learner.share_prefixes: true."
        )


def _agent_fits_inside(config: Keys, external: ExternalSection, where: str) -> None:
    shown = f"{where}agent.external.inside is true, but"
    if external.entry:
        raise ValueError(
            f"{shown} agent.external.entry is set: only a command can run in a sandbox. Give "
            "agent.external.command in place of entry, or leave inside out (docs/agents.md)."
        )
    if (provider := config.sandbox.provider.type) not in ("local", "plugin"):
        raise ValueError(
            f"{shown} the agent can't reach the policy from sandboxes of {provider}. Use local in sandbox.providers, "
            "or leave inside out (docs/agents.md)."
        )
    if config.sandbox.lease_ttl_s < (least_s := external.timeout_s + 60.0):
        raise ValueError(
            f"{where}sandbox.lease_ttl_s is {config.sandbox.lease_ttl_s:g}, but an agent inside a sandbox needs a "
            f"lease of agent.external.timeout_s + 60 = {least_s:g} s. Raise the one, or lower the other."
        )


def _judges_fit(config: Keys) -> None:
    judges = {judge.name: judge for judge in config.judges}
    if twice := _twice([judge.name for judge in config.judges]):
        raise ValueError(f"judges: two judges have the name {twice!r}. Rename one of them.")
    for name, own in config.by_source():
        _source_has_judges(own, _named(name), judges)


def _twice(names: Sequence[str]) -> str:
    return next((name for name in names if names.count(name) > 1), "")


def _named(source: str) -> str:
    return f"source {source}: " if source else ""


def _source_has_judges(own: Keys, where: str, judges: Mapping[str, JudgeSection]) -> None:
    reward, weight = own.reward, own.reward.verdict_weight
    if not weight and not any(reward.judges.values()):
        raise ValueError(
            f"{where}reward.verdict_weight and all weights in reward.judges are 0, so every reward would be 0. Raise "
            "one of them."
        )
    for name in reward.judges:
        if name not in judges:
            raise ValueError(
                f"{where}reward.judges names {name}, but `judges` has {', '.join(judges) or 'none'}: add it there "
                "(docs/judges.md)."
            )
        judge, deadline_s = judges[name], own.group_deadline_s
        if judge.kind == "pairwise" and judge.timeout_s >= deadline_s:
            raise ValueError(
                f"{where}judges ({name}): timeout_s is {judge.timeout_s:g}, but must be below rollout.group_deadline_s "
                f"= {deadline_s:g}: a pairwise judge answers before the group's deadline."
            )


def _warmup_fits(config: Keys) -> None:
    warmup, budget = config.warmup, config.learner.max_tokens_per_microbatch
    longest, parts = config.max_demonstration_tokens, config.learner.sequence_parallel
    if warmup.num_steps and isinstance(budget, int) and longest > budget * parts:
        source = "warmup.max_tokens" if warmup.max_tokens else "the model's maximum length, as warmup.max_tokens is 0"
        over = f" x learner.sequence_parallel {parts} = {budget * parts}" if parts > 1 else ""
        raise ValueError(
            f"warmup: a demonstration may have {longest} tokens ({source}), but learner.max_tokens_per_microbatch is "
            f"{budget}{over}. Raise learner.max_tokens_per_microbatch, or set a lower warmup.max_tokens."
        )


def _dapo_fits(config: Keys) -> None:
    buffer = config.algorithm.overlong.buffer_tokens
    longest = min(own.rollout.max_completion_tokens for _, own in config.by_source())
    if buffer > longest:
        raise ValueError(
            f"algorithm.overlong.buffer_tokens is {buffer}, but rollout.max_completion_tokens is {longest}: the "
            f"penalty would begin before the first token. Use at most {longest}."
        )
    estimator = config.algorithm.adv_estimator
    if config.algorithm.dynamic_sampling.enabled and estimator in ("gdpo", *NEEDS_NO_GROUP):
        raise ValueError(
            "algorithm.dynamic_sampling.enabled is true, which drops groups of equal rewards, but "
            f"algorithm.adv_estimator {estimator} learns from these too. Leave dynamic_sampling out, or use grpo."
        )


def _groups_suffice(config: Keys) -> None:
    estimator = config.algorithm.adv_estimator
    if config.rollout.group_size == 1 and (config.compares_groups or estimator in NEEDS_GREEDY_BASELINE):
        raise ValueError(
            f"rollout.group_size is 1, but algorithm.adv_estimator {estimator} compares the trajectories of a group, "
            "or keeps one as the greedy baseline: nothing would be trained. Use 2 or more."
        )


def _tasks_or_data(config: Keys) -> None:
    if config.sources:
        for key, given in (("tasks", config.tasks), ("eval.tasks", config.eval.tasks)):
            if given:
                raise ValueError(
                    f"{key} ({', '.join(given)}) and sources are both set: {key} is a short form for a run with one "
                    "source. Move these tasks into a source."
                )
        return
    _one_kind(config)
    _tools_have_players(config)
    if config.reward.custom and config.tasks and not config.uses_data:
        raise ValueError(
            f"reward.custom is {config.reward.custom!r}, but the run's tasks ({', '.join(config.tasks)}) score answers "
            "themselves. Name data files (.parquet), or leave reward.custom out."
        )


def _one_kind(config: Keys, where: str = "") -> None:
    """Refuse data files and other tasks in one source: they differ in order, agent and scoring."""
    rows, others = _of_kind(config, files=True), _of_kind(config, files=False)
    if not (any(rows) and any(others)):
        return
    named_rows, named_others = (", ".join([*trained, *evaluated]) for trained, evaluated in (rows, others))
    alone = "Evaluate the kind that `tasks` doesn't have by itself: rayapp eval CONFIG tasks=[] eval.tasks=[…]."
    way_out = "Make two `sources` (docs/tasks.md)." if rows[0] and others[0] else alone
    raise ValueError(
        f"{where}data files ({named_rows}) and other tasks ({named_others}) can't be in one source. {way_out}"
    )


def _of_kind(config: Keys, *, files: bool) -> tuple[list[str], list[str]]:
    trained, evaluated = (
        [task for task in tasks if is_data_file(task) == files] for tasks in (config.tasks, config.eval.tasks)
    )
    return trained, evaluated


def _tools_have_players(config: Keys, where: str = "") -> None:
    name, is_alone = config.agent_name, config.agent_name == "single_turn_agent" and not config.uses_data
    if config.agent.tool_file and (name == EXTERNAL_AGENT or is_alone):
        raise ValueError(
            f"{where}agent.tool_file is {config.agent.tool_file!r}, but {name} plays these tasks, and doesn't use "
            "these tools. Set agent.name: tool_agent (also for one source), or leave agent.tool_file empty."
        )


def _gpus_suffice(config: Keys) -> None:
    have = config.cluster.num_gpus
    if have is None or config.cluster.device == "cpu":
        return
    bundles = bundles_of(config)
    if num_gpus_of(bundles) > have:
        raise ValueError(
            f"the run needs {gpu_arithmetic(bundles)} GPUs, but cluster.num_gpus is {have}. {fewer_gpus(config, have)}"
        )


def _placement_fits(config: Keys) -> None:
    if config.cluster.placement == "split":
        return
    servers, tp, learners = config.server.num_servers, config.server.tensor_parallel_size, config.learner.num_learners
    if servers * tp != learners:
        fewer = "" if learners % tp else f"server.num_servers to {learners // tp}, or "
        raise ValueError(
            f"cluster.placement is colocated, so learner.num_learners = {learners} must equal the servers' GPUs: "
            f"server.num_servers {servers} x server.tensor_parallel_size {tp} = {servers * tp}. Set {fewer}"
            f"learner.num_learners to {servers * tp}, or use placement split."
        )
    if config.train.partial_rollouts and config.learner.router_replay:
        raise ValueError(
            "train.partial_rollouts and learner.router_replay are both true, and cluster.placement is colocated: "
            "servers compute paused trajectories again with new weights, so learners would replay the wrong experts. "
            "Turn one of the two off, or use placement split."
        )
    if config.train.max_staleness > 0 and not config.train.partial_rollouts:
        raise ValueError(
            f"cluster.placement is colocated and train.max_staleness is {config.train.max_staleness}: on shared GPUs "
            "servers can't generate while the learners train. Use max_staleness 0, or train.partial_rollouts, or "
            "placement split."
        )


def _minibatches_divide(config: Keys) -> None:
    groups, minibatches = config.train.groups_per_step, config.train.num_minibatches
    if groups % minibatches:
        raise ValueError(
            f"train.num_minibatches is {minibatches}, which does not divide train.groups_per_step = {groups}: all "
            "mini-batches must have the same number of whole groups."
        )


def _sequence_fits_microbatch(config: Keys) -> None:
    longest, budget = config.max_model_tokens, config.learner.max_tokens_per_microbatch
    parts = config.learner.sequence_parallel
    if isinstance(budget, int) and longest > budget * parts:
        over = f" x learner.sequence_parallel {parts} = {budget * parts}" if parts > 1 else ""
        raise ValueError(
            f"rollout.max_prompt_tokens {config.rollout.max_prompt_tokens} + rollout.max_completion_tokens "
            f"{config.rollout.max_completion_tokens} = {longest} tokens, but "
            f"learner.max_tokens_per_microbatch is {budget}{over}. Raise it to at least {-(-longest // parts)}, or "
            "learner.sequence_parallel."
        )


def _rounding_is_corrected(config: Keys) -> None:
    server, level = config.server, config.algorithm.rollout_correction.level
    if server.is_rounded and level != "token":
        key = "quantization" if server.quantization != "none" else "kv_cache_dtype"
        raise ValueError(
            f"server.{key} is {getattr(server, key)}, but algorithm.rollout_correction.level is {level}: the servers "
            "sample from a rounded policy. Set algorithm.rollout_correction.level: token."
        )


def _packed_weights_are_frozen(config: Keys) -> None:
    if config.model.quantization != "none" and config.learner.lora.rank == 0:
        raise ValueError(
            f"model.quantization is {config.model.quantization}, but learner.lora.rank is 0: weights in 4 bits stay "
            "frozen, so nothing would be trained. Set learner.lora.rank, e.g. to 32, or model.quantization: none."
        )


# Attention backends that vLLM 0.30 calls batch-invariant.
INVARIANT_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASH_ATTN_MLA", "TRITON_MLA")


def _repeats(config: Keys) -> None:
    if not config.run.deterministic:
        return
    if config.train.max_staleness > 0:
        raise ValueError(
            f"run.deterministic is true and train.max_staleness is {config.train.max_staleness}: the weights that "
            "sample a token would depend on the processes' speed. Set train.max_staleness: 0."
        )
    if config.learner.compile is True:
        raise ValueError(
            "run.deterministic and learner.compile are both true: sums of compiled kernels depend on a process's first "
            "micro-batch. Leave learner.compile out."
        )
    args = config.server.engine_args
    backend = str(args.get("attention_backend") or INVARIANT_BACKENDS[0]).upper()
    if backend not in INVARIANT_BACKENDS:
        raise ValueError(
            f"run.deterministic is true and server.engine_args.attention_backend is {backend}, whose results depend on "
            f"the batch. Use one of {', '.join(INVARIANT_BACKENDS)}, or leave it out."
        )
    if args.get("speculative_config"):
        raise ValueError(
            "run.deterministic is true and server.engine_args.speculative_config is set: the batches would depend on "
            "the number of accepted draft tokens. Leave speculative_config out."
        )

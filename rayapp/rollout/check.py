"""Checks of a run's inputs, before any actor starts, for the driver and `rayapp doctor`.

Tools behind a service are checked by the rollout workers, from their own machines.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rayapp.config.agent import EXTERNAL_AGENT, AgentSection
from rayapp.config.config import Config, Source, sources_of
from rayapp.config.sandbox import LocalConfig, SandboxConfig
from rayapp.config.sections import EvalSection, ModelSection
from rayapp.core.errors import ConfigError, InputError, SandboxError
from rayapp.core.machine import num_cores
from rayapp.core.names import load_extra
from rayapp.rollout.agent.build import check_template
from rayapp.rollout.agent.chat import load_template
from rayapp.rollout.agents import SINGLE_TURN_AGENT, check_agent_name, render_prompts
from rayapp.rollout.external_agent import check_agent
from rayapp.rollout.order import evaluation_waves
from rayapp.rollout.problem import MAX_KEPT_CHARS, agent_start, is_kept, plays_environments
from rayapp.rollout.sources import answer_rewards, naming, open_judges
from rayapp.sandbox.pool.build import open_pool
from rayapp.sandbox.providers import why_no_workspace
from rayapp.storage.models.check import check_model, check_teacher
from rayapp.storage.models.fetch import with_local_model
from rayapp.storage.models.pictures import load_pictures
from rayapp.storage.models.tokenizer import load_tokenizer
from rayapp.tasks.code.languages import Language
from rayapp.tasks.code.scoring import check_languages
from rayapp.tasks.data.files import is_remote
from rayapp.tasks.data.reading import ReadOptions, TrainingData, open_data
from rayapp.tasks.loading import load_tasks
from rayapp.tools.config import ToolEntry, read_tool_file
from rayapp.tools.loading import KNOWN, load_class
from rayapp.tools.workspace import WorkspaceTool


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCheck:
    """One check before a run. Checks don't depend on each other."""

    what: str  # part in messages, e.g. evaluation, tasks, data or tools
    run: Callable[[], None]  # raises UserError or StorageError if the part can't be used


def check_inputs(config: Config, *, training: bool) -> None:
    """Check the model, the teacher, and the tasks or data with their tools and rewards."""
    config = with_local_model(config)
    check_model(config)
    if training:
        check_teacher(config)
    for check in input_checks(config, training=training):
        check.run()


def input_checks(
    config: Config, *, training: bool, has_tokenizer: bool = True, may_fetch: bool = True, asks_judges: bool = False
) -> Iterator[InputCheck]:
    """Yield the checks of a run's inputs, without those of the model. `rayapp doctor` runs all, others stop at the
    first.

    Without `has_tokenizer` no prompts are rendered; without `may_fetch` remote data files are left out; `asks_judges`
    asks each judge from this machine (in a run the rollout workers do).
    """
    yield InputCheck(what="evaluation", run=partial(_check_something_to_evaluate, config, training=training))
    if asks_judges:
        yield InputCheck(what="judges", run=partial(_check_judges, config))
    for source in sources_of(config):
        own = source.config
        checks: dict[str, Callable[[], object]] = {
            "tools": partial(_check_tools, own, training=training, has_tokenizer=has_tokenizer)
        }
        if own.agent_name == EXTERNAL_AGENT:
            checks["agent"] = partial(check_agent, own.agent.external)
        if own.uses_data:
            files = (*own.tasks, *own.eval.tasks)
            wanted = [file for file in files if may_fetch or not is_remote(file)]
            checks["data"] = partial(_check_rows, own, wanted, training=training)
        else:
            checks["tasks"] = partial(check_tasks, own, training=training, has_tokenizer=has_tokenizer)
        for what, run in checks.items():
            yield InputCheck(what=what, run=partial(_named, source, run))


def _check_judges(config: Config) -> None:
    # Leave out judges on the run's own servers: these servers start with the run, and the rollout workers check the
    # judges on them.
    judges = open_judges(config, of_run=False)

    async def check() -> None:
        assert judges is not None
        try:
            await judges.check()
        finally:
            await judges.close()

    if judges is not None:
        asyncio.run(check())


def _named(source: Source, check: Callable[[], object]) -> None:
    with naming(source):
        check()


def _check_rows(config: Config, files: Sequence[str], *, training: bool) -> None:
    if training and not config.tasks:
        raise InputError("tasks is empty: name tasks or data files to train on (docs/data.md)")
    check_data(config, files)


def check_tasks(config: Config, *, training: bool, has_tokenizer: bool = True) -> None:
    """Check every task, and what its agent requires. UserError: one can't be used, or there are too few sandboxes."""
    brought: dict[str, str] = {}
    for names in (config.tasks, *([config.eval.tasks] if config.eval.tasks else [])):
        tasks = load_tasks(names)
        if plays_environments(tasks):
            if load_extra("environments.agent:check_environments")(tasks) and has_tokenizer:
                _check_template(config.model, config.agent)
            continue
        if config.agent_name == SINGLE_TURN_AGENT:
            if has_tokenizer:
                tokenizer = load_tokenizer(config.model, config.agent.chat_template_kwargs)
                render_prompts(tasks, tokenizer, config.rollout.max_prompt_tokens)
            continue
        if config.agent_name == EXTERNAL_AGENT:
            for task in tasks:
                agent_start(task)
            continue
        # Don't check the length of prompts with tools: only the rollout workers have all tools' schemas.
        starts = {task.name: agent_start(task) for task in tasks}
        for task_name, start in starts.items():
            if why := why_no_workspace(config.sandbox, start):
                raise ConfigError(f"task {task_name} {why}")
        brought |= {name: f"task {task}: tools: {name}" for task, start in starts.items() for name in start.tools}
    for name, where in brought.items():
        load_class(name, Path(), where)
    # Leave the template to `_check_tools` if there is a tool file.
    asks_template = has_tokenizer and not config.agent.tool_file
    _check_entries(
        config, [ToolEntry(class_name=name) for name in brought], training=training, asks_template=asks_template
    )


def _check_something_to_evaluate(config: Config, *, training: bool) -> None:
    # If only some sources with data files lack eval.tasks, these sources are not evaluated.
    own = [source.config for source in sources_of(config)]
    if _evaluates(config.eval, training=training) and all(each.uses_data and not each.eval.tasks for each in own):
        why = "eval.every_steps or eval.before_training is set" if training else "this is an evaluation"
        raise InputError(f"eval.tasks is empty, but {why}. Name the data files to evaluate on (docs/data.md)")


def _evaluates(section: EvalSection, *, training: bool) -> bool:
    return not training or section.every_steps > 0 or section.before_training


def check_data(config: Config, files: Sequence[str]) -> None:
    """Check every file's schema, each row's agent and rule, one complete row per file, and compilers. The rollout
    workers check lengths later: only they have the schemas of all tools."""
    rewards = answer_rewards(config.reward)
    if rewards.custom is not None:
        rewards.custom.load()

    async def check() -> None:
        languages: frozenset[Language] = frozenset()
        for file in files:
            data = await open_data(
                (file,),
                ReadOptions(shuffle=False),
                cache=config.data.cache_dir,
                check_agent=check_agent_name,
                truth_kind=rewards.truth_kind,
            )
            if data.has_pictures:  # imports transformers
                load_pictures(with_local_model(config).model)
            data.row(0)
            languages |= data.languages
            if config.judges_read_references:
                _check_references(file, data)
        await _check_compilers(config.sandbox, languages)

    asyncio.run(check())


async def _check_compilers(section: SandboxConfig, languages: Collection[Language]) -> None:
    if not languages:
        return
    try:
        async with open_pool(section.without_stock, f"check-{os.getpid()}") as (sandboxes, _):
            await check_languages(languages, sandboxes)
    except SandboxError as error:
        names = ", ".join(sorted(each.name for each in languages))
        raise InputError(f"rows that need {names} can't be scored: {error}") from error


def _check_references(file: str, data: TrainingData) -> None:
    """Refuse rows whose ground truth is too long for a judge to read."""
    for number in range(len(data)):
        if not is_kept(data.row(number).ground_truth):
            raise InputError(
                f"{file}, row {number}: its ground_truth has more than {MAX_KEPT_CHARS:,} characters, which is "
                "the maximum for judges with `reference: true`. Leave out the row, or set `reference: false`"
            )


def _check_tools(config: Config, *, training: bool, has_tokenizer: bool) -> None:
    if config.agent.chat_template:
        load_template(config.agent.chat_template)
    file = config.agent.tool_file
    entries = read_tool_file(file) if file else ()
    for entry in entries:
        _check_own_file(entry, Path(file).parent, f"tool file {file}: {entry.class_name}")
    _check_entries(config, entries, training=training, asks_template=has_tokenizer)


def _check_entries(config: Config, entries: Sequence[ToolEntry], *, training: bool, asks_template: bool) -> None:
    """Check that there are enough sandboxes, and that the chat template lists tools."""
    file = config.agent.tool_file
    holding = (entry for entry in entries if _holds_sandbox(entry, f"tool file {file}: {entry.class_name}: config"))
    if (first := next(holding, None)) is not None:
        _check_sandboxes_suffice(config, first, training=training)
    if entries and asks_template:
        _check_template(config.model, config.agent)


def _check_template(model: ModelSection, agent: AgentSection) -> None:
    tokenizer: Any = load_tokenizer(model, agent.chat_template_kwargs)
    check_template(tokenizer, model=model.path, chat_template=agent.chat_template)


def _check_own_file(entry: ToolEntry, folder: Path, where: str) -> None:
    file, colon, _ = entry.class_name.rpartition(":")
    if colon and not (folder / file).is_file() and not Path(file).is_file():
        raise ConfigError(f"{where}: there is no file {folder / file}")


def _holds_sandbox(entry: ToolEntry, where: str) -> bool:
    # Tools that keep a sandbox for each trajectory; of users' classes, which only the rollout workers load, it is not
    # known.
    if not KNOWN.get(entry.class_name, entry.class_name).startswith("rayapp.tools."):
        return False
    kind = load_class(entry.class_name, Path(), where)
    return isinstance(kind, type) and issubclass(kind, WorkspaceTool) and kind.holds_sandbox(entry.config, where=where)


def _check_sandboxes_suffice(config: Config, entry: ToolEntry, *, training: bool) -> None:
    # A tool with a workspace keeps a sandbox per trajectory, from its first call on.
    need, arithmetic = trajectories_at_once(config, training=training)
    have = num_sandboxes(config.sandbox)
    if have < need:
        raise ConfigError(
            f"sandbox.providers and sandbox.max_leases allow {have} sandboxes, but the tool {entry.class_name} keeps a "
            f"sandbox for each trajectory, and {need} trajectories run at once ({arithmetic}). Raise "
            f"sandbox.max_leases to {need}, or lower a number in the parentheses. If `python` is the only tool that "
            "keeps sandboxes, you can set `stateful: false` in its config instead"
        )


def trajectories_at_once(config: Config, *, training: bool) -> tuple[int, str]:
    """Return the maximum number of trajectories at once, and its calculation as text."""
    train, rollout = config.train, config.rollout
    in_training = train.max_groups_in_flight * rollout.group_size
    text = f"train.groups_per_step {train.groups_per_step} x rollout.group_size {rollout.group_size}"
    if train.extra_groups is not None:
        text += f" + train.extra_groups {train.extra_groups} x rollout.group_size {rollout.group_size}"
    elif train.max_staleness:
        text += f" x (train.max_staleness {train.max_staleness} + 1)"
    if not _evaluates(config.eval, training=training):
        return in_training, text
    # The first wave has the most prompts.
    most, samples = train.groups_per_step * rollout.group_size, config.eval.samples_per_task
    wave = evaluation_waves(most, rollout, train.groups_per_step, samples)[0]
    evaluating = len(wave) * config.eval.samples_per_task
    of_eval = f"{len(wave)} prompts x eval.samples_per_task {config.eval.samples_per_task}"
    if not training:
        return evaluating, of_eval
    if train.max_staleness:
        return in_training + evaluating, f"{text} + {of_eval}"
    return max((in_training, text), (evaluating, of_eval))


def num_sandboxes(sandbox: SandboxConfig) -> int:
    """Return the maximum number of sandboxes that the pool leases at once."""
    cores = num_cores()
    limits = [
        (section.max_sandboxes or sandbox.max_leases or cores)
        if isinstance(section, LocalConfig)
        else section.max_sandboxes
        for section in sandbox.providers
    ]
    return min(sandbox.max_leases or sum(limits), sum(limits))

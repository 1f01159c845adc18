"""Translates a GRPO run of TRL: `rayapp.trl_config(GRPOConfig(...), ...)` returns a run for `rayapp.train`.

`fields.py` has a rule for every field of TRL's `GRPOConfig`. TRL itself is never imported. Reward functions are called
as TRL calls them, for one completion at a time; TRL's `tools` become the methods of an environment.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any

from rayapp.config.foreign_keys import GivenRun, KeyRow, Values, landing_of, load_settings, settings_of
from rayapp.config.sections import ModelSection
from rayapp.core.errors import ConfigError, InputError
from rayapp.core.names import PREFIX, did_you_mean
from rayapp.core.protocols import Tokenizer
from rayapp.extras.trl.fields import ARGUMENTS, DEFAULTS, FIELDS, NUM_GPUS, NUM_ROWS, PEFT
from rayapp.storage.media import as_png
from rayapp.storage.models.tokenizer import load_tokenizer
from rayapp.tasks.data.pictures import COLUMNS as PICTURES
from rayapp.tasks.data.pictures import as_marks, as_stored, with_parts

DATA_SOURCE = "trl"
_FOLDER = "trl_data"
# Columns that TRL doesn't pass to reward functions under their name.
_NOT_PASSED = ("prompt", "prompts", "completion", "completions", "completion_ids", *PICTURES)


def trl_config(
    args: Any,
    *,
    model: str,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    environment_factory: Callable[[], Any] | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    peft_config: Any = None,
    num_gpus: int = 1,
    overrides: Sequence[str] = (),
    **others: Any,
) -> GivenRun:
    """Translate the arguments of TRL's `GRPOTrainer` into a run for `rayapp.train`.

    The datasets are written to `<output_dir>/trl_data`. Nothing else is written, and nothing is started.

    Args:
        args: TRL's GRPOConfig, or a mapping of its fields. Fields that the mapping omits have TRL's defaults.
        model: a model folder or hub id.
        train_dataset, eval_dataset: rows as mappings, such as a datasets.Dataset, with a column `prompt`.
        reward_funcs: functions in TRL's form, which the field `reward_weights` weighs.
        environment_factory: a class in TRL's form. Its rows are those of the datasets.
        tools: functions that the policy may call, in TRL's form.
        peft_config: a LoraConfig, or a mapping of its fields.
        num_gpus: number of training processes of the TRL run. The processes of a vLLM server don't count.
        overrides: settings of rayapp that replace the translated ones, e.g. ["run.name=math"].
        others: further arguments of GRPOTrainer, which must be None.
    Returns:
        The run. Its attribute `rows` lists each field with the keys that it sets.
    Raises:
        ConfigError: fields are unknown, or their values can't be imported. One message names all of them.
        InputError: a dataset can't be used.
    """
    given = _fields_of(args)
    rewards = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    train_rows = _rows(train_dataset, "train_dataset")
    known = dict(DEFAULTS) | given | {NUM_GPUS: num_gpus, NUM_ROWS: len(train_rows)}
    rows, problems = _landings(given, known)
    passed = {"prompts", "completions", *_passed(train_rows[0] if train_rows else {})}
    passed |= {"environments"} if environment_factory or tools else set()
    problems += _problems_of_arguments(model, others) + _problems_of_rewards(rewards, known, passed)
    if tools and environment_factory:
        problems.append("tools can't be imported with environment_factory: make them methods of the environment")
    if not rewards and not environment_factory:
        problems.append("reward_funcs is empty: give the functions that score what the policy does")
    problems += [] if train_rows or environment_factory else [_NO_ROWS]
    adapters = _adapters(peft_config, problems)
    if problems:
        raise ConfigError("settings of TRL that can't be imported:\n  " + "\n  ".join(dict.fromkeys(problems)))
    settings = settings_of(rows) | adapters | {"model.path": model}
    folder = Path(str(settings["run.output_dir"])) / _FOLDER
    weighted = WeightedRewards(tuple(rewards), tuple(known["reward_weights"] or [1.0] * len(rewards)), model)
    objects: dict[str, object] = {}
    environment_factory = _environment_of(tools) if tools else environment_factory
    eval_rows = _rows(eval_dataset, "eval_dataset")
    if environment_factory is not None:
        settings["tasks"] = [_environment(environment_factory, train_rows, weighted, folder / "train", objects)]
        if eval_rows:
            settings["eval.tasks"] = [_environment(environment_factory, eval_rows, weighted, folder / "eval", objects)]
    else:
        objects[f"{PREFIX}trl_rewards"] = _Answers(weighted)
        settings["reward.custom"] = f"{PREFIX}trl_rewards"
        settings["tasks"] = [_write_rows(folder / "train.parquet", train_rows)]
        if eval_rows:
            settings["eval.tasks"] = [_write_rows(folder / "eval.parquet", eval_rows)]
    return GivenRun(config=load_settings(settings, rows, overrides), objects=objects, rows=tuple(rows))


_NO_ROWS = "train_dataset is empty: give rows with a column `prompt`, e.g. load_dataset(...)"


def _fields_of(args: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        args = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    if not isinstance(args, Mapping):
        raise ConfigError(f"args is a {type(args).__name__}: give TRL's GRPOConfig, or a mapping of its fields")
    return {str(name): value.value if isinstance(value, Enum) else value for name, value in args.items()}


def _landings(given: Mapping[str, Any], known: Values) -> tuple[list[KeyRow], list[str]]:
    rows, problems = [], []
    for name, value in (dict(given) | {name: value for name, value in DEFAULTS.items() if name not in given}).items():
        try:
            if name not in FIELDS:
                raise ConfigError(
                    f"{name} is not a field of TRL's GRPOConfig that rayapp knows{did_you_mean(name, FIELDS)}"
                )
            landing = landing_of(FIELDS[name], name, value, known)
            rows.append(KeyRow(key=name, value=value, landing=landing, is_default=name not in given))
        except ConfigError as error:
            problems.append(str(error))
    return rows, problems


def _problems_of_arguments(model: Any, others: Mapping[str, Any]) -> list[str]:
    problems = [] if isinstance(model, str) else [f"model is a {type(model).__name__}: give its folder or hub id"]
    for name, value in others.items():
        if name not in ARGUMENTS:
            problems.append(f"{name} is not an argument of TRL's GRPOTrainer{did_you_mean(name, ARGUMENTS)}")
        elif value is not None and value != (None, None):
            problems.append(f"{name} can't be imported: {ARGUMENTS[name]}. Leave it out")
    return problems


def _names(functions: Sequence[Any]) -> list[str]:
    """Return different names for the functions: they are names of reward terms."""
    names: list[str] = []
    for function in functions:
        plain = getattr(function, "func", function)  # of functools.partial
        name = str(getattr(plain, "__name__", type(plain).__name__))
        numbered = chain([name], (f"{name}_{number}" for number in count(2)))
        names.append(next(each for each in numbered if each not in names))
    return names


def _problems_of_rewards(rewards: Sequence[Any], known: Values, passed: set[str]) -> list[str]:
    weights, problems = known["reward_weights"], []
    if weights is not None and len(weights) != len(rewards):
        problems.append(f"reward_weights has {len(weights)} weights for {len(rewards)} reward_funcs: give one for each")
    for reward, name in zip(rewards, _names(rewards), strict=True):
        if not callable(reward):
            problems.append(f"reward_funcs: {reward!r} is a model: make it a judge with a weight (docs/judges.md)")
            continue
        parts = {part.name: part for part in _parameters(reward)}
        if missing := [each for each, part in parts.items() if _is_needed(part) and each not in passed]:
            problems.append(
                f"reward_funcs: {name} needs {', '.join(missing)}, which rayapp doesn't pass: give a default, such as "
                "None (docs/migrate-from-trl.md)"
            )
        is_open = not parts or any(part.kind is inspect.Parameter.VAR_KEYWORD for part in parts.values())
        if not is_open and (unread := sorted(passed - parts.keys())):
            problems.append(f"reward_funcs: {name} doesn't take {', '.join(unread)}, which it gets: add **kwargs")
    return problems


def _passed(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in row.items() if name not in _NOT_PASSED}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return []


def _is_needed(part: inspect.Parameter) -> bool:
    is_one = part.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return is_one and part.default is inspect.Parameter.empty and part.name != "completion_ids"


def _environment_of(tools: Sequence[Callable[..., Any]]) -> Callable[[], Any]:
    names = _names(tools)
    members: dict[str, Any] = dict(zip(names, map(staticmethod, tools), strict=True))
    return type("Tools", (), members | {"reset": lambda self, **columns: None, "rayapp_tools": tuple(names)})


def _adapters(peft_config: Any, problems: list[str]) -> dict[str, Any]:
    if peft_config is None:
        return {}
    fields = dict(peft_config) if isinstance(peft_config, Mapping) else vars(peft_config)
    for name, value in PEFT.items():
        if (found := fields.get(name, value)) != value:
            problems.append(f"peft_config.{name} = {found!r} can't be imported: rayapp supports only {value!r}")
    targets = fields.get("target_modules")
    if not targets or (isinstance(targets, str) and targets != "all-linear"):
        problems.append(f"peft_config.target_modules = {targets!r} can't be imported: name the layers, or 'all-linear'")
        return {}
    return {
        "learner.lora.rank": int(fields.get("r", 8)),
        "learner.lora.alpha": int(fields.get("lora_alpha", 8)),
        "learner.lora.target_modules": [targets] if isinstance(targets, str) else sorted(targets),
    }


def _rows(dataset: Any, what: str) -> list[dict[str, Any]]:
    if dataset is None:
        return []
    if isinstance(dataset, str | Path | Mapping) or not isinstance(dataset, Iterable):
        raise InputError(
            f"{what} is a {type(dataset).__name__}: give an iterable of rows, e.g. load_dataset(..., split=...)"
        )
    rows = [dict(row) if isinstance(row, Mapping) else row for row in dataset]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError(f"{what}, row {index}: a row must be a mapping, not {row!r:.80}")
        if not row.get("prompt"):
            raise InputError(f"{what}, row {index} has no prompt: {row!r:.80}")
    return rows


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows in verl's schema. TRL's columns are one JSON text, which `_Answers` reads, without pictures."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made, images = [], list[list[dict[str, Any]]]()
    for index, row in enumerate(rows):
        prompt, pictures = row["prompt"], _pictures(row)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        images.append(pictures)
        try:
            columns = json.dumps({name: value for name, value in row.items() if name not in PICTURES})
        except TypeError as error:
            raise InputError(f"{path.stem}_dataset, row {index}: a value can't be written as JSON: {error}") from error
        made.append(
            {
                "data_source": DATA_SOURCE,
                "prompt": as_marks(with_parts(messages, len(pictures))),
                "ability": "own",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index, "columns": columns},
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(made)
    if any(images):
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = table.append_column("images", pa.array(images, pa.list_(kind)))
    pq.write_table(table, path)
    return str(path)


def _pictures(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row's pictures in verl's form."""
    found: Any = next((row[name] for name in PICTURES if row.get(name)), [])
    return list(map(_stored, found if isinstance(found, list | tuple) else [found]))


def _stored(picture: Any) -> dict[str, Any]:
    """Return a picture in verl's form: bytes, a path relative to the working directory, or Pillow's."""
    if hasattr(picture, "save"):
        picture = as_png(picture)
    stored = as_stored(picture)
    path = stored["path"]
    is_file = path is not None and not path.startswith("data:") and "://" not in path
    return {**stored, "path": str(Path(path).absolute())} if is_file else stored


def _environment(
    factory: Callable[[], Any],
    rows: Sequence[Mapping[str, Any]],
    weighted: WeightedRewards,
    folder: Path,
    objects: dict[str, object],
) -> str:
    """Write the environment's task file; return its path."""
    name = _names([factory])[0]
    objects[f"{PREFIX}{name}"] = factory
    task = {"environment": "trl", "factory": f"{PREFIX}{name}"}
    folder.mkdir(parents=True, exist_ok=True)
    if rows:
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        task["rows"] = "rows.jsonl"
    if weighted.functions:
        objects[f"{PREFIX}trl_rewards"] = weighted
        task["reward"] = f"{PREFIX}trl_rewards"
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(task), encoding="utf-8")  # JSON is also valid YAML
    return str(file)


@cache
def _tokenizer(model: str) -> Tokenizer:
    return load_tokenizer(ModelSection(path=model))


@dataclasses.dataclass(frozen=True, slots=True)
class WeightedRewards:
    """A reward function in TRL's form: the weighted sum of several. As in TRL, a reward of None adds nothing."""

    functions: tuple[Callable[..., Any], ...]
    weights: tuple[float, ...]
    model: str = ""  # Model whose tokenizer gives `completion_ids`.

    def terms(self, **arguments: Any) -> Any:
        """Return name of a function -> its reward for one completion, or an awaitable of this mapping."""
        found = [function(**arguments, **self._ids(function, arguments)) for function in self.functions]
        return _then(_all_of(found) if any(map(inspect.isawaitable, found)) else found, self._named)

    def _ids(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        if all(part.name != "completion_ids" for part in _parameters(function)):
            return {}
        [said] = arguments["completions"]
        text = said if isinstance(said, str) else "".join(turn["content"] for turn in said)
        return {"completion_ids": [_tokenizer(self.model).encode(text, add_special_tokens=False)]}

    def _named(self, found: Sequence[Any]) -> dict[str, float]:
        named = dict[str, float]()
        for name, values in zip(_names(self.functions), found, strict=True):
            try:
                [value] = values
            except (TypeError, ValueError):
                raise TypeError(
                    f"{name} returned {values!r:.60}, not a list with a reward for each completion"
                ) from None
            named |= {} if value is None else {name: float(value)}
        return named

    def total(self, terms: Mapping[str, float]) -> float:
        return sum(
            weight * terms.get(name, 0.0) for name, weight in zip(_names(self.functions), self.weights, strict=True)
        )

    def __call__(self, **arguments: Any) -> Any:
        """Return a list with the reward of the only completion, or an awaitable of this list."""
        return _then(self.terms(**arguments), lambda terms: [self.total(terms)])


async def _all_of(found: Sequence[Any]) -> list[Any]:
    return [await each if inspect.isawaitable(each) else each for each in found]


def _then(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the function of a value, or an awaitable of it if the value is an awaitable."""
    if not inspect.isawaitable(value):
        return function(value)

    async def later() -> Any:
        return function(await value)

    return later()


@dataclasses.dataclass(frozen=True, slots=True)
class _Answers:
    """TRL's reward functions as one for `reward.custom`, whose terms are their rewards."""

    rewards: WeightedRewards

    def __call__(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Any:
        columns = json.loads(extra_info["columns"])
        prompt = columns["prompt"]
        said: Any = solution_str if isinstance(prompt, str) else [{"role": "assistant", "content": solution_str}]
        each = {name: [value] for name, value in _passed(columns).items()}
        terms = self.rewards.terms(prompts=[prompt], completions=[said], **each)
        return _then(terms, lambda found: {**found, "score": self.rewards.total(found)})

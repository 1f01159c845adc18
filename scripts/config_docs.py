"""Writes docs/configure.md from the config's schema: `python -m scripts.config_docs > docs/configure.md`. A test finds
a stale page.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayapp.config.algorithm import ADV_ESTIMATORS, POLICY_LOSSES
from rayapp.config.config import Config
from rayapp.core import syntax
from rayapp.core.validation import values_of

Section = type[BaseModel]
NAMES = {"algorithm.adv_estimator": ADV_ESTIMATORS, "algorithm.policy_loss": POLICY_LOSSES}
"""Key -> allowed values, for keys whose values are checked against a registry and not by the schema."""
HEADER = """# Every key

Generated from `rayapp/config/` by `python -m scripts.config_docs`. A config file states only what differs from these
defaults; `key.sub=value` on the command line wins over the file. Values are YAML: lists are `[a, b]`, none is `null`.
`rayapp config show CONFIG` prints the result.

## Learning rate, batch, length: where to begin

| to change | keys |
|---|---|
| the model | `model.path` |
| the learning rate and its schedule | `learner.optimizer.lr`, `.schedule`, `.warmup_steps` |
| the batch: prompts, and completions of each | `train.groups_per_step`, `rollout.group_size` |
| how long a run is, and how long completions may be | `train.num_steps`, `rollout.max_completion_tokens` |
| your own data set and reward function | `tasks`, `reward.custom` ([data.md](data.md)) |
| out of memory in the learner | `learner.max_tokens_per_microbatch`, `.activation_checkpointing`, `.cpu_offload` |
| out of memory in the server | `server.gpu_memory_utilization`, `.max_num_seqs`, `.tensor_parallel_size` |
| the loss | `algorithm.adv_estimator`, `algorithm.policy_loss`, `algorithm.kl_loss_coef` |
"""


def render() -> str:
    page = "\n".join([HEADER, *_section(Config, "", Config())])
    return re.sub(r"docs/([\w-]+\.md(#[\w-]+)?)(?=[),;])", r"[\1](\1)", page)


def keys_without_meaning() -> list[str]:
    rows = (line.split(" | ") for line in render().splitlines() if line.startswith("| `"))
    return [row[0].removeprefix("| ") for row in rows if len(row) == 4 and row[3].strip(" |") == ""]


def _section(section: Section, prefix: str, values: BaseModel | None) -> Iterator[str]:
    """Yield the lines about one section: its own keys, then its subsections, then the sections in its lists.

    Args:
        values: the section with its defaults; None if the section has required keys.
    """
    fields = section.model_fields
    plain = {name: field for name, field in fields.items() if not _is_section(field)}
    if plain:
        yield from _table(plain, _docstrings(section), prefix, values)
    for name, field in fields.items():
        if _is_section(field):
            yield f"## `{prefix}{name}`\n"
            yield from _about(_as_section(field.annotation))
            yield from _section(_as_section(field.annotation), f"{prefix}{name}.", getattr(values, name, None))
    for name, field in fields.items():
        for element in _elements(field):
            kind = element.model_fields["type"].default if "type" in element.model_fields else ""
            yield f"## `{prefix}{name}[…]`{kind and f' of type {kind}'}\n"
            yield from _about(element)
            yield from _element(element, f"{prefix}{name}[…].")


def _about(section: Section) -> Iterator[str]:
    if "__doc__" in section.__dict__ and section.__doc__:
        yield " ".join(section.__doc__.split()) + "\n"


def _elements(field: FieldInfo) -> Iterator[Section]:
    for argument in get_args(field.annotation) if get_origin(field.annotation) is tuple else ():
        choices = get_args(argument)[0] if get_origin(argument) is Annotated else argument
        yield from (each for each in (choices, *get_args(choices)) if _is_model(each))


def _element(section: Section, prefix: str) -> Iterator[str]:
    """Yield the lines about the keys of a section in a list. Subsections that a run also has at the top level are
    described only there.
    """
    of_run = {field.annotation for field in Config.model_fields.values()}
    parts = {name: field for name, field in section.model_fields.items() if _is_section(field)}
    own = {name: field for name, field in parts.items() if field.annotation not in of_run}
    plain = {name: field for name, field in section.model_fields.items() if name not in {*own, "type"}}
    yield from _table(plain, _docstrings(section), prefix, None)
    for name, field in own.items():
        inner = _as_section(field.annotation)
        yield from _table(inner.model_fields, _docstrings(inner), f"{prefix}{name}.", None)


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _is_section(field: FieldInfo) -> bool:
    return _is_model(field.annotation)


def _as_section(annotation: object) -> Section:
    assert isinstance(annotation, type)
    assert issubclass(annotation, BaseModel)
    return annotation


def _table(fields: dict[str, FieldInfo], notes: dict[str, str], prefix: str, values: BaseModel | None) -> Iterator[str]:
    yield "| key | default | values | meaning |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        key = f"{prefix}{name}"
        taken = f"one of {', '.join(NAMES[key])}, or a plug-in" if key in NAMES else values_of(field)
        cells = (f"`{key}`", _default(name, field, values), taken, notes.get(name, ""))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _default(name: str, field: FieldInfo, values: BaseModel | None) -> str:
    """Return the default in YAML, as a config file would have it. It is empty for a required key and for a section."""
    if _is_section(field) or (values is None and field.is_required()):
        return ""
    value = getattr(values, name) if values is not None else field.get_default(call_default_factory=True)
    plain = [each.model_dump(mode="json") if isinstance(each, BaseModel) else each for each in _listed(value)]
    shown = plain if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    return f"`{yaml.safe_dump(shown, default_flow_style=True, width=1 << 20).strip().removesuffix('...').strip()}`"


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, tuple) else []


def _docstrings(section: Section) -> dict[str, str]:
    """Return field -> docstring below it, including fields of parent classes. The source is parsed, because Python does
    not keep these docstrings.
    """
    found: dict[str, str] = {}
    for model in reversed(section.__mro__):
        if _is_model(model) and model is not BaseModel:
            found |= _own_docstrings(_as_section(model))
    return found


def _own_docstrings(section: Section) -> dict[str, str]:
    source = Path(inspect.getfile(section)).read_text(encoding="utf-8")
    classes = (node for node in syntax.module(source).body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in classes if node.name == section.__name__)
    found: dict[str, str] = {}
    for field, note in itertools.pairwise(body):
        is_note = isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_note:
            assert isinstance(note, ast.Expr)
            assert isinstance(note.value, ast.Constant)
            found[field.target.id] = " ".join(str(note.value.value).split())
    return found


if __name__ == "__main__":
    print(render(), end="")

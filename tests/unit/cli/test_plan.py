"""`rayapp plan`, and the same checks in `rayapp doctor`: what they plan, and the input that they need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rayapp.cli.main import run
from rayapp.config.loading import load_config

ARCHITECTURES = Path(__file__).parents[2] / "data" / "architectures"
SMALL = str(ARCHITECTURES / "qwen2.5-0.5b.json")


def test_a_config_for_gpus_asks_which_where_there_are_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["plan", "configs/coding_8gpu.yaml", "--model-config", SMALL]) == 2
    assert "name a kind of GPU with --gpu h200|h100" in capsys.readouterr().err
    assert run(["plan", "configs/coding_8gpu.yaml", "--gpu", "tpu", "--model-config", SMALL]) == 2
    assert "use one of h200, h100, a100" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["coding_cpu", "coding_warmup_cpu", "distillation_cpu"])
def test_the_kv_cache_of_the_default_job_holds_every_sequence_that_runs_at_once(name: str) -> None:
    config = load_config(Path(f"configs/{name}.yaml"))
    layers, key_heads, width, element = 30, 3, 64, 2  # SmolLM2-135M in bfloat16

    tokens = config.server.kv_cache_gib * 2**30 / (layers * 2 * key_heads * width * element)

    assert tokens > config.server.max_num_seqs * config.max_model_tokens


def test_a_config_for_cpu_is_planned_for_this_machines_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayapp.cli.plan.available_memory", lambda: 40 << 30)
    assert run(["plan", "configs/coding_cpu.yaml", "--model-config", SMALL]) == 0
    printed = capsys.readouterr().out
    assert "494.0M parameters in 24 layers, on this machine's CPU" in printed
    assert "GiB, 0.5 each of KV cache" in printed
    assert "h200" in printed.splitlines()[-1]
    monkeypatch.setattr("rayapp.cli.plan.available_memory", lambda: 4 << 30)
    assert run(["plan", "configs/coding_cpu.yaml", "--model-config", SMALL]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_plan_and_doctor_need_no_more_than_a_config_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayapp.cli.doctor.machine", lambda: iter(()))
    for command in ("doctor", "plan"):
        monkeypatch.setattr(f"rayapp.cli.{command}.available_memory", lambda: 64 << 30)
    gpus = ["cluster.num_gpus=8"]
    assert run(["plan", "configs/coding_8gpu.yaml", *gpus, "--gpu", "h100", "--model-config", SMALL]) == 0
    assert "a step: about" in capsys.readouterr().out
    assert run(["doctor", "configs/coding_cpu.yaml", "--model-config", SMALL]) == 0
    assert "can run on this machine" in capsys.readouterr().out
    assert run(["plan", "configs/coding_cpu.yaml", "--model-config", "nowhere.json"]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_a_silent_hub_is_told_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert run(["plan", "configs/coding_8gpu.yaml", "--gpu", "h100"]) == 2
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9 does not answer" in error
    assert "--model-config FILE" in error


@pytest.mark.parametrize("path", ["/nowhere/Qwen2.5-7B", "./nowhere", "models/nowhere", "~/nowhere"])
def test_the_plan_of_a_folder_that_is_not_there_says_so(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "configs/coding_8gpu.yaml", "--gpu", "h100", f"model.path={path}"]) == 2
    assert f"model.path {path!r}: there is no such folder" in capsys.readouterr().err


def test_a_model_that_is_on_this_disk_is_used_when_the_hub_is_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    from rayapp.storage.models.check import check_hub_answers

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    check_hub_answers("some/model")
    assert constants.HF_HUB_OFFLINE


def test_the_table_of_shapes_is_that_of_the_models(tmp_path: Path) -> None:
    sizes = {"qwen2.5-0.5b": 0.494, "qwen2.5-3b": 3.086, "qwen3-8b": 8.191, "llama-3.1-70b": 70.554}
    from rayapp.config.config import Config
    from rayapp.learner.memory.shape import model_shape

    for name, billions in sizes.items():
        architecture = json.loads((ARCHITECTURES / f"{name}.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(architecture))
        shape = model_shape(Config.model_validate({"model": {"path": str(tmp_path)}}))
        assert shape.num_parameters / 1e9 == pytest.approx(billions, abs=0.001)

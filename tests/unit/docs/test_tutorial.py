"""docs/tutorial.md: its files and its commands, as a reader copies them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from rayapp.cli import main

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
MODEL = """{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536,
 "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2,
 "tie_word_embeddings": true,
 "vocab_size": 151936, "max_position_embeddings": 32768, "hidden_act": "silu", "rms_norm_eps": 1e-06}"""
"""What plan reads of Qwen2.5-1.5B, whose hub the tests can't reach."""


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return text


def command(beginning: str) -> list[str]:
    """Return the arguments of the page's command that begins so."""
    line = next(line.strip() for line in PAGE.splitlines() if line.startswith(f"    rayapp {beginning}"))
    return shlex.split(line, comments=True)[1:]


def test_own_data_and_own_reward_become_a_configuration_that_fits_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, language in {"mine.jsonl": "json", "rewards.py": "python", "mine.yaml": "yaml"}.items():
        Path(name).write_text(block(language))
    Path("config.json").write_text(MODEL)

    assert main.run(command("data rows")) == 0
    assert {path.name for path in Path("data/mine").glob("*.parquet")} == {"train.parquet", "test.parquet"}
    assert main.run(command("score")) == 0, capsys.readouterr().err
    assert main.run(command("config show")) == 0
    capsys.readouterr()
    assert main.run([*command("plan"), "--model-config", "config.json"]) == 0

    assert "rayapp train CONFIG --smoke" in capsys.readouterr().out


def test_own_tests_and_an_own_reward_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = re.findall(
        r"^```python\n(# brief.py.*?)^```", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE | re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    Path("brief.py").write_text(text)
    Path("right.py").write_text("def double(x):\n    return x + x\n")
    Path("long.py").write_text(f"def double(x):\n    # {'talk ' * 50}\n    return 2 * x\n")

    assert main.run(["score", "brief.py", "right.py", "long.py"]) == 0
    verdicts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [verdict["reward"] for verdict in verdicts] == [1.0, 0.8]
    assert [verdict["terms"]["long"] for verdict in verdicts] == [0.0, 1.0]
    assert all(verdict["terms"]["solved"] == 1.0 for verdict in verdicts)

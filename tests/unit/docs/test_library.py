"""The examples of docs/library.md and its notebook do what they say."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.synthetic_run import write_run

ROOT = Path(__file__).parents[3]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "library.md").read_text(), re.MULTILINE | re.DOTALL)
MODEL = "models/smollm2-135m"
MOST_LINES = 30


@pytest.fixture
def desk(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the checkout, with a model and a run in it."""
    (tmp_path / "models").mkdir()
    (tmp_path / MODEL).symlink_to(tiny_model)
    for name in ("coding_cpu", "coding_warmup_cpu"):
        write_run(tmp_path / "outputs" / name, num_trajectories=32, per_step=16)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_is_short_and_runs(number: int, desk: Path) -> None:
    text = EXAMPLES[number]
    assert len(text.splitlines()) <= MOST_LINES
    code = compile(text, f"example {number} of docs/library.md", "exec")
    if "rayapp.train(" in text:
        return  # whole runs from Python are in tests/e2e/test_python_api.py
    exec(code, {})


async def test_the_notebook_runs_from_top_to_bottom_in_a_running_event_loop(desk: Path) -> None:
    cells = json.loads((ROOT / "docs" / "library.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] != "code" or "takes-minutes" in cell["metadata"].get("tags", ()):
            continue
        code = compile(cell["source"], cell["id"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        found = eval(code, names)  # a coroutine where the cell awaits, as IPython runs it
        if inspect.isawaitable(found):
            await found
        await asyncio.sleep(0)

    assert names["result"].stdout == "42\n"
    assert len(names["rows"]) == 32
    assert not any(cell.get("outputs") for cell in cells), "the notebook is kept without outputs"

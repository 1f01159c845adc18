"""`import rayapp` is fast and offers the documented names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rayapp

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "ray", "vllm", "transformers", "numpy", "pandas", "pyarrow", "pydantic", "matplotlib", "asyncio"}


def test_importing_the_library_loads_nothing_else() -> None:
    program = f"""
import sys, time
before = time.process_time()
import rayapp
took = time.process_time() - before
print(sorted({HEAVY!r} & set(sys.modules)), took < 0.3)
assert "train" in dir(rayapp) and not {HEAVY!r} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )

    assert done.stdout == "[] True\n"


@pytest.mark.parametrize("name", rayapp.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(rayapp, name)

    assert name == "__version__" or found.__doc__

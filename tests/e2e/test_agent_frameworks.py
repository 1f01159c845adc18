"""Agent frameworks as they are published, from PyPI and npm, on a scripted policy over the real gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.agent_frameworks import BY_NAME, PAGE, install, play, problem_of, row_of

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", BY_NAME)
async def test_a_framework_solves_the_task_as_the_table_says(
    name: str, chat_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    programs: Path = install(BY_NAME[name], tmp_path_factory.mktemp("frameworks"))

    played = await play(BY_NAME[name], programs, chat_tokenizer)

    assert problem_of(BY_NAME[name], played) == ""
    assert row_of(BY_NAME[name], played) in PAGE.read_text().splitlines()

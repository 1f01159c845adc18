"""The doctor's proof holds at every level, and finds everything where nothing isolates."""

from __future__ import annotations

import pytest

from rayapp.sandbox.local.doctor import examine
from support.levels import EACH_LEVEL


@pytest.mark.parametrize("level", EACH_LEVEL)
async def test_code_reaches_nothing_outside_of_its_sandbox(level: str) -> None:
    report = await examine(levels=(level,))
    if report.level == "none":
        pytest.skip(str(report.refused))

    assert (report.level, report.num_tried, report.reached) == (level, 4, ())


async def test_without_isolation_code_reaches_every_decoy() -> None:
    report = await examine(levels=("unisolated",))

    assert (report.num_tried, len(report.reached)) == (4, 4)

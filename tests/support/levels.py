"""Isolation levels for tests that repeat at each: `ns`, which differs from `ns+proc` in /proc alone, with `-m long`."""

import pytest

from rayapp.sandbox.local.provider import LEVELS

EACH_LEVEL = tuple(pytest.param(level, marks=pytest.mark.long) if level == "ns" else level for level in LEVELS)

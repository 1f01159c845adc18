"""A code problem's hidden tests as plain objects: what runs in a sandbox, and what its outcome must be. Pure.

Made by `formats.py` from a row of data, run by `scoring.py`. What a test expects stays outside: only programs, standard
input and arguments enter a sandbox, but for an `InsideTest`, which is counted as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Condition = Callable[[Sequence[object]], object]
"""From the results of a test's calls to a value that is true where the test is passed. May raise: then it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTest:
    """A program reads `stdin`; what it writes must be the expected output."""

    stdin: str
    is_expected: Callable[[str], bool]
    """Compares what the program wrote, as its data set's checker does."""
    max_output_bytes: int
    """Longer output can't be right: the program is stopped there."""
    expected: str = ""
    """The expected output, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """The function is called; the condition must hold for the results."""

    calls: tuple[tuple[object, ...], ...]
    """Arguments of each call, plain data."""
    condition: Condition

    def is_passed(self, values: Sequence[object]) -> bool:
        try:
            return bool(self.condition(values))
        except Exception:  # boundary: a comparison that these values don't support, e.g. abs("x")
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideTest:
    """Assertions that can't be told apart from their calls: they run beside the candidate, which could forge them."""

    check: str
    """Python source of `def check(candidate)`, which raises where the candidate is wrong."""
    modules: tuple[str, ...]
    """Modules that it uses."""


Test = StdinTest | CallTest | InsideTest


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    """The tests of one problem."""

    tests: tuple[Test, ...]
    function: str = ""
    """Name of the function to write, or of a method of `class Solution`; empty: a whole program."""
    preamble: str = ""
    """Python that stands above the candidate's code, and that it may rely on."""
    has_usual_imports: bool = False
    """It may rely on the imports of competitive programming, too (`assembling.py`)."""
    num_public: int = 0
    """So many of the first tests are known to whoever reads the problem."""

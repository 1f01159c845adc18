"""A trajectory that is a tree: what each of its tokens was read after. Pure; used by the learner, traces and the view.

    token_ids  p q r a b c d e   forks (start 5, after 2)      p q r a b
    index      0 1 2 3 4 5 6 7                                 p q r c d e

Runs of neighbours between forks go on from each other; a *branch* is a whole sequence from a first token to a last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayapp.core.types import Fork

Int64Array = NDArray[np.int64]


def path_to(index: int, forks: Sequence[Fork]) -> Int64Array:
    """Indices of the tokens that the token at `index` was read after, from the first on, and its own; none for -1."""
    starts = [0, *(fork.start for fork in forks)]
    parts = list[Int64Array]()
    while index >= 0:
        run = bisect_right(starts, index) - 1
        parts.append(np.arange(starts[run], index + 1))
        index = forks[run - 1].after if run else -1
    return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int64)


def branches(num_tokens: int, forks: Sequence[Fork]) -> list[Int64Array]:
    """The indices of each branch's tokens; every token is in at least one. No branch is the beginning of another.

    Example: 8 tokens and the fork of the module's text -> [0 1 2 3 4] and [0 1 2 5 6 7].
    """
    if not forks:
        return [np.arange(num_tokens)]
    lasts = [fork.start - 1 for fork in forks] + [num_tokens - 1]
    gone_on_from = {fork.after for fork in forks}
    return [path_to(last, forks) for last in lasts if last not in gone_on_from]


def before(index: int, forks: Sequence[Fork]) -> Int64Array:
    """Indices of what was read before the token at `index`."""
    return path_to(index, forks)[:-1]

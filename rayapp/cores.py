"""How many of this machine's cores a server or a learner computes on, where the config leaves it open."""

from __future__ import annotations

import os

from rayapp.config import Config


def share_of_cores(config: Config, num_processes: int) -> int:
    """Threads for each of so many processes of a kind.

    A synchronous run has either its servers or its learners at work: each kind gets all cores. Above staleness 0 both
    are, and with all cores for both they wait for each other in every operator.
    """
    cores = len(os.sched_getaffinity(0))
    if config.train.max_staleness > 0:
        cores //= 2
    return max(1, cores // num_processes)

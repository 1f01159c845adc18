"""`rayapp` with servers that have no engine, behind the same Ray calls: for runs whose subject is not vLLM.

Called as the command is; SCRIPTS in the environment holds what trajectories say, see `support.stand_ins`. Driver,
learners, rollout workers, sandboxes, storage and the way out are the real ones.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

from rayapp.cli.main import main
from rayapp.driver import evaluation, loop
from rayapp.driver.cluster import open_cluster

sys.path.append(str(Path(__file__).parents[1]))
from support.stand_ins import stand_ins

# The names that training and evaluations look up.
assert loop.open_cluster is evaluation.open_cluster is open_cluster
scripts = tuple(
    tuple(turn if isinstance(turn, str) else tuple(turn) for turn in script)
    for script in json.loads(os.environ.get("SCRIPTS", "[]"))
)
loop.open_cluster = evaluation.open_cluster = partial(
    open_cluster, stand_ins=stand_ins(completion_s=0.2, step_s=None, scripts=scripts)
)
main()

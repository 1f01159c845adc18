"""`rayapp train` with servers that have no engine, behind the same Ray calls: for runs whose subject is not vLLM.

Called as the command is. Driver, learners, rollout workers, sandboxes, storage and the way out are the real ones.
"""

import sys
from functools import partial

from rayapp.cli.main import main
from rayapp.driver import loop
from rayapp.driver.cluster import StandIns, open_cluster

assert loop.open_cluster is open_cluster  # the name that training looks up
loop.open_cluster = partial(open_cluster, stand_ins=StandIns(completion_s=0.2, step_s=None))
sys.argv.insert(1, "train")
main()

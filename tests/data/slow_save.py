"""A run in small, for test_jobs: three steps are done, and saving them takes longer than Ray waits by default."""

import asyncio
import sys
from pathlib import Path

from rayapp.config.config import Config
from rayapp.core.aio import run_until_done
from rayapp.driver.saving import CheckpointSaver, saving, saving_when_stopped
from rayapp.driver.store import TrajectoryStore
from rayapp.runs.folder import RunFolder

RAYS_OWN_GRACE_S = 3.0


class Learners:
    def holds(self, version):
        return True

    async def begin_checkpoint(self, folder, version):
        await asyncio.sleep(2 * RAYS_OWN_GRACE_S)
        folder.mkdir()
        (folder / "weights").write_text(str(version))

    async def checkpoint_done(self):
        return True


async def train(folder):
    store = TrajectoryStore(groups_per_step=2, max_staleness=0, version=3, num_groups=10)
    saver = CheckpointSaver(Learners(), folder)

    async def begin(version):
        await saver.begin(version, next_group_id=store.next_untrained_id)

    async with saving(saver), saving_when_stopped(saver, folder, store, begin):
        print("training", flush=True)
        await asyncio.Event().wait()


config = Config.model_validate({"run": {"name": "slow", "output_dir": Path(sys.argv[1])}})
with RunFolder.open(config) as opened:
    run_until_done(train(opened))

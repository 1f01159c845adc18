"""Extension of vLLM's workers: loads new weights from shared memory, and ends the engine when the server ends.

The engine's processes refuse pickled calls, so a call has only a file's name and plain data as arguments.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from rayapp.engine.vllm_arguments import is_adapter, load_adapter
from rayapp.engine.weights.buckets import Checksums, TensorEntry, unpack
from rayapp.engine.weights.reload_workarounds import (
    expect_unsent_towers,
    is_tied,
    mend_after_reload,
    mend_reload,
)


class WeightUpdateExtension:
    """Mixin of vLLM's worker, which provides the declared attributes."""

    model_runner: Any
    reload_weights: Any
    parallel_config: Any
    weight_transfer_engine: Any

    def load_shared_weights(self, path: str, entries: list[TensorEntry], checksums: dict[str, int]) -> int:
        """Load a whole model, or an adapter, from a file in shared memory such as /proc/<server>/fd/<memfd>. Return the
        number of tensors. ValueError: other tensors arrived than were sent, by the learner's `checksums` of a
        sample."""
        import torch

        size = Path(path).stat().st_size
        data = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        if is_adapter(entries):
            arrivals = Checksums()
            load_adapter(self.model_runner, arrivals.passed(unpack(entries, data)))
            return arrivals.check(checksums)
        # Use the layer-wise reload, not load_weights: on CPU vLLM repacks parameters after the first load, and repacked
        # parameters have no weight_loader for a second load.
        self._prepare()
        self.reload_weights(weights_iterator=unpack(entries, data))
        return self.seal_weights(checksums)

    def seal_weights(self, checksums: dict[str, int]) -> int:
        """Pack and tie the weights that vLLM's reload skips, and compare what arrived with the learner's checksums.
        Return the number of loaded tensors. ValueError: a tensor differs, or did not arrive."""
        model = self.model_runner.get_model()
        mend_after_reload(model, is_tied=is_tied(self.model_runner.model_config))
        arrivals: Checksums = model.arrivals
        model.arrivals = Checksums()
        return arrivals.check(checksums)

    def leave_weight_group(self) -> None:
        """Destroy the weight group before joining another: vLLM would leak its GPU memory."""
        self._prepare()
        group = getattr(self.weight_transfer_engine, "model_update_group", None)
        if group is not None:
            group.destroy()
            self.weight_transfer_engine.model_update_group = None

    def _prepare(self) -> None:
        """Make `load_weights` fit for reloads, and record what it is given."""
        model = self.model_runner.get_model()
        if hasattr(model, "arrivals"):
            return
        mend_reload(model)
        if self.model_runner.model_config.is_multimodal_model:
            expect_unsent_towers()
        model.arrivals, load_weights = Checksums(), model.load_weights
        model.load_weights = lambda weights: load_weights(model.arrivals.passed(weights))

    def seed_sampling(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def answer(self) -> bool:
        return True

    def die_with(self, server_pid: int) -> None:
        """End this engine when the server's process ends, even by SIGKILL."""
        server = os.pidfd_open(server_pid)
        # With tensor parallelism the engine core started this worker; otherwise this process is the engine core. Don't
        # use getppid: an orphan's parent is the process that adopted it, such as a user's systemd.
        maker = getattr(parent_process(), "pid", server_pid)
        engine_core = None if maker == server_pid else os.pidfd_open(maker)
        threading.Thread(target=_end_engine_after, args=(server, engine_core), daemon=True).start()


def _end_engine_after(server: int, engine_core: int | None) -> None:
    select.select([server], [], [])
    if engine_core is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine_core, signal.SIGKILL)
    os._exit(1)

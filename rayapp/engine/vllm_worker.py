"""Extension of vLLM's workers: loads new weights from shared memory, and ends the engine when the server ends.

vLLM mixes the class `WeightUpdateExtension` into its own worker by import path (`worker_extension_cls`), in the
engine's processes. These are not Ray workers and refuse pickled calls, so a call has only a file's name and plain data
as arguments.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from rayapp.engine.vllm_arguments import is_adapter, load_adapter
from rayapp.engine.weights import vllm_gloo
from rayapp.engine.weights.buckets import TensorEntry, checksum_of, part_of, unpack
from rayapp.engine.weights.held import check_rounded, held_experts, held_parts, keep_sent_parts, pack_experts
from rayapp.engine.weights.reload_workarounds import mend_after_reload, mend_reload

# Register here, because every worker imports this module before it makes its weight-transfer engine.
vllm_gloo.register()


class WeightUpdateExtension:
    """Mixin of vLLM's worker; the worker provides the attributes that the mixin declares."""

    model_runner: Any
    reload_weights: Any
    parallel_config: Any
    weight_transfer_engine: Any

    def load_shared_weights(self, path: str, entries: list[TensorEntry], checksums: dict[str, int]) -> int:
        """Load a whole model, or an adapter, from a file in shared memory.

        Args:
            path: file of raw tensors in memory, such as /proc/<server>/fd/<memfd>.
            entries: name, dtype, shape and position of each tensor in the file.
            checksums: the learner's checksums of a sample of the tensors.
        Returns:
            Number of tensors that were verified to equal the sent tensors.
        Raises:
            ValueError: the received tensors, or the model's tensors, differ from the tensors that were sent.
        """
        import torch

        size = Path(path).stat().st_size
        data = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        arrived = ((name, part_of(name, t)) for name, t in unpack(entries, data) if name in checksums)
        _check("received by", arrived, checksums)
        if is_adapter(entries):
            return load_adapter(self.model_runner, unpack(entries, data))
        # Use the layer-wise reload, not load_weights: on CPU vLLM repacks parameters after the first load, and repacked
        # parameters have no weight_loader for a second load.
        self._mend()
        self.reload_weights(weights_iterator=unpack(entries, data))
        return self.seal_weights(checksums)

    def seal_weights(self, checksums: dict[str, int]) -> int:
        """Complete a load of new weights: pack and tie the weights that vLLM's reload skips, and compare with the
        learner's checksums.

        Returns:
            Number of tensors that were compared.
        Raises:
            ValueError: a tensor differs, or experts don't compute with the weights that they hold.
        """
        model, architecture = self.model_runner.get_model(), self.model_runner.model_config.hf_text_config
        mend_after_reload(model, architecture)
        tied = architecture.tie_word_embeddings
        held = _check(
            "held by", chain(held_experts(model, checksums), held_parts(model, checksums, tied=tied)), checksums
        )
        held |= check_rounded(model, checksums)
        # Do this last: a rank that raises before one of the gathers above would leave the others waiting.
        pack_experts(model)
        return len(held)

    def leave_weight_group(self) -> None:
        """Destroy the weight group, if there is one, before joining another: vLLM would leak the group's GPU memory."""
        self._mend()
        group = getattr(self.weight_transfer_engine, "model_update_group", None)
        if group is not None:
            group.destroy()
            self.weight_transfer_engine.model_update_group = None

    def _mend(self) -> None:
        """Prepare the model for loads of new weights. Idempotent."""
        mend_reload(self.model_runner.get_model())
        keep_sent_parts(self.model_runner.get_model())

    def seed_sampling(self, seed: int) -> None:
        """Seed the generator that all requests share, for runners that have one."""
        import torch

        torch.manual_seed(seed)

    def answer(self) -> bool:
        """Return True, to show that this worker answers calls."""
        return True

    def die_with(self, server_pid: int) -> None:
        """End this engine when the server's process ends, even by SIGKILL."""
        server = os.pidfd_open(server_pid)
        # With tensor parallelism the engine core started this worker; otherwise this process is the engine core. Don't
        # use getppid: an orphan's parent is the process that adopted it, such as a user's systemd.
        maker = getattr(parent_process(), "pid", server_pid)
        engine_core = None if maker == server_pid else os.pidfd_open(maker)
        threading.Thread(target=_end_engine_after, args=(server, engine_core), daemon=True).start()


def _check(what: str, parts: Iterable[tuple[str, Any]], checksums: dict[str, int]) -> set[str]:
    """Compare each tensor's checksum with the learner's checksum. Return the tensors' names."""
    found = [(name, checksum_of(part)) for name, part in parts]
    wrong = [name for name, value in found if value != checksums[name]]
    if wrong:
        raise ValueError(
            f"the weights {what} this server are not the learner's weights: {len(wrong)} of {len(found)} compared "
            f"tensors have other checksums: {', '.join(wrong[:3])}"
        )
    return {name for name, _ in found}


def _end_engine_after(server: int, engine_core: int | None) -> None:
    select.select([server], [], [])
    if engine_core is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine_core, signal.SIGKILL)
    os._exit(1)

"""Our extension of vLLM's workers: taking new weights out of shared memory, and not outliving the server.

vLLM mixes this class into its own worker by import path (`worker_extension_cls`), in the engine's processes. Those are
no Ray workers and refuse pickled calls, so a call carries only a file's name and plain data.
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

from rayapp.engine.vllm_adapter import is_adapter, load_adapter
from rayapp.engine.weights import vllm_gloo
from rayapp.engine.weights.buckets import TensorEntry, unpack
from rayapp.engine.weights.checksum import checksum_of, part_of
from rayapp.engine.weights.experts import held_experts, pack_experts
from rayapp.engine.weights.gpt_oss import copy_sinks, mend_reload
from rayapp.engine.weights.held import held_parts
from rayapp.engine.weights.mamba import copy_convolutions

# This module is imported in every worker before it makes its weight-transfer engine.
vllm_gloo.register()


class WeightUpdateExtension:
    """Mixed into vLLM's worker, which brings what is declared here."""

    model_runner: Any
    reload_weights: Any
    parallel_config: Any
    weight_transfer_engine: Any

    def load_shared_weights(self, path: str, entries: list[TensorEntry], checksums: dict[str, int]) -> int:
        """Load a whole model, or an adapter, from a file in shared memory. Returns the number of tensors found to be
        held as sent.

        Args:
            path: file of raw tensors in memory, such as /proc/<server>/fd/<memfd>.
            entries: what is where in it.
            checksums: of a sample of its tensors, made by the learner.
        Raises:
            ValueError: what arrived, or what the model holds now, is not what was sent.
        """
        import torch

        size = Path(path).stat().st_size
        data = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        arrived = ((name, part_of(name, t)) for name, t in unpack(entries, data) if name in checksums)
        _check("arrive", arrived, checksums)
        if is_adapter(entries):
            return load_adapter(self.model_runner, unpack(entries, data))
        # Layer-wise reload and not load_weights: on CPU vLLM repacks parameters after the first load, and a second
        # plain load finds no weight_loader on them.
        mend_reload(self.model_runner.get_model())
        self.reload_weights(weights_iterator=unpack(entries, data))
        return self.seal_weights(checksums)

    def seal_weights(self, checksums: dict[str, int]) -> int:
        """After new weights are in the model: pack and tie again what vLLM does not, and compare what the model
        computes with to checksums of the learner's. Returns how many tensors those are.

        Raises:
            ValueError: one differs, or experts compute something else than they hold.
        """
        model, architecture = self.model_runner.get_model(), self.model_runner.model_config.hf_text_config
        copy_sinks(model)
        copy_convolutions(model)
        _tie_again(model, architecture)
        tied = architecture.tie_word_embeddings
        held = _check(
            "are held", chain(held_experts(model, checksums), held_parts(model, checksums, tied=tied)), checksums
        )
        # Last: a rank that raised before one of the gathers above would leave the others waiting.
        pack_experts(model)
        return len(held)

    def leave_weight_group(self) -> None:
        """Before another is joined. Destroys it, if there is one: vLLM would forget it with its GPU memory."""
        mend_reload(self.model_runner.get_model())
        group = getattr(self.weight_transfer_engine, "model_update_group", None)
        if group is not None:
            group.destroy()
            self.weight_transfer_engine.model_update_group = None

    def seed_sampling(self, seed: int) -> None:
        """Seed the generator that all requests sample from, where the runner has one for all."""
        import torch

        torch.manual_seed(seed)

    def answer(self) -> bool:
        """Return True: whoever gets it knows that this worker takes calls."""
        return True

    def die_with(self, server_pid: int) -> None:
        """End this engine when the server's process ends, SIGKILL included: nobody else would."""
        server = os.pidfd_open(server_pid)
        # With tensor parallelism this worker was made by the engine core; else it is the engine core. Its parent is not
        # asked: of an orphan that is whoever adopted it, such as a user's systemd.
        maker = getattr(parent_process(), "pid", server_pid)
        engine_core = None if maker == server_pid else os.pidfd_open(maker)
        threading.Thread(target=_end_engine_after, args=(server, engine_core), daemon=True).start()


def _check(what: str, parts: Iterable[tuple[str, Any]], checksums: dict[str, int]) -> set[str]:
    """The names of what was compared, one after the other."""
    found = [(name, checksum_of(part)) for name, part in parts]
    wrong = [name for name, value in found if value != checksums[name]]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of {len(found)} sampled tensors have another checksum where they {what} than where the "
            f"learner sent them: {', '.join(wrong[:3])}"
        )
    return {name for name, _ in found}


def _tie_again(model: Any, architecture: Any) -> None:
    """Give a tied output layer the new embedding.

    vLLM 0.30 reloads layer by layer and passes over an output layer that has no weights of its own in the checkpoint.
    On CPU that layer holds a repacked copy of the embedding: without this it would go on sampling with the old one.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    if not architecture.tie_word_embeddings:
        return
    layers = list(model.modules())
    embedding = next(layer for layer in layers if type(layer) is VocabParallelEmbedding)
    for head in (layer for layer in layers if isinstance(layer, ParallelLMHead)):
        head.tie_weights(embedding)
        head.quant_method.process_weights_after_loading(head)


def _end_engine_after(server: int, engine_core: int | None) -> None:
    select.select([server], [], [])
    if engine_core is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine_core, signal.SIGKILL)
    os._exit(1)

"""The learners' side of vLLM's weight-transfer API: weights go from their memory to the engines', not through Ray.

Used by the learner actor on every rank (gathering is collective); rank 0 sends. NCCL (split) and CUDA IPC (colocated)
are vLLM's own backends and need GPUs: **neither has been run on one yet**. `vllm_gloo` is the same on CPU, and is
what the tests run. Written for vLLM 0.24 to 0.31; the classes' names moved between them, see docs/decisions.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rayapp.config.learner import LoraSection
from rayapp.core.errors import ConfigError, WeightSyncError
from rayapp.engine.weights.checksum import checksum_of, is_sampled
from rayapp.engine.weights.transfer_plan import TransferPlan
from rayapp.learner.policy import PolicyModel
from rayapp.learner.state.export import device_weights, weight_shapes

WIRE_DTYPE = torch.bfloat16


class LearnerSource:
    """A learner's weights as vLLM's `WeightSource`: one pass per sync; it counts what it gave."""

    def __init__(self, model: PolicyModel, lora: LoraSection) -> None:
        self._model = model
        self._lora = lora
        self.checksums: dict[str, int] = {}
        self.num_bytes = 0

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, WIRE_DTYPE, shape) for name, shape in weight_shapes(self._model)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.checksums, self.num_bytes = {}, 0
        for name, tensor in device_weights(self._model, self._lora):
            nbytes = tensor.numel() * tensor.element_size()
            self.num_bytes += nbytes
            if is_sampled(name, nbytes):
                self.checksums[name] = checksum_of(tensor)
            yield name, tensor


class WeightSender:
    """One learner rank's end of the group. Made once; `send` for every sync.

    Args:
        client: calls every server; only rank 0's is used.
        address: rank 0's address, where the servers' workers find it.
    Raises:
        ConfigError: the transport needs a GPU and there is none.
        WeightSyncError: somebody did not join.
    """

    def __init__(
        self,
        plan: TransferPlan,
        source: LearnerSource,
        *,
        rank: int,
        client: Any,
        address: tuple[str, int],
        timeout_s: float,
    ) -> None:
        if plan.transport in ("nccl", "ipc") and not torch.cuda.is_available():
            raise ConfigError(
                f"weights can't be sent by {plan.transport}: this learner has no CUDA device. Use "
                "server.weight_transport object_store or gloo."
            )
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from rayapp.engine.weights import vllm_gloo

        vllm_gloo.register()
        self.source = source
        self._timeout_s = timeout_s
        info = _init_info(plan, rank=rank, address=address, timeout_s=timeout_s)
        try:
            self._engine: Any = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise WeightSyncError(
                f"learner {rank} and the servers did not form a {plan.transport} group within "
                f"server.sync_timeout_s = {timeout_s:g} s: {error}"
            ) from error

    def send(self) -> None:
        """Give every server the weights as they are now. Collective.

        Raises:
            WeightSyncError: they did not all get there; the group is of no use any more.
        """
        try:
            with self._aborted_after_deadline():
                self._engine.send_weights()
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise WeightSyncError(f"the weights did not reach every server: {error}") from error

    @contextmanager
    def _aborted_after_deadline(self) -> Iterator[None]:
        """Abort the group when the deadline passes: NCCL waits without end for a peer that is gone."""
        group = getattr(self._engine, "model_update_group", None)
        if group is None:
            yield
            return
        timer = threading.Timer(self._timeout_s, group.destroy)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._engine.shutdown()


def _init_info(plan: TransferPlan, *, rank: int, address: tuple[str, int], timeout_s: float) -> Any:
    from rayapp.engine.weights.vllm_gloo import GlooTrainerInitInfo

    if plan.transport == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=plan.bucket_bytes)
    common: dict[str, Any] = {
        "rank": rank,
        "master_address": address[0],
        "master_port": address[1],
        "world_size": plan.world_size,
    }
    if plan.transport == "gloo":
        return GlooTrainerInitInfo(**common, bucket_bytes=plan.bucket_bytes, timeout_s=timeout_s)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(**common, packed=True, packed_buffer_size_bytes=plan.bucket_bytes)

"""The learners' side of vLLM's weight-transfer API, which sends weights directly to the engines, not through Ray.

Every rank uses it, because gathering is collective; rank 0 sends. NCCL (split) and CUDA IPC (colocated) are vLLM's own
backends and need GPUs: IPC has run on an H100, **NCCL not yet**. Tests run it over gloo. It needs vLLM 0.30 or 0.31.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from rayapp.config.learner import LoraSection
from rayapp.core.errors import WeightSyncError
from rayapp.core.own_thread import in_thread
from rayapp.engine.weights.buckets import Checksums
from rayapp.engine.weights.sync import TransferRanks
from rayapp.learner.policy import PolicyModel
from rayapp.learner.state.export import Formats, device_weights, weight_shapes

log = logging.getLogger(__name__)


class LearnerSource:
    """Weights of a learner, as vLLM's `WeightSource`, with their checksums."""

    formats: Formats  # to which the next sync rounds; the last is the servers'

    def __init__(self, model: PolicyModel, lora: LoraSection, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._lora = lora
        self._device = device
        self.formats = (dtype,)
        self.sums = Checksums()  # of the last sync

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, self.formats[-1], shape) for name, shape in weight_shapes(self._model)]

    def largest_bytes(self) -> int:
        """Return the least size of a bucket: vLLM does not split tensors."""
        return max(shape.numel() for _, shape in weight_shapes(self._model)) * self.formats[-1].itemsize

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.sums = Checksums()
        weights = device_weights(self._model, self._lora, self._device, self.formats)
        is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        yield from self.sums.passed(gathered_in_order(weights, self._device, is_alone=is_alone))


def gathered_in_order(
    tensors: Iterator[tuple[str, torch.Tensor]], device: torch.device, *, is_alone: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors, each only after it is gathered; on a GPU the call returns before that.

    vLLM iterates in streams of its own, with a broadcast to the servers behind each bucket. There the gathers of rank 0
    would wait behind that broadcast, but the others' would not: NCCL deadlocks when ranks use two communicators in
    different orders. So all ranks gather in the default stream, and wait for it. A rank alone lets the GPU wait.
    """
    if device.type != "cuda":
        yield from tensors
        return
    stream = torch.cuda.default_stream(device)
    while True:
        callers = torch.cuda.current_stream(device)  # another one at every bucket
        with torch.cuda.stream(stream):
            item = next(tensors, None)
        if is_alone:
            callers.wait_stream(stream)
        else:
            stream.synchronize()
        if item is None:
            return
        # The caller copies the tensor in another stream. The allocator must not reuse its memory before that copy.
        item[1].record_stream(callers)
        yield item


class _Exchange:
    """Calls and broadcasts of rank 0 to the servers.

    After the first failure all methods do nothing, and vLLM's sequence runs to its end: all ranks stay usable.
    """

    def __init__(self, client: Any, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._failed: Future[Exception] = Future()
        self._failing = threading.Lock()
        self.group: Any = None  # NCCL communicator of vLLM; None for CUDA IPC

    @property
    def failure(self) -> Exception | None:
        return self._failed.result() if self._failed.done() else None

    def fail(self, error: Exception) -> None:
        """Abort all waits for servers. Only the first failure is reported."""
        with self._failing:
            if self._failed.done():
                return
            log.warning("the weights can't be sent to every server: %s", error)
            self._failed.set_result(error)
        self.close()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._call(self._client.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        self._call(partial(self._client.update_weights, update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(self._client.finish_weight_update)

    def _call(self, call: Callable[[], None]) -> None:
        if self._failed.done():
            return
        answer = in_thread(call, name="weight-sync")
        either: tuple[Future[Any], ...] = (answer, self._failed)
        wait(either, timeout=self._timeout_s, return_when=FIRST_COMPLETED)
        if answer.done():
            if isinstance(error := answer.exception(), Exception):
                self.fail(error)
        else:
            self.fail(TimeoutError(f"no answer within {self._timeout_s:g} s (a fifth of server.start_timeout_s)"))

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Broadcast with the signature of vLLM's communicator."""
        if self._failed.done():
            return
        try:
            self.group.broadcast(tensor, src=src)
        except Exception as error:  # NCCL may raise anything
            self.fail(error)

    def close(self) -> None:
        """Destroy the group, which vLLM would only drop. Idempotent."""
        if self.group is not None:
            self.group.destroy()


class WeightSender:
    """One learner rank's membership in the transfer group, for many syncs. `client` calls every server (rank 0's is
    used); the workers connect to `address`, rank 0's. WeightSyncError: a server or learner did not join."""

    def __init__(
        self,
        plan: TransferRanks,
        source: LearnerSource,
        *,
        rank: int,
        client: Any,
        address: tuple[str, int],
        timeout_s: float,
    ) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        self.source = source
        self._exchange = _Exchange(client, timeout_s)
        self._shares_memory = plan.transport == "ipc"
        info = _init_info(plan, source, rank=rank, address=address)
        try:
            with _same_stream():
                self._engine: Any = WeightTransferTrainerFactory.trainer_init(
                    info, client=self._exchange, source=source
                )
        except Exception as error:  # vLLM may raise anything
            raise WeightSyncError(
                f"learner {rank} and the servers did not form a {plan.transport} group within "
                f"{timeout_s:g} s (a fifth of server.start_timeout_s): {_first_line(error)}"
            ) from error
        if getattr(self._engine, "model_update_group", None) is not None:
            self._exchange.group, self._engine.model_update_group = self._engine.model_update_group, self._exchange

    def send(self) -> None:
        """Send the weights to every server. Collective. WeightSyncError: a server did not get all; the group is
        unusable."""
        with _same_stream(), _plain_segments() if self._shares_memory else nullcontext():
            self._engine.send_weights()
        if (failure := self._exchange.failure) is not None:
            raise WeightSyncError(f"the weights did not reach every server: {_first_line(failure)}") from failure

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._exchange.close()
        self._engine.shutdown()


def _same_stream() -> AbstractContextManager[object]:
    """Restore the stream, which vLLM's `current_stream` changes."""
    return torch.cuda.stream(torch.cuda.current_stream()) if torch.cuda.is_available() else nullcontext()


@contextmanager
def _plain_segments() -> Iterator[None]:
    # Segments that another process can open: expandable ones need `pidfd_getfd`, which a user in a container may not
    # call (pytorch issue 165685).
    set_allocator: Any = torch._C._accelerator_setAllocatorSettings  # noqa: SLF001 - torch has no public name for it
    set_allocator("expandable_segments:False")
    try:
        yield
    finally:
        set_allocator("expandable_segments:True")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _init_info(plan: TransferRanks, source: LearnerSource, *, rank: int, address: tuple[str, int]) -> Any:
    bucket_bytes = max(plan.bucket_bytes, source.largest_bytes())
    if plan.transport == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=bucket_bytes)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        rank=rank,
        master_address=address[0],
        master_port=address[1],
        world_size=plan.world_size,
        packed=True,
        packed_buffer_size_bytes=bucket_bytes,
    )

"""The learners' side of vLLM's weight-transfer API: weights go from their memory to the engines', not through Ray.

Used by the learner actor on every rank (gathering is collective); rank 0 sends. NCCL (split) and CUDA IPC (colocated)
are vLLM's own backends and need GPUs: **neither has been run on one yet**. `vllm_gloo` is the same on CPU, and is
what the tests run. Written for vLLM 0.30 and 0.31; older ones lack some of the classes.
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
from rayapp.core.errors import ConfigError, WeightSyncError
from rayapp.engine.weights.background import in_background
from rayapp.engine.weights.checksum import Sampler, checksum_of, part_of
from rayapp.engine.weights.transfer_plan import TransferPlan
from rayapp.learner.policy import PolicyModel
from rayapp.learner.state.export import device_weights, weight_shapes

log = logging.getLogger(__name__)
WIRE_DTYPE = torch.bfloat16


class LearnerSource:
    """A learner's weights as vLLM's `WeightSource`: one pass per sync; it counts what it gave.

    Args:
        device: where the learner computes, and where the weights are given, also those that live in host memory.
    """

    def __init__(self, model: PolicyModel, lora: LoraSection, device: torch.device) -> None:
        self._model = model
        self._lora = lora
        self._device = device
        self.checksums: dict[str, int] = {}
        self.num_bytes = 0

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, WIRE_DTYPE, shape) for name, shape in weight_shapes(self._model)]

    def largest_bytes(self) -> int:
        """Of its largest tensor, mostly the embedding. No bucket may be smaller: vLLM cuts no tensor in two."""
        return max(shape.numel() for _, shape in weight_shapes(self._model)) * WIRE_DTYPE.itemsize

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.checksums, self.num_bytes, sampler = {}, 0, Sampler()
        for name, tensor in gathered_in_order(device_weights(self._model, self._lora, self._device), self._device):
            self.num_bytes += tensor.numel() * tensor.element_size()
            if sampler.takes(name):
                self.checksums[name] = checksum_of(part_of(name, tensor))
            yield name, tensor


def gathered_in_order(
    tensors: Iterator[tuple[str, torch.Tensor]], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, each whole before it is given: on a GPU gathering is only queued when the call returns.

    vLLM asks for them within streams of its own, and queues a broadcast to the servers behind each bucket. Gathered
    there, the gathers of rank 0 would wait behind that broadcast while those of the other ranks don't: two
    communicators in another order on one rank than on the others is how NCCL deadlocks. So all ranks gather in the
    default stream, and wait for it.
    """
    if device.type != "cuda":
        yield from tensors
        return
    stream = torch.cuda.default_stream(device)
    while True:
        with torch.cuda.stream(stream):
            item = next(tensors, None)
            stream.synchronize()
        if item is None:
            return
        # Whoever asks copies it in a stream of its own: the allocator may not hand the memory out again before that.
        item[1].record_stream(torch.cuda.current_stream(device))
        yield item


class _Exchange:
    """What rank 0 does towards the servers during a send: vLLM's calls, and its broadcasts.

    After the first failure everything does nothing, and vLLM's own sequence runs to its end: the other ranks gather in
    step with rank 0 whatever becomes of the servers, and are of use afterwards.

    Args:
        client: calls every server.
        timeout_s: of each call.
    """

    def __init__(self, client: Any, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._failed: Future[Exception] = Future()
        self._failing = threading.Lock()
        self.group: Any = None
        """vLLM's communicator, or ours over gloo; None for CUDA IPC."""

    @property
    def failure(self) -> Exception | None:
        return self._failed.result() if self._failed.done() else None

    def fail(self, error: Exception) -> None:
        """End everything that waits for a server. The first failure is the one that is told."""
        with self._failing:
            if self._failed.done():
                return
            log.warning("weights don't get through to every server: %s", error)
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
        answer = in_background(call)
        either: tuple[Future[Any], ...] = (answer, self._failed)
        wait(either, timeout=self._timeout_s, return_when=FIRST_COMPLETED)
        if answer.done():
            if isinstance(error := answer.exception(), Exception):
                self.fail(error)
        else:
            self.fail(TimeoutError(f"no answer within server.sync_timeout_s = {self._timeout_s:g} s"))

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """As vLLM's communicator does it."""
        if self._failed.done():
            return
        try:
            self.group.broadcast(tensor, src=src)
        except Exception as error:  # boundary: NCCL or gloo
            self.fail(error)

    def close(self) -> None:
        """Destroy the group, which vLLM would only forget: a communicator keeps its memory. Idempotent."""
        if self.group is not None:
            self.group.destroy()


class WeightSender:
    """One learner rank's end of the group. Made once; `send` for every sync.

    Args:
        client: calls every server; only rank 0's is used.
        address: rank 0's address, where the servers' workers find it.
        timeout_s: of each of the servers' answers.
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
        self._exchange = _Exchange(client, timeout_s)
        self._shares_memory = plan.transport == "ipc"
        info = _init_info(plan, source, rank=rank, address=address, timeout_s=timeout_s)
        try:
            with _same_stream():
                self._engine: Any = WeightTransferTrainerFactory.trainer_init(
                    info, client=self._exchange, source=source
                )
        except Exception as error:  # boundary: vLLM and what it calls
            raise WeightSyncError(
                f"learner {rank} and the servers did not form a {plan.transport} group within "
                f"server.sync_timeout_s = {timeout_s:g} s: {_first_line(error)}"
            ) from error
        if getattr(self._engine, "model_update_group", None) is not None:
            self._exchange.group, self._engine.model_update_group = self._engine.model_update_group, self._exchange

    def send(self) -> None:
        """Give every server the weights as they are now. Collective; all ranks stay in step, whatever the servers do.

        Raises:
            WeightSyncError: they did not all get there; the group is of no use any more.
        """
        with _same_stream(), _plain_segments() if self._shares_memory else nullcontext():
            self._engine.send_weights()
        if (failure := self._exchange.failure) is not None:
            raise WeightSyncError(f"the weights did not reach every server: {_first_line(failure)}") from failure

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._exchange.close()
        self._engine.shutdown()


def _same_stream() -> AbstractContextManager[object]:
    """Within, vLLM may change this thread's CUDA stream, as its `current_stream` does; behind it is what it was."""
    return torch.cuda.stream(torch.cuda.current_stream()) if torch.cuda.is_available() else nullcontext()


@contextmanager
def _plain_segments() -> Iterator[None]:
    """Within, memory is allocated in segments that another process can open.

    Expandable ones (`actors/environments/learner.yaml`) are opened through `pidfd_getfd`, which an ordinary user in a
    container may not call: pytorch issue 165685.
    """
    set_allocator: Any = torch._C._accelerator_setAllocatorSettings  # noqa: SLF001 - torch has no public name for it
    set_allocator("expandable_segments:False")
    try:
        yield
    finally:
        set_allocator("expandable_segments:True")


def _first_line(error: BaseException) -> str:
    """The error's first line, without the C++ stack that torch adds."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _init_info(
    plan: TransferPlan, source: LearnerSource, *, rank: int, address: tuple[str, int], timeout_s: float
) -> Any:
    from rayapp.engine.weights.vllm_gloo import GlooTrainerInitInfo

    bucket_bytes = max(plan.bucket_bytes, source.largest_bytes())
    if plan.transport == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=bucket_bytes)
    common: dict[str, Any] = {
        "rank": rank,
        "master_address": address[0],
        "master_port": address[1],
        "world_size": plan.world_size,
    }
    if plan.transport == "gloo":
        return GlooTrainerInitInfo(**common, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(**common, packed=True, packed_buffer_size_bytes=bucket_bytes)

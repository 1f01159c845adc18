"""vLLM's NCCL backend with gloo in place of NCCL: handshake, ranks and lifecycle are vLLM's, and no GPU is needed.

`support.gloo_for_nccl` puts it in NCCL's place. There is one group of learner 0 and all workers, made once and kept
between syncs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

from rayapp.core.machine import use_interface_towards
from rayapp.core.own_thread import in_thread

SENDER = 0
POLL_S = 0.02
JOIN_S = 120.0
"""Deadline of joining and of each broadcast."""


class GlooGroup:
    """Group of learner 0 and all workers. It has the two methods of vLLM's NCCL communicator that a sync uses.

    Args:
        is_hopeless: called while rank 0 waits for the other ranks; raises an error if one of them will never join.
    Raises:
        RuntimeError: a rank did not join in time, or the port is taken.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        is_hopeless: Callable[[], None] = lambda: None,
    ) -> None:
        use_interface_towards(address)
        timeout = timedelta(seconds=timeout_s)
        is_master = rank == SENDER
        store = TCPStore(address, port, world_size, is_master=is_master, timeout=timeout, wait_for_workers=False)
        # First wait until every rank has reported: forming the group's connections waits for all ranks and can't be
        # interrupted.
        store.set(f"here/{rank}", "")
        if is_master:
            _wait_for(store, [f"here/{other}" for other in range(world_size)], timeout_s, is_hopeless)
        self._group: Any = ProcessGroupGloo(PrefixStore("rayapp-weights", store), rank, world_size, timeout)
        self._destroyed: Future[None] = Future()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send the tensor on rank `src`, receive it on the other ranks; return when this is done.

        Raises:
            RuntimeError: a peer is gone, or the deadline passed, or `destroy` was called.
        """
        if self._destroyed.done():
            raise RuntimeError("the gloo group of the weight sync is destroyed")
        # Broadcast in a thread, because gloo's own abort does not interrupt a waiting broadcast. The thread keeps a
        # reference to the group: freeing the group would also wait.
        group = self._group
        sent = in_thread(lambda: group.broadcast(tensor, src).wait(), name="weight-sync")
        wait((sent, self._destroyed), return_when=FIRST_COMPLETED)
        if not sent.done():
            raise RuntimeError("the gloo group of the weight sync was destroyed during a broadcast")
        sent.result()

    def destroy(self) -> None:
        """Interrupt a waiting `broadcast`. Idempotent."""
        if not self._destroyed.done():
            self._destroyed.set_result(None)
            self._group = None


def _wait_for(store: TCPStore, keys: list[str], timeout_s: float, is_hopeless: Callable[[], None]) -> None:
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        is_hopeless()
        if time.monotonic() > deadline:
            missing = sum(not store.check([key]) for key in keys)
            raise RuntimeError(
                f"{missing} of {len(keys)} members did not join the gloo group of the weight sync within {timeout_s:g} "
                "s"
            )
        time.sleep(POLL_S)


def chunks(sizes: Sequence[int], bucket_bytes: int) -> Iterator[range]:
    """Yield the positions of tensors that are sent together: at most bucket_bytes in total, or a single larger
    tensor.
    """
    start, filled = 0, 0
    for position, size in enumerate(sizes):
        if position > start and filled + size > bucket_bytes:
            yield range(start, position)
            start, filled = position, 0
        filled += size
    if start < len(sizes):
        yield range(start, len(sizes))


class GlooWeightTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """The engine worker's side of the transfer: receives buckets and loads them layer by layer."""

    def init_transfer_engine(self, init_info: Any) -> None:
        parallel = self.parallel_config
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.model_update_group: Any = GlooGroup(
            init_info.master_address,
            init_info.master_port,
            rank=rank,
            world_size=init_info.world_size,
            timeout_s=JOIN_S,
        )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class would synchronize an accelerator, which this machine lacks.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [_nbytes(shape, dtype) for shape, dtype in zip(update_info.shapes, dtypes, strict=True)]
        for positions in chunks(sizes, self.packed_buffer_size_bytes):
            buffer = torch.empty(sum(sizes[p] for p in positions), dtype=torch.uint8)
            self.model_update_group.broadcast(buffer, SENDER)
            parts: Any = buffer.split([sizes[p] for p in positions])  # type: ignore[no-untyped-call]
            self.model.load_weights(
                (update_info.names[p], part.view(dtypes[p]).view(update_info.shapes[p]))
                for p, part in zip(positions, parts, strict=True)
            )


class GlooTrainerWeightTransferEngine(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
    """The learner's side of the transfer: vLLM's own sequence of calls, with gloo in place of NCCL."""

    _bucket_bytes = 0

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> GlooTrainerWeightTransferEngine:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._bucket_bytes = init_info.packed_buffer_size_bytes
        if not engine.is_sender:
            return engine
        size = init_info.packed_buffer_size_bytes
        wanted = {"master_address": init_info.master_address, "master_port": init_info.master_port, "rank_offset": 1}
        wanted |= {"world_size": init_info.world_size, "packed_buffer_size_bytes": size}
        with ThreadPoolExecutor(max_workers=1) as joining:
            # Joining blocks each side until the other side joins. So another thread makes the workers join, while this
            # thread joins for learner 0.
            workers = joining.submit(client.init_weight_transfer_engine, wanted)
            engine.model_update_group = GlooGroup(
                init_info.master_address,
                init_info.master_port,
                rank=SENDER,
                world_size=init_info.world_size,
                timeout_s=JOIN_S,
                is_hopeless=lambda: _raise_if_failed(workers),
            )
            workers.result()
        return engine

    def _broadcast(self, source: Any, meta: Any) -> None:
        if not self.is_sender:
            for _ in source:
                pass
            return
        sizes = [_nbytes(m.shape, m.dtype) for m in meta]
        tensors: Iterable[tuple[str, torch.Tensor]] = self._checked_iter(source, meta)
        tensors = iter(tensors)
        for positions in chunks(sizes, self._bucket_bytes):
            parts = [next(tensors)[1].reshape(-1).view(torch.uint8).cpu() for _ in positions]
            self.model_update_group.broadcast(torch.cat(parts), SENDER)
        # Exhaust the generator: its last lines check that no tensor is missing.
        assert next(tensors, None) is None


def _raise_if_failed(workers: Future[None]) -> None:
    """Raise the workers' error, if there is one: it names the servers that are missing, while torch knows only their
    number.
    """
    if workers.done():
        workers.result()


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return int(torch.Size(shape).numel()) * dtype.itemsize

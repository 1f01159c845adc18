"""Weights over gloo, as a backend of vLLM's weight-transfer API: the same handshake, ranks and lifecycle as its NCCL
backend, on a machine without GPUs.

Registered on both sides: in the engine's workers by `vllm_worker`, in the learners by `sender`. One group of
learner 0 and all workers, made once and kept between syncs; a peer that is gone is an error after the deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

BACKEND = "gloo"
SENDER = 0


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The numbers with which a worker joins the group. vLLM makes it from a dict."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    bucket_bytes: int
    timeout_s: float


@dataclass(kw_only=True)
class GlooTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The numbers with which learner 0 joins the group. The other learners only take part in gathering."""

    backend: ClassVar[str] = BACKEND
    master_address: str
    master_port: int
    world_size: int
    bucket_bytes: int
    timeout_s: float


def join(address: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> Any:
    """Join the group; blocks until all are there. Returns a `ProcessGroupGloo`, whose collectives torch leaves untyped.

    Raises:
        RuntimeError: somebody did not come in time, or the port is taken.
    """
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(address, port, world_size, is_master=rank == SENDER, timeout=timeout)
    return ProcessGroupGloo(PrefixStore("rayapp-weights", store), rank, world_size, timeout)


def chunks(sizes: Sequence[int], bucket_bytes: int) -> Iterator[range]:
    """Positions of the tensors that travel together: at most bucket_bytes, or one tensor that is larger."""
    start, filled = 0, 0
    for position, size in enumerate(sizes):
        if position > start and filled + size > bucket_bytes:
            yield range(start, position)
            start, filled = position, 0
        filled += size
    if start < len(sizes):
        yield range(start, len(sizes))


class GlooWeightTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """In an engine's worker: receives buckets and loads them layer by layer."""

    init_info_cls = GlooInitInfo

    def init_transfer_engine(self, init_info: Any) -> None:
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._bucket_bytes = init_info.bucket_bytes
        self._group: Any = join(
            init_info.master_address,
            init_info.master_port,
            rank=rank,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
        )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class would synchronize an accelerator, and there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [_nbytes(shape, dtype) for shape, dtype in zip(update_info.shapes, dtypes, strict=True)]
        for positions in chunks(sizes, self._bucket_bytes):
            buffer = torch.empty(sum(sizes[p] for p in positions), dtype=torch.uint8)
            self._group.broadcast(buffer, SENDER).wait()
            parts: Any = buffer.split([sizes[p] for p in positions])  # type: ignore[no-untyped-call]
            self.model.load_weights(
                (update_info.names[p], part.view(dtypes[p]).view(update_info.shapes[p]))
                for p, part in zip(positions, parts, strict=True)
            )

    def shutdown(self) -> None:
        self._group = None


class GlooTrainerWeightTransferEngine(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
    """In a learner: vLLM's own sequence of calls, with gloo where NCCL would be."""

    init_info_cls = GlooTrainerInitInfo
    _group: Any = None
    _bucket_bytes = 0

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> GlooTrainerWeightTransferEngine:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._bucket_bytes = init_info.bucket_bytes
        if not engine.is_sender:
            return engine
        wanted = {key: value for key, value in asdict(init_info).items() if key != "rank"}
        with ThreadPoolExecutor(max_workers=1) as joining:
            # Joining blocks on both sides until the other is there: the workers join in a thread, learner 0 here.
            workers = joining.submit(client.init_weight_transfer_engine, wanted | {"rank_offset": 1})
            try:
                engine._group = join(
                    init_info.master_address,
                    init_info.master_port,
                    rank=SENDER,
                    world_size=init_info.world_size,
                    timeout_s=init_info.timeout_s,
                )
            except RuntimeError as error:
                # torch knows how many are missing; which servers they are, only the client does.
                raise RuntimeError(f"{_first_line(error)} {workers.exception() or ''}".strip()) from error
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
            self._group.broadcast(torch.cat(parts), SENDER).wait()
        # Exhaust the generator: at its end it checks that nothing is missing.
        assert next(tensors, None) is None

    def shutdown(self) -> None:
        self._group = None


def _first_line(error: BaseException) -> str:
    """The error's first line, without the C++ stack that torch adds."""
    return str(error).strip().partition("\n")[0]


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return int(torch.Size(shape).numel()) * dtype.itemsize


def register() -> None:
    """Make vLLM know the backend in this process. Idempotent."""
    for factory, engine in (
        (WeightTransferEngineFactory, GlooWeightTransferEngine),
        (WeightTransferTrainerFactory, GlooTrainerWeightTransferEngine),
    ):
        if BACKEND not in factory._registry:  # noqa: SLF001 - registering twice raises, and there is no way to ask
            factory.register_engine(BACKEND, engine)


__all__ = ["BACKEND", "GlooTrainerInitInfo", "chunks", "register"]

"""Where a learner's numbers are while it waits: in host memory, when a server that shares the GPU wants it for its
cache.

The tensors stay the objects that FSDP and the optimizer know; their storage alone is emptied and filled again. Used by
the learner actor around everything that computes (`learner.offload_when_idle`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rayapp.learner.distributed import local_part


class _Parked(NamedTuple):
    """A storage without memory, and what was in it."""

    storage: torch.UntypedStorage
    content: Tensor
    """Bytes in host memory, pinned where the storage is a GPU's."""


class IdleMemory:
    """Moves tensors out of the way and back. Their memory must not be touched in between."""

    def __init__(self) -> None:
        self._parked: dict[int, _Parked] = {}
        self._copies: dict[int, Tensor] = {}
        """Host memory of earlier rounds, by storage: pinning it takes as long as several copies."""

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copy what they hold to the host and give up their memory. What is parked already stays so."""
        storages = {key: storage for key, storage in _storages(tensors) if key not in self._parked}
        for key, storage in storages.items():
            if key not in self._copies or self._copies[key].numel() != storage.nbytes():
                self._copies[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda)
            self._parked[key] = _Parked(storage, self._copies[key])
            self._copies[key].copy_(_bytes(storage), non_blocking=True)
        _wait(storages.values())
        for storage in storages.values():
            storage.resize_(0)

    def fetch(self, tensors: Iterable[Tensor]) -> None:
        """Give these tensors their memory and content again, as far as they are parked."""
        fetched = [self._parked.pop(key) for key, _ in _storages(tensors) if key in self._parked]
        for storage, content in fetched:
            storage.resize_(content.numel())
            _bytes(storage).copy_(content, non_blocking=True)
        _wait(storage for storage, _ in fetched)


def weights_of(*models: nn.Module) -> Iterator[Tensor]:
    """This rank's part of all parameters. What a forward without a backward has left whole is given up."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        yield from model.parameters()


def moments_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """This rank's part of what the optimizer keeps for its parameters."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0)


def _storages(tensors: Iterable[Tensor]) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Each storage once, with an identity that lasts as long as it does."""
    seen = set[int]()
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        key = storage._cdata  # noqa: SLF001 - torch has no public name for a storage's identity
        if key not in seen:
            seen.add(key)
            yield key, storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(storages: Iterable[torch.UntypedStorage]) -> None:
    """Until copies to and from a GPU are done: they are only queued when the calls return."""
    for device in {storage.device for storage in storages if storage.is_cuda}:
        torch.cuda.current_stream(device).synchronize()

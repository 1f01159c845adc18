"""Parks an idle learner's tensors in host memory, for the cache of a server on the same GPU (`offload_when_idle`).

FSDP and the optimizer keep their tensor objects; only the storages are emptied and filled again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rayapp.learner.distributed import local_part, reshard


class _Parked(NamedTuple):
    storage: torch.UntypedStorage
    content: Tensor  # in host memory, pinned if the storage is on a GPU


class IdleMemory:
    """Moves tensors to host memory and back. Parked tensors must not be used."""

    def __init__(self) -> None:
        self._parked: dict[int, _Parked] = {}
        self._copies: dict[int, Tensor] = {}  # by storage, kept because pinning takes as long as several copies

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors to the host and free their memory. Idempotent."""
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
        """Restore parked tensors. torch.OutOfMemoryError: the GPU has no room; all stay parked."""
        keys = [key for key, _ in _storages(tensors) if key in self._parked]
        storages = [self._parked[key].storage for key in keys]
        try:
            for key in keys:
                storage, content = self._parked[key]
                storage.resize_(content.numel())
                _bytes(storage).copy_(content, non_blocking=True)
            _wait(storages)
        except BaseException:
            for storage in storages:
                storage.resize_(0)
            raise
        for key in keys:
            del self._parked[key]

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return a parked tensor's copy, else the tensor."""
        part = local_part(tensor)
        parked = self._parked.get(part.untyped_storage()._cdata)  # noqa: SLF001 - as in `_storages`
        if parked is None:
            return tensor
        content = parked.content.untyped_storage()
        copy = torch.empty(0, dtype=part.dtype).set_(content, part.storage_offset(), part.shape, part.stride())
        if not isinstance(tensor, DTensor):
            return copy
        # `from_local` would move the copy to the mesh's device.
        return DTensor(copy, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001


def weights_of(*models: nn.Module) -> Iterator[Tensor]:
    """Yield this rank's shards of all parameters, resharding those that a forward left gathered."""
    for model in models:
        reshard(model)
        yield from model.parameters()


def moments_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0)


def _storages(tensors: Iterable[Tensor]) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Yield each storage once, with a key that identifies it during its lifetime."""
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
    """Wait for copies to and from GPUs, which are only queued."""
    for device in {storage.device for storage in storages if storage.is_cuda}:
        torch.cuda.current_stream(device).synchronize()

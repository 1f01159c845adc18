"""Tensors that wait in host memory: nothing is lost if there is no room for them, and checkpoints read them there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rayapp.learner.memory.idle import IdleMemory


def test_a_fetch_without_room_leaves_everything_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, tensors = IdleMemory(), [torch.full((1000,), float(number)) for number in range(3)]
    idle.park(tensors)
    resize, calls = torch.UntypedStorage.resize_, 0

    def second_fails(storage: torch.UntypedStorage, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("no room")
        resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", second_fails)
    with pytest.raises(torch.OutOfMemoryError):
        idle.fetch(tensors)

    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0
    idle.park(tensors)
    idle.fetch(tensors)
    assert [float(tensor.mean()) for tensor in tensors] == [0.0, 1.0, 2.0]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[dist.device_mesh.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_tensor_is_saved_while_it_is_parked(one_rank: dist.device_mesh.DeviceMesh, tmp_path: Path) -> None:
    content = torch.arange(24.0).reshape(6, 4)
    sharded, idle = distribute_tensor(content.clone(), one_rank, [Shard(0)]), IdleMemory()
    idle.park([sharded])

    copy = idle.on_host(sharded)
    saving = async_save({"weight": copy}, checkpoint_id=str(tmp_path / "saved"))

    assert isinstance(copy, DTensor)
    assert sharded.to_local().untyped_storage().nbytes() == 0
    saving.result()  # type: ignore[union-attr]
    found: dict[str, Tensor] = {"weight": torch.zeros(6, 4)}
    load(found, checkpoint_id=str(tmp_path / "saved"))
    assert torch.equal(found["weight"], content)

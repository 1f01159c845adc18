"""Copies from the host to a rank's device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def moved(values: Any, device: torch.device) -> Tensor:
    """Return an array or a tensor of the host on the device. A copy to a GPU does not wait for the work that is queued
    there."""
    tensor = torch.as_tensor(values)
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

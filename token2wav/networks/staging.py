"""Copies of small arrays from the host to a device, without waiting for work on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def copy_to(out: torch.Tensor, values: NDArray[Any]) -> None:
    """Copies an array into a tensor of the same shape and dtype, on any device.

    The copy to a GPU starts from pinned memory, because the host then does not wait for it. Every
    call allocates pinned memory anew, because the copy of an earlier call may still be running.
    torch reuses the memory after its copy has ended.
    """
    host = torch.empty(out.shape, dtype=out.dtype, pin_memory=out.is_cuda)
    np.copyto(host.numpy(), values)
    out.copy_(host, non_blocking=True)


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns a tensor on a device with the shape, dtype and values of an array."""
    dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
    out = torch.empty(values.shape, dtype=dtype, device=device)
    copy_to(out, values)
    return out

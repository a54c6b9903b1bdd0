"""Copies between host and device through pinned memory, from which a GPU copies by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def copy_to(out: torch.Tensor, values: NDArray[Any]) -> None:
    """Copies an array into a tensor of the same shape and dtype, on any device, without waiting for
    work on the device.

    Every call allocates pinned memory anew, because the copy of an earlier call may still be
    running. torch reuses the memory after its copy has ended.
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


def to_host(parts: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """Returns tensors of one dtype on one device as arrays, after the work on them has ended.

    All tensors (n,) are copied from a GPU at once, because each copy waits for the work that runs
    there. The arrays are copies of the pinned memory. So it can be reused at once, even if a caller
    keeps the arrays.
    """
    if not parts or not parts[0].is_cuda:
        return [part.numpy() for part in parts]
    joined = torch.cat(list(parts))
    host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
    host.copy_(joined, non_blocking=True)
    torch.cuda.current_stream(joined.device).synchronize()
    return [part.numpy().copy() for part in host.split([len(part) for part in parts])]

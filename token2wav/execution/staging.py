"""Copies between host and device through pinned memory, from which a GPU copies by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def copy_to(out: torch.Tensor, values: NDArray[Any]) -> None:
    """Copies an array into a tensor of the same shape and dtype, on any device, without waiting for
    work on the device.

    Every call allocates pinned memory anew, because the copy of an earlier call may still be
    running.
    """
    host = torch.empty(out.shape, dtype=out.dtype, pin_memory=out.is_cuda)
    np.copyto(host.numpy(), values)
    out.copy_(host, non_blocking=True)


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
    out = torch.empty(values.shape, dtype=dtype, device=device)
    copy_to(out, values)
    return out


def frames_to_device(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Returns tensors (bands, n) of one dtype on a device. Tensors that lie elsewhere are copied.

    All tensors of the host are copied to a GPU at once. A copy of one tensor, which is not in
    pinned memory, would wait for the work that runs there.
    """
    if device.type == "cpu":
        return [part.to(device) for part in parts]
    host = [part for part in parts if part.device.type == "cpu"]
    if not host:
        return list(parts)
    together = to_device(np.concatenate([part.numpy() for part in host], axis=1), device)
    copies = iter(together.split([part.shape[1] for part in host], dim=1))
    return [next(copies) if part.device.type == "cpu" else part for part in parts]


def to_host(parts: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """Returns tensors of one dtype on one device as arrays, after the work on them has ended.

    All tensors (n,) are copied from a GPU at once, because each copy waits for the work that runs
    there. The arrays are copies, so the pinned memory can be reused at once.
    """
    if not parts or not parts[0].is_cuda:
        return [part.numpy() for part in parts]
    joined = torch.cat(list(parts))
    host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
    host.copy_(joined, non_blocking=True)
    torch.cuda.current_stream(joined.device).synchronize()
    return [part.numpy().copy() for part in host.split([len(part) for part in parts])]


class IntegerTensors:
    """int32 tensors that one copy from the host fills, at fixed addresses."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self._flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.tensors = [
            part.view(shape) for part, shape in zip(self._flat.split(sizes), shapes, strict=True)
        ]

    def fill(self, *arrays: NDArray[Any]) -> None:
        copy_to(self._flat, np.concatenate([array.ravel() for array in arrays]))


def joined(windows: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Joins the pieces (..., n) of each window along the last axis, in one launch for all windows.
    The results are views of one tensor.
    """
    widths = [sum(piece.shape[-1] for piece in pieces) for pieces in windows]
    return list(torch.cat([piece for pieces in windows for piece in pieces], -1).split(widths, -1))

"""Kernels that measure rates of a GPU: one that does nothing, and one that reads a buffer.

The module imports the Triton language.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _nothing(out):
    pass


@triton.jit
def _read(x, out, size: tl.constexpr, width: tl.constexpr, iterations: tl.constexpr):
    """Sums parts of x. Each program begins at another part."""
    column = tl.arange(0, width)
    total = tl.zeros((width,), tl.float32)
    for iteration in range(iterations):
        begin = (tl.program_id(0) * iterations + iteration) * width % size
        begin = tl.multiple_of(begin, width)  # for wide loads
        total += tl.load(x + begin + column, cache_modifier=".cg")  # not from the L1 cache
    tl.store(out + tl.program_id(0), tl.sum(total, axis=0))


def nothing(out: torch.Tensor) -> None:
    """Launches an empty kernel."""
    _nothing[(1,)](out)


def read(x: torch.Tensor, out: torch.Tensor, *, width: int, iterations: int, warps: int) -> None:
    """Reads `iterations * width` numbers of x in each program.

    Args:
        x: float32 buffer; its length is a multiple of the width.
        out: a sum for each program.
        width: numbers that a program reads at once.
        iterations: reads of each program.
        warps: warps of a program.
    """
    _read[(len(out),)](x, out, size=len(x), width=width, iterations=iterations, num_warps=warps)

"""Snake activation of signals in one launch, alone or with LeakyReLU for other channels.

The strides of the signal and of its result are arguments of the kernel. So a signal may be in the
order of its axes or have its channels last, and the result may be a part of the longer input of a
convolution.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.kernels.activations import snake
from token2wav.layers.streaming import is_channels_last

_TILE = 32  # rows and columns; 96 channels and the like fill their tiles
_WARPS = 8  # with 4 warps a register is spilled


@triton.jit(do_not_specialize=("rows",))
def _snake(
    x,  # (batch, rows, columns), in any strides
    out,  # (batch, rows, columns)
    frequency,  # (snakes,)
    inverse,
    rows,
    columns,
    x_batch,  # elements between batch items,
    x_row,  # between rows
    x_column,  # and between columns
    out_batch,
    out_row,
    out_column,
    snakes,  # channels with Snake, the first ones
    slope,  # of LeakyReLU for the other channels; None if there are none
    CHANNELS_LAST: tl.constexpr,  # whether columns are channels, not positions
    TILE: tl.constexpr,
):
    first, in_tile = tl.program_id(0) * TILE, tl.arange(0, TILE)[:, None]
    row, column = first + in_tile, tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    # A batch, or the signal of a whole utterance, may have 2^31 elements.
    batch, first = tl.program_id(2).to(tl.int64), first.to(tl.int64)
    x += batch * x_batch + first * x_row
    out += batch * out_batch + first * out_row
    values = tl.load(x + in_tile * x_row + column * x_column, mask=inside, other=0.0)
    channel = column if CHANNELS_LAST else row
    curved = channel < snakes
    result = snake(
        values,
        tl.load(frequency + channel, mask=curved, other=0.0),
        tl.load(inverse + channel, mask=curved, other=0.0),
    )
    if slope is not None:
        result = tl.where(curved, result, tl.where(values > 0, values, values * slope))
    tl.store(out + in_tile * out_row + column * out_column, result, mask=inside)


def snake_signal(
    x: torch.Tensor,
    frequency: torch.Tensor,
    inverse: torch.Tensor,
    out: torch.Tensor | None = None,
    slope: float | None = None,
) -> torch.Tensor:
    """Computes x + sin²(frequency * x) * inverse of the first channels of x, and LeakyReLU of the
    others.

    Args:
        x: (B, C, T) float32.
        frequency, inverse: contiguous coefficients of the first channels.
        out: where the result is stored, of the shape of x; None for a new tensor.
        slope: slope of LeakyReLU; None if all channels have coefficients.
    """
    out = torch.empty_like(x) if out is None else out
    assert x.dtype == out.dtype == torch.float32
    assert x.shape == out.shape
    batch, channels, positions = x.shape
    channels_last = is_channels_last(x)
    rows, columns = (positions, channels) if channels_last else (channels, positions)
    axes = (0, 2, 1) if channels_last else (0, 1, 2)
    _snake[(triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE), batch)](
        x,
        out,
        frequency,
        inverse,
        rows,
        columns,
        *(x.stride(axis) for axis in axes),
        *(out.stride(axis) for axis in axes),
        frequency.numel(),
        slope,
        CHANNELS_LAST=channels_last,
        TILE=_TILE,
        num_warps=_WARPS,
    )
    return out

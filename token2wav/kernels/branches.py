"""Start and end of the parallel branches of a vocoder: a sum with its activations for each branch,
and the mean of all branches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.kernels.activations import activated
from token2wav.kernels.convolution import RESIDUAL_FIRST, SPAN
from token2wav.kernels.rounding import Precision, rounded
from token2wav.kernels.signals import (
    COLUMNS,
    FRAMES,
    OF_A_LAYER,
    REMAINING,
    START,
    PieceTensors,
    Signal,
    SignalLayout,
    alignment,
    carry_halo,
    store_rows,
)


@triton.jit(do_not_specialize=OF_A_LAYER)
def _fan_out(
    x,  # (streams, rows, channels)
    source,  # (streams, rows, channels)
    row_limit,  # rows of a stream in both
    channels,
    raw,  # signal for x + source
    raw_stream,
    raw_halo,
    raw_state,
    out,  # signal of several branches for the activations of x + source
    out_stream,
    out_branch,
    out_halo,
    out_state,
    slopes,  # (branches, 3, channels)
    old,
    new,
    state_width,
    pieces,
    rate,
    extra,
    delay,
    MIRROR: tl.constexpr,
    ROUND: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    tile, branch, stream = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    piece = pieces + stream * COLUMNS
    rows, start = tl.load(piece + FRAMES) * rate, tl.load(piece + START)
    # Program 0 carries the halos. Program n computes tile n - 1 of the rows.
    first_row = (tile - 1) * TILE_ROWS
    if first_row >= rows:
        return
    shift = rows * channels
    old += stream * state_width
    new += stream * state_width
    raw += stream * raw_stream
    out += stream * out_stream + branch * out_branch
    out_state += branch * out_halo
    if tile == 0:
        if rows == 0:
            return
        carry_halo(out, old + out_state, new + out_state, out_halo, shift, start == 0, 0, 1)
        if branch == 0:
            carry_halo(raw, old + raw_state, new + raw_state, raw_halo, shift, start == 0, 0, 1)
        return
    row, column = first_row + tl.arange(0, TILE_ROWS), tl.arange(0, TILE_CHANNELS)
    position = row - delay + start * rate
    read = row
    if MIRROR:
        # An STFT has one window more than hops, so the source has one position more than x.
        # Position 0 of x therefore repeats position 2.
        read = tl.where(position == 0, row + 2, row)
    channel_mask = column < channels
    inside = (row < rows)[:, None] & channel_mask[None, :]
    begin = stream * row_limit * channels
    readable = (read < rows)[:, None] & channel_mask[None, :]
    values = tl.load(
        x + begin + read[:, None] * channels + column[None, :], mask=readable, other=0.0
    )
    at = row[:, None] * channels + column[None, :]
    values += tl.load(source + begin + at, mask=inside, other=0.0)
    in_stream = (position >= 0) & (
        position - start * rate < tl.load(piece + REMAINING) * rate + extra
    )
    if branch == 0:
        total = tl.where(in_stream[:, None], values, 0)
        store_rows(total, raw, new + raw_state, at, raw_halo, shift, inside)
    values = activated(
        values, slopes + branch * 3 * channels, channels, column, channel_mask, 0.0, "snake"
    )
    values = tl.where(in_stream[:, None], values, 0)
    if ROUND:
        values = rounded(values)
    store_rows(values, out, new + out_state, at, out_halo, shift, inside)


@triton.jit(do_not_specialize=OF_A_LAYER)
def _mean(
    x,  # signal of several branches
    x_stream,
    x_branch,
    geometry,  # of the branches
    branches,
    channels,
    out,  # signal for the leaky ReLU of the mean
    out_stream,
    out_halo,
    out_state,
    old,
    new,
    state_width,
    pieces,
    rate,
    extra,
    delay,
    slope,
    ROUND: tl.constexpr,
    ALIGNED: tl.constexpr,  # divisor of the indices in the buffer of x
    TILE_ROWS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    tile, stream = tl.program_id(0), tl.program_id(1).to(tl.int64)
    piece = pieces + stream * COLUMNS
    rows, start = tl.load(piece + FRAMES) * rate, tl.load(piece + START)
    # Program 0 carries the halos. Program n computes tile n - 1 of the rows.
    first_row = (tile - 1) * TILE_ROWS
    if first_row >= rows:
        return
    shift = rows * channels
    old += stream * state_width + out_state
    new += stream * state_width + out_state
    out += stream * out_stream
    if tile == 0:
        if rows == 0:
            return
        carry_halo(out, old, new, out_halo, shift, start == 0, 0, 1)
        return
    row, column = first_row + tl.arange(0, TILE_ROWS), tl.arange(0, TILE_CHANNELS)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    at = row[:, None] * channels + column[None, :]
    values = tl.zeros((TILE_ROWS, TILE_CHANNELS), tl.float32)
    for branch in range(branches):
        first = tl.load(geometry + branch * SPAN + RESIDUAL_FIRST)
        first = tl.multiple_of(first, ALIGNED)
        values += tl.load(
            x + branch * x_branch + stream * x_stream + first + at, mask=inside, other=0.0
        )
    values = values / branches
    values = tl.where(values < 0, values * slope, values)
    in_stream = (row - delay >= -start * rate) & (
        row - delay < tl.load(piece + REMAINING) * rate + extra
    )
    values = tl.where(in_stream[:, None], values, 0)
    if ROUND:
        values = rounded(values)
    store_rows(values, out, new, at, out_halo, shift, inside)


def fan_out(
    batch: PieceTensors,
    x: Signal,
    source: Signal,
    raw: SignalLayout,
    out: SignalLayout,
    slopes: torch.Tensor,
    *,
    mirror: bool,
    precision: Precision,
) -> tuple[Signal, Signal]:
    """Returns x + source, and its Snakes for several branches.

    Args:
        x, source: signals without halo.
        slopes: (branches, 3, channels) coefficients of Snake.
        mirror: whether position 0 repeats position 2.
        precision: with `tf32` the Snakes are rounded.
    """
    total, activated_sum = Signal.empty(raw, batch), Signal.empty(out, batch)
    sizes = _rows_of(raw.channels)
    grid = 1 + triton.cdiv(batch.frames * raw.rate, sizes["TILE_ROWS"]), len(slopes), batch.streams
    _fan_out[grid](
        x.data,
        source.data,
        x.data.shape[2],
        raw.channels,
        *total.writing_alone,
        *activated_sum.writing,
        slopes,
        *batch.states(raw.dtype),
        batch.pieces,
        raw.rate,
        raw.extra,
        raw.delays[0],
        MIRROR=mirror,
        ROUND=precision == "tf32",
        **sizes,
    )
    return total, activated_sum


def mean(
    batch: PieceTensors,
    x: Signal,
    geometry: torch.Tensor,
    out: SignalLayout,
    slope: float,
    *,
    precision: Precision,
) -> Signal:
    """Returns the leaky ReLU of the mean of all branches.

    Args:
        geometry: (branches, 5) int32; only the indices of the residuals are read.
        precision: with `tf32` the result is rounded.
    """
    result, sizes = Signal.empty(out, batch), _rows_of(out.channels)
    _mean[(1 + triton.cdiv(batch.frames * out.rate, sizes["TILE_ROWS"]), batch.streams)](
        *x.reading,
        geometry,
        len(geometry),
        out.channels,
        *result.writing_alone,
        *batch.states(out.dtype),
        batch.pieces,
        out.rate,
        out.extra,
        out.delays[0],
        slope,
        ROUND=precision == "tf32",
        ALIGNED=alignment(x.layout.channels),
        **sizes,
    )
    return result


def _rows_of(channels: int) -> dict[str, int]:
    """Returns sizes of tiles of about 1024 elements that hold whole rows."""
    width = max(16, triton.next_power_of_2(channels))
    return {"TILE_ROWS": max(1, 1024 // width), "TILE_CHANNELS": width}

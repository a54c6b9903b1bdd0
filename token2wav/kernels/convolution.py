"""Convolutions over signals in channels-last buffers, fused with bias, residual and activation.

One launch computes one layer of several parallel branches, for all streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from token2wav.kernels import tiles
from token2wav.kernels.activations import activated
from token2wav.kernels.rounding import Precision, rounded, to_float16
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

Activation = Literal["none", "snake", "leaky", "elu"]

# Columns of the geometry of a branch.
TAPS = tl.constexpr(0)
TAP_STEP = tl.constexpr(1)  # elements of the buffer between two taps
FIRST = tl.constexpr(2)  # index in the buffer of the first tap of the first row
RESIDUAL_FIRST = tl.constexpr(3)  # index of the first row in the buffer of the residual
DELAY = tl.constexpr(4)  # rows by which the result is late
SPAN = tl.constexpr(5)  # columns of a geometry

_NOWHERE = (None, 0, 0, 0, 0)  # arguments of a kernel for a signal that it does not write


@triton.jit(do_not_specialize=OF_A_LAYER)
def _multiply_rows(
    x,  # signal; products read it
    x_stream,  # elements between streams of the signal
    x_branch,  # elements between branches
    x_step,  # elements between the first taps of neighbouring rows
    weights,  # (branches, outputs, taps * channels)
    bias,  # (branches, outputs)
    geometry,  # (branches, SPAN) int32
    channels,  # elements of a tap
    width,  # elements of all taps, in the branch with the most taps
    outputs,
    residual,  # signal that is added to the result, or None
    residual_stream,
    residual_branch,
    raw,  # signal for the result before the activation, or None
    raw_stream,
    raw_branch,
    raw_halo,
    raw_state,  # index of its halo in a row of states
    out,  # signal for the result after the activation, or None
    out_stream,
    out_branch,
    out_halo,
    out_state,
    slopes,  # (branches, 3, outputs) coefficients of Snake
    old,  # (streams, state_width) states before the piece
    new,  # (streams, state_width) states after the piece
    state_width,
    pieces,  # (streams, COLUMNS) int32
    streams,
    rate,  # rows per frame
    extra,  # rows after the last frame of a stream
    slope,  # of the leaky ReLU
    PHASES: tl.constexpr,  # rows of the result that one row of the product holds
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGNED: tl.constexpr,  # divisor of every index and step in the buffer of x
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    branch, stream = tl.program_id(2) // streams, (tl.program_id(2) % streams).to(tl.int64)
    piece = pieces + stream * COLUMNS
    frames = tl.load(piece + FRAMES)
    start = tl.load(piece + START)
    rows = frames * rate
    first_row = (tile - 1) * TILE_ROWS
    if first_row >= rows:
        return
    old += stream * state_width
    new += stream * state_width
    if raw is not None:
        raw += branch * raw_branch + stream * raw_stream
    if out is not None:
        out += branch * out_branch + stream * out_stream
    if tile == 0:
        if rows == 0:
            return
        if raw is not None:
            state_offset = raw_state + branch * raw_halo
            carry_halo(
                raw,
                old + state_offset,
                new + state_offset,
                raw_halo,
                rows * outputs,
                start == 0,
                part,
                tl.num_programs(1),
            )
        if out is not None:
            state_offset = out_state + branch * out_halo
            carry_halo(
                out,
                old + state_offset,
                new + state_offset,
                out_halo,
                rows * outputs,
                start == 0,
                part,
                tl.num_programs(1),
            )
        return
    branch_geometry = geometry + branch * SPAN
    taps = tl.load(branch_geometry + TAPS)
    tap_step = tl.multiple_of(tl.load(branch_geometry + TAP_STEP), ALIGNED)
    first = tl.multiple_of(tl.load(branch_geometry + FIRST), ALIGNED)
    row = first_row + tl.arange(0, TILE_ROWS)
    output = part * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    column = tl.arange(0, TILE_INPUTS)
    x += branch * x_branch + stream * x_stream + first
    weights += branch * outputs * width
    result = tl.zeros((TILE_ROWS, TILE_OUTPUTS), x.dtype.element_ty)
    chunks = tl.cdiv(channels, TILE_INPUTS)
    for step in range(taps * chunks):
        tap, channel = step // chunks, (step % chunks) * TILE_INPUTS + column
        channel_mask = channel < channels
        inputs = tl.load(
            x + row[:, None] * x_step + tap * tap_step + channel[None, :],
            mask=(row < rows)[:, None] & channel_mask[None, :],
            other=0.0,
        )
        weight = tl.load(
            weights + output[None, :] * width + tap * channels + channel[:, None],
            mask=(output < outputs)[None, :] & channel_mask[:, None],
            other=0.0,
        )
        if PRECISION == "float16":
            result = tl.dot(to_float16(inputs), weight, result)
        else:
            result = tl.dot(
                inputs, weight, result, input_precision=PRECISION, out_dtype=x.dtype.element_ty
            )
    output_mask = output < outputs
    result += tl.load(bias + branch * outputs + output, mask=output_mask, other=0.0)[None, :]
    inside = (row < rows)[:, None] & output_mask[None, :]
    at = row[:, None] * outputs + output[None, :]
    if residual is not None:
        residual += branch * residual_branch + stream * residual_stream
        residual += tl.multiple_of(tl.load(branch_geometry + RESIDUAL_FIRST), ALIGNED)
        result += tl.load(residual + at, mask=inside, other=0.0)
    # Position 0 of the stream is in row `delay - start`, in rows of the result.
    delay, speed = tl.load(branch_geometry + DELAY), rate * PHASES
    position = row[:, None] * PHASES + output[None, :] // (outputs // PHASES) - delay
    remaining = tl.load(piece + REMAINING)
    in_stream = (position >= -start * speed) & (position < remaining * speed + extra)
    shift = rows * outputs
    if raw is not None:
        state_offset = raw_state + branch * raw_halo
        store_rows(
            tl.where(in_stream, result, 0), raw, new + state_offset, at, raw_halo, shift, inside
        )
    if out is not None:
        if ACTIVATION == "snake":
            slopes += branch * 3 * outputs
        result = activated(result, slopes, outputs, output, output_mask, slope, ACTIVATION)
        result = tl.where(in_stream, result, 0)
        if ROUND:
            result = rounded(result)
        state_offset = out_state + branch * out_halo
        store_rows(result, out, new + state_offset, at, out_halo, shift, inside)


@dataclass(frozen=True, eq=False)
class Convolution:
    """Convolutions of one or more branches, with bias, residual and activation, in one launch.

    Attributes:
        weights: (branches, outputs, taps * channels).
        bias: (branches, outputs).
        geometry: (branches, 5) int32: taps, elements between taps, index of the first tap, index of
            the residual, delay of the result.
        channels: elements of a tap.
        step: elements between the first taps of neighbouring rows.
        rate: rows of the product per frame.
        phases: rows of the result that a row of the product holds.
        raw: layout of the result before the activation; None if no layer reads it.
        out: layout of the result after the activation; None if no layer reads it.
        slopes: (branches, 3, outputs) coefficients of Snake.
        precision: arithmetic of the products. With `tf32` the activated result is rounded. With
            `float16` the weights are float16, and signals float32.
    """

    weights: torch.Tensor
    bias: torch.Tensor
    geometry: torch.Tensor
    channels: int
    step: int
    rate: int
    phases: int = 1
    raw: SignalLayout | None = None
    out: SignalLayout | None = None
    activation: Activation = "none"
    slopes: torch.Tensor | None = None
    slope: float = 0.0
    precision: Precision = "ieee"

    def __call__(
        self, batch: PieceTensors, x: Signal, residual: Signal | None = None
    ) -> tuple[Signal | None, Signal | None]:
        """Returns the result before the activation, and after it."""
        branches, outputs, width = self.weights.shape
        raw, out = (
            Signal.empty(layout, batch) if layout else None for layout in (self.raw, self.out)
        )
        result_layout = self.out or self.raw
        assert result_layout is not None
        rows, dtype, copies = batch.frames * self.rate, x.layout.dtype, branches * batch.streams
        size = tiles.ProductSize(rows, outputs, width, dtype, copies)
        tile = tiles.choose("vocoder", size, self.weights.device)
        grid = 1 + triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs), copies
        _multiply_rows[grid](
            *x.reading,
            self.step,
            self.weights,
            self.bias,
            self.geometry,
            self.channels,
            width,
            outputs,
            *(residual.reading if residual else (None, 0, 0)),
            *(raw.writing if raw else _NOWHERE),
            *(out.writing if out else _NOWHERE),
            self.slopes,
            *batch.states(dtype),
            batch.pieces,
            batch.streams,
            self.rate,
            result_layout.extra,
            self.slope,
            PHASES=self.phases,
            ACTIVATION=self.activation,
            PRECISION=self.precision,
            ROUND=self.precision == "tf32",
            ALIGNED=alignment(x.layout.channels),
            TILE_ROWS=tile.rows,
            TILE_OUTPUTS=tile.outputs,
            TILE_INPUTS=tile.inputs,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return raw, out
